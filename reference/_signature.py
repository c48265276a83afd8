"""What an operation's annotated signature says, and the shape checks that both trees share.

A public function annotates each tensor with `Dims` and each option with `Choices` or `typing.Literal`. The annotations are
the single description of the input space: `check` enforces it, the verification harness draws its cases from it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dims:
    """Shape and dtype of a tensor argument.

    shape: words of the dimension key (paper_notes/README.md), e.g. "* N"; "*" is any number of leading dims.
    dtype: "working" follows the case's dtype; "own" may be any floating dtype; an argument's name copies that argument's.
    fan_in: of a weight, the word of the dimension that is summed over: the harness draws it 1/√fan_in in size, as models do.
    beside: an argument that it may share one packed tensor with, and the word of the dimension along which they are packed.
    """

    shape: str
    dtype: str = "working"
    fan_in: str | None = None
    beside: tuple[str, str] | None = None


@dataclass(frozen=True)
class Choices:
    """Values of an option that the harness draws (other values may be legal too).

    needs: the argument without which only the default is allowed.
    """

    values: tuple[Any, ...]
    needs: str | None = None


def check(function: str, dims: dict[str, tuple[Tensor | None, str]]) -> dict[str, Any]:
    """Match each given tensor against its `Dims.shape`; return the sizes of the dimensions ("*" maps to a shape tuple).

    Raises TypeError for what is no floating-point tensor, ValueError for a shape or a device that does not fit.
    """
    sizes: dict[str, Any] = {}
    first = None
    for name, (tensor, shape) in dims.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{function}: {name} must be a torch.Tensor, got {type(tensor).__name__}")
        if not tensor.is_floating_point():
            raise TypeError(f"{function}: {name} must have a floating-point dtype, got {tensor.dtype}")
        first = first or (name, tensor.device)
        if tensor.device != first[1]:
            raise ValueError(
                f"{function}: {name} is on {tensor.device}, but {first[0]} is on {first[1]}; all must be on one device"
            )
        if not _fits(tensor.shape, shape.split(), sizes):
            wanted = ", ".join(
                f"{word}={sizes[word]}" if word in sizes and word != "*" else word for word in shape.split()
            )
            wanted = wanted.replace("*", ", ".join(map(str, sizes["*"])) or "*") if "*" in sizes else wanted
            raise ValueError(f"{function}: {name} must have shape [{wanted}], got {list(tensor.shape)}")
    return sizes


def _fits(shape: torch.Size, words: list[str], sizes: dict[str, Any]) -> bool:
    if words[0] == "*":
        lead = len(shape) - len(words) + 1
        if lead < 0 or sizes.setdefault("*", shape[:lead]) != shape[:lead]:
            return False
        shape, words = shape[lead:], words[1:]
    return len(shape) == len(words) and all(
        sizes.setdefault(word, size) == size for word, size in zip(words, shape, strict=True)
    )


def promote(*tensors: Tensor | None, floor: torch.dtype = torch.float32) -> torch.dtype:
    """The dtype to compute in: at least `floor`, at least that of every tensor given (so float64 stays float64)."""
    for tensor in tensors:
        if tensor is not None:
            floor = torch.promote_types(floor, tensor.dtype)
    return floor
