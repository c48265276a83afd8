"""Where a tensor's elements lie in memory: every test tensor is a view into a larger storage, the rest of which is a guard."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

# Elements before and after the view; a multiple of 16 bytes for every dtype.
MARGIN = 64
# Read as bf16, fp16 or fp32 it is a quiet NaN with a payload of its own: who reads it shows, and so does who writes it.
GUARD = 0x7FE5

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """A view: its strides, and its storage_offset, in elements."""

    stride: tuple[int, ...]
    offset: int = MARGIN

    def extent(self, shape: Shape) -> int:
        """Elements of the storage, both margins included."""
        reach = sum((size - 1) * stride for size, stride in zip(shape, self.stride, strict=True)) + 1
        return self.offset + (reach if prod(shape) else 0) + MARGIN


def contiguous(shape: Shape) -> Placement:
    return Placement(_strides(shape))


def offset(shape: Shape) -> Placement:
    """A slice that starts at an odd element: no vector load of 16 bytes is aligned."""
    return Placement(_strides(shape), MARGIN + 1)


def padded(shape: Shape) -> Placement:
    """Rows that are 3 elements apart."""
    return Placement(_strides((*shape[:-1], shape[-1] + 3))) if len(shape) > 1 else offset(shape)


def step2(shape: Shape) -> Placement:
    """Every second element: the last stride is 2."""
    return Placement(tuple(2 * s for s in _strides(shape)))


def transposed(shape: Shape) -> Placement:
    """The last two dims swapped in memory."""
    if len(shape) < 2:
        return step2(shape)
    *lead, inner, outer = _strides((*shape[:-2], shape[-1], shape[-2]))
    return Placement((*lead, outer, inner))


def permuted(shape: Shape) -> Placement:
    """The leading dims reversed in memory, as after [B, H, T, D] → [B, T, H, D]; the last dim is dense."""
    strides = _strides((*shape[:-1][::-1], shape[-1])) if shape else ()
    return Placement((*strides[:-1][::-1], *strides[-1:]))


def packed(shape: Shape) -> Placement:
    """The middle third of a packed tensor, as k in qkv [B, T, 3, H, D]; [M, 3, N] for a matrix."""
    at = max(0, len(shape) - 2 if len(shape) > 2 else len(shape) - 1)
    strides = _strides((*shape[:at], 3, *shape[at:]))
    return Placement((*strides[:at], *strides[at + 1 :]), MARGIN + strides[at])


def expanded(shape: Shape) -> Placement:
    """Stride 0 in the first dim: the same numbers again and again."""
    return Placement((0, *_strides(shape)[1:]) if shape else ())


def far(shape: Shape) -> Placement:
    """The first dim so wide that its last row begins past 2³¹ elements: 32-bit offsets wrap."""
    if len(shape) < 2 or shape[0] < 2:
        return contiguous(shape)
    return Placement((2**31 // (shape[0] - 1) + 128, *_strides(shape)[1:]))


LAYOUTS: dict[str, Callable[[Shape], Placement]] = {
    f.__name__: f for f in (contiguous, offset, padded, step2, transposed, permuted, packed, expanded, far)
}
# `far` takes 2³¹ elements of memory: only where it is asked for.
DRAWN = tuple(name for name in LAYOUTS if name != "far")

# Layouts that differ from others only where there are several leading dims.
NESTED = ("transposed", "permuted", "packed", "expanded")


# Of two tensors in one packed tensor: one behind the other, or element by element in turn.
PAIRED = ("halves", "alternating")


def pair(
    layout: str, shape: Shape, dim: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Two unfilled views of `shape` in one guarded storage, packed along `dim` as one of PAIRED says."""
    both = allocate("contiguous", (*shape[:dim], 2 * shape[dim], *shape[dim + 1 :]), dtype, device)
    if layout == "halves":
        return both.narrow(dim, 0, shape[dim]), both.narrow(dim, shape[dim], shape[dim])
    every_second = (slice(None),) * dim
    return both[(*every_second, slice(0, None, 2))], both[(*every_second, slice(1, None, 2))]


def allocate(layout: str, shape: Shape, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """An unfilled view of `shape` in a guarded storage."""
    place = LAYOUTS[layout](shape)
    storage = torch.empty(place.extent(shape), dtype=dtype, device=device)
    storage.view(torch.int16).fill_(GUARD)
    return storage.as_strided(shape, place.stride, place.offset)


def fill(view: Tensor, values: Tensor) -> Tensor:
    """Write values [shape of view] into the view, once where stride-0 dims repeat an element; returns the view."""
    once = view
    for dim, stride in enumerate(view.stride()):
        if stride == 0 and view.shape[dim]:
            once, values = once.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    once.copy_(values)
    return view


def bits(tensor: Tensor) -> Tensor:
    """The tensor's elements as integers, so that NaNs and signed zeros compare by their bits."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().view(width)


def storage(tensor: Tensor) -> Tensor:
    """The whole storage that the tensor is a view of, as bytes."""
    return torch.tensor([], dtype=torch.uint8, device=tensor.device).set_(tensor.detach().untyped_storage())


def _strides(shape: Shape) -> tuple[int, ...]:
    return tuple(max(1, prod(shape[i + 1 :])) for i in range(len(shape)))
