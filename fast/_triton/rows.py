"""Addresses of rows: a tensor [*, N] as M rows whose leading dims need at most two strides."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class RowView(NamedTuple):
    """Row m lies at (m // inner) · outer_stride + (m % inner) · inner_stride, its elements column_stride apart."""

    tensor: Tensor
    outer_stride: int
    inner_stride: int
    inner: int
    column_stride: int = 1

    def aligned(self) -> "RowView":
        """Itself, or a copy, such that the pointer is a multiple of 16 bytes and both strides are of 16 elements."""
        x = self.tensor
        if x.data_ptr() % 16 == 0 and self.outer_stride % 16 == 0 and self.inner_stride % 16 == 0:
            return self
        return RowView(x.clone(memory_format=torch.contiguous_format), x.shape[-1], 0, 1)


def as_rows(x: Tensor, any_column_stride: bool = False) -> RowView:
    """View the leading dims of x as rows. Copies only where two strides and a column stride (1 unless any is taken) cannot
    address them."""
    N = x.shape[-1]
    if x.is_contiguous():
        return RowView(x, N, 0, 1)
    groups: list[tuple[int, int]] = []  # (size, stride) of the merged leading dims, outermost first
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if groups and groups[-1][1] == stride * size:
            groups[-1] = (groups[-1][0] * size, stride)
        else:
            groups.append((size, stride))
    column_stride = x.stride(-1) if N > 1 else 1
    if len(groups) > 2 or (column_stride != 1 and not any_column_stride):
        return RowView(x.contiguous(), N, 0, 1)
    if len(groups) < 2:
        return RowView(x, groups[0][1] if groups else 0, 0, 1, column_stride)
    (_, outer_stride), (inner, inner_stride) = groups
    return RowView(x, outer_stride, inner_stride, inner, column_stride)


@triton.jit
def row_offsets(first, outer_stride, inner_stride, inner, BLOCK_M: tl.constexpr):
    """Element offsets of rows first … first + BLOCK_M − 1 of a RowView; one 64-bit division a program, 32-bit ones after it."""
    within = (first % inner).to(tl.int32) + tl.arange(0, BLOCK_M)
    outer = first // inner + within // inner
    return outer * outer_stride + (within % inner).to(tl.int64) * inner_stride
