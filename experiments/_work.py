"""One row of work: an operation's function at a shape, buildable in any dtype on any device.

Every experiments/<op>.py has
    ROWS      the shapes that bench times, of all the operation's functions, in the order of the tables
    PEERS     {name: {function: maker}}: maker() imports what it needs and returns a function with the reference's signature
    NOTES     {implementation: what a reader of its figures must know}
    row(shape), random_shape(generator)
    compiled(architecture)   the rows that reach every tile configuration of the operation's tables
    ladders()                the fusion ladders (experiments/_ladder.py)
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from importlib import import_module
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
PHASES = ("fwd", "bwd", "fwd+bwd")


def _parts(value: Any) -> dict[str, Any]:
    """The attributes of a quantised weight, whose tensors count as the call's; none of anything else."""
    return vars(value) if hasattr(value, "dequantize") and not isinstance(value, Tensor) else {}


@dataclass
class Call:
    """Arguments of one call, in nested tuples too, and the cotangents of its outputs. `wanted`: the tensors with a gradient."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cotangents: tuple[Tensor, ...]
    wanted: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        given = tree_leaves((self.args, self.kwargs))
        self.wanted = [t for t in given if isinstance(t, Tensor) and t.requires_grad]

    def each(self, change: Callable[[Tensor], Tensor]) -> "Call":
        """The call with every tensor changed."""

        def changed(value: Any) -> Any:
            if parts := _parts(value):
                value = copy(value)
                vars(value).update({name: changed(part) for name, part in parts.items()})
            return change(value) if isinstance(value, Tensor) else value

        return Call(*tree_map(changed, (self.args, self.kwargs, self.cotangents)))

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor of the call, those inside of quantised weights too, cotangents last."""
        leaves = tree_leaves((self.args, self.kwargs, self.cotangents))
        parts = (part for leaf in leaves for part in (leaf, *_parts(leaf).values()))
        return [t for t in parts if isinstance(t, Tensor)]

    def outputs(self, function: Callable) -> tuple[Tensor, ...]:
        found = function(*self.args, **self.kwargs)
        return found if isinstance(found, tuple) else (found,)

    def gradients(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Through autograd, keeping the graph so that the same outputs can be asked again."""
        if not self.wanted:
            return ()
        return torch.autograd.grad(outputs, self.wanted, self.cotangents, retain_graph=True)

    def step(self, function: Callable) -> tuple[Tensor, ...]:
        """Outputs and gradients of one training step: the graph is not kept, so backward may free what forward saved."""
        outputs = self.outputs(function)
        if not self.wanted:
            return outputs
        return *outputs, *torch.autograd.grad(outputs, self.wanted, self.cotangents)


@dataclass(frozen=True)
class Row:
    """shape: as the tables print it. make(dtype, device, generator) -> Call with fresh random contents.
    backward: the work of that direction where fewer gradients are asked for than COST counts."""

    op: str
    function: str
    shape: str
    make: Callable[[torch.dtype, torch.device, torch.Generator | None], Call] = field(repr=False)
    phases: tuple[str, ...] = ("fwd", "bwd")
    backward: Callable[[Call], Any] | None = field(default=None, repr=False)

    def cost(self, call: Call) -> Any:
        found = import_module(f"reference.{self.op}").COST[self.function](*call.args, **call.kwargs)
        return found if self.backward is None else replace(found, backward=self.backward(call))


def named(tree: str, name: str) -> Callable:
    """A function or a method of `reference` or `fast`, such as "swiglu" or "NF4Weight.dequantize"."""
    return attrgetter(name)(import_module(tree))


def operations() -> list[str]:
    """Names of the operations, in the order of `reference.__all__`."""
    reference = import_module("reference")
    functions = (getattr(reference, name) for name in reference.__all__)
    return list(dict.fromkeys(function.__module__.rsplit(".")[-1] for function in functions))


def experiment(op: str) -> ModuleType:
    """The module experiments.<op>. Raises ValueError for what is no operation."""
    if op not in operations():
        raise ValueError(f"op must be one of {', '.join(operations())}; got {op!r}")
    return import_module(f"experiments.{op}")
