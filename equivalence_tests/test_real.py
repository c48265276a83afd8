"""The real-input fixture, and training with fast operations in the place of the model's own."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import fast
import reference
from equivalence_tests.harness import real
from equivalence_tests.harness.real import DEVICE, Site
from fast.integrations import patched

STEPS, LR = 12, 0.1


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with real.one_thread():
        yield


def norms(model: nn.Module) -> Iterator[Site]:
    """The first, a middle and the last layer's norm before attention."""
    layers = model.model.layers
    for index in (0, len(layers) // 2, len(layers) - 1):
        yield Site(
            f"layers.{index}.input_layernorm",
            layers[index].input_layernorm,
            lambda norm, inputs: ((inputs["hidden_states"], norm.weight), {"eps": norm.variance_epsilon}),
        )


def check(calls: list[real.Recorded], label: str, tokens: int, hidden: int, dtype: torch.dtype) -> None:
    assert len(calls) == 3
    for call in calls:
        assert call.label.startswith(f"{label}, layers.")
        tensors = [*call.args, *call.cotangents]
        assert [tuple(t.shape) for t in tensors] == [(1, tokens, hidden), (hidden,), (1, tokens, hidden)]
        for tensor in tensors:
            assert tensor.dtype == dtype
            assert not tensor.requires_grad
            assert tensor.isfinite().all()
            assert len(tensor.unique()) > 50  # neither zeros nor ones
        assert 1 <= call.cotangents[0].abs().max() <= 2
        assert call.kwargs["eps"] > 0


def test_recorded_step_of_the_small_model() -> None:
    model, tokenizer, label = real.small()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    (batch,) = real.batches(tokenizer, tokens=48)
    calls = real.record(model.to(DEVICE), norms(model), batch.to(DEVICE), label)
    check(
        [real.cast(call, torch.float32) for call in calls],
        "small Llama trained 50 steps",
        48,
        128,
        torch.float32,
    )
    check(
        [real.cast(call, torch.float16) for call in calls],
        "small Llama trained 50 steps",
        48,
        128,
        torch.float16,
    )

    # Nothing stays behind in the model.
    assert all(torch.equal(value, before[name].to(DEVICE)) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_recorded_takes_sites_from_the_operations_test_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "equivalence_tests.test_planted", SimpleNamespace(real_sites=norms))
    monkeypatch.setattr(real, "load", real.small)
    float16, float32 = (
        real.recorded("planted", DEVICE, dtype, 40) for dtype in (torch.float16, torch.float32)
    )
    check(float16, "small Llama trained 50 steps", 40, 128, torch.float16)
    check(float32, "small Llama trained 50 steps", 40, 128, torch.float32)
    assert all(torch.equal(a.args[0], b.args[0].half()) for a, b in zip(float16, float32, strict=True))
    again = real.recorded("planted", DEVICE, torch.float32, 40)
    assert not any(a.args[0] is b.args[0] for a, b in zip(float32, again, strict=True))


def test_recorded_cotangents_are_the_gradients_of_the_loss() -> None:
    model, tokenizer, label = real.small()
    (batch,) = real.batches(tokenizer, tokens=48, device=DEVICE)
    model.to(DEVICE)
    call = real.record(model, norms(model), batch, label)[0]
    weight = model.model.layers[0].input_layernorm.weight
    (want,) = torch.autograd.grad(model(input_ids=batch, labels=batch).loss, weight)
    args = [t.requires_grad_() for t in call.args]
    (got,) = torch.autograd.grad(reference.rms_norm(*args, **call.kwargs), args[1], call.cotangents)
    # The same formula on the same numbers; a GPU may add the 48 rows up in another order: √48 u in norm.
    assert (got - want).norm() <= 2**-21 * want.norm()


@pytest.mark.skipif(
    any(importlib.util.find_spec(name.replace("-", "_")) is None for name in real.NEEDED),
    reason=f"needs {', '.join(real.NEEDED)}",
)
def test_recorded_step_of_smollm2() -> None:
    model, tokenizer, label = real.load()
    (batch,) = real.batches(tokenizer, tokens=32)
    calls = real.record(model, norms(model), batch, label)
    check([real.cast(call, torch.bfloat16) for call in calls], "SmolLM2-135M", 32, 576, torch.bfloat16)
    # A pretrained model on English: far below the 10.8 of a uniform guess among 49152 tokens.
    with torch.no_grad():
        assert model(input_ids=batch, labels=batch).loss < 5


def test_a_missing_package_is_named_in_the_label(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name))
    _, _, label = real.load.__wrapped__()
    assert label.startswith("small Llama trained 50 steps (")
    assert "gguf not installed" in label or "gguf, " in label


def test_training_is_deterministic_and_learns() -> None:
    batches = real.batches(real.ByteTokenizer(), tokens=32, size=2, count=4, device=DEVICE)
    first, second = (real.train(real.small_llama(64, 2).to(DEVICE), batches, 8, lr=3e-3) for _ in range(2))
    assert first == second
    assert first[-1] < first[0] - 0.3


class RecordingSGD(torch.optim.SGD):
    """Plain gradient descent that keeps the norm of each step's gradient."""

    norms: list[float]

    def step(self) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        self.norms.append(float(torch.stack([g.double().norm() for g in gradients]).norm()))
        super().step()


def losses_and_norms(function: Callable[..., Tensor] | None) -> tuple[Tensor, Tensor]:
    """Of STEPS steps of gradient descent; with every RMSNorm replaced by `function`, or the model's own for None."""
    model = real.small_llama(hidden=64, layers=2).to(DEVICE)
    batches = real.batches(real.ByteTokenizer(), tokens=32, size=2, count=STEPS, device=DEVICE)
    norms: list[float] = []

    def optimizer(parameters: Iterator[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        sgd = RecordingSGD(parameters, lr=lr)
        sgd.norms = norms
        return sgd

    with pytest.MonkeyPatch.context() as monkeypatch:
        if function is None:
            losses = real.train(model, batches, STEPS, LR, optimizer)
        else:
            monkeypatch.setattr(fast, "rms_norm", function)
            with patched(model) as report:
                assert report.counts["rms_norm"] == 5
                losses = real.train(model, batches, STEPS, LR, optimizer)
    return torch.tensor(losses, dtype=torch.float64), torch.tensor(norms, dtype=torch.float64)


def excess(run: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> float:
    """Largest difference of two runs as a fraction of what fp32 rounding explains; ≤ 1 is agreement.

    At equal weights two fp32 models that differ in the order of the norms' sums have losses within 2⁻²⁰ and gradients within
    2⁻¹⁸ of each other, relatively (test_integrations.py holds every gradient to that). So step s moves the weights apart by
    lr · 2⁻¹⁸ ‖g_s‖, and to first order the loss of a later step t by that times ‖g_t‖:
        |ΔL_t| ≤ 2⁻²⁰ L_t + 2⁻¹⁸ lr ‖g_t‖ Σ_{s<t} ‖g_s‖.
    """
    (losses, norms), (others, _) = run, other
    bound = 2**-20 * others + 2**-18 * LR * norms * (norms.cumsum(0) - norms)
    first_gradient = (norms[0] / other[1][0] - 1).abs() / 2**-18
    return max(float(((losses - others).abs() / bound).max()), float(first_gradient))


@pytest.fixture(scope="module")
def own() -> tuple[Tensor, Tensor]:
    """The run of the model's own norms."""
    return losses_and_norms(None)


def test_training_with_fast_operations_gives_the_losses_of_the_reference(own: tuple[Tensor, Tensor]) -> None:
    assert own[0][-1] < own[0][0] - 1
    ours = losses_and_norms(fast.rms_norm)
    assert excess(ours, own) <= 1
    assert excess(ours, losses_and_norms(reference.rms_norm)) <= 1


def weight_gradient_forgotten(x: Tensor, weight: Tensor, **options: float) -> Tensor:
    return reference.rms_norm(x, weight.detach(), **options) + 0 * weight


def weight_gradient_one_percent_off(x: Tensor, weight: Tensor, **options: float) -> Tensor:
    return reference.rms_norm(x, 1.01 * weight - (0.01 * weight).detach(), **options)


def input_gradient_one_per_mille_off(x: Tensor, weight: Tensor, **options: float) -> Tensor:
    return reference.rms_norm(1.001 * x - (0.001 * x).detach(), weight, **options)


def eps_doubled(x: Tensor, weight: Tensor, *, eps: float, **options: float) -> Tensor:
    return reference.rms_norm(x, weight, eps=2 * eps, **options)


@pytest.mark.parametrize(
    "wrong",
    [
        weight_gradient_forgotten,
        weight_gradient_one_percent_off,
        input_gradient_one_per_mille_off,
        eps_doubled,
    ],
)
def test_the_bound_on_losses_refuses(wrong: Callable[..., Tensor], own: tuple[Tensor, Tensor]) -> None:
    assert excess(losses_and_norms(wrong), own) > 4
