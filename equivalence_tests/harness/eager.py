"""What eager PyTorch does to memory: kernels launched and bytes moved, op by op, on any device."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"}
_NO_KERNEL |= {"_unsafe_view", "lift_fresh", "_local_scalar_dense"}
_READS_NOTHING_BACK = {
    "copy_",
    "fill_",
    "zero_",
    "normal_",
    "uniform_",
    "random_",
    "exponential_",
    "bernoulli_",
}


@dataclass
class EagerTraffic:
    """launches: ops that are a kernel (no view, no allocation). bytes: of each such op its inputs once and its outputs once."""

    launches: int = 0
    bytes: int = 0
    ops: list[tuple[str, int]] = field(default_factory=list)


@contextmanager
def eager_traffic() -> Iterator[EagerTraffic]:
    """Count what the torch ops of the block do. An expanded dimension counts once; a fused library kernel counts as one op."""
    traffic = EagerTraffic()
    with _Meter(traffic):
        yield traffic


class _Meter(TorchDispatchMode):
    def __init__(self, traffic: EagerTraffic) -> None:
        super().__init__()
        self.traffic = traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        written = _written(func, args, kwargs)
        views = any(a.alias_info is not None and not a.alias_info.is_write for a in func._schema.returns)
        if views or name in _NO_KERNEL:
            return out
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if name in _READS_NOTHING_BACK or func._overloadname.endswith("out"):
            read = [t for t in read if not any(t is w for w in written)]
        results = {id(t): t for t in [*written, *(t for t in tree_leaves(out) if isinstance(t, Tensor))]}
        moved = sum(_nbytes(t) for t in {_place(t): t for t in read}.values()) + sum(
            map(_nbytes, results.values())
        )
        self.traffic.launches += 1
        self.traffic.bytes += moved
        self.traffic.ops.append((str(func), moved))
        return out


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    written = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            written += [t for t in tree_leaves(value) if isinstance(t, Tensor)]
    return written


def _place(t: Tensor) -> tuple[Any, ...]:
    return (t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype)


def _nbytes(t: Tensor) -> int:
    if t.numel() == 0:
        return 0
    distinct = [n for n, stride in zip(t.shape, t.stride(), strict=True) if stride]
    return int(torch.Size(distinct).numel()) * t.element_size()
