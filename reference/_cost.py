"""What an operation must do at least: FLOPs, bytes through device memory, bytes kept for the backward pass."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Work:
    """flops: floating-point operations. bytes: every input read once and every output written once."""

    flops: int
    bytes: int


@dataclass(frozen=True)
class Cost:
    """Work of both directions, and the bytes that must live from one to the other (inputs that the caller keeps included)."""

    forward: Work
    backward: Work
    saved: int


def nbytes(*tensors: Tensor | None) -> int:
    """Bytes of the tensors' elements; None counts nothing. Only shapes and dtypes are read, so meta tensors do."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
