"""What a kernel does to memory, seen from Triton's interpreter; no kernel has to cooperate.

with traced() as trace:
    rms_norm(x, w)
assert trace.findings() == []
assert trace.unique_bytes == floor
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import triton.runtime.interpreter as triton_interpreter
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, InterpreterBuilder

from equivalence_tests.harness.eager import EagerTraffic, eager_traffic
from equivalence_tests.harness.interpreter import correct, interpreting
from equivalence_tests.harness.memory_map import memory_map, violations
from equivalence_tests.harness.recorder import Recorder
from equivalence_tests.harness.trace import Fault, Launch, Trace

__all__ = ["EagerTraffic", "Fault", "Launch", "Trace", "eager_traffic", "memory_map", "traced", "violations"]


@contextmanager
def traced(shuffle: int | None = None) -> Iterator[Trace]:
    """Record every interpreted launch of the block. shuffle: seed of a random order in which each launch's programs run.

    Raises RuntimeError where kernels are compiled, and inside another traced block.
    """
    if not interpreting():
        raise RuntimeError(
            "traced() watches Triton's interpreter; set TRITON_INTERPRET=1 before the process imports triton"
        )
    if isinstance(InterpretedFunction.run, _Hook):
        raise RuntimeError("traced() inside another traced() block")
    correct()
    recorder = Recorder(shuffle)
    hooks = [
        (InterpretedFunction, "run", recorder.run),
        (GridExecutor, "_init_args_hst", recorder.arguments),
        (triton_interpreter, "_implicit_cvt", recorder.convert),
        (InterpreterBuilder, "set_grid_dim", recorder.grid_dim),
        (InterpreterBuilder, "set_grid_idx", recorder.grid_idx),
        (InterpreterBuilder, "create_masked_load", recorder.load),
        (InterpreterBuilder, "create_masked_store", recorder.store),
        (InterpreterBuilder, "create_atomic_rmw", recorder.atomic_rmw),
        (InterpreterBuilder, "create_atomic_cas", recorder.atomic_cas),
    ]
    names = ("create_atomic_load", "create_atomic_store", "create_atomic_poll")  # not in Triton 3.6
    hooks += [
        (InterpreterBuilder, name, recorder.atomically) for name in names if hasattr(InterpreterBuilder, name)
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in hooks]
    for (owner, name, original), (_, _, hook) in zip(originals, hooks, strict=True):
        setattr(owner, name, _Hook(hook, original))
    try:
        yield recorder.trace
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


class _Hook:
    """Stands in for a function or method: hook(original, *args)."""

    def __init__(self, hook: Callable[..., Any], original: Callable[..., Any]) -> None:
        self.hook, self.original = hook, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.hook(self.original, *args, **kwargs)

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        return lambda *args, **kwargs: self.hook(self.original, instance, *args, **kwargs)
