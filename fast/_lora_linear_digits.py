"""Numbers of more digits as sums of 16-bit numbers: how adapters in fp32, S and dS enter 16-bit products.

    value ≈ hi + mid + lo       bf16: 8 digits each, 24 together, as fp32; fp16: hi + mid has them, where its exponents reach

Portable kernels split what they have loaded. Those for Hopper read all operands by TMA, so `spread` writes the digits out first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fast._triton.launch import cdiv, launch
from fast._triton.tuning import Table, config

SPREAD = Table("lora_linear_spread", {80: [(1, config(BLOCK_I=32, num_warps=4))]})
HI, MID, LO, NONE = 0, 1, 2, 3  # what a block of columns holds; NONE: zeros


@triton.jit
def split(value, DTYPE: tl.constexpr):
    """value as hi + lo of DTYPE, to about twice its digits."""
    hi = value.to(DTYPE)
    return hi, (value.to(tl.float32) - hi.to(tl.float32)).to(DTYPE)


@triton.jit
def digits(value, DTYPE: tl.constexpr):
    """value = unit · (hi + mid + lo) of DTYPE, with fp32's digits: bf16 takes three numbers, fp16 two. As fp16 has few
    exponents, each column is scaled there by a power of two, its unit, so that its largest number lies from 2¹³ to 2¹⁴."""
    unit = tl.full([value.shape[1]], 1.0, tl.float32)
    if (tl.float16 == DTYPE) & (value.dtype != DTYPE):
        exponent = tl.max(tl.abs(value.to(tl.float32)), axis=0).to(tl.int32, bitcast=True) & 0x7F800000
        exponent = tl.minimum(tl.maximum(exponent, 14 << 23), 253 << 23)
        unit = (exponent - (13 << 23)).to(tl.float32, bitcast=True)
        value = (
            value.to(tl.float32) * ((253 << 23) - exponent + (14 << 23)).to(tl.float32, bitcast=True)[None, :]
        )
    hi = value.to(DTYPE)
    mid, lo = split(value.to(tl.float32) - hi.to(tl.float32), DTYPE)
    return hi, mid, lo, unit


# fmt: off
@triton.jit
def _lora_linear_spread(
    X1, stride_xi1, stride_xr1,   # [rows1, R]            in
    Y1, stride_yi1, stride_yr1,   # [rows1, blocks · W]   out   block b holds the digit FORM1[b] of X1's columns, then zeros
    X2, stride_xi2, stride_xr2,   # [rows2, R]            in    likewise, or None
    Y2, stride_yi2, stride_yr2,   # [rows2, blocks · W]   out
    rows1, rows2, R, W,
    FORM1: tl.constexpr, FORM2: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_W: tl.constexpr,
):
    # fmt: on
    pid, first = tl.program_id(0), tl.cdiv(rows1, BLOCK_I)
    if pid < first:
        spread_tile(X1, stride_xi1, stride_xr1, Y1, stride_yi1, stride_yr1, pid, rows1, R, W, FORM1, BLOCK_I, BLOCK_W)
    else:
        if X2 is not None:
            spread_tile(X2, stride_xi2, stride_xr2, Y2, stride_yi2, stride_yr2, pid - first, rows2, R, W, FORM2, BLOCK_I, BLOCK_W)


# fmt: off
@triton.jit
def spread_tile(
    X, stride_xi, stride_xr, Y, stride_yi, stride_yr, tile, rows, R, W,
    FORM: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_W: tl.constexpr,
):
    # fmt: on
    offs_i = tile.to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)
    offs_r = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    mask_i, columns = (offs_i < rows)[:, None], offs_r[None, :].to(tl.int64)
    x = tl.load(X + offs_i[:, None] * stride_xi + columns * stride_xr, mask=mask_i & (offs_r < R)[None, :], other=0.0)
    hi = x.to(Y.dtype.element_ty)
    mid, lo = split(x.to(tl.float32) - hi.to(tl.float32), Y.dtype.element_ty)
    out = Y + offs_i[:, None] * stride_yi + columns * stride_yr
    mask = mask_i & (offs_r < W)[None, :]
    for block in tl.static_range(len(FORM)):
        digit = tl.zeros_like(hi)
        if FORM[block] == 0:
            digit = hi
        elif FORM[block] == 1:
            digit = mid
        elif FORM[block] == 2:
            digit = lo
        tl.store(out + block * W * stride_yr, digit, mask=mask)


def spread(
    jobs: list[tuple[Tensor, tuple[int, ...], bool]], dtype: torch.dtype, width: int, device: torch.device
) -> list[Tensor]:
    """Each x [rows, R] of one or two jobs (x, form, transposed) as digits [rows, len(form) · width] of dtype: block b holds the
    digit form[b] of x's columns, and zeros from R to width. transposed: stored with the rows last, and returned so."""
    stored, arguments = [], []
    for x, form, transposed in jobs:
        rows, blocks = len(x), len(form) * width
        # TMA wants rows of whole 16 bytes.
        size = (blocks, cdiv(rows, 8) * 8) if transposed else (rows, blocks)
        y = x.new_empty(size, dtype=dtype)[:, : rows if transposed else blocks]
        stored.append(y)
        y = y.T if transposed else y
        arguments += [x, *x.stride(), y, *y.stride()]
    arguments += [None, 0, 0, None, 0, 0] * (2 - len(jobs))
    rows = [len(x) for x, _, _ in jobs] + [0] * (2 - len(jobs))
    tile, block = SPREAD.pick(1, device), 16 if width <= 16 else 64
    launch(
        _lora_linear_spread, (sum(cdiv(n, tile["BLOCK_I"]) for n in rows), cdiv(width, block)), device,
        *arguments, *rows, jobs[0][0].shape[1], width,
        FORM1=jobs[0][1], FORM2=jobs[-1][1], BLOCK_W=block, **tile.options,
    )  # fmt: skip
    return stored
