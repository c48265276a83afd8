"""Launches, bytes moved and memory needed by a block of code on the CPU, counted as a GPU would have them.

Kernels run in Triton's interpreter, where every access is seen; eager operations count their inputs once and their outputs once;
a product by fast._triton.matmul is one operation, whatever the CPU does to compute it.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Metered:
    """bytes: each byte once per launch and direction. peak_bytes: allocated at most at one time, results included."""

    launches: int
    bytes: int
    peak_bytes: int


def metered(run: Callable[..., Any], inputs: dict[str, Tensor]) -> Metered:
    """Of one call run(**inputs). What an operator of ours allocates inside is not seen, its launches are."""
    from equivalence_tests.harness.instruments import eager_traffic, traced

    allocations, products = _Allocations(inputs.values()), []
    with (
        traced() as trace,
        eager_traffic() as eager,
        _kernels_hidden(True),
        _products_as_one(products.append),
    ):
        run(**inputs)
    # Again for the memory, because a trace keeps the tensors that it has seen; what kernels compute does not matter to it.
    with allocations, _kernels_hidden(False), _products_as_one(lambda _: None, allocations.see):
        run(**inputs)
    # An operator of our own is its launches, which the trace has.
    ops = [*products, *(moved for name, moved in eager.ops if name.startswith("aten."))]
    return Metered(len(trace.launches) + len(ops), trace.launch_bytes + sum(ops), allocations.peak)


class _Allocations(TorchDispatchMode):
    """Bytes of the storages that operations make, as long as they live."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known = {t.untyped_storage()._cdata for t in given}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.see(out)
        return out

    def see(self, out: Any) -> None:
        for storage in (t.untyped_storage() for t in tree_leaves(out) if isinstance(t, Tensor)):
            if storage._cdata not in self.known:
                self.known.add(storage._cdata)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())

    def _freed(self, storage: int, nbytes: int) -> None:
        self.known.discard(storage)
        self.live -= nbytes


@contextmanager
def _kernels_hidden(running: bool) -> Iterator[None]:
    """Hide from dispatch modes the copies by which the interpreter itself carries tensors into a launch and back."""
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def hidden(self: Any, *args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            if running:
                run(self, *args, **kwargs)

    with mock.patch.object(InterpretedFunction, "run", hidden):
        yield


@contextmanager
def _products_as_one(
    moved: Callable[[int], Any], made: Callable[[Tensor], Any] = lambda _: None
) -> Iterator[None]:
    """A call of matmul or add_matmul, wherever it was imported, is one operation: moved(bytes), made(result)."""
    from fast._triton import matmul as products

    def one(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def product(*args: Any, **kwargs: Any) -> Tensor:
            with _disable_current_modes():
                out = original(*args, **kwargs)
            read = [t for name, t in kwargs.items() if name != "out"]
            moved(sum(t.nbytes for t in (*args, *read, out) if isinstance(t, Tensor)))
            made(out)
            return out

        return product

    with ExitStack() as stack:
        for name in ("matmul", "add_matmul"):
            original = getattr(products, name)
            for module in [m for key, m in sys.modules.items() if key.split(".")[0] == "fast"]:
                if vars(module).get(name) is original:
                    stack.enter_context(mock.patch.object(module, name, one(original)))
        yield
