"""The memory map that a kernel's signature states in comments, and what a launch did against it."""

import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from equivalence_tests.harness.instruments import Launch

Direction = Literal["in", "out", "inout"]
# "# [M, N]  in", "# [M]  out, fp32", "# inout"; a comment such as "# in elements" is none.
_STATED = re.compile(r"#\s*(?:\[.*?\]\s*(inout|out|in)\b|(inout|out|in)\s*(?:[,;(]|$))")


def memory_map(kernel: Any) -> dict[str, Direction]:
    """Parameter → direction, from the comments in the signature: each speaks for the parameters on its line but the strides.

    kernel: what triton.jit, autotune or heuristics returned, or the Python function.
    """
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return dict(_stated(kernel))


def violations(kernel: Any, launch: "Launch") -> list[str]:
    """What a launch of the kernel did against the kernel's memory map, in words; empty if it kept to it."""
    stated, found = memory_map(kernel), []
    for name, argument in launch.arguments.items():
        direction = stated.get(re.sub(r"\[.*", "", name))
        what = f"{launch.kernel}: {name}"
        if direction is None:
            found.append(f'{what} is a pointer, and the signature does not say "in", "out" or "inout"')
        if direction == "in" and argument.accesses & {"store", "atomic"}:
            found.append(f'{what} is "in", and is stored to')
        if direction == "out" and argument.accesses & {"load", "atomic"}:
            found.append(f'{what} is "out", and is loaded from')
    return found


@cache
def _stated(function: Callable[..., Any]) -> dict[str, Direction]:
    parameters, stated, line = set(inspect.signature(function).parameters), {}, []
    depth, began = 0, False
    for token in tokenize.generate_tokens(io.StringIO(textwrap.dedent(inspect.getsource(function))).readline):
        if token.type == tokenize.NAME and token.string == "def":
            began = True
        elif not began:
            continue
        elif token.type == tokenize.OP and token.string in "([{":
            depth += 1
        elif token.type == tokenize.OP and token.string in ")]}":
            depth -= 1
            if depth == 0:
                break
        elif token.type == tokenize.NAME and depth == 1 and token.string in parameters:
            line.append(token.string)
        elif token.type == tokenize.COMMENT:
            found = _STATED.match(token.string)
            if found:
                stated |= {name: found[1] or found[2] for name in line if not name.startswith("stride")}
        elif token.type == tokenize.NL:
            line = []
    return stated
