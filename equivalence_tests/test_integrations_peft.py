"""LoRA layers of PEFT patched to run fast.lora_linear: the same function, and everything else is still PEFT's."""

import copy
import importlib.util
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
BF16 = torch.bfloat16


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of each call of fast.lora_linear."""
    calls: list[dict[str, Any]] = []
    real = fast.lora_linear
    monkeypatch.setattr(
        fast, "lora_linear", lambda *args, **options: calls.append(options) or real(*args, **options)
    )
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


def make(
    dtype: torch.dtype = torch.float32,
    *others: dict,
    bias: bool = True,
    trained: bool = False,
    upcast: bool = True,
    **options: Any,
) -> nn.Module:
    """A model of one LoRA layer. others: options of more adapters, "b", "c", … upcast: PEFT's default, fp32 adapters."""
    torch.manual_seed(0)
    model = peft.get_peft_model(Net(bias).to(DEVICE, dtype), config(**options), autocast_adapter_dtype=upcast)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DoRA and LoRA in one model
        for name, more in zip("bcde", others, strict=False):
            model.add_adapter(name, config(**more))
    layer(model).base_layer.requires_grad_(trained)
    for magnitude in layer(model).lora_magnitude_vector.values():
        magnitude.weight.data *= (
            torch.rand_like(magnitude.weight) + 0.5
        )  # PEFT starts at the norm, where the factor is 1
    return model


def layer(model: nn.Module) -> nn.Module:
    return model.base_model.model.proj


def inputs(dtype: torch.dtype = torch.float32, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, T, width, generator=generator).to(DEVICE, dtype) for width in (K, N))


def step(model: nn.Module, x: Tensor, dy: Tensor, **options: Any) -> dict[str, Tensor]:
    """Output of the layer and all gradients, by name."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = layer(model)(x, **options)
    y.backward(dy.to(y.dtype))
    found = {"y": y.detach(), "x": x.grad} | {
        n: p.grad for n, p in model.named_parameters() if p.grad is not None
    }
    return {name: value.clone() for name, value in found.items()}


def check(model: nn.Module, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Tensor]:
    """Patches the model; its errors are PEFT's at most, against PEFT in float64."""
    x, dy = inputs(dtype)
    truth = step(copy.deepcopy(model).double(), x.double(), dy.double(), **options)
    theirs = step(model, x, dy, **options)
    patch(model)
    ours = step(model, x, dy, **options)
    assert ours.keys() == theirs.keys() == truth.keys()
    # 16-bit operands: S and dS enter products as hi + lo, to 2⁻¹⁶. fp32: sums of some hundred terms in another order.
    slack = 2**-16 if dtype != torch.float32 else 2**-21
    for name, want in truth.items():
        assert ours[name].dtype == theirs[name].dtype, name
        error, allowed = ((t[name].double() - want).norm() / want.norm() for t in (ours, theirs))
        assert error <= 1.1 * allowed + slack, (name, error, allowed)
    return ours


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False, "use_rslora": True, "r": 3},
        {"trained": True},
        {"upcast": False, "lora_alpha": 3},
        {"use_dora": True},
        {"use_dora": True, "trained": True, "bias": False},
    ],
    ids=str,
)
def test_same_function(options: dict, dtype: torch.dtype, fused: list) -> None:
    check(make(dtype, **options), dtype)
    assert len(fused) == 1


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(
    "second", [{"r": 7, "lora_alpha": 14}, {"r": 3, "lora_alpha": 1}], ids=["one scale", "scales"]
)
def test_several_active_adapters(second: dict, dtype: torch.dtype, fused: list) -> None:
    model = make(dtype, second)
    model.base_model.set_adapter(["default", "b"])
    found = check(model, dtype)
    assert len(fused) == 1
    assert sum("lora_" in name for name in found) == 4


NAMES = ["b", "__base__", "default", "c"]  # c is an adapter that this layer does not have


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(
    "second", [{"r": 7, "lora_alpha": 14}, {"r": 3, "lora_alpha": 1}], ids=["one scale", "scales"]
)
def test_adapter_names_mix_a_batch(second: dict, dtype: torch.dtype, fused: list) -> None:
    model = make(dtype, second, {"target_modules": ["head"]})
    model.base_model.set_adapter(["default", "b"])  # what makes both train
    found = check(model, dtype, adapter_names=NAMES)
    assert len(fused) == 1
    (x, dy), loop = inputs(dtype), {}
    for i, name in enumerate(NAMES):
        alone = step(model, x[i : i + 1], dy[i : i + 1], adapter_names=[name])
        for key, value in alone.items():
            if key in ("y", "x"):
                loop[key] = torch.cat([loop.get(key, value[:0]), value])
            elif value.any():
                loop[key] = value
    # The same sums for each row; the zeros of other adapters may lie between its terms.
    u = torch.finfo(dtype).eps
    for key, value in loop.items():
        assert (found[key] - value).norm() <= (u if key in ("y", "x") else 2**-16) * value.norm(), key
    with pytest.raises(ValueError, match="Length of `adapter_names`"):
        layer(model)(x, adapter_names=["b"])


def test_mixed_batch_trains_and_survives_checkpointing(fused: list) -> None:
    model = make(torch.float32, {"r": 7}, modules_to_save=["head"]).train()
    model.base_model.set_adapter(["default", "b"])
    names, x = ["b", "__base__", "default", "b"], inputs()[0]
    want = step(model, x, inputs()[1], adapter_names=names)
    with pytest.raises(ValueError, match="training mode"):
        model(x, adapter_names=names)
    patch(model)
    for run in (layer(model), lambda x: checkpoint(layer(model), x, use_reentrant=False)):
        model.zero_grad()
        with mixed_batch(model, names):
            y = run(x)
            y.backward(inputs()[1])
        assert len(fused) in (1, 3)  # once, and with checkpointing twice more
        for name, p in model.named_parameters():
            if p.grad is not None:
                assert (p.grad - want[name]).norm() <= 2**-18 * want[name].norm(), name
    assert not layer(model)._forward_pre_hooks
    with pytest.raises(ValueError, match=r"must be among .*got \['nobody'\]"), mixed_batch(model, ["nobody"]):
        pass


def test_dropout_is_that_of_the_reference(fused: list) -> None:
    model = make(torch.float32, lora_dropout=0.3)
    patch(model)
    (x, dy), own = inputs(), layer(model)
    for training in (True, False):
        model.train(training)
        torch.manual_seed(3)
        found = step(model, x, dy)
        assert fused[-1]["dropout_p"] == (0.3 if training else 0.0)
        a, b = (part["default"].weight.detach().clone().requires_grad_() for part in (own.lora_A, own.lora_B))
        inner = x.clone().requires_grad_()
        torch.manual_seed(3)
        y = reference.lora_linear(
            inner,
            own.base_layer.weight,
            a,
            b,
            scale=2.0,
            bias=own.base_layer.bias,
            dropout_p=0.3 if training else 0.0,
        )
        y.backward(dy)
        prefix = "base_model.model.proj.lora_"
        want = {
            "y": y,
            "x": inner.grad,
            f"{prefix}A.default.weight": a.grad,
            f"{prefix}B.default.weight": b.grad,
        }
        assert all((found[key] - value).norm() <= 2**-20 * value.norm() for key, value in want.items())
    model.train()
    mean = sum(own(x).detach() for _ in range(64)) / 64
    assert (mean - y).norm() <= 0.5 * (own(x) - y).norm()  # 1/8 of one draw's distance, and its scatter
    assert not torch.equal(own(x), own(x))


def test_it_follows_what_peft_does_afterwards(fused: list) -> None:
    """Each step on a patched and on an unpatched model."""
    twins = make(torch.float32), make(torch.float32)
    patch(twins[0])
    x, dy = inputs()
    adapter = config(r=6)

    def both(change: Callable[[nn.Module], Any], fuses: bool) -> None:
        for model in twins:
            torch.manual_seed(5)
            change(model)
        before = len(fused)
        ours, theirs = (step(model, x, dy) for model in twins)
        assert len(fused) == before + fuses
        assert ours.keys() == theirs.keys()
        if not fuses:
            assert same_bits(ours, theirs)
        assert all((ours[k] - theirs[k]).norm() <= 2**-19 * theirs[k].norm() for k in theirs)

    for model in twins:
        with torch.no_grad(), model.disable_adapter():
            disabled = layer(model)(x)
            assert torch.equal(disabled, layer(model).base_layer(x))
    assert not fused
    both(lambda m: m.add_adapter("b", adapter), True)
    both(lambda m: m.set_adapter("b"), True)
    both(lambda m: layer(m).scale_layer(0.5), True)
    both(lambda m: m.merge_adapter(), False)
    assert "PEFT's own forward now: merged: b" in str(patch(twins[0]))
    both(lambda m: m.unmerge_adapter(), True)
    both(lambda m: m.delete_adapter("default"), True)
    both(lambda m: m.base_model.disable_adapter_layers(), False)
    assert "its adapters are disabled" in str(patch(twins[0]))
    both(lambda m: m.base_model.enable_adapter_layers(), True)
    both(lambda m: m.delete_adapter("b"), False)
    assert "no active adapter" in str(patch(twins[0]))
    both(lambda m: (m.add_adapter("c", adapter), m.set_adapter("c")), True)
    merged = [model.merge_and_unload() for model in twins]
    assert all(torch.equal(a, b) for a, b in zip(*(m.state_dict().values() for m in merged), strict=True))
    assert not any("forward" in vars(module) for module in merged[0].modules())


@pytest.mark.parametrize(
    ("options", "others", "active", "reason"),
    [
        ({}, [{"lora_bias": True}], "b", "adapter 'b': lora_B has a bias"),
        ({}, [{"r": 257}], "b", "adapter 'b': rank 257"),
        ({}, [{"alora_invocation_tokens": [1]}], "b", "adapter 'b': ALoraLinearVariant"),
        ({"use_dora": True, "lora_dropout": 0.2}, [], "default", "adapter 'default': DoRA with dropout, fused in evaluation"),
        ({"use_dora": True}, [{}], ["default", "b"], "several active adapters, and DoRA among them"),
        ({"lora_dropout": 0.2}, [{}], ["default", "b"], "several active adapters with dropout in training"),
        ({"r": 200}, [{"r": 100}], ["default", "b"], "ranks of the active adapters come to 300"),
    ],
)  # fmt: skip
def test_what_is_not_fused_runs_pefts_own_forward(
    options: dict, others: list, active: Any, reason: str, fused: list
) -> None:
    model, (x, dy) = make(torch.float32, *others, **options).train(), inputs()
    model.base_model.set_adapter(active)
    torch.manual_seed(2)
    want = step(model, x, dy)
    assert reason in str(patch(model))
    torch.manual_seed(2)
    assert same_bits(step(model, x, dy), want)
    assert not fused
    if "dropout" in reason and isinstance(active, str):
        check(model.eval())
        assert len(fused) == 2  # the first of them is what check takes for PEFT's


def gpt2() -> nn.Module:
    model = transformers.GPT2Model(transformers.GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=16))
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["c_attn", "wte"], fan_in_fan_out=True))


def changed(change: Callable[[nn.Module], Any], **options: Any) -> nn.Module:
    model = make(torch.float32, **options)
    change(layer(model))
    return model


@pytest.mark.parametrize(
    ("model", "reasons"),
    [
        (gpt2, ["fan_in_fan_out", r"is a peft\.tuners\.lora\.layer\.Embedding"]),
        (lambda: make(lora_bias=True), ["lora_B has a bias"]),
        (lambda: changed(lambda m: m.base_layer.register_forward_hook(print)), ["its base layer has hooks"]),
        (lambda: changed(lambda m: m.lora_A["default"].register_forward_hook(print)), ["lora_A has hooks"]),
        (lambda: changed(lambda m: m.double()), ["its base weight is torch.float64"]),
        (lambda: changed(lambda m: m.to("meta")), ["meta device"]),
        (
            lambda: changed(lambda m: vars(m).update(forward=abs)),
            ["already re-bound on this instance, to abs"],
        ),
    ],
)
def test_left_with_a_reason(model: Callable[[], nn.Module], reasons: list[str]) -> None:
    model = model()
    before = [dict(vars(module)) for module in model.modules()]
    for reason in reasons:
        with pytest.raises(ValueError, match=f"nothing was replaced(.|\n)*{reason}"):
            patch(model)
    assert [dict(vars(module)) for module in model.modules()] == before


def test_models_without_lora_layers() -> None:
    ia3 = peft.get_peft_model(Net(), peft.IA3Config(target_modules=["proj"], feedforward_modules=[]))
    for model, said in ((Net(), "looked for LoRA layers"), (ia3, r"is a peft\.tuners\.ia3")):
        with pytest.raises(ValueError, match=f"holds no LoRA layers of PEFT(.|\n)*{said}"):
            patch(model)
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got int"):
        patch(3)
    with pytest.raises(ValueError, match="no LoRA layer of this Net is patched"):
        unpatch(Net())


def test_reversible_and_copied(fused: list) -> None:
    model, (x, dy) = make(torch.float32), inputs()
    before = {path: {k: id(v) for k, v in vars(m).items()} for path, m in model.named_modules()}
    keys = list(model.state_dict())
    with patched(model) as report:
        assert report.counts == {"lora_linear": 1}
        with patched(model) as again:
            assert [(e.replaced, e.reason) for e in again.entries] == [(True, "was patched before")]
        want = step(model, x, dy)
        assert len(fused) == 1
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            layer(model).lora_B["default"].weight.data.zero_()  # a copy uses its own weights
            assert same_bits(step(copied, x, dy), want)
            assert vars(layer(copied))["forward"].module is layer(copied)
            unpatch(copied)
            assert "forward" not in vars(layer(copied))
            layer(model).load_state_dict(layer(copied).state_dict())
        assert len(fused) == 3
        assert list(model.state_dict()) == keys
    assert {path: {k: id(v) for k, v in vars(m).items()} for path, m in model.named_modules()} == before


def test_saving_and_loading(tmp_path: Path) -> None:
    model, x = make(torch.float32, modules_to_save=["head"]), inputs()[0]
    model.save_pretrained(tmp_path / "plain")
    patch(model)
    model.save_pretrained(tmp_path / "patched")
    plain, written = (sorted((tmp_path / kind).iterdir()) for kind in ("plain", "patched"))
    assert [(a.name, a.read_bytes()) for a in plain] == [(a.name, a.read_bytes()) for a in written]
    other = make(torch.float32, modules_to_save=["head"])
    layer(other).lora_B["default"].weight.data.zero_()
    patch(other)
    assert not torch.equal(other(x), model(x))
    other.load_adapter(tmp_path / "patched", "default")
    assert torch.equal(other(x), model(x))
    other(x).sum().backward()  # modules_to_save trains
    assert [n for n, p in other.named_parameters() if p.grad is not None and "modules_to_save" in n]


def test_autocast_and_compile(fused: list) -> None:
    model, (x, dy) = make(torch.float32), inputs()
    with torch.autocast(DEVICE, BF16):
        want = step(model, x, dy)
        patch(model)
        got = step(model, x, dy)
    # Both round x, W and y to bf16; PEFT the adapter's factors as well.
    assert all(got[k].dtype == want[k].dtype for k in want)
    assert all((got[k] - want[k]).norm() <= 2**-7 * want[k].norm() for k in want)
    compiled = torch.compile(layer(model), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), layer(model)(x))
    model.disable_adapter_layers()
    assert torch.equal(compiled(x), layer(model).base_layer(x))


def test_whole_model_with_both_patches_and_checkpointing(fused: list) -> None:
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
    torch.manual_seed(0)
    model = peft.get_peft_model(make_llama(), config(target_modules=targets)).train()
    want = llama_step(model)
    assert hugging_face.patch(model).counts["rms_norm"] == 5
    assert patch(model).counts == {"lora_linear": 10}
    model.gradient_checkpointing_enable({"use_reentrant": False})
    got = llama_step(model)
    assert len(fused) == 20
    assert got.keys() == want.keys()
    assert all((got[key] - want[key]).norm() <= 2**-17 * want[key].norm() for key in want)
    unpatch(model)
    assert len(hugging_face.patch(model).entries) > 5  # those are still there
    hugging_face.unpatch(model)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes(kind: str, fused: list) -> None:
    from bitsandbytes.nn import Linear4bit

    if not hasattr(fast.NF4Weight, "from_bitsandbytes"):
        pytest.skip("fast.NF4Weight has no from_bitsandbytes yet")
    net = Net()
    net.is_loaded_in_4bit = True
    net.proj = Linear4bit(64, N, quant_type=kind, compute_dtype=torch.float32)
    net.proj.load_state_dict(nn.Linear(64, N).state_dict())
    model = peft.get_peft_model(net.to(DEVICE), config()).train()
    assert type(layer(model)).__module__ == "peft.tuners.lora.bnb"
    if kind == "fp4":
        with pytest.raises(ValueError, match="its base weight is fp4"):
            patch(model)
        return
    x, dy = torch.randn(B, T, 64, device=DEVICE), inputs()[1]
    want = step(model, x, dy)
    assert patch(model).counts == {"lora_linear": 1}
    got = step(model, x, dy)
    assert len(fused) == 1
    assert all((got[key] - want[key]).norm() <= 2**-19 * want[key].norm() for key in want)
    forward = vars(layer(model))["forward"]
    assert forward.nf4() is forward.nf4()
    assert forward.nf4().codes.data_ptr() == layer(model).base_layer.weight.data_ptr()
    twin = copy.deepcopy(model)
    assert same_bits(step(twin, x, dy), got)
    assert vars(layer(twin))["forward"].nf4().codes.data_ptr() == layer(twin).base_layer.weight.data_ptr()
