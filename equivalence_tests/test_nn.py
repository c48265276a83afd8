"""fast.nn: parameters named and initialised as torch's and Transformers' modules, values those of the function."""

import copy
import pickle

import pytest
import torch
from transformers import Gemma2Config, LlamaConfig, Phi3Config, Qwen2Config
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

import reference
from equivalence_tests.harness.real import DEVICE
from fast.nn import RMSNorm, SwiGLU, SwiGLUMLP, projection_tensors

GEMMA = {"weight_offset": 1.0, "casting": "gemma"}
GPT_OSS = {"alpha": 1.702, "limit": 7.0, "up_offset": 1.0}
SIZES = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (torch.nn.RMSNorm(48, eps=1e-6), RMSNorm(48, casting="gemma")),
        (LlamaRMSNorm(48), RMSNorm(48)),
        (GemmaRMSNorm(48), RMSNorm(48, **GEMMA)),
    ],
    ids=["torch", "llama", "gemma"],
)
def test_loads_and_computes_what_the_common_modules_do(theirs: torch.nn.Module, ours: RMSNorm) -> None:
    assert {k: v.tolist() for k, v in ours.state_dict().items()} == {
        k: v.tolist() for k, v in theirs.state_dict().items()
    }
    theirs, ours = theirs.to(DEVICE, torch.bfloat16), ours.to(DEVICE, torch.bfloat16)
    torch.nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = torch.randn(3, 5, 48, device=DEVICE, dtype=torch.bfloat16)
    # Both round the same fp32 values up to the order of the row's sum: one bf16 step where that crosses a boundary.
    torch.testing.assert_close(ours(x), theirs(x), rtol=2**-7, atol=0)


@pytest.mark.parametrize("options", [{}, GEMMA, {"bias": True}, {"elementwise_affine": False}])
@pytest.mark.parametrize("residual", [False, True])
def test_values_and_gradients_are_the_functions(options: dict, residual: bool) -> None:
    norm = RMSNorm(40, eps=1e-5, device=DEVICE, **options)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    x, r, dy = (torch.randn(2, 3, 40, device=DEVICE, requires_grad=i < 2) for i in range(3))
    casting, offset = options.get("casting", "llama"), options.get("weight_offset", 0.0)
    tensors = [x, *([r] if residual else []), *norm.parameters()]
    results = []
    for y in (
        norm(x, r if residual else None),
        reference.rms_norm(
            x,
            norm.weight,
            bias=norm.bias,
            residual=r if residual else None,
            eps=1e-5,
            weight_offset=offset,
            casting=casting,
        ),
    ):
        outputs = y if residual else (y,)
        results.append([*outputs, *torch.autograd.grad(outputs, tensors, [dy] * len(outputs))])
    for got, want in zip(*results, strict=True):
        # In norm: 36 roundings at most and sums of 40, which add up like random numbers, in each of the two.
        assert (got - want).norm() <= 2**-20 * want.norm()


def test_initial_gain_is_one_and_reset_brings_it_back() -> None:
    for norm in (RMSNorm(8), RMSNorm(8, bias=True), RMSNorm(8, **GEMMA)):
        torch.nn.init.normal_(norm.weight)
        norm.reset_parameters()
        assert (norm.weight + norm.weight_offset == 1).all()
        assert norm.bias is None or not norm.bias.any()


def test_repr_parameters_and_placement() -> None:
    assert repr(RMSNorm(8, 1e-5)).startswith(
        "RMSNorm(8, eps=1e-05, weight_offset=0.0, casting='llama', elementwise_affine=True"
    )
    assert list(RMSNorm(8, elementwise_affine=False).state_dict()) == []
    assert list(RMSNorm(8, bias=True).state_dict()) == ["weight", "bias"]
    norm = RMSNorm(8, device="meta", dtype=torch.bfloat16)
    assert norm.weight.is_meta
    assert norm.weight.dtype == torch.bfloat16


def test_copies_use_their_own_weight() -> None:
    norm = RMSNorm(8, device=DEVICE)
    x = torch.randn(2, 8, device=DEVICE)
    for twin in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        torch.nn.init.zeros_(twin.weight)
        assert not twin(x).any()
        assert norm(x).all()


@pytest.mark.parametrize(
    "options",
    [
        {"N": 0},
        {"N": 8, "eps": -1.0},
        {"N": 8, "casting": "lama"},
        {"N": 8, "bias": True, "elementwise_affine": False},
        {"N": 8, "weight_offset": 1.0, "elementwise_affine": False},
    ],
)
def test_refuses_options_that_the_function_refuses(options: dict) -> None:
    with pytest.raises(ValueError, match=r"RMSNorm|rms_norm"):
        RMSNorm(**options)


@pytest.mark.parametrize(
    ("theirs", "options"),
    [
        (LlamaMLP(LlamaConfig(**SIZES)), {}),
        (LlamaMLP(LlamaConfig(**SIZES, mlp_bias=True)), {"bias": True}),
        (Qwen2MLP(Qwen2Config(**SIZES)), {}),
        (Gemma2MLP(Gemma2Config(**SIZES)), {"activation": "gelu_tanh"}),
        (Phi3MLP(Phi3Config(**SIZES)), {"packed": True}),
    ],
    ids=["llama", "llama with biases", "qwen2", "gemma2", "phi3"],
)
def test_mlp_loads_and_computes_what_transformers_do(theirs: torch.nn.Module, options: dict) -> None:
    theirs, ours = theirs.to(DEVICE), SwiGLUMLP(24, 40, **options, device=DEVICE)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    assert [p.shape for p in ours.parameters()] == [p.shape for p in theirs.parameters()]
    x, dy = (torch.randn(2, 5, 24, device=DEVICE, requires_grad=i == 0) for i in range(2))
    results = [
        [y, *torch.autograd.grad(y, [x, *module.parameters()], dy)]
        for module in (ours, theirs)
        for y in [module(x)]
    ]
    for got, want in zip(*results, strict=True):
        # In norm: sums of 40 at most and some 10 roundings of 2⁻²⁴ in each of three products in a row, in both.
        assert (got - want).norm() <= 2**-20 * want.norm()


@pytest.mark.parametrize("options", [{}, GPT_OSS, {"activation": "relu2", "bias": True, "packed": True}])
def test_mlp_is_the_function_and_recompute_gives_the_same_bits(options: dict) -> None:
    kept = SwiGLUMLP(24, 40, **options, device=DEVICE, dtype=torch.bfloat16)
    again = SwiGLUMLP(24, 40, **options, recompute=True, device=DEVICE, dtype=torch.bfloat16)
    again.load_state_dict(kept.state_dict())
    x, dy = (torch.randn(3, 24, device=DEVICE, dtype=torch.bfloat16, requires_grad=i == 0) for i in range(2))
    results, sizes = [], []
    for module in (kept, again):
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.append(t) or t, lambda t: t
        ):
            y = module(x)
        sizes.append(sum(t.numel() for t in saved))
        results.append([y, *torch.autograd.grad(y, [x, *module.parameters()], dy)])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert sizes[0] - sizes[1] == 2 * 3 * 40  # gate and up

    tensors = {
        name: p.detach() for name, p in projection_tensors(kept, kept.projections).items() if p is not None
    }
    named = {name: value for name, value in options.items() if name not in ("bias", "packed")}
    want = reference.swiglu_mlp(x.detach(), **tensors, **named)
    # gate, up, h and y may each be rounded to the other side: 4 bf16 steps of the largest term.
    torch.testing.assert_close(results[0][0], want, rtol=2**-6, atol=2**-6 * want.abs().max().item())


@pytest.mark.parametrize("options", [{}, GPT_OSS, {"activation": "gelu"}])
def test_swiglu_is_the_function_on_halves_and_alternating_columns(options: dict) -> None:
    module, packed = SwiGLU(**options), torch.randn(3, 40, device=DEVICE)
    for gate, up in (packed.chunk(2, -1), (packed[..., ::2], packed[..., 1::2])):
        # 20 fp32 roundings and the two libraries' exp and erf.
        torch.testing.assert_close(
            module(gate, up), reference.swiglu(gate, up, **options), rtol=2**-18, atol=2**-20
        )
    assert not list(module.parameters())
    assert "activation='" in repr(module)


@pytest.mark.parametrize("wrapped", ["gate_proj", "up_proj", "down_proj"])
def test_mlp_refuses_a_projection_that_computes_more_than_its_weight_says(wrapped: str) -> None:
    class LoRA(torch.nn.Linear):
        pass

    mlp, x = SwiGLUMLP(8, 16, device=DEVICE), torch.randn(2, 8, device=DEVICE)
    own = getattr(mlp, wrapped)
    setattr(mlp, wrapped, LoRA(own.in_features, own.out_features))
    with pytest.raises(TypeError, match=rf"SwiGLUMLP: {wrapped} is a .*LoRA, not a plain torch\.nn\.Linear"):
        mlp(x)
    setattr(mlp, wrapped, own)
    handle = own.register_forward_hook(lambda *_: None)
    with pytest.raises(TypeError, match=f"SwiGLUMLP: {wrapped} has hooks"):
        mlp(x)
    handle.remove()
    torch.nn.utils.parametrizations.weight_norm(own)
    with pytest.raises(TypeError, match=f"SwiGLUMLP: {wrapped} is a .*ParametrizedLinear"):
        mlp(x)


def test_mlp_repr_placement_and_copies() -> None:
    mlp = SwiGLUMLP(8, 16, bias=True, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in mlp.parameters()} == {("meta", torch.bfloat16)}
    assert "activation='silu', alpha=1.0, limit=None, up_offset=0.0, recompute=False" in repr(mlp)
    mlp, x = SwiGLUMLP(8, 16, packed=True, device=DEVICE), torch.randn(2, 8, device=DEVICE)
    for twin in (copy.deepcopy(mlp), pickle.loads(pickle.dumps(mlp))):
        torch.nn.init.zeros_(twin.down_proj.weight)
        assert not twin(x).any()
        assert mlp(x).all()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"activation": "swish"}, ValueError),
        ({"limit": 0.0}, ValueError),
        ({"alpha": float("inf")}, ValueError),
        ({"up_offset": "1"}, TypeError),
    ],
)
def test_swiglu_modules_refuse_options_that_the_functions_refuse(options: dict, error: type) -> None:
    with pytest.raises(error, match="swiglu: "):
        SwiGLU(**options)
    with pytest.raises(error, match="swiglu_mlp: "):
        SwiGLUMLP(8, 16, **options)


def test_mlp_refuses_empty_widths_and_a_recompute_that_is_no_bool() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        SwiGLUMLP(8, 0)
    with pytest.raises(TypeError, match="recompute must be a bool"):
        SwiGLUMLP(8, 16, recompute=1)
