"""The generator of reference/_philox.py inside kernels: a tile's dropout mask from a seed and the tile's place."""

import triton
import triton.language as tl


@triton.jit
def kept(seed, rows, first_column, threshold, BLOCK_N: tl.constexpr):
    """Mask [rows, BLOCK_N] of the elements that are kept; first_column and BLOCK_N are multiples of 4, threshold is p·2³²."""
    groups = first_column // 4 + tl.arange(0, BLOCK_N // 4)
    zero = tl.zeros([rows.shape[0], BLOCK_N // 4], tl.uint32)
    c0 = groups[None, :].to(tl.uint32) + zero
    c1 = rows[:, None].to(tl.uint32) + zero
    n0, n1, n2, n3 = tl.philox(seed, c0, c1, zero, zero)
    numbers = tl.join(tl.join(n0, n2), tl.join(n1, n3))  # [rows, groups, 2, 2], the last index the faster
    return tl.reshape(numbers, [rows.shape[0], BLOCK_N]) >= threshold.to(tl.uint32)
