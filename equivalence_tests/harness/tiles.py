"""Tile configurations of the fast path: they are part of the input space, so cases number them and the oracle forces them."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def count(op: str) -> int:
    """How many numbers there are. Going through all of them forces every configuration of every tuning table of fast.<op>."""
    longest = max((len(table.configs()) for table in _tables(op)), default=0)
    return longest * (2 if any(_optional(table) for table in _tables(op)) else 1)


@contextmanager
def forced(op: str, number: int | None) -> Iterator[None]:
    """The tables of fast.<op> pick the configurations of this number; None leaves the choice to the tables."""
    from fast._triton import tuning

    with tuning.forced({} if number is None else choices(op, number)):
        yield


def choices(op: str, number: int) -> dict[str, Any]:
    """Table name → configuration: each table's own list, counted cyclically. A table that is not used everywhere (it has None
    rows) is forced in the second half of the numbers only, for where it is, it keeps others from being used."""
    tables = _tables(op)
    longest = max(len(table.configs()) for table in tables)
    chosen = [t for t in tables if number >= longest or not _optional(t)]
    return {t.name: t.configs()[number % len(t.configs())] for t in chosen}


def describe(op: str, number: int) -> str:
    return "; ".join(f"{name}: {config}" for name, config in choices(op, number).items())


def _optional(table: Any) -> bool:
    return any(choice is None for rows in table.rows.values() for _, choice in rows)


def _tables(op: str) -> list[Any]:
    from fast._triton import tuning

    return tuning.tables(importlib.import_module(f"fast.{op}"))
