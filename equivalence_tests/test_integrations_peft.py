"""LoRA layers of PEFT patched to run fast.lora_linear: the same function, and everything else is still PEFT's."""

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fast
import reference
from equivalence_tests.harness.real import DEVICE, one_thread
from equivalence_tests.test_integrations import make as make_llama
from equivalence_tests.test_integrations import step as llama_step
from fast.integrations import transformers as hugging_face

peft = pytest.importorskip("peft", reason="peft is not installed")
from fast.integrations.peft import mixed_batch, patch, patched, unpatch  # noqa: E402 - it imports peft

B, T, K, N = 4, 5, 24, 40
FP32, BF16 = torch.float32, torch.bfloat16
DORA = {"use_dora": True}
Step = dict[str, Tensor]
second_adapters = pytest.mark.parametrize("second", [{"r": 7, "lora_alpha": 14}, {"r": 3, "lora_alpha": 1}])
dtypes = pytest.mark.parametrize("dtype", [FP32, BF16])


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of each call of fast.lora_linear."""
    calls, real = [], fast.lora_linear
    monkeypatch.setattr(fast, "lora_linear", lambda *t, **named: calls.append(named) or real(*t, **named))
    return calls


class Net(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.proj, self.head = nn.Linear(K, N, bias=bias), nn.Linear(N, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.proj(x))


def config(**options: Any) -> Any:
    given = {"r": 4, "lora_alpha": 8, "target_modules": ["proj"], "init_lora_weights": False}
    return peft.LoraConfig(**given | options)


def make(dtype=FP32, *others: dict, bias=True, trained=False, upcast=True, **options: Any) -> nn.Module:
    """A model of one LoRA layer. others: options of adapters "b", "c". upcast: PEFT's default, adapters in fp32."""
    torch.manual_seed(0)
    model = peft.get_peft_model(Net(bias).to(DEVICE, dtype), config(**options), autocast_adapter_dtype=upcast)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DoRA and LoRA in one model
        for name, more in zip("bc", others, strict=False):
            model.add_adapter(name, config(**more))
    layer(model).base_layer.requires_grad_(trained)
    for magnitude in layer(model).lora_magnitude_vector.values():
        magnitude.weight.data *= torch.rand_like(magnitude.weight) + 0.5  # PEFT starts where the factor is 1
    return model


def layer(model: nn.Module) -> nn.Module:
    return model.base_model.model.proj


def inputs(dtype: torch.dtype = FP32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(B, T, width, generator=generator).to(DEVICE, dtype) for width in (K, N))


def step(model: nn.Module, x: Tensor, dy: Tensor, **options: Any) -> Step:
    """Output of the layer and all gradients, by name."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = layer(model)(x, **options)
    y.backward(dy.to(y.dtype))
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad} | gradients


def error(found: Tensor, want: Tensor) -> float:
    assert found.shape == want.shape
    found, want = found.detach().double(), want.detach().double()
    return float((found - want).norm() / want.norm())


def near(found: Step, want: Step, bound: float) -> bool:
    return found.keys() == want.keys() and all(error(found[key], want[key]) <= bound for key in want)


def same_bits(a: Step, b: Step) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def check(model: nn.Module, dtype: torch.dtype = FP32, **options: Any) -> Step:
    """Patches the model; its errors against PEFT in float64 are PEFT's at most."""
    x, dy = inputs(dtype)
    truth = step(copy.deepcopy(model).double(), x.double(), dy.double(), **options)
    theirs = step(model, x, dy, **options)
    patch(model)
    ours = step(model, x, dy, **options)
    assert ours.keys() == theirs.keys() == truth.keys()
    # fp32: sums of some hundred terms in another order. bf16: S and dS enter products as hi + lo, to 2⁻¹⁶; with DoRA
    # fast.lora_linear rounds u and du to x's dtype, and the adapter's gradients are made from these.
    slack = 2**-21 if dtype == FP32 else 2**-8 if layer(model).lora_magnitude_vector else 2**-16
    for name, want in truth.items():
        assert ours[name].dtype == theirs[name].dtype, name
        assert error(ours[name], want) <= 1.1 * error(theirs[name], want) + slack, name
    return ours


@dtypes
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False, "use_rslora": True, "r": 3, "trained": True},
        {"upcast": False, "lora_alpha": 3, "trained": True},
        {"use_dora": True, "trained": True},
        {"use_dora": True, "bias": False},
    ],
    ids=str,
)
def test_same_function(options: dict, dtype: torch.dtype, fused: list) -> None:
    check(make(dtype, **options), dtype)
    assert len(fused) == 1


@dtypes
@second_adapters
def test_several_active_adapters(second: dict, dtype: torch.dtype, fused: list) -> None:
    model = make(dtype, second)
    model.base_model.set_adapter(["default", "b"])
    assert sum("lora_" in name for name in check(model, dtype)) == 4
    assert len(fused) == 1


@dtypes
@second_adapters
def test_adapter_names_mix_a_batch(second: dict, dtype: torch.dtype, fused: list) -> None:
    model = make(dtype, second, {"target_modules": ["head"]})
    model.base_model.set_adapter(["default", "b"])  # what makes both train
    names = ["b", "__base__", "default", "c"]  # this layer has no adapter c
    found = check(model, dtype, adapter_names=names)
    assert len(fused) == 1
    (x, dy), loop = inputs(dtype), {}
    for i, name in enumerate(names):
        for key, value in step(model, x[i : i + 1], dy[i : i + 1], adapter_names=[name]).items():
            if key in ("y", "x"):
                loop[key] = torch.cat([loop.get(key, value[:0]), value])
            elif value.any():
                loop[key] = value
    assert found.keys() == loop.keys()
    for key, value in loop.items():  # the same products, with the other adapters' zeros between
        exact = dtype == FP32 or key in ("y", "x")
        assert error(found[key], value) <= (torch.finfo(dtype).eps if exact else 2**-16) * 4, key
    with pytest.raises(ValueError, match="Length of `adapter_names`"):
        layer(model)(x, adapter_names=["b"])


def test_mixed_batch_trains_and_survives_checkpointing(fused: list) -> None:
    model, names, (x, dy) = make(FP32, {"r": 7}).train(), ["b", "__base__", "default", "b"], inputs()
    model.base_model.set_adapter(["default", "b"])
    want = step(model, x, dy, adapter_names=names)
    with pytest.raises(ValueError, match="training mode"):
        model(x, adapter_names=names)
    patch(model)
    for run in (layer(model), lambda x: checkpoint(layer(model), x, use_reentrant=False)):
        with mixed_batch(model, names):
            model.zero_grad()
            run(x).backward(dy)
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert near(found, {name: want[name] for name in found}, 2**-20)
        assert len(found) == 4
    assert len(fused) == 3
    assert not layer(model)._forward_pre_hooks
    with pytest.raises(ValueError, match=r"among .*got \['nobody'\]"), mixed_batch(model, ["nobody"]):
        pass


def test_batches_that_are_not_fused(fused: list) -> None:
    model, x = make(FP32, {"lora_dropout": 0.1}, DORA).train(), inputs()[0]
    patch(model)
    with pytest.raises(ValueError, match="when DoRA is enabled"):
        layer(model)(x, adapter_names=["default", "c"] * 2)
    for training in (True, False):
        layer(model.train(training))(
            x, adapter_names=["default", "b"] * 2
        )  # with unlike dropout where it acts
        assert len(fused) == (not training)


def test_dropout_is_that_of_the_reference(fused: list) -> None:
    model, (x, dy) = make(FP32, lora_dropout=0.3), inputs()
    patch(model)
    own = layer(model)
    for p in (0.3, 0.0):
        model.train(p > 0)
        torch.manual_seed(3)
        found = step(model, x, dy)
        assert fused[-1]["dropout_p"] == p
        operands = (x, own.lora_A["default"].weight, own.lora_B["default"].weight)
        inner, a, b = (t.detach().clone().requires_grad_() for t in operands)
        torch.manual_seed(3)
        options = {"scale": 2.0, "bias": own.base_layer.bias, "dropout_p": p}
        y = reference.lora_linear(inner, own.base_layer.weight, a, b, **options)
        y.backward(dy)
        want = {"y": y, "x": inner.grad, "A": a.grad, "B": b.grad}
        assert all(error(*pair) <= 2**-20 for pair in zip(found.values(), want.values(), strict=True))
    model.train()
    draws = torch.stack([own(x).detach() for _ in range(64)])
    assert len({float(draw.sum()) for draw in draws}) == 64
    distances = (draws - y).flatten(1).norm(dim=1)
    assert (draws.mean(0) - y).norm() <= 2 * distances.mean() / 8  # expected: a draw's distance / √64
    mixed = []
    for names in (None, ["default", "__base__"] * 2):
        torch.manual_seed(3)
        mixed.append(own(x, adapter_names=names))
    assert error(mixed[1][::2], mixed[0][::2]) <= 2**-20
    assert error(mixed[1][1::2], own.base_layer(x[1::2])) <= 2**-20


def test_it_follows_what_peft_does_afterwards(fused: list) -> None:
    """Each change to a patched and to an unpatched model."""
    twins, (x, dy), adapter = (make(), make()), inputs(), config(r=6)
    patch(twins[0])

    def both(fuses: bool, change: Callable[[nn.Module], Any], said: str = "") -> None:
        for model in twins:
            torch.manual_seed(5)
            change(model)
        before = len(fused)
        ours, theirs = (step(model, x, dy) for model in twins)
        assert len(fused) == before + fuses
        assert near(ours, theirs, 2**-20) if fuses else same_bits(ours, theirs)
        assert said in str(patch(twins[0]))

    with torch.no_grad(), twins[0].disable_adapter():
        assert torch.equal(layer(twins[0])(x), layer(twins[0]).base_layer(x))
    assert not fused
    both(True, lambda m: m.add_adapter("b", adapter))
    both(True, lambda m: m.set_adapter("b"))
    both(True, lambda m: layer(m).scale_layer(0.5))
    both(False, lambda m: m.merge_adapter(), "PEFT's own forward now: merged: b")
    both(True, lambda m: m.unmerge_adapter())
    both(True, lambda m: m.delete_adapter("default"))
    both(False, lambda m: m.base_model.disable_adapter_layers(), "its adapters are disabled")
    both(True, lambda m: m.base_model.enable_adapter_layers())
    both(False, lambda m: m.delete_adapter("b"), "no active adapter")
    both(True, lambda m: (m.add_adapter("c", adapter), m.set_adapter("c")))
    merged, others = (model.merge_and_unload() for model in twins)
    assert same_bits(merged.state_dict(), others.state_dict())
    assert not any("forward" in vars(module) for module in merged.modules())


@pytest.mark.parametrize(
    ("options", "others", "active", "reason"),
    [
        ({}, [{"lora_bias": True}], "b", "adapter 'b': lora_B has a bias"),
        ({}, [{"r": 257}], "b", "adapter 'b': rank 257"),
        ({"alora_invocation_tokens": [1]}, [{}], "default", "adapter 'default': ALoraLinearVariant"),
        (
            DORA | {"lora_dropout": 0.2},
            [],
            "default",
            "adapter 'default': DoRA with dropout, fused in evaluation",
        ),
        (DORA, [{}], ["default", "b"], "several active adapters, and DoRA among them"),
        ({"lora_dropout": 0.2}, [{}], ["default", "b"], "several active adapters with dropout in training"),
        ({"r": 200}, [{"r": 100}], ["default", "b"], "ranks of the active adapters come to 300"),
    ],
)
def test_not_fused_runs_pefts_own_forward(options, others, active, reason, fused: list) -> None:
    model, found = make(FP32, *others, **options).train(), []
    model.base_model.set_adapter(active)
    for _ in range(2):
        torch.manual_seed(2)
        found.append(step(model, *inputs()))
        assert reason in str(patch(model))
    assert same_bits(*found)
    assert not fused
    if options == DORA | {"lora_dropout": 0.2}:
        unpatch(model.eval())
        check(model)
        assert len(fused) == 1


def gpt2() -> nn.Module:
    model = transformers.GPT2Model(transformers.GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=16))
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["c_attn", "wte"], fan_in_fan_out=True))


def bitsandbytes(kind: str, dtype: torch.dtype = FP32, **options: Any) -> nn.Module:
    quantised = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed").nn.Linear4bit
    net = Net().to(dtype)
    net.is_loaded_in_4bit, net.proj = True, quantised(K, N, quant_type=kind, compute_dtype=dtype)
    net.proj.load_state_dict(nn.Linear(K, N).state_dict())
    return peft.get_peft_model(net.to(DEVICE), config(**options)).train()


def changed(change: Callable[[nn.Module], Any]) -> nn.Module:
    model = make()
    change(layer(model))
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (gpt2, "fan_in_fan_out"),
        (gpt2, r"is a peft\.tuners\.lora\.layer\.Embedding"),
        (lambda: bitsandbytes("fp4"), "its base weight is fp4"),
        (lambda: make(lora_bias=True), "lora_B has a bias"),
        (lambda: changed(lambda m: m.base_layer.register_forward_hook(print)), "its base layer has hooks"),
        (lambda: changed(lambda m: m.lora_A.default.register_forward_hook(print)), "lora_A has hooks"),
        (lambda: changed(lambda m: m.double()), "its base weight is torch.float64"),
        (lambda: changed(lambda m: m.to("meta")), "meta device"),
        (lambda: changed(lambda m: vars(m).update(forward=abs)), "already re-bound on this instance, to abs"),
        (lambda: peft.get_peft_model(Net(), peft.IA3Config(None, target_modules=["proj"], feedforward_modules=[])), "ia3"),
        (Net, r"looked for LoRA layers of PEFT"),
    ],
)  # fmt: skip
def test_left_with_a_reason(model: Callable[[], nn.Module], reason: str) -> None:
    model = model()
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(ValueError, match=f"(nothing was replaced|holds no LoRA layers)(.|\n)*{reason}"):
        patch(model)
    assert [dict(vars(module)) for module in model.modules()] == before
    with pytest.raises(ValueError, match=r"no LoRA layer of this .* is patched"):
        unpatch(model)


def attributes(model: nn.Module) -> dict:
    return {path: {k: id(v) for k, v in vars(module).items()} for path, module in model.named_modules()}


def test_reversible_and_copied(fused: list) -> None:
    model, (x, dy) = make(), inputs()
    before, keys = attributes(model), list(model.state_dict())
    with patched(model) as report:
        assert report.counts == {"lora_linear": 1}
        with patched(model) as again:
            assert [(e.replaced, e.reason) for e in again.entries] == [(True, "was patched before")]
        want = step(model, x, dy)
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        layer(model).lora_B.default.weight.data.zero_()  # the copies use their own weights
        for copied in copies:
            assert same_bits(step(copied, x, dy), want)
            unpatch(copied)
            assert "forward" not in vars(layer(copied))
        assert len(fused) == 3
        assert list(model.state_dict()) == keys
    assert attributes(model) == before


def test_saving_loading_and_modules_to_save(tmp_path: Path) -> None:
    model, other = (make(modules_to_save=["head"]) for _ in range(2))
    model.save_pretrained(tmp_path / "plain")
    patch(model)
    model.save_pretrained(tmp_path / "patched")
    plain, written = (sorted((tmp_path / kind).iterdir()) for kind in ("plain", "patched"))
    assert [(f.name, f.read_bytes()) for f in plain] == [(f.name, f.read_bytes()) for f in written]
    layer(other).lora_B.default.weight.data.zero_()
    patch(other)
    x = inputs()[0]
    assert not torch.equal(other(x), model(x))
    other.load_adapter(tmp_path / "patched", "default")
    assert torch.equal(other(x), model(x))
    other(x).sum().backward()
    assert any("modules_to_save" in name and p.grad is not None for name, p in other.named_parameters())


def test_autocast_and_compile() -> None:
    model, (x, dy) = make(), inputs()
    with torch.autocast(DEVICE, BF16):
        want = step(model, x, dy)
        patch(model)
        got = step(model, x, dy)
    assert all(got[key].dtype == want[key].dtype for key in want)
    assert near(got, want, 2**-7)  # both round x, W and y to bf16, PEFT also A, B and S
    compiled = torch.compile(layer(model), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), layer(model)(x))
    model.base_model.disable_adapter_layers()
    assert torch.equal(compiled(x), layer(model).base_layer(x))


def test_whole_model_with_both_patches_and_checkpointing(fused: list) -> None:
    torch.manual_seed(0)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
    model = peft.get_peft_model(make_llama(), config(target_modules=targets)).train()
    want = llama_step(model)
    assert hugging_face.patch(model).counts["rms_norm"] == 5
    assert patch(model).counts == {"lora_linear": 10}
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert near(llama_step(model), want, 2**-17)  # as for whole models without LoRA
    assert len(fused) == 20
    unpatch(model)
    assert all(e.reason == "was patched before" for e in hugging_face.patch(model, ops="rms_norm").entries)


@dtypes
def test_bitsandbytes_4_bit(dtype: torch.dtype, fused: list) -> None:
    model, (x, dy) = bitsandbytes("nf4", dtype), inputs(dtype)
    for autocast in (False, True):
        with torch.autocast(DEVICE, BF16, enabled=autocast):
            want = step(model, x, dy)
            assert patch(model).counts == {"lora_linear": 1}
            got = step(model, x, dy)
        assert all(got[key].dtype == want[key].dtype for key in want)
        assert near(got, want, 2**-20 if dtype == FP32 and not autocast else 2**-7)
        unpatch(model)
    patch(model)
    step(model, x, dy)
    copied = copy.deepcopy(model)
    assert vars(layer(copied))["forward"].quantized is None  # else a second copy of the codes
    assert same_bits(step(copied, x, dy), step(model, x, dy))
    for owner in (model, copied):
        nf4, weight = vars(layer(owner))["forward"].nf4, layer(owner).base_layer.weight
        assert nf4() is nf4()
        assert nf4().codes.data_ptr() == weight.data_ptr()
    assert len(fused) == 5
    step(model.float(), x.float(), dy)
    assert len(fused) == 5 + (dtype == FP32)  # in bf16 the base computes in less than x: PEFT's own
