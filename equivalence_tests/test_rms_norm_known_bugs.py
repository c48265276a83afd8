"""Faults of other people's RMSNorm kernels, each reported in public, as tests of this one: the smallest call that triggers each.

R1 Liger-Kernel#370; R2 Liger-Kernel#1482, #1483, #803; R3 quack#53; R4 liger_kernel 0.8.5 itself;
R5 Liger-Kernel#1350; R6 Liger-Kernel#764.
"""

import pytest
import torch
from torch import Tensor

import fast
import reference
from equivalence_tests.harness.interpreter import interpreting
from equivalence_tests.harness.real import DEVICE
from equivalence_tests.test_rms_norm import BF16, F16, F32, close, draw, gradients, on_gpu


def test_known_bug_r1_incoming_gradient_is_not_overwritten():
    x, w, o, g = draw(4, 64), draw(64), draw(4, 64, seed=1), draw(4, 64, seed=2).detach()
    (fast.rms_norm(x, w) + o).backward(g)
    assert torch.equal(o.grad, draw(4, 64, seed=2))


@pytest.mark.parametrize("rows", [3, 40])
def test_known_bug_r2_offsets_are_64_bit(rows):
    """row · stride passes 2³¹ in a view of few rows; untouched pages of the storage cost no memory on a CPU."""
    stride = 2**31 // (rows - 1) + 16
    x = torch.empty(stride * (rows - 1) + 64, dtype=F16, device=DEVICE).as_strided((rows, 64), (stride, 1))
    x.copy_(draw(rows, 64).detach())
    x, dense, w = x.requires_grad_(), x.detach().clone().requires_grad_(), draw(64, dtype=F16)
    got, wanted = ((*gradients((y := fast.rms_norm(t, w)), (t, w)), y) for t in (x, dense))
    assert all(map(torch.equal, got, wanted))


@on_gpu
def test_known_bug_r2_many_elements():
    x = torch.randn(2**23 + 16, 256, dtype=F16, device=DEVICE).requires_grad_()
    w = draw(256, dtype=F16)
    tail = x.detach()[-64:].clone().requires_grad_()
    y, last = fast.rms_norm(x, w), fast.rms_norm(tail, w)
    dy = torch.zeros_like(y)
    dy[-64:] = draw(64, 256, dtype=F16, seed=1)
    assert torch.equal(y[-64:], last)
    assert torch.equal(torch.autograd.grad(y, x, dy)[0][-64:], torch.autograd.grad(last, tail, dy[-64:])[0])


def test_known_bug_r3_gradient_of_both_outputs():
    x, r, w = draw(5, 48), draw(5, 48, seed=1), draw(48)
    wanted = gradients(reference.rms_norm(x, w, residual=r), (x, r, w))
    close(gradients(fast.rms_norm(x, w, residual=r), (x, r, w)), wanted)
    only_sum = torch.autograd.grad(fast.rms_norm(x, w, residual=r)[1].sum(), (x, r))
    assert all(torch.equal(g, torch.ones_like(g)) for g in only_sum)


def test_known_bug_r4_result_dtype_is_promoted():
    x, w = draw(4, 64, dtype=BF16), draw(64)
    y = fast.rms_norm(x, w)
    dx, dw = gradients(y, (x, w))
    assert (y.dtype, dx.dtype, dw.dtype, fast.rms_norm(x, w, casting="gemma").dtype) == (F32, BF16, F32, BF16)


def test_known_bug_r5_and_compile():
    """Under torch.compile Python floats stay fp32 in the kernel: the bits of the eager call, in one graph."""

    def norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return fast.rms_norm(x, w, residual=r, eps=1.1e-6, weight_offset=0.3)

    x, r, w = draw(6, 72, dtype=BF16), draw(6, 72, dtype=BF16, seed=1), draw(72, dtype=BF16)
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager" if interpreting() else "inductor")
    got, wanted = compiled(x, r, w), norm(x, r, w)
    assert all(map(torch.equal, got + gradients(got, (x, r, w)), wanted + gradients(wanted, (x, r, w))))


def test_known_bug_r6_the_number_of_rows_changes_no_bits():
    M = 32768 if DEVICE == "cuda" else 130
    x, w = draw(M, 128, dtype=BF16), draw(128, dtype=BF16)
    dy = draw(M, 128, dtype=BF16, seed=1).detach()
    for rows in (1, 7, M - 1):
        part = x.detach()[:rows].requires_grad_()
        y = fast.rms_norm(part, w)
        assert torch.equal(y, fast.rms_norm(x, w)[:rows])
        whole = torch.autograd.grad(fast.rms_norm(x, w), x, dy)[0]
        assert torch.equal(torch.autograd.grad(y, part, dy[:rows])[0], whole[:rows])
