"""fast.nn: parameters named and initialised as torch's and Transformers' modules, values those of the function."""

import copy
import pickle

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import reference
from equivalence_tests.harness.real import DEVICE
from fast.nn import RMSNorm

GEMMA = {"weight_offset": 1.0, "casting": "gemma"}


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
