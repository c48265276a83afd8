"""The NF4 kernels and what launches them; fast/quantized_weights.py explains them."""

import triton
import triton.language as tl
from torch import Tensor

from fast._triton.launch import cdiv, launch
from fast._triton.tuning import Table, config

# By the elements that share a scale. Four bytes of codes a thread are eight elements of the result: loads and stores then agree
# on who holds what.
DEQUANTIZE = Table(
    "nf4_dequantize",
    {
        80: [
            (block, config(BLOCK_B=max(1, 1024 // block), num_warps=4))
            for block in (32, 64, 128, 256, 512, 1024)
        ]
        + [(2048, config(BLOCK_B=1, num_warps=8)), (4096, config(BLOCK_B=1, num_warps=16))],
        90: [
            (block, config(BLOCK_B=2048 // block, num_warps=4))
            for block in (32, 64, 128, 256, 512, 1024, 2048)
        ]
        + [(4096, config(BLOCK_B=1, num_warps=8))],
    },
)
QUANTIZE = Table(
    "nf4_quantize",
    {
        80: [
            (b, config(BLOCK_B=max(1, 2048 // b), num_warps=8))
            for b in (32, 64, 128, 256, 512, 1024, 2048, 4096)
        ]
    },
)
SCALES = Table("nf4_quantize_scales", {80: [(256, config(BLOCK_B=4, num_warps=4))]})


# fmt: off
@triton.jit
def _nf4_dequantize(
    CODES,           # [⌈N/2⌉]      in   uint8, first element in the high nibble
    TABLE,           # [16]         in
    ABSMAX,          # [blocks]     in   or None: the scales are quantised
    ABSMAX_CODES,    # [blocks]     in   uint8, or None
    ABSMAX2,         # [blocks/256] in   or None
    CODE,            # [256]        in   or None
    OFFSET,          # []           in   or None
    OUT,             # [N]          out
    N, BYTES, BLOCK: tl.constexpr, BLOCK_B: tl.constexpr,
):
    # fmt: on
    # Addresses are 64-bit up to the program's first element, 32-bit from there.
    first_b = tl.program_id(0).to(tl.int64) * BLOCK_B
    left = N - first_b * BLOCK
    offs_b = tl.arange(0, BLOCK_B)
    mask_b = offs_b * BLOCK < left
    if ABSMAX is not None:
        scale = tl.load(ABSMAX + first_b + offs_b, mask=mask_b, other=0.0)
    else:
        c = tl.load(ABSMAX_CODES + first_b + offs_b, mask=mask_b, other=0).to(tl.int32)
        a = tl.load(ABSMAX2 + (first_b + offs_b) // 256, mask=mask_b, other=0.0)
        # Two roundings: launches never fuse a product with a sum.
        scale = tl.load(CODE + c) * a + tl.load(OFFSET)
    offs_h = offs_b[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    byte = tl.load(CODES + first_b * (BLOCK // 2) + offs_h, mask=offs_h < BYTES - first_b * (BLOCK // 2), other=0)
    table = tl.load(TABLE + tl.arange(0, 16))
    high, low = _looked_up(table, byte >> 4), _looked_up(table, byte & 15)
    w = tl.interleave(high * scale[:, None], low * scale[:, None])
    offs_n = offs_b[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(OUT + first_b * BLOCK + offs_n, w.to(OUT.dtype.element_ty), mask=offs_n < left)


@triton.jit
def _looked_up(table, index):
    """table[index], from registers and shared memory: a load from pointers would have its own layout."""
    found = tl.gather(table, tl.reshape(index, [index.numel]).to(tl.int32), 0)
    return tl.reshape(found, index.shape)


# fmt: off
@triton.jit
def _nf4_quantize(
    W,               # [N]       in
    TABLE,           # [16]      in
    CODES,           # [⌈N/2⌉]   out  uint8
    ABSMAX,          # [blocks]  out  fp32
    N, BLOCK: tl.constexpr, BLOCK_B: tl.constexpr,
):
    # fmt: on
    offs_b = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    offs_n = offs_b[:, None] * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(W + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
    short = (offs_b + 1) * BLOCK > N
    absmax, x = _normalised(w, short)
    # A short block keeps what it was divided by.
    absmax = tl.where(short & (absmax < 1e-38), 1e-38, absmax)
    tl.store(ABSMAX + offs_b, absmax, mask=offs_b < tl.cdiv(N, BLOCK))
    code = tl.zeros([BLOCK_B, BLOCK], dtype=tl.int32)
    for i in tl.static_range(15):
        code += (x > (tl.load(TABLE + i) + tl.load(TABLE + i + 1)) * 0.5).to(tl.int32)
    high, low = tl.split(tl.reshape(code, [BLOCK_B, BLOCK // 2, 2]))
    offs_h = offs_b[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
    tl.store(CODES + offs_h, (high * 16 + low).to(tl.uint8), mask=offs_h < (N + 1) // 2)


# fmt: off
@triton.jit
def _nf4_quantize_scales(
    ABSMAX,          # [N]        in   scales
    OFFSET,          # []         in   their mean
    CODE,            # [256]      in   ascending
    ABSMAX_CODES,    # [N]        out  uint8
    ABSMAX2,         # [⌈N/256⌉]  out
    N, BLOCK_B: tl.constexpr,
):
    # fmt: on
    offs_b = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    offs_n = offs_b[:, None] * 256 + tl.arange(0, 256)
    mask = offs_n < N
    s = tl.load(ABSMAX + offs_n, mask=mask, other=0.0)
    d = tl.where(mask, s - tl.load(OFFSET), 0.0)
    absmax, x = _normalised(d, (offs_b + 1) * 256 > N)
    tl.store(ABSMAX2 + offs_b, absmax, mask=offs_b < tl.cdiv(N, 256))
    code = tl.zeros([BLOCK_B, 256], dtype=tl.int32)
    for i in tl.static_range(8):
        middle = code + (128 >> i)
        boundary = (tl.load(CODE + middle - 1) + tl.load(CODE + middle)) * 0.5
        code = tl.where(x > boundary, middle, code)
    tl.store(ABSMAX_CODES + offs_n, code.to(tl.uint8), mask=mask)


@triton.jit
def _normalised(rows, short):
    """Largest magnitude of each row, and its elements as fractions of that; a short block's are divided and rounded once."""
    absmax = tl.max(tl.abs(rows), axis=1)
    safe = tl.where(absmax < 1e-38, 1e-38, absmax)[:, None]
    # A quotient of two fp32 numbers is never so near to the middle of two others that fp64's error could carry it across.
    quotient = rows.to(tl.float64) * (1.0 / safe.to(tl.float64))
    return absmax, tl.where(short[:, None], quotient.to(tl.float32), rows * tl.div_rn(1.0, safe))


def nf4_dequantize(
    out: Tensor,
    codes: Tensor,
    table: Tensor,
    absmax: Tensor | None,
    absmax_codes: Tensor | None,
    absmax2: Tensor | None,
    code: Tensor | None,
    offset: Tensor | None,
    block: int,
) -> None:
    """Write the weight to `out`, contiguous."""
    N = out.numel()
    if N == 0:
        return
    tile = DEQUANTIZE.pick(block, out.device)
    grid = (cdiv(cdiv(N, block), tile["BLOCK_B"]),)
    given = (codes, table, absmax, absmax_codes, absmax2, code, offset, out, N, len(codes))
    launch(_nf4_dequantize, grid, out.device, *given, BLOCK=block, **tile.options)


def nf4_quantize(w: Tensor, table: Tensor, codes: Tensor, absmax: Tensor, block: int) -> None:
    """Write codes and scales of w, contiguous."""
    if w.numel() == 0:
        return
    tile = QUANTIZE.pick(block, w.device)
    grid = (cdiv(len(absmax), tile["BLOCK_B"]),)
    launch(_nf4_quantize, grid, w.device, w, table, codes, absmax, w.numel(), BLOCK=block, **tile.options)


def nf4_quantize_scales(
    absmax: Tensor, offset: Tensor, code: Tensor, absmax_codes: Tensor, absmax2: Tensor
) -> None:
    """Write codes of the scales, and scales of those."""
    if len(absmax) == 0:
        return
    tile = SCALES.pick(256, absmax.device)
    grid = (cdiv(len(absmax2), tile["BLOCK_B"]),)
    given = (absmax, offset, code, absmax_codes, absmax2, len(absmax))
    launch(_nf4_quantize_scales, grid, absmax.device, *given, **tile.options)
