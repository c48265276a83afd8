"""What stands in a patched module's `__dict__` in place of its forward, and where it stands."""

import inspect
from types import MethodType
from typing import Any

from torch import Tensor, nn


class Forward:
    """A replacement for a `module.forward` of one tensor; subclasses define `operation` and `__call__`.

    An object, not a bound method: pickle stores a bound method as getattr(module, name), which at loading finds the class's
    own forward, so a loaded copy would silently be unpatched. An object that holds the module is carried by deepcopy and
    pickle to the copy, and uses the copy's weights.

    operation: name of the fast operation that it runs. argument: what the class's own forward calls its tensor. had_entry:
    whether the slot had an entry (the class's own forward, bound) before, which `restore` then puts back.
    """

    operation: str

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.had_entry = False
        _, self.argument = inspect.signature(type(module).forward).parameters

    def __call__(self, *args: Tensor, **named: Tensor) -> Any:
        raise NotImplementedError

    def tensor(self, args: tuple[Tensor, ...], named: dict[str, Tensor]) -> Tensor:
        """The one tensor of a call, by position or by name. Raises TypeError for any other call."""
        if len(args) + len(named) != 1 or not named.keys() <= {self.argument}:
            given = f"{len(args)} positional arguments and {list(named)}"
            raise TypeError(
                f"{type(self.module).__name__}.forward takes one tensor, {self.argument}; got {given}"
            )
        return args[0] if args else named[self.argument]

    def changed(self) -> str | None:
        """What happened to the module since it was patched that this replacement cannot follow; None: nothing."""
        return None


def not_one_tensor(module: nn.Module) -> str | None:
    """Why the class's forward is not one of one tensor; None where it is."""
    arguments = list(inspect.signature(type(module).forward).parameters.values())[1:]
    if len(arguments) == 1 and arguments[0].kind == inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return None
    return f"forward takes ({', '.join(map(str, arguments))}), not one tensor"


def slot(module: nn.Module) -> str:
    """Key of `module.__dict__` whose entry computes: accelerate's hooks take `forward` and move the former one here."""
    return "_old_forward" if "_old_forward" in vars(module) else "forward"


def standing(module: nn.Module) -> Forward | None:
    """The replacement that the module runs now, if any."""
    entry = vars(module).get(slot(module))
    return entry if isinstance(entry, Forward) else None


def rebound(module: nn.Module) -> str | None:
    """Name of a forward that others bound on this instance and that is not its class's own; None where there is none."""
    entry = vars(module).get(slot(module))
    if entry is None or (getattr(entry, "__self__", None), getattr(entry, "__func__", None)) == (
        module,
        type(module).forward,
    ):
        return None
    return getattr(entry, "__qualname__", type(entry).__qualname__)


def install(replacement: Forward) -> None:
    """Let the replacement's module run it."""
    entries, key = vars(replacement.module), slot(replacement.module)
    replacement.had_entry = key in entries
    entries[key] = replacement


def restore(module: nn.Module) -> None:
    """Take the replacement out, from under accelerate's hook too."""
    own, wrapper, key = MethodType(type(module).forward, module), wrapper_of_replacement(module), slot(module)
    if wrapper is not None:
        wrapper.__wrapped__ = own
    if standing(module).had_entry or key != "forward":
        vars(module)[key] = own
    else:
        del vars(module)[key]


def wrapper_of_replacement(module: nn.Module) -> Any:
    """The function that someone put around the replacement as the module's forward (functools.wraps, accelerate), or None."""
    outer, inner = None, vars(module).get("forward")
    while inner is not None and not isinstance(inner, Forward):
        outer, inner = inner, getattr(inner, "__wrapped__", None)
    return outer if inner is not None else None
