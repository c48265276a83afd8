"""Draws cases from an operation's annotated signature: for hypothesis (`cases`), or from a seed (`sample`)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from random import Random
from typing import Any

from hypothesis import strategies as st

from equivalence_tests.harness import tiles
from equivalence_tests.harness.cases import DTYPES, Case, Spec
from equivalence_tests.harness.contents import CONTENTS, OF_WEIGHTS
from equivalence_tests.harness.layouts import DRAWN, NESTED, PAIRED
from equivalence_tests.harness.operations import Argument, Operation


@dataclass(frozen=True)
class Profile:
    """How much is tried.

    examples: drawn cases per function and dtype. size: largest size of one dim. elements: of the largest tensor, about.
    large: real sizes and offsets past 2³¹ too, on a GPU. thorough: each mutant in every dtype. real: tensors of a real model.
    rows: largest product of leading dims where the kernel may take one program for each row.
    """

    name: str
    examples: int
    size: int
    elements: int
    rows: int
    large: bool = False
    thorough: bool = False
    real: bool = True


PROFILES = {
    p.name: p
    for p in (
        Profile("quick", examples=24, rows=17, size=257, elements=2**13),
        Profile("ci", examples=20, rows=17, size=257, elements=2**13, real=False),
        Profile("gpu", examples=48, rows=2**16, size=16384, elements=2**22, large=True),
        Profile("deep", examples=400, rows=65, size=2049, elements=2**15, large=True, thorough=True),
    )
}
# The simplest first, because hypothesis shrinks towards it: odd sizes, and powers of two with their neighbours.
_SIZES = (3, 1, 2, 5, 8, 7, 16, 15, 17, 33, 32, 31, 64, 100, 63, 65, 128, 127, 129, 256, 257, 255, 1000)
_SIZES += tuple(2**k + d for k in range(9, 18) for d in (0, 1, -1))
# How many leading dims a case has, as often as they are named here.
_ANY, _MANY = (1, 2, 0, 3, 4, 2, 2, 3), (2, 3, 2, 4)
_CONTIGUOUS = ("contiguous",) * 4 + DRAWN
_NORMAL = ("normal",) * 7 + tuple(CONTENTS)


def cases(function: Operation, dtype: str, profile: Profile, configs: bool = True) -> st.SearchStrategy[Case]:
    """Hypothesis strategy of the function's cases in a working dtype; with `configs` a tile configuration is drawn too."""
    numbers = tiles.count(function.op) if configs else 0
    number = st.none() | st.integers(0, numbers - 1) if numbers else st.none()
    return st.builds(
        draw, st.randoms(use_true_random=False), st.just(function), st.just(dtype), st.just(profile), number
    )


def sample(
    function: Operation, dtype: str, profile: Profile, seed: int, configs: bool = True
) -> Iterator[Case]:
    """Cases without end, independent of each other (hypothesis' own generation repeats and varies a few).

    Tile configurations, and layouts of the first tensor, come in turn rather than at random, so that few cases see them all.
    """
    numbers = list(range(tiles.count(function.op) if configs else 0))
    Random(f"{seed} {function} {dtype}").shuffle(numbers)
    for i in count():
        number = numbers[(i - i // 4) % len(numbers)] if numbers and i % 4 < 3 else None
        few_rows = not configs or number is not None
        layout = DRAWN[i % len(DRAWN)]
        random = Random(f"{seed} {function} {dtype} {i}")
        case = draw(random, function, dtype, profile, number, few_rows, _MANY if layout in NESTED else _ANY)
        (name, spec), *others = case.tensors
        yield case.replace(tensors=((name, replace(spec, layout=layout)), *others))


def enough(function: Operation, profile: Profile, configs: bool) -> int:
    """How many cases of a sample to take: those of the profile, and more where there are more tile configurations."""
    return max(profile.examples, -(-4 * tiles.count(function.op) // 3) if configs else 0)


def draw(
    random: Random,
    function: Operation,
    dtype: str,
    profile: Profile,
    config: int | None,
    few_rows: bool = True,
    dims: tuple[int, ...] = _ANY,
) -> Case:
    """One case with the given tile configuration, with profile.rows rows at most if few_rows, and with as many leading dims as
    one of `dims` says; `random` decides the rest."""
    sizes = _sizes(random, function, profile, profile.rows if few_rows else profile.elements, dims)
    tensors = {a.name: _tensor(random, a, dtype) for a in function.tensors}
    given = [name for name, spec in tensors.items() if spec]
    asked = [name for name in given if name in function.differentiable]
    cotangents: tuple[Spec | None, ...] = (_spec(random),)
    if random.random() < 0.5:
        cotangents += (_spec(random) if random.random() < 0.7 else None,)
        cotangents = cotangents if random.random() < 0.7 else cotangents[::-1]
    return Case(
        function=function.function,
        dtype=dtype,
        sizes=tuple(sizes.items()),
        tensors=tuple(tensors.items()),
        options=tuple((a.name, _option(random, a, given)) for a in function.options),
        requires_grad=tuple(
            asked if random.random() < 0.5 else (name for name in asked if random.random() < 0.5)
        ),
        cotangents=cotangents,
        seed=random.randrange(2**16),
        config=config,
    )


def _sizes(
    random: Random, function: Operation, profile: Profile, rows: int, dims: tuple[int, ...]
) -> dict[str, Any]:
    words = dict.fromkeys(word for a in function.tensors for word in a.dims.shape.split())
    allowed = [size for size in _SIZES if size <= profile.size]
    sizes: dict[str, Any] = {}
    left = profile.elements  # of a weight, whose dims are not leading ones
    for word in words:
        if word != "*":
            limit = min(max(3, left), function.largest.get(word, profile.size))
            sizes[word] = random.choice([size for size in allowed if size <= limit])
            left //= sizes[word]
    if "*" in words:
        rows = min(rows, max(2, profile.elements // max([1, *sizes.values()])))
        sizes["*"] = _lead(random, rows, profile.size, random.choice(dims))
    return {word: sizes[word] for word in words}


def _lead(random: Random, rows: int, size: int, dims: int) -> tuple[int, ...]:
    """Leading dims with `rows` rows at most; one case in eight has no rows at all."""
    lead: list[int] = []
    for left in range(dims, 0, -1):
        # Each dim gets its share: a dim of size 1 has no layout to get wrong.
        limit = min(size, rows, max(3, round(2 * rows ** (1 / left))))
        lead.append(random.choice([s for s in _SIZES if s <= limit]))
        rows = max(1, rows // lead[-1])
    random.shuffle(lead)
    if lead and random.random() < 0.125:
        lead[random.randrange(len(lead))] = 0
    return tuple(lead)


def _spec(
    random: Random,
    dtypes: tuple[str | None, ...] = (None,),
    numbers: tuple[str, ...] = _NORMAL,
    places: tuple[str, ...] = _CONTIGUOUS,
) -> Spec:
    """Plain layouts and numbers often enough that many cases have full power."""
    return Spec(random.choice(places), random.choice(numbers), random.choice(dtypes))


def _tensor(random: Random, argument: Argument, dtype: str) -> Spec | None:
    # Half of the tensors that may have a dtype of their own have the working one.
    own = (None, None, *(d for d in DTYPES if d != dtype)) if argument.dims.dtype == "own" else (None,)
    numbers = OF_WEIGHTS if argument.dims.fan_in else _NORMAL
    places = _CONTIGUOUS + 4 * PAIRED if argument.dims.beside else _CONTIGUOUS
    return None if argument.optional and random.random() < 0.35 else _spec(random, own, numbers, places)


def _option(random: Random, argument: Argument, given: list[str]) -> Any:
    if argument.needs is not None and argument.needs not in given:
        return argument.default
    return random.choice(argument.choices)
