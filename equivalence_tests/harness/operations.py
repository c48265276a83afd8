"""What operations there are, and what their annotated signatures say about the inputs."""

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from torch import Tensor

import reference
from reference._signature import Choices, Dims


@dataclass(frozen=True)
class Argument:
    """One parameter of an operation: a tensor (dims is set) or an option (choices, the default among them)."""

    name: str
    keyword: bool
    dims: Dims | None
    optional: bool
    choices: tuple[Any, ...]
    needs: str | None
    default: Any

    @property
    def labels(self) -> str | None:
        """Of a tensor of class labels (dtype "labels V"), the word of the dimension that they point into; it has no gradient."""
        return self.dims.dtype.removeprefix("labels ") if self.dims.dtype.startswith("labels ") else None


@dataclass(frozen=True)
class Operation:
    """One public function of one operation module, by name; everything else is looked up in reference/<op>.py."""

    op: str
    function: str

    @property
    def module(self) -> ModuleType:
        return importlib.import_module(f"reference.{self.op}")

    @property
    def definition(self) -> Callable:
        return getattr(self.module, self.function)

    @property
    def backward(self) -> Callable:
        return getattr(self.module, f"{self.function}_backward")

    @property
    def majorant(self) -> Callable:
        return getattr(self.module, f"{self.function}_majorant")

    @property
    def largest(self) -> dict[str, int]:
        """LARGEST of reference/<op>.py: sizes of dimensions that have a limit."""
        return getattr(self.module, "LARGEST", {})

    @property
    def arguments(self) -> tuple[Argument, ...]:
        return _arguments(self.definition)

    @property
    def tensors(self) -> tuple[Argument, ...]:
        return tuple(a for a in self.arguments if a.dims)

    @property
    def differentiable(self) -> frozenset[str]:
        """Names of the tensors that may have a gradient."""
        return frozenset(a.name for a in self.tensors if a.labels is None)

    @property
    def options(self) -> tuple[Argument, ...]:
        return tuple(a for a in self.arguments if not a.dims)

    def split(self, values: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of a call, from values by name."""
        args = tuple(values[a.name] for a in self.arguments if not a.keyword)
        return args, {a.name: values[a.name] for a in self.arguments if a.keyword}

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Values by name, defaults filled in; the inverse of `split`."""
        bound = inspect.signature(self.definition).bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)


def operations() -> list[Operation]:
    """Every public function of `reference` that has an error majorant, in its order. Classes, and functions that are composed of
    others (lora_qkv of lora_linear), are judged by tests of their own."""
    found = (
        Operation(getattr(reference, name).__module__.rsplit(".")[-1], name) for name in reference.__all__
    )
    return [o for o in found if hasattr(o.module, f"{o.function}_majorant")]


def operation(function: str) -> Operation:
    """The operation of a public function; ValueError names those that exist."""
    found = next((o for o in operations() if o.function == function), None)
    if found is None:
        raise ValueError(f"function must be one of {reference.__all__}, got {function!r}")
    return found


def suite(op: str) -> ModuleType | None:
    """equivalence_tests/test_<op>.py, which holds the operation's EXAMPLES, MUTANTS and real_sites; None without that file."""
    name = f"equivalence_tests.test_{op}"
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


@lru_cache
def _arguments(function: Callable) -> tuple[Argument, ...]:
    hints = get_type_hints(function, include_extras=True)
    return tuple(
        _argument(function, p, hints[p.name]) for p in inspect.signature(function).parameters.values()
    )


def _argument(function: Callable, parameter: inspect.Parameter, hint: Any) -> Argument:
    keyword, default = parameter.kind is inspect.Parameter.KEYWORD_ONLY, parameter.default
    inner, extras = (get_args(hint)[0], get_args(hint)[1:]) if get_origin(hint) is Annotated else (hint, ())
    for extra in extras:
        if isinstance(extra, Dims):
            return Argument(parameter.name, keyword, extra, inner is not Tensor, (), None, default)
        if isinstance(extra, Choices):
            return Argument(parameter.name, keyword, None, False, extra.values, extra.needs, default)
    if get_origin(hint) is Literal:
        return Argument(parameter.name, keyword, None, False, get_args(hint), None, default)
    if hint is bool:
        return Argument(parameter.name, keyword, None, False, (False, True), None, default)
    raise TypeError(
        f"reference.{function.__name__}: {parameter.name} is annotated {hint!r}; "
        "the harness draws what is annotated with Dims, Choices, typing.Literal or bool"
    )
