"""Autocast of an operation that multiplies x by a weight: as torch.nn.functional.linear casts them."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def cast_as_linear(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's dtype where it is on for their device and they are fp32 or narrower; else as they are."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind) or any(t.dtype == torch.float64 for t in tensors):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) for t in tensors)


def without_autocast(launcher: Callable) -> Callable:
    """A launcher whose products are those that it writes down; its first argument is a tensor."""

    @wraps(launcher)
    def launch(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(x.device.type, enabled=False):
            return launcher(x, *args, **kwargs)

    return launch
