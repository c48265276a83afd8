"""The steps between eager PyTorch and fast.rms_norm, as small kernels: one idea each, contiguous rows, no options."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fast._triton.launch import launch

ROWS_PER_PROGRAM = 4


# fmt: off
@triton.jit
def _rstd(
    X,       # [M, N]  in
    RSTD,    # [M]     out, fp32
    N, eps, BLOCK_N: tl.constexpr,
):
    # fmt: on
    m = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    x = tl.load(X + m * N + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
    tl.store(RSTD + m, 1.0 / tl.sqrt_rn(tl.sum(x * x) / N + eps))


# fmt: off
@triton.jit
def _scale(
    X,       # [M, N]  in
    W,       # [N]     in
    RSTD,    # [M]     in
    Y,       # [M, N]  out
    N, BLOCK_N: tl.constexpr,
):
    # fmt: on
    m = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    mask = offs_n < N
    x = tl.load(X + m * N + offs_n, mask=mask, other=0.0)
    xhat = (x.to(tl.float32) * tl.load(RSTD + m)).to(x.dtype)
    w = tl.load(W + offs_n, mask=mask, other=0.0).to(tl.float32)
    tl.store(Y + m * N + offs_n, (xhat.to(tl.float32) * w).to(Y.dtype.element_ty), mask=mask)


# fmt: off
@triton.jit
def _rstd_and_scale(
    X,       # [M, N]  in
    W,       # [N]     in
    Y,       # [M, N]  out
    RSTD,    # [M]     out, fp32
    N, eps, BLOCK_N: tl.constexpr,
):
    # fmt: on
    m = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    mask = offs_n < N
    x = tl.load(X + m * N + offs_n, mask=mask, other=0.0)
    wide = x.to(tl.float32)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(wide * wide) / N + eps)
    tl.store(RSTD + m, rstd)
    w = tl.load(W + offs_n, mask=mask, other=0.0).to(tl.float32)
    y = (wide * rstd).to(x.dtype).to(tl.float32) * w
    tl.store(Y + m * N + offs_n, y.to(Y.dtype.element_ty), mask=mask)


# fmt: off
@triton.jit
def _dx(
    DY,      # [M, N]  in
    X,       # [M, N]  in
    W,       # [N]     in
    RSTD,    # [M]     in
    DX,      # [M, N]  out
    N, BLOCK_N: tl.constexpr,
):
    # fmt: on
    m = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    mask = offs_n < N
    rstd = tl.load(RSTD + m)
    g = tl.load(DY + m * N + offs_n, mask=mask, other=0.0).to(tl.float32)
    g *= tl.load(W + offs_n, mask=mask, other=0.0).to(tl.float32)
    xhat = tl.load(X + m * N + offs_n, mask=mask, other=0.0).to(tl.float32) * rstd
    dx = rstd * (g - xhat * (tl.sum(g * xhat) / N))
    tl.store(DX + m * N + offs_n, dx.to(DX.dtype.element_ty), mask=mask)


# fmt: off
@triton.jit
def _dw(
    DY,      # [M, N]  in
    X,       # [M, N]  in
    RSTD,    # [M]     in
    DW,      # [N]     out
    M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    # fmt: on
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, M, BLOCK_M):
        offs_m = first + tl.arange(0, BLOCK_M)
        mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
        rows = offs_m.to(tl.int64)[:, None] * N
        dy = tl.load(DY + rows + offs_n, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(X + rows + offs_n, mask=mask, other=0.0).to(tl.float32)
        acc += dy * x * tl.load(RSTD + offs_m, mask=offs_m < M, other=0.0)[:, None]
    tl.store(DW + offs_n, tl.sum(acc, axis=0).to(DW.dtype.element_ty), mask=offs_n < N)


# fmt: off
@triton.jit
def _dx_and_partial_dw(
    DY,      # [M, N]  in
    X,       # [M, N]  in
    W,       # [N]     in
    RSTD,    # [M]     in
    DX,      # [M, N]  out
    DW,      # [P, N]  out, fp32
    M, N, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):
    # fmt: on
    p = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    w = tl.load(W + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    acc = tl.zeros([BLOCK_N], tl.float32)
    for m in range(p * ROWS, tl.minimum(p * ROWS + ROWS, M)):
        rstd = tl.load(RSTD + m)
        dy = tl.load(DY + m * N + offs_n, mask=mask_n, other=0.0).to(tl.float32)
        xhat = tl.load(X + m * N + offs_n, mask=mask_n, other=0.0).to(tl.float32) * rstd
        g = dy * w
        dx = rstd * (g - xhat * (tl.sum(g * xhat) / N))
        tl.store(DX + m * N + offs_n, dx.to(DX.dtype.element_ty), mask=mask_n)
        acc += dy * xhat
    tl.store(DW + p * N + offs_n, acc, mask=mask_n)


def _whole_row(N: int) -> dict[str, int]:
    return {"BLOCK_N": triton.next_power_of_2(N), "num_warps": 8}


def two_kernels(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y of x [M, N]: a kernel for r [M], and one that reads x again."""
    (M, N), y = x.shape, torch.empty_like(x)
    rstd = torch.empty(M, dtype=torch.float32, device=x.device)
    launch(_rstd, (M,), x.device, x, rstd, N, eps, **_whole_row(N))
    launch(_scale, (M,), x.device, x, weight, rstd, y, N, **_whole_row(N))
    return y


def one_kernel(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y of x [M, N]: a program keeps its row in registers between the sum and the scaling."""
    (M, N), y = x.shape, torch.empty_like(x)
    rstd = torch.empty(M, dtype=torch.float32, device=x.device)
    launch(_rstd_and_scale, (M,), x.device, x, weight, y, rstd, N, eps, **_whole_row(N))
    return y


def dx_then_dw(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """dx along the rows, then dw down the columns, which reads dy and x again."""
    (M, N), dx, dw = x.shape, torch.empty_like(x), torch.empty_like(weight)
    launch(_dx, (M,), x.device, dy, x, weight, rstd, dx, N, **_whole_row(N))
    launch(_dw, (triton.cdiv(N, 64),), x.device, dy, x, rstd, dw, M, N, BLOCK_M=64, BLOCK_N=64, num_warps=4)
    return dx, dw


def partial_dw(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """dx and, while dy and x are in registers, a partial dw for every few rows; summed afterwards."""
    (M, N), dx = x.shape, torch.empty_like(x)
    programs = triton.cdiv(M, ROWS_PER_PROGRAM)
    partial = torch.empty(programs, N, dtype=torch.float32, device=x.device)
    tile = {"ROWS": ROWS_PER_PROGRAM, **_whole_row(N)}
    launch(_dx_and_partial_dw, (programs,), x.device, dy, x, weight, rstd, dx, partial, M, N, **tile)
    return dx, partial.sum(0).to(weight.dtype)
