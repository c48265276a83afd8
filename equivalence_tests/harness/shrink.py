"""Makes a failing case simpler, one step at a time, as long as it still fails in the same way."""

import time
from collections.abc import Callable, Iterator

from equivalence_tests.harness.cases import Case, Spec


def shrink(case: Case, fails: Callable[[Case], bool], seconds: float = 60.0) -> Case:
    """The simplest case found by greedy steps for which `fails` holds; `case` itself must fail."""
    until = time.monotonic() + seconds
    while True:
        for simpler in steps(case):
            if time.monotonic() > until:
                return case
            if fails(simpler):
                case = simpler
                break
        else:
            return case


def steps(case: Case) -> Iterator[Case]:
    """Every case that is one step simpler; the largest steps first."""
    yield from _without_tiles(case)
    yield from _smaller(case)
    yield from _fewer_tensors(case)
    yield from _default_options(case)
    yield from _plainer(case)
    if len(case.cotangents) > 1:
        yield case.replace(cotangents=case.cotangents[:1] if case.cotangents[0] else case.cotangents[1:])
    given = tuple(name for name, spec in case.tensors if spec and name in case.operation.differentiable)
    if set(case.requires_grad) != set(given):
        yield case.replace(requires_grad=given)
    if case.seed:
        yield case.replace(seed=0)


def _without_tiles(case: Case) -> Iterator[Case]:
    if case.config is not None:
        yield case.replace(config=None)


def _smaller(case: Case) -> Iterator[Case]:
    for i, (word, size) in enumerate(case.sizes):
        for smaller in _leads(size) if word == "*" else _sizes(size):
            yield case.replace(sizes=(*case.sizes[:i], (word, smaller), *case.sizes[i + 1 :]))


def _sizes(size: int) -> Iterator[int]:
    """1, halves, and one less."""
    yield from dict.fromkeys(
        s for s in (1, 2, size // 4, size // 2, size - size // 8, size - 1) if 0 < s < size
    )


def _leads(lead: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for i, size in enumerate(lead):
        yield lead[:i] + lead[i + 1 :]
        yield from ((*lead[:i], s, *lead[i + 1 :]) for s in _sizes(size))


def _fewer_tensors(case: Case) -> Iterator[Case]:
    optional = {a.name for a in case.operation.tensors if a.optional}
    defaults = {a.name: (a.needs, a.default) for a in case.operation.options}
    for name, spec in case.tensors:
        if spec and name in optional:
            options = tuple(
                (o, defaults[o][1] if defaults[o][0] == name else value) for o, value in case.options
            )
            grads = tuple(g for g in case.requires_grad if g != name)
            yield _with(case, name, None).replace(options=options, requires_grad=grads)


def _default_options(case: Case) -> Iterator[Case]:
    for argument in case.operation.options:
        if dict(case.options)[argument.name] != argument.default:
            options = ((n, argument.default if n == argument.name else v) for n, v in case.options)
            yield case.replace(options=tuple(options))


def _plainer(case: Case) -> Iterator[Case]:
    for name, spec in case.tensors:
        for plainer in _plain(spec):
            yield _with(case, name, plainer)
    for i, spec in enumerate(case.cotangents):
        for plainer in _plain(spec):
            yield case.replace(cotangents=(*case.cotangents[:i], plainer, *case.cotangents[i + 1 :]))


def _plain(spec: Spec | None) -> Iterator[Spec]:
    if spec is not None:
        if spec.layout != "contiguous":
            yield Spec("contiguous", spec.content, spec.dtype)
        if spec.content != "normal":
            yield Spec(spec.layout, "normal", spec.dtype)
        if spec.dtype is not None:
            yield Spec(spec.layout, spec.content)


def _with(case: Case, name: str, spec: Spec | None) -> Case:
    return case.replace(tensors=tuple((n, spec if n == name else s) for n, s in case.tensors))
