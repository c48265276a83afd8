"""What is watched while an implementation runs: memory that nobody wrote, and memory that nobody may write."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from equivalence_tests.harness.layouts import bits, storage


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill what torch.empty and its kin return with NaN (integers: their largest value), whoever calls them, C++ included.

    torch does so only in deterministic mode, which may choose other algorithms for torch's own operations; warn_only, so
    that operations without a deterministic one still run.
    """
    mode, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    filling = torch.utils.deterministic.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.utils.deterministic.fill_uninitialized_memory = filling
            torch.use_deterministic_algorithms(mode, warn_only=warn_only)


class Watch:
    """Tensors whose bits, and those of their whole storages, must stay as they are."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor | None]]):
        self._kept = [(name, t, storage(t).clone()) for name, t in tensors if t is not None]

    def undo(self) -> Iterator[tuple[str, bool]]:
        """Restore what changed: (name, whether the tensor's own elements did, rather than only the memory around them)."""
        for name, tensor, before in self._kept:
            if not torch.equal(storage(tensor), before):
                place = tensor.shape, tensor.stride(), tensor.storage_offset()
                changed = not torch.equal(bits(before.view(tensor.dtype).as_strided(*place)), bits(tensor))
                storage(tensor).copy_(before)
                yield name, changed


class Saved:
    """Tensors that autograd saves for the backward pass within `recording`, with copies of what they held."""

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, Tensor]] = []

    def recording(self) -> torch.autograd.graph.saved_tensors_hooks:
        def pack(tensor: Tensor) -> int:
            # Detached: an output that its own node saves would keep itself alive.
            self._kept.append((tensor.detach(), tensor.detach().clone()))
            return len(self._kept) - 1

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda i: self._kept[i][0])

    def changed(self) -> list[str]:
        """Shape and dtype of each saved tensor that no longer holds what was saved."""
        return [
            f"{t.dtype} {list(t.shape)}".removeprefix("torch.")
            for t, copy in self._kept
            if not same_bits(t, copy)
        ]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in shape, dtype and every bit."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def stir(device: torch.device) -> None:
    """Leave numbers in the freed memory that the next torch.empty may return: stale memory differs from run to run."""
    for power in range(8, 22, 2):
        torch.full((2**power,), 1e4, device=device)


def repeats(tensor: Tensor) -> int:
    """How often the most frequent row of a tensor [*, N] occurs, by its bits."""
    if not tensor.numel():
        return 1
    rows = tensor.detach().reshape(-1, tensor.shape[-1]).contiguous().view(-1, tensor.shape[-1])
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(2**62, (rows.shape[1],), generator=generator).to(rows.device)
    hashes = (bits(rows).long() * keys).sum(-1)  # wraps, exactly
    return int(hashes.unique(return_counts=True)[1].max())
