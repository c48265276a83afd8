"""What the instruments report: launches, what they did to each argument, and what was wrong with it."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from equivalence_tests.harness.footprint import Argument, Storage
from equivalence_tests.harness.memory_map import memory_map, violations


@dataclass
class Fault:
    """Lanes of one launch's accesses to one argument that did the same wrong thing; program and element are the first one's.

    kind: "out_of_bounds", "outside_view", "race" or "maskless". access: "load", "store" or "atomic".
    element: offset from the argument's pointer, in its elements (None for a pointer that is no argument).
    """

    kind: str
    kernel: str
    argument: str
    access: str
    program: tuple[int, int, int]
    element: int | None
    what: str
    lanes: int  # for races: units of storage

    def __str__(self) -> str:
        where = "" if self.element is None else f", first at element {self.element}"
        return f"{self.kernel}: {self.argument}: {self.what}, by program {self.program}{where} ({self.lanes} lanes in all)"


@dataclass
class Launch:
    """One launch. unique_bytes: bytes loaded, each once, plus bytes stored to, each once, over its storages."""

    kernel: str
    function: Any
    grid: tuple[int, int, int] = (0, 0, 0)
    arguments: dict[str, Argument] = field(default_factory=dict)
    faults: dict[tuple[str, str, str], Fault] = field(default_factory=dict)
    unique_bytes: int = 0

    @property
    def programs(self) -> int:
        return int(np.prod(self.grid))


@dataclass
class Trace:
    """All launches of the block, in order."""

    launches: list[Launch] = field(default_factory=list)
    storages: dict[int, Storage] = field(default_factory=dict)

    @property
    def unique_bytes(self) -> int:
        """Bytes loaded, each once, plus bytes stored to, each once, over all launches together."""
        return sum(storage.unique_bytes for storage in self.storages.values())

    @property
    def launch_bytes(self) -> int:
        """Sum of the launches' unique_bytes: what goes through memory if nothing stays cached between launches."""
        return sum(launch.unique_bytes for launch in self.launches)

    @property
    def requested_bytes(self) -> int:
        return sum(a.loaded + a.stored for launch in self.launches for a in launch.arguments.values())

    def faults(self, *kinds: str) -> list[Fault]:
        return [f for launch in self.launches for f in launch.faults.values() if not kinds or f.kind in kinds]

    @property
    def out_of_bounds(self) -> list[Fault]:
        """Accesses outside the argument's storage; they were not performed, and loads gave NaN (0 for integers)."""
        return self.faults("out_of_bounds")

    @property
    def outside_view(self) -> list[Fault]:
        """Loads beyond a view's extent, and stores to bytes that belong to none of its elements; they were performed."""
        return self.faults("outside_view")

    @property
    def races(self) -> list[Fault]:
        """A byte that one program stores to and another one loads, stores to or updates atomically, in any order.

        Programs that take turns by atomics are reported too: the instrument does not know their protocol.
        """
        return self.faults("race")

    @property
    def maskless(self) -> list[Fault]:
        """Loads with lanes masked off and no `other`: undefined on a GPU. Here those lanes gave NaN (0 for integers)."""
        return self.faults("maskless")

    def findings(self) -> list[str]:
        """Everything that is wrong, in words: the faults, and for kernels that state a memory map what was done against it."""
        found = [str(fault) for fault in self.faults()]
        for launch in self.launches:
            if memory_map(launch.function):
                found += violations(launch.function, launch)
        return list(dict.fromkeys(found))
