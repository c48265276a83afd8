"""Tuning tables: shipped, measured, looked up in constant time. Nothing is tuned at run time."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import ModuleType

import torch

from fast._triton.device import arch


@dataclass(frozen=True)
class Config:
    """One tile configuration: its constexpr block sizes by name, and the launch options."""

    blocks: tuple[tuple[str, int], ...]
    num_warps: int
    num_stages: int

    def __getitem__(self, block: str) -> int:
        return self.options[block]

    @cached_property
    def options(self) -> dict[str, int]:
        """The keyword arguments of the kernel launch."""
        return {**dict(self.blocks), "num_warps": self.num_warps, "num_stages": self.num_stages}

    def replace(self, **blocks: int) -> "Config":
        return _replaced(self, tuple(blocks.items()))

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.options.items())


@lru_cache
def _replaced(tile: Config, blocks: tuple[tuple[str, int], ...]) -> Config:
    return Config(tuple({**dict(tile.blocks), **dict(blocks)}.items()), tile.num_warps, tile.num_stages)


def config(num_warps: int = 4, num_stages: int = 1, **blocks: int) -> Config:
    return Config(tuple(blocks.items()), num_warps, num_stages)


class Table:
    """Rows of (limit, Config) per architecture, ascending: a key gets the first row whose limit it does not exceed, or the last.
    None in a row says that the table's kernel is not used there.

    The key must depend on the shape of one row only (never on the number of rows), so that a row's bits do not depend on
    the rows beside it. An architecture without rows of its own uses those of the nearest older one.
    """

    def __init__(self, name: str, rows: Mapping[int, list[tuple[int, Config | None]]]):
        self.name, self.rows = name, dict(sorted(rows.items()))

    def pick(self, key: int, device: torch.device) -> Config | None:
        if self.name in _forced:
            return _forced[self.name]
        return self._shipped(key, device)

    @lru_cache(maxsize=4096)  # noqa: B019  tables live as long as the process
    def _shipped(self, key: int, device: torch.device) -> Config | None:
        rows = self.rows[max(a for a in self.rows if a <= max(arch(device), min(self.rows)))]
        return next((choice for limit, choice in rows if key <= limit), rows[-1][1])

    def configs(self, architecture: int | None = None) -> list[Config]:
        """Every configuration that the table can pick (on one architecture, or on any)."""
        chosen = [rows for a, rows in self.rows.items() if architecture in (None, a)]
        return list(dict.fromkeys(choice for rows in chosen for _, choice in rows if choice is not None))


_forced: dict[str, Config] = {}


@contextmanager
def forced(choices: Mapping[str, Config]) -> Iterator[None]:
    """Make the named tables pick the given configuration for every key; how the harness draws tile configurations."""
    before = dict(_forced)
    _forced.update(choices)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)


def tables(module: ModuleType) -> list[Table]:
    """The tuning tables that a module defines."""
    return [value for value in vars(module).values() if isinstance(value, Table)]
