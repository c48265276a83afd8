"""The judge judged: planted implementations of rms_norm are refused, each for the right reason, and a right one is accepted."""

import sys
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from equivalence_tests.harness.cases import DTYPES, Case, Spec, example
from equivalence_tests.harness.interpreter import interpreting
from equivalence_tests.harness.operations import operation
from equivalence_tests.harness.oracle import Judgement, Sample, Unsupported, judge, subsets
from equivalence_tests.harness.peers import hand_derived
from equivalence_tests.harness.probes import poisoned
from equivalence_tests.harness.strategies import PROFILES, sample
from reference import rms_norm
from reference.rms_norm import rms_norm_backward

DEVICE = "cpu" if interpreting() else "cuda"
RMS_NORM = operation("rms_norm")


def case(dtype: str = "fp32", rows: int = 5, columns: int = 33, **changes: Any) -> Case:
    return example("rms_norm", dtype, {"*": (rows,), "N": columns}, {"weight": Spec()}, **changes)


def verdict(implementation: Callable, of: Case | None = None) -> Judgement:
    return judge(Sample.of_case(of or case(), DEVICE), implementation)


def planted(
    values: Callable | None = None, gradients: Callable | None = None, saved: Callable | None = None
) -> Callable:
    """rms_norm of x and weight, with a fault: values(y, x, w) gives y, gradients(dx, dw, dy, x, w, needed) dx and dw;
    saved(copy of w) runs in the backward pass."""

    class Planted(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
            y = rms_norm(x, weight, eps=eps)
            ctx.eps = eps
            ctx.save_for_backward(x, weight, weight.clone())
            return values(y, x, weight) if values else y

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            x, weight, copy = ctx.saved_tensors
            grads = rms_norm_backward((dy,), x, copy, eps=ctx.eps)
            dx, dw = grads["x"], grads["weight"]
            if saved:
                saved(copy)
            if gradients:
                dx, dw = gradients(dx, dw, dy, x, weight, ctx.needs_input_grad)
            return dx, dw, None

    return lambda x, weight=None, **options: Planted.apply(x, weight, options["eps"])


def changed(tensor: Tensor, **rows: Any) -> Tensor:
    """The tensor, with its last two rows dropped."""
    tensor[-2:] = 0
    return tensor


def unwritten_tail(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    out = torch.empty_like(y)
    out[:-1] = y[:-1]
    return out


def outside(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    end = x.storage_offset() + x.numel()
    if x.untyped_storage().nbytes() > end * x.element_size():
        x.detach().as_strided((1,), (1,), end).fill_(1.0)
    return y


def overwritten(tensor: Tensor, by: Tensor) -> None:
    tensor.detach().copy_(by)


def stale() -> Callable:
    kept: list[Tensor] = []

    def gradients(dx: Tensor, dw: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        kept.append(dx.clone())
        return kept[0], dw

    return planted(gradients=gradients)


def late() -> Callable:
    """No dx for the first cotangents, and a wrong one for later ones."""
    calls: list[int] = []

    def gradients(dx: Tensor, dw: Tensor, *_: Any) -> tuple[Tensor | None, Tensor]:
        calls.append(1)
        return None if len(calls) < 3 else 2 * dx, dw

    return planted(gradients=gradients)


def noisy(y: Tensor, *_: Any) -> Tensor:
    # At most one unit in the last place: within every bound.
    return torch.where(torch.rand(y.shape, device=y.device) < 0.5, y, y * (1 + 2**-23))


def careless(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    # Off by u either way, then rounded: no element leaves its bound of two roundings, but all of them are near it.
    exact = rms_norm(x.double(), weight.double())
    signs = torch.arange(x.shape[-1], device=x.device) % 2 * 2 - 1
    return (exact * (1 + 2**-8 * signs)).to(y.dtype)


def counting() -> Callable:
    """Right, but the bits depend on how often it ran."""
    runs: list[int] = []

    def values(y: Tensor, *_: Any) -> Tensor:
        runs.append(1)
        return y * (1 + 2**-23 * (len(runs) == 1))

    return planted(values)


def accumulated_in_bf16(
    dx: Tensor, dw: Tensor, dy: Tensor, x: Tensor, weight: Tensor, needed: Any
) -> tuple[Tensor, Tensor]:
    rows = dy * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6))
    total = torch.zeros_like(dw)
    for row in rows:
        total += row.to(total.dtype)
    return dx, total


@triton.jit
def _copy_too_far(X, Y, N: tl.constexpr):
    offs = tl.arange(0, 2 * N)
    tl.store(Y + offs, tl.load(X + offs, mask=offs < N, other=0.0), mask=offs < N + 1)


@triton.jit
def _copy_racing(X, Y, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(Y + offs, tl.load(X + offs))


def copied(kernel: Any, programs: int) -> Callable:
    """y goes through a kernel that copies it."""

    def values(y: Tensor, *_: Any) -> Tensor:
        out = torch.empty_like(y)
        kernel[(programs,)](y, out, y.numel())
        return out

    return planted(values)


FAULTS = {
    "zeros": ("values", planted(lambda y, x, w: y * 0), case()),
    "× 1.01": ("values", planted(lambda y, x, w: y * 1.01), case()),
    "one more rounding's error": ("normwise", planted(careless), case("bf16", 40, 64)),
    "last rows dropped": ("values", planted(lambda y, x, w: changed(y)), case()),
    "weight forgotten": ("values", planted(lambda y, x, w: y / w), case()),
    "NaN": ("values", planted(lambda y, x, w: y * torch.nan), case()),
    "wrong dtype": ("output", planted(lambda y, x, w: y.double()), case()),
    "wrong shape": ("output", planted(lambda y, x, w: y[:-1]), case()),
    "unwritten": ("unwritten", planted(unwritten_tail), case()),
    "raises": ("error", planted(lambda y, x, w: y.no_such_attribute), case()),
    "nondeterministic": ("determinism", planted(noisy), case()),
    "depends on the number of calls": ("determinism", counting(), case()),
    "input written": ("input written", planted(lambda y, x, w: (y, overwritten(x, y))[0]), case()),
    "outside written": ("guard written", planted(outside), case()),
    "out of bounds": ("instruments", copied(_copy_too_far, 1), case(rows=4, columns=8)),
    "racing writes": ("instruments", copied(_copy_racing, 2), case(rows=4, columns=8)),
    "zero gradient": ("gradients", planted(gradients=lambda dx, dw, *_: (dx * 0, dw)), case()),
    "gradient × 1.01": ("gradients", planted(gradients=lambda dx, dw, *_: (dx, dw * 1.01)), case()),
    "gradient rows dropped": ("gradients", planted(gradients=lambda dx, dw, *_: (changed(dx), dw)), case()),
    "no gradient": ("missing gradient", planted(gradients=lambda dx, dw, *_: (dx, None)), case()),
    "stale gradient": ("stale gradient", stale(), case()),
    "late gradient": ("missing gradient", late(), case()),
    "cotangent written": (
        "cotangent written",
        planted(gradients=lambda dx, dw, dy, *_: (dx, dw, overwritten(dy, dx))[:2]),
        case(),
    ),
    "saved written": ("saved written", planted(saved=lambda w: w.mul_(2)), case()),
    "saved written, seen twice": ("second backward", planted(saved=lambda w: w.mul_(2)), case()),
    "bf16 accumulator": ("gradients", planted(gradients=accumulated_in_bf16), case("bf16", 200, 8)),
    "frozen weight, no dx": (
        "subset",
        planted(gradients=lambda dx, dw, dy, x, w, needed: (dx if needed[1] else None, dw)),
        case().replace(requires_grad=("x",)),
    ),
    "frozen x, other dw": (
        "subset",
        planted(gradients=lambda dx, dw, dy, x, w, needed: (dx, dw if needed[0] else dw * (1 + 2**-23))),
        case().replace(requires_grad=("weight",)),
    ),
}


# A fault may show in more than one way; what else it shows must follow from it.
COMPANIONS = {
    "second backward": {"saved written", "stale gradient"},
    "saved written": {"second backward", "stale gradient"},
    "input written": {"gradients", "stale gradient", "saved written", "determinism", "values", "normwise"},
    "cotangent written": {"second backward", "determinism"},
    "unwritten": {"values"},
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_refused_for_its_reason(name: str):
    kind, implementation, of = FAULTS[name]
    if kind == "instruments" and not interpreting():
        pytest.skip("what a kernel does in memory is seen in the interpreter only (TRITON_INTERPRET=1)")
    judgement = verdict(implementation, of)
    assert kind in judgement.kinds, judgement.findings
    assert judgement.kinds <= {kind} | COMPANIONS.get(kind, set()), judgement.findings


def test_a_copy_through_a_kernel_is_no_fault():
    assert verdict(copied(_copy_racing, 1), case(rows=4, columns=8)).ok


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_with_its_own_gradients_is_accepted(dtype: str):
    honest = hand_derived(RMS_NORM)
    for of in islice(sample(RMS_NORM, dtype, PROFILES["quick"], seed=1, configs=False), 60):
        judgement = verdict(honest, of)
        assert judgement.ok, f"{of.describe()}\n{judgement.findings}"


def test_an_option_that_is_lacked_is_counted_and_no_failure():
    def lacking(x: Tensor, weight: Tensor | None = None, **options: Any) -> Tensor:
        raise Unsupported("a weight")

    judgement = verdict(lacking)
    assert judgement.ok
    assert judgement.unsupported == "a weight"


def test_lacking_without_a_reason_is_no_pass():
    def lacking(x: Tensor, weight: Tensor | None = None, **options: Any) -> Tensor:
        raise Unsupported

    assert verdict(lacking).unsupported


def test_an_implementation_that_exits_is_refused():
    def leaving(x: Tensor, weight: Tensor | None = None, **options: Any) -> Tensor:
        sys.exit(0)

    assert "error" in verdict(leaving).kinds


@pytest.mark.parametrize("name", ["frozen weight, no dx", "frozen x, other dw"])
def test_every_subset_of_requires_grad_is_tried(name: str):
    judgement = subsets(Sample.of_case(case(), DEVICE), FAULTS[name][1])
    assert judgement.kinds == {"subset"}


def test_no_gradient_is_asked_for_and_none_is_offered():
    def eager(x: Tensor, weight: Tensor | None = None, **options: Any) -> Tensor:
        return rms_norm(x.requires_grad_(), weight, **options)

    judgement = verdict(eager, case().replace(requires_grad=()))
    assert "subset" in judgement.kinds, judgement.findings


def test_ready_tensors_are_judged_as_cases_are():
    x, weight, dy = torch.randn(3, 4, 8), torch.randn(8), torch.randn(3, 4, 8)
    ready = Sample.of_tensors(RMS_NORM, (x.to(DEVICE), weight.to(DEVICE)), {"eps": 1e-5}, (dy.to(DEVICE),))
    assert "x: float32 [3, 4, 8]" in ready.describe()
    assert "eps=1e-05" in ready.describe()
    assert judge(ready, hand_derived(RMS_NORM)).ok
    assert judge(ready, FAULTS["× 1.01"][1]).kinds == {"values"}
    assert judge(ready, stale()).kinds == {"stale gradient"}


def test_judging_leaves_torch_as_it_was():
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    verdict(FAULTS["raises"][1])
    assert (
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    ) == before
    with poisoned():
        assert torch.empty(8, device=DEVICE).isnan().all()
        assert torch.empty_strided((2, 3), (5, 1), device=DEVICE).isnan().all()
        assert torch.zeros(2, device=DEVICE).new_empty(3).isnan().all()
