"""Tile configurations of the fast path: they are part of the input space, so cases number them and the oracle forces them."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager


def count(op: str) -> int:
    """How many numbers there are: those of the longest tuning table of fast.<op>, so that each table's configurations all occur."""
    return max((len(table.configs()) for table in _tables(op)), default=0)


@contextmanager
def forced(op: str, number: int | None) -> Iterator[None]:
    """Every table of fast.<op> picks its configuration `number` (counted cyclically); None leaves the choice to the tables."""
    from fast._triton import tuning

    choices = {} if number is None else {t.name: t.configs()[number % len(t.configs())] for t in _tables(op)}
    with tuning.forced(choices):
        yield


def describe(op: str, number: int) -> str:
    return "; ".join(f"{t.name}: {t.configs()[number % len(t.configs())]}" for t in _tables(op))


def _tables(op: str) -> list:
    from fast._triton import tuning

    return tuning.tables(importlib.import_module(f"fast.{op}"))
