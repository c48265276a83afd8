"""Which bytes of which tensor a kernel touches: the pointer arguments of one launch and the storages behind them."""

import mmap
from functools import cached_property

import numpy as np
from torch import Tensor

MANY = -1  # in a map of programs: more than one
_LARGE = 1 << 26
_RIVALS = {"load": {"store", "atomic"}, "store": {"store", "load", "atomic"}, "atomic": {"store", "load"}}


def _zeros(n: int, dtype: type) -> np.ndarray:
    """Zeros that take memory only where they are written, however large the storage is that they describe."""
    if n * np.dtype(dtype).itemsize < _LARGE:
        return np.zeros(n, dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return np.frombuffer(mmap.mmap(-1, n * np.dtype(dtype).itemsize, flags=flags), dtype)


class Cover:
    """A set of a storage's cells, and how many there are in it."""

    def __init__(self, cells: int) -> None:
        self.mask, self.count = _zeros(cells, np.bool_), 0

    def add(self, cells: slice | np.ndarray) -> None:
        fresh = ~self.mask[cells]
        if isinstance(cells, slice):
            self.count += int(np.count_nonzero(fresh))
        elif fresh.any():
            self.count += np.unique(cells[fresh]).size
        self.mask[cells] = True

    def refine(self, by: int) -> None:
        self.mask, self.count = np.repeat(self.mask, by), self.count * by


class Storage:
    """One tensor storage of a trace. A cell is the largest unit of bytes that every access so far was made of.

    loaded, stored: the cells of the whole trace. programs: for "load", "store" and "atomic", and for each cell, the program
    of the current launch (its number + 1, MANY, or 0 for none) that did it.
    """

    def __init__(self, tensor: Tensor) -> None:
        # Alive as long as the trace, so that no other storage gets its address.
        self.kept = tensor.untyped_storage()
        self.address, self.nbytes, self.cell = self.kept.data_ptr(), self.kept.nbytes(), tensor.element_size()
        self.end = self.address + self.nbytes
        self.loaded, self.stored = Cover(self.cells), Cover(self.cells)
        self.forget_launch()

    @property
    def cells(self) -> int:
        return -(-self.nbytes // self.cell)

    @property
    def unique_bytes(self) -> int:
        """Bytes that were loaded, each once, plus bytes that were stored to, each once, in all launches together."""
        return (self.loaded.count + self.stored.count) * self.cell

    def forget_launch(self) -> None:
        self.covers: list[Cover] = []
        self.programs: dict[str, np.ndarray] = {}

    def cover(self) -> Cover:
        """A set of cells that lives as long as the launch."""
        self.covers.append(Cover(self.cells))
        return self.covers[-1]

    def cells_of(self, addresses: np.ndarray, width: int) -> slice | np.ndarray:
        """The cells of accesses of `width` bytes at addresses within the storage."""
        offsets = (addresses - np.uint64(self.address)).astype(np.int64)
        if self.cell > 1 and (width % self.cell or (offsets % self.cell).any()):
            self._refine()
        cells = offsets // self.cell
        if width > self.cell:
            cells = (cells[:, None] + np.arange(width // self.cell)).ravel()
        if cells[-1] - cells[0] + 1 == cells.size and (np.diff(cells) == 1).all():
            return slice(int(cells[0]), int(cells[-1]) + 1)
        return cells

    def conflict(
        self, kind: str, cells: slice | np.ndarray, program: int
    ) -> tuple[np.ndarray, str, int] | None:
        """Note that a program touches cells. If that is a race: addresses, what the other program did, its number or MANY."""
        me, found = program + 1, None
        for rival in _RIVALS[kind] & self.programs.keys():
            others = self.programs[rival][cells]
            clash = np.flatnonzero((others != 0) & (others != me))
            if clash.size:
                raced = clash + cells.start if isinstance(cells, slice) else cells[clash]
                other = int(others[clash[0]])
                found = (
                    np.uint64(self.address) + (raced * self.cell).astype(np.uint64),
                    rival,
                    max(other - 1, MANY),
                )
                break
        if kind not in self.programs:
            self.programs[kind] = _zeros(self.cells, np.int32)
        mine = self.programs[kind]
        before = mine[cells]
        mine[cells] = np.where((before == 0) | (before == me), me, MANY)
        return found

    def _refine(self) -> None:
        for cover in (self.loaded, self.stored, *self.covers):
            cover.refine(self.cell)
        self.programs = {kind: np.repeat(owners, self.cell) for kind, owners in self.programs.items()}
        self.cell = 1


class Argument:
    """One pointer argument of a launch.

    loaded, stored: bytes requested by lanes that are not masked off; unique_loaded, unique_stored: each byte counted once.
    An atomic operation loads and stores. accesses: which of "load", "store", "atomic" occurred.
    """

    def __init__(self, name: str, tensor: Tensor, storage: Storage) -> None:
        self.name, self.storage = name, storage
        self.address, self.itemsize = tensor.data_ptr(), tensor.element_size()
        self.size, self.stride, self.contiguous = tuple(tensor.shape), tensor.stride(), tensor.is_contiguous()
        self.extent = (
            1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True)) if tensor.numel() else 0
        )
        self.loaded = self.stored = 0
        self.accesses: set[str] = set()
        self._loaded, self._stored = storage.cover(), storage.cover()
        self.unique_loaded = self.unique_stored = 0

    def out_of_bounds(self, addresses: np.ndarray, width: int) -> np.ndarray:
        """Which accesses leave the storage."""
        return (addresses < np.uint64(self.storage.address)) | (
            addresses + np.uint64(width) > np.uint64(self.storage.end)
        )

    def outside_view(self, kind: str, addresses: np.ndarray, width: int) -> np.ndarray:
        """Which accesses leave the view: for loads its extent (first to last element), for stores its own elements."""
        offsets = addresses.astype(np.int64) - self.address
        outside = (offsets < 0) | (offsets + width > self.extent * self.itemsize)
        if kind == "load" or self.contiguous or outside.all() or len(self._elements) == self.extent:
            return outside
        for byte in {*range(0, width, self.itemsize), width - 1}:
            element = (offsets + byte) // self.itemsize
            place = np.searchsorted(self._elements, element).clip(max=len(self._elements) - 1)
            outside |= self._elements[place] != element
        return outside

    def count(self, kind: str, cells: slice | np.ndarray, nbytes: int) -> None:
        self.accesses.add(kind)
        if kind != "store":
            self.loaded += nbytes
            self._loaded.add(cells)
            self.storage.loaded.add(cells)
        if kind != "load":
            self.stored += nbytes
            self._stored.add(cells)
            self.storage.stored.add(cells)

    def finish(self) -> None:
        """Freeze the counts at the end of the launch; the maps go."""
        self.unique_loaded, self.unique_stored = (
            c.count * self.storage.cell for c in (self._loaded, self._stored)
        )
        del self._loaded, self._stored

    @cached_property
    def _elements(self) -> np.ndarray:
        """Offsets of the view's elements, ascending."""
        offsets = np.zeros(1, np.int64)
        for n, stride in zip(self.size, self.stride, strict=True):
            if stride and n > 1:
                offsets = (offsets[:, None] + np.arange(n) * stride).ravel()
        return np.unique(offsets)
