"""The generator of reference/_philox.py as a kernel: which elements are kept, a bit for each.

Bits are made once for each direction, with all SMs, and gone when it ends: ⅛ byte an element. Drawn inside of a product, the
numbers cost more than the product, for its few warps wait for each of them (measured; experiments/lora_linear.py has the row).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fast._triton.launch import cdiv, launch

_BLOCK_M, _BLOCK_W = 8, 32


# fmt: off
@triton.jit
def _dropout_bits(
    SEED,            # []          in    int64
    BITS,            # [M, WORDS]  out   int32; element 32·w + i of a row is bit i of word w
    M, WORDS, threshold,
    BLOCK_M: tl.constexpr, BLOCK_W: tl.constexpr,
):
    # fmt: on
    seed, limit = tl.load(SEED), threshold.to(tl.uint32)
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    zero = tl.zeros([BLOCK_M, BLOCK_W], tl.uint32)
    rows, word = offs_m[:, None].to(tl.uint32) + zero, zero
    for i in tl.static_range(8):
        groups = (8 * offs_w + i)[None, :].to(tl.uint32) + zero
        n0, n1, n2, n3 = tl.philox(seed, groups, rows, zero, zero)
        four = bit(n0, limit) + bit(n1, limit) * 2 + bit(n2, limit) * 4 + bit(n3, limit) * 8
        word += four << (4 * i)
    mask = (offs_m < M)[:, None] & (offs_w < WORDS)[None, :]
    tl.store(BITS + offs_m[:, None] * WORDS + offs_w[None, :], word.to(tl.int32, bitcast=True), mask=mask)


@triton.jit
def bit(number, limit):
    return (number >= limit).to(tl.uint32)


@triton.jit
def kept(BITS, stride, rows, columns, mask):
    """Which elements (rows × columns) are kept; none where the mask forbids."""
    word = tl.load(BITS + rows[:, None] * stride + (columns // 32)[None, :], mask=mask, other=0)
    return ((word >> (columns % 32).to(tl.int32)[None, :]) & 1) != 0


def dropout_bits(seed: Tensor, x: Tensor, threshold: int) -> Tensor:
    """The mask of x [M, N], [M, ⌈N/32⌉] int32. seed [] int64; threshold: p · 2³²."""
    M, N = x.shape
    bits = x.new_empty(M, cdiv(N, 32), dtype=torch.int32)
    if bits.numel():
        launch(
            _dropout_bits, (cdiv(M, _BLOCK_M), cdiv(bits.shape[1], _BLOCK_W)), x.device,
            seed, bits, M, bits.shape[1], threshold, BLOCK_M=_BLOCK_M, BLOCK_W=_BLOCK_W, num_warps=4,
        )  # fmt: skip
    return bits
