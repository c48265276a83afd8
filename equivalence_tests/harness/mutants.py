"""Named one-line bugs. The harness must refuse each of them, or it would not notice such a bug in earnest."""

import ast
import importlib
import inspect
import linecache
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from equivalence_tests.harness.cases import DTYPES, Case
from equivalence_tests.harness.oracle import Judgement, Sample, judge


@dataclass(frozen=True)
class Mutant:
    """A bug: in the source of `where` ("package.module:function" or ":Class.method"), `old`, which occurs once, becomes `new`.

    dtypes: the working dtypes in which it is one (a rounding that is forgotten changes nothing in fp32). note: for the reader.
    of: the public function whose cases must refuse it; None: any of the operation's, they all run that code.
    """

    name: str
    where: str
    old: str
    new: str
    note: str = ""
    dtypes: tuple[str, ...] = tuple(DTYPES)
    of: str | None = None

    @property
    def module(self) -> ModuleType:
        return importlib.import_module(self.where.split(":")[0])

    @property
    def function(self) -> str:
        return self.where.split(":")[1]


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The module runs with the bug inside the block. Raises ValueError if `old` does not occur exactly once."""
    module = mutant.module
    owner, attribute = _resolve(module, mutant.function)
    original = vars(owner)[attribute]
    with tempfile.NamedTemporaryFile("w", suffix=f"_{module.__name__.replace('.', '_')}.py") as file:
        # Triton reads a kernel's source from its file, so the mutated module has to exist as one.
        file.write(_mutated(mutant, module))
        file.flush()
        replacement = _compiled(mutant, module, Path(file.name))
        try:
            with _swapped(original, replacement):
                yield
        finally:
            linecache.cache.pop(file.name, None)


def killed(
    mutant: Mutant, impl: Callable, cases: Iterable[Case], device: str
) -> tuple[bool, str, Case | None]:
    """Whether a case refuses the bug; what it says, and the case. The quickest cases first; what shows only from run to run is
    looked for when all else has passed. A mutant that only raises is an error of its author: ValueError."""
    ordered = sorted(cases, key=_effort)
    with planted(mutant):
        for again in (False, True):
            for case in ordered:
                judgement = judge(Sample.of_case(case, device), impl, again=again)
                if judgement.kinds == {"error"}:
                    raise ValueError(f"mutant {mutant.name!r} does not run: {_reason(judgement)}")
                if not judgement.ok:
                    return True, _reason(judgement), case
    return False, "", None


def shared(mutants: Sequence[Mutant], dtypes: Sequence[str], each: bool) -> dict[str, tuple[Mutant, ...]]:
    """Which mutants are planted in which dtype: each in every one that it is a bug in, or else in one of them, in turn."""
    found: dict[str, list[Mutant]] = {dtype: [] for dtype in dtypes}
    for i, mutant in enumerate(mutants):
        possible = [dtype for dtype in dtypes if dtype in mutant.dtypes]
        for dtype in possible if each else possible[i % max(1, len(possible)) :][:1]:
            found[dtype].append(mutant)
    return {dtype: tuple(those) for dtype, those in found.items()}


def _effort(case: Case) -> float:
    """Elements of the largest tensor, for each tensor given: many tensors reach more of the code."""
    sizes = [prod(size) if word == "*" else size for word, size in case.sizes]
    return (prod(sizes) or 1e9) / sum(spec is not None for _, spec in case.tensors)


def _reason(judgement: Judgement) -> str:
    return str(judgement.findings[0])


def _resolve(module: ModuleType, path: str) -> tuple[Any, str]:
    owner: Any = module
    *classes, attribute = path.split(".")
    for name in classes:
        owner = getattr(owner, name)
    if attribute not in vars(owner):
        raise ValueError(f"{module.__name__} has no {path}")
    return owner, attribute


def _mutated(mutant: Mutant, module: ModuleType) -> str:
    source = Path(inspect.getsourcefile(module)).read_text()
    node = _node(ast.parse(source), mutant.function)
    lines = source.splitlines(keepends=True)
    start = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
    body = "".join(lines[start : node.end_lineno])
    if body.count(mutant.old) != 1:
        found = body.count(mutant.old)
        raise ValueError(
            f"mutant {mutant.name!r}: {mutant.old!r} must occur once in {mutant.where}, found {found} times"
        )
    return "".join(lines[:start]) + body.replace(mutant.old, mutant.new) + "".join(lines[node.end_lineno :])


def _node(tree: ast.Module, path: str) -> ast.FunctionDef:
    body, node = tree.body, None
    for name in path.split("."):
        node = next(n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name)
        body = node.body
    return node


def _compiled(mutant: Mutant, module: ModuleType, file: Path) -> Any:
    """The mutated function, decorated as in the source, with the module's own globals."""
    node = _node(ast.parse(file.read_text()), mutant.function)
    namespace: dict[str, Any] = {}
    exec(compile(ast.Module([node], []), str(file), "exec"), vars(module), namespace)
    return namespace[node.name]


@contextmanager
def _swapped(original: Any, replacement: Any) -> Iterator[None]:
    plain, mutated = (getattr(f, "__func__", f) for f in (original, replacement))
    if isinstance(plain, FunctionType):
        # In place: whoever holds the function, an operator registry for one, runs the mutated code.
        code, plain.__code__ = plain.__code__, mutated.__code__
        try:
            yield
        finally:
            plain.__code__ = code
        return
    holders = [
        (module, name)
        for module in _fast_modules()
        for name, value in vars(module).items()
        if value is original
    ]
    try:
        for module, name in holders:
            setattr(module, name, replacement)
        _forget_compiled()
        yield
    finally:
        for module, name in holders:
            setattr(module, name, original)
        _forget_compiled()


def _fast_modules() -> list[ModuleType]:
    return [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "fast"]


def _forget_compiled() -> None:
    """A compiled kernel has its helpers inlined: kernels that call a mutated one must be compiled again."""
    from triton.runtime.jit import JITFunction

    for module in _fast_modules():
        for value in vars(module).values():
            if isinstance(value, JITFunction):
                value.device_caches.clear()
                value.hash = None
