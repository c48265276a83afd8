"""The steps between eager PyTorch and fast.quantized_weights, as small kernels: one idea each, no gaps, no options."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fast._triton.launch import cdiv, launch

BLOCK = 64


# fmt: off
@triton.jit
def _dequantize(
    CODES,   # [N/2]   in   uint8
    TABLE,   # [16]    in
    SCALE,   # [N/64]  in
    W,       # [N]     out
    N, BLOCK_H: tl.constexpr,
):
    # fmt: on
    offs_h = tl.program_id(0).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = offs_h * 2 < N
    byte = tl.load(CODES + offs_h, mask=mask, other=0).to(tl.int32)
    scale = tl.load(SCALE + offs_h // 32, mask=mask, other=0.0)
    high, low = tl.load(TABLE + (byte >> 4)) * scale, tl.load(TABLE + (byte & 15)) * scale
    tl.store(W + offs_h * 2, high.to(W.dtype.element_ty), mask=mask)
    tl.store(W + offs_h * 2 + 1, low.to(W.dtype.element_ty), mask=offs_h * 2 + 1 < N)


# fmt: off
@triton.jit
def _scale(
    X,       # [M, N]  in
    SCALE,   # [M]     out
    N, BLOCK_N: tl.constexpr,
):
    # fmt: on
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    x = tl.load(X + row * N + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(x), axis=0), 127.5)
    tl.store(SCALE + row, tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale))


# fmt: off
@triton.jit
def _quantised(
    X,       # [M, N]  in
    SCALE,   # [M]     in
    Y,       # [M, N]  out
    N, BLOCK_N: tl.constexpr,
):
    # fmt: on
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    mask, scale = offs_n < N, tl.load(SCALE + row)
    x = tl.load(X + row * N + offs_n, mask=mask, other=0.0).to(tl.float32)
    level = (x * tl.div_rn(1.0, scale) + 12582912.0) - 12582912.0
    y = tl.where(level > 127.0, 127.0, level) * scale
    tl.store(Y + row * N + offs_n, y.to(Y.dtype.element_ty), mask=mask)


def dequantize(codes: Tensor, table: Tensor, scale: Tensor, like: Tensor) -> Tensor:
    """One kernel; its scales are in memory."""
    w = torch.empty_like(like)
    launch(_dequantize, (cdiv(len(codes), 512),), w.device, codes, table, scale, w, w.numel(), BLOCK_H=512)
    return w


def scale_then_quantise(x: Tensor) -> Tensor:
    """Two kernels, which both read x."""
    (M, N), y = x.shape, torch.empty_like(x)
    scale, block = x.new_empty(M, dtype=torch.float32), triton.next_power_of_2(N)
    launch(_scale, (M,), x.device, x, scale, N, BLOCK_N=block)
    launch(_quantised, (M,), x.device, x, scale, y, N, BLOCK_N=block)
    return y
