"""The steps between eager PyTorch and fast.swiglu, as small kernels: one idea each, tensors without gaps, silu, no options."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from experiments import _swiglu_gemm
from fast._triton import matmul as products
from fast._triton.device import arch
from fast._triton.launch import launch
from fast._triton.tuning import Config, config

BLOCK = 1024


# fmt: off
@triton.jit
def _h(
    GATE,    # [N]  in
    UP,      # [N]  in
    H,       # [N]  out
    N, BLOCK_N: tl.constexpr,
):
    # fmt: on
    offs_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = offs_n < N
    gate = tl.load(GATE + offs_n, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(UP + offs_n, mask=mask, other=0.0).to(tl.float32)
    tl.store(H + offs_n, (gate * tl.sigmoid(gate) * up).to(H.dtype.element_ty), mask=mask)


# fmt: off
@triton.jit
def _dgate(
    DH,      # [N]  in
    GATE,    # [N]  in
    UP,      # [N]  in
    DGATE,   # [N]  out
    N, BLOCK_N: tl.constexpr,
):
    # fmt: on
    offs_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = offs_n < N
    dh = tl.load(DH + offs_n, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(GATE + offs_n, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(UP + offs_n, mask=mask, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    tl.store(DGATE + offs_n, (dh * up * (s + gate * s * (1.0 - s))).to(DGATE.dtype.element_ty), mask=mask)


# fmt: off
@triton.jit
def _dup(
    DH,      # [N]  in
    GATE,    # [N]  in
    DUP,     # [N]  out
    N, BLOCK_N: tl.constexpr,
):
    # fmt: on
    offs_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = offs_n < N
    dh = tl.load(DH + offs_n, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(GATE + offs_n, mask=mask, other=0.0).to(tl.float32)
    tl.store(DUP + offs_n, (dh * gate * tl.sigmoid(gate)).to(DUP.dtype.element_ty), mask=mask)


# fmt: off
@triton.jit
def _dgate_dup_h(
    DH,      # [N]  in
    GATE,    # [N]  in
    UP,      # [N]  in
    DGATE,   # [N]  out
    DUP,     # [N]  out
    H,       # [N]  out   or None
    N, BLOCK_N: tl.constexpr,
):
    # fmt: on
    offs_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = offs_n < N
    dh = tl.load(DH + offs_n, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(GATE + offs_n, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(UP + offs_n, mask=mask, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    a = gate * s
    tl.store(DGATE + offs_n, (dh * up * (s + a * (1.0 - s))).to(DGATE.dtype.element_ty), mask=mask)
    tl.store(DUP + offs_n, (dh * a).to(DUP.dtype.element_ty), mask=mask)
    if H is not None:
        tl.store(H + offs_n, (a * up).to(H.dtype.element_ty), mask=mask)


def _launch(kernel: triton.JITFunction, *tensors: Tensor | None) -> None:
    N, device = tensors[0].numel(), tensors[0].device
    launch(kernel, (triton.cdiv(N, BLOCK),), device, *tensors, N, BLOCK_N=BLOCK, num_warps=4)


def one_kernel(gate: Tensor, up: Tensor) -> Tensor:
    """h: three passes."""
    h = torch.empty_like(gate)
    _launch(_h, gate, up, h)
    return h


def dgate_then_dup(dh: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """A kernel per gradient: four passes and three."""
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    _launch(_dgate, dh, gate, up, dgate)
    _launch(_dup, dh, gate, dup)
    return dgate, dup


def both_gradients(dh: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """dgate and dup: five passes."""
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    _launch(_dgate_dup_h, dh, gate, up, dgate, dup, None)
    return dgate, dup


def block(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    """y: gate, up and h in memory, between two products and a third."""
    h = one_kernel(products.matmul(x, w_gate.T), products.matmul(x, w_up.T))
    return products.matmul(h, w_down.T)


def block_in_two(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    """y: gate and up never leave the kernel that computes h."""
    h = x.new_empty(x.shape[0], w_gate.shape[0])
    _swiglu_gemm.gate_up(x, w_gate, w_up, None, None, None, None, h, _tile(x))
    return products.matmul(h, w_down.T)


def _tile(x: Tensor) -> Config:
    """One whose pipeline fits the shared memory, and whose sums fit the registers."""
    if x.dtype == torch.float32:  # products without tensor cores
        return config(BLOCK_M=64, BLOCK_F=64, BLOCK_K=32, GROUP_M=8, PARTS=1, FLATTEN=False, num_warps=8, num_stages=2)
    hopper = arch(x.device) >= 90
    blocks = {"BLOCK_M": 128, "BLOCK_F": 128 if hopper else 64, "BLOCK_K": 64, "GROUP_M": 8}
    return config(**blocks, PARTS=2, FLATTEN=False, num_warps=8, num_stages=4 if hopper else 3)


def block_backward(
    dy: Tensor, x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, gate: Tensor, up: Tensor, **_: Tensor
) -> tuple[Tensor, ...]:
    """dx, dw_gate, dw_up, dw_down: one pass for all that is elementwise, dx summed in fp32; everything [M, F] at once."""
    dh = products.matmul(dy, w_down)
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    h = torch.empty_like(dh)
    _launch(_dgate_dup_h, dh, gate, up, dgate, dup, h)
    dx = products.add_matmul(products.add_matmul(None, dgate, w_gate), dup, w_up).to(x.dtype)
    return dx, products.matmul(dgate.T, x), products.matmul(dup.T, x), products.matmul(dy.T, h)
