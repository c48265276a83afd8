"""What kernels around a matrix product share: what TMA can address, and the order of tiles."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def describable(x: Tensor) -> bool:
    """Whether a tensor descriptor can address x, but for its pointer: outer strides in 16 bytes, last stride 1, not empty."""
    outer = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    in_16_bytes = all(n == 1 or (s > 0 and s * x.element_size() % 16 == 0) for n, s in outer)
    return in_16_bytes and x.numel() > 0 and (x.stride(-1) == 1 or x.shape[-1] == 1)


def aligned(x: Tensor) -> Tensor:
    """x, or a copy of it where its pointer is no multiple of 16 bytes."""
    return x if x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


@triton.jit
def grouped_tile(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Tile number → (row, column) of tiles: down GROUP_M rows of tiles, then one column on, so that L2 holds what is shared."""
    per_group = GROUP_M * tiles_n
    first = tile // per_group * GROUP_M
    rows = tl.minimum(tiles_m - first, GROUP_M)
    within = tile % per_group
    return first + within % rows, within // rows
