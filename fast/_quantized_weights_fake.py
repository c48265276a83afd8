"""The fake-quantisation kernel and what launches it; fast/quantized_weights.py explains it."""

import triton
import triton.language as tl
from torch import Tensor

from fast._triton.launch import cdiv, launch
from fast._triton.rows import as_rows, row_offsets
from fast._triton.tuning import Table, config

# By the length of a group. Longer ones than a tile are read twice.
FAKE = Table(
    "fake_quantize",
    {
        80: [
            (32, config(BLOCK_M=64, BLOCK_L=32, num_warps=4)),
            (64, config(BLOCK_M=32, BLOCK_L=64, num_warps=4)),
            (128, config(BLOCK_M=16, BLOCK_L=128, num_warps=4)),
            (256, config(BLOCK_M=8, BLOCK_L=256, num_warps=4)),
            (1024, config(BLOCK_M=2, BLOCK_L=1024, num_warps=4)),
            (4096, config(BLOCK_M=1, BLOCK_L=4096, num_warps=8)),
            (16384, config(BLOCK_M=1, BLOCK_L=16384, num_warps=16)),
            (16385, config(BLOCK_M=1, BLOCK_L=8192, num_warps=16)),
        ]
    },
)


# fmt: off
@triton.jit
def _fake_quantize(
    X, stride_xo, stride_xi,        # [M, L]  in    groups: (m // inner)·outer + (m % inner)·inner stride
    DY, stride_dyo, stride_dyi,     # [M, L]  in    or None: OUT is y, else dx
    OUT, stride_om,                 # [M, L]  out
    M, L, x_inner, dy_inner,
    BITS: tl.constexpr, SYMMETRIC: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_L: tl.constexpr,
):
    # fmt: on
    first = tl.program_id(0).to(tl.int64) * BLOCK_M
    offs_m, offs_l = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_L)
    mask_m = (offs_m < M)[:, None]
    x_rows = X + row_offsets(first, stride_xo, stride_xi, x_inner, BLOCK_M)[:, None]
    out_rows = OUT + offs_m[:, None] * stride_om
    if DY is not None:
        dy_rows = DY + row_offsets(first, stride_dyo, stride_dyi, dy_inner, BLOCK_M)[:, None]
    if WHOLE:
        mask = mask_m & (offs_l < L)[None, :]
        x = tl.load(x_rows + offs_l, mask=mask, other=0.0).to(tl.float32)
        low, high = _extent(x, SYMMETRIC)
        scale, zero = _scale_and_zero(low, high, BITS, SYMMETRIC)
        level, q = _levels(x, scale, zero, BITS)
        if DY is not None:
            dy = tl.load(dy_rows + offs_l, mask=mask, other=0.0)
            result = tl.where(level == q, dy.to(tl.float32), 0.0)
        else:
            result = (q - zero) * scale
        tl.store(out_rows + offs_l, result.to(OUT.dtype.element_ty), mask=mask)
    else:
        low, high = tl.zeros([BLOCK_M, 1], dtype=tl.float32), tl.zeros([BLOCK_M, 1], dtype=tl.float32)
        for start in range(0, L, BLOCK_L):
            mask = mask_m & (start + offs_l < L)[None, :]
            x = tl.load(x_rows + start + offs_l, mask=mask, other=0.0).to(tl.float32)
            x_low, x_high = _extent(x, SYMMETRIC)
            low, high = tl.minimum(low, x_low), tl.maximum(high, x_high)
        scale, zero = _scale_and_zero(low, high, BITS, SYMMETRIC)
        for start in range(0, L, BLOCK_L):
            mask = mask_m & (start + offs_l < L)[None, :]
            x = tl.load(x_rows + start + offs_l, mask=mask, other=0.0).to(tl.float32)
            level, q = _levels(x, scale, zero, BITS)
            if DY is not None:
                dy = tl.load(dy_rows + start + offs_l, mask=mask, other=0.0)
                result = tl.where(level == q, dy.to(tl.float32), 0.0)
            else:
                result = (q - zero) * scale
            tl.store(out_rows + start + offs_l, result.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def _extent(x, SYMMETRIC: tl.constexpr):
    """How far each group [BLOCK_M, ·] reaches below and above 0; NaN counts as inf, which makes all of its group NaN."""
    x = tl.where(x != x, float("inf"), x)
    if SYMMETRIC:
        high = tl.max(tl.abs(x), axis=1)[:, None]
        low = 0.0 * high
    else:
        low, high = tl.min(x, axis=1)[:, None], tl.max(x, axis=1)[:, None]
        low, high = tl.where(low < 0.0, low, 0.0), tl.where(high > 0.0, high, 0.0)
    return low, high


@triton.jit
def _scale_and_zero(low, high, BITS: tl.constexpr, SYMMETRIC: tl.constexpr):
    """The step of each group, at least 2⁻¹²⁶, and the level of 0."""
    steps: tl.constexpr = (2 ** (BITS - 1) - 0.5) if SYMMETRIC else (2**BITS - 1) * 1.0
    lowest: tl.constexpr = -(2 ** (BITS - 1)) * 1.0
    scale = tl.div_rn(high if SYMMETRIC else high - low, steps)
    scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)
    if SYMMETRIC:
        zero = tl.zeros_like(scale)
    else:
        zero = _clamped(lowest - _rint(tl.div_rn(low, scale)), BITS)
    return scale, zero


@triton.jit
def _levels(x, scale, zero, BITS: tl.constexpr):
    """The level of each element before and after the clamp."""
    level = _rint(x * tl.div_rn(1.0, scale)) + zero
    return level, _clamped(level, BITS)


@triton.jit
def _clamped(level, BITS: tl.constexpr):
    # By comparison, which lets NaN through.
    lowest: tl.constexpr = -(2 ** (BITS - 1)) * 1.0
    highest: tl.constexpr = 2 ** (BITS - 1) - 1.0
    return tl.where(level < lowest, lowest, tl.where(level > highest, highest, level))


@triton.jit
def _rint(t):
    """To the nearest integer, halves to even, for |t| < 2²²: 1.5·2²³ leaves no room for fractions."""
    return (t + 12582912.0) - 12582912.0


def fake_quantize(
    x: Tensor, dy: Tensor | None, out: Tensor, bits: int, group: int | None, symmetric: bool
) -> None:
    """Write y, or with dy the clipped gradient dx, to `out`, contiguous."""
    if x.numel() == 0:
        return
    L = group or x.shape[-1]
    xs, dys = (None if t is None else as_rows(t.unflatten(-1, (-1, L))) for t in (x, dy))
    tile = FAKE.pick(L, x.device)
    M = x.numel() // L
    launch(
        _fake_quantize, (cdiv(M, tile["BLOCK_M"]),), x.device,
        xs.tensor, xs.outer_stride, xs.inner_stride,
        *((None, 0, 0) if dys is None else (dys.tensor, dys.outer_stride, dys.inner_stride)),
        out, L, M, L, xs.inner, 1 if dys is None else dys.inner,
        BITS=bits, SYMMETRIC=symmetric, WHOLE=tile["BLOCK_L"] >= L, **tile.options,
    )  # fmt: skip
