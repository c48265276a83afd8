"""The hooks behind `instruments.traced`: each stands for one function of Triton's interpreter, and is given the original.

Inside a launch each pointer argument carries its number in the 16 bits above its 48-bit address. Pointer arithmetic leaves
them alone, so every access knows from which argument its pointer came, even when it lands in another tensor's memory.
"""

from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

from equivalence_tests.harness.footprint import MANY, Argument, Storage
from equivalence_tests.harness.trace import Fault, Launch, Trace

_ADDRESS = np.uint64((1 << 48) - 1)
_ABOVE = np.uint64(48)


class Recorder:
    def __init__(self, shuffle: int | None) -> None:
        self.trace, self.launch = Trace(), None
        self.random = None if shuffle is None else np.random.default_rng(shuffle)
        self.kind: str | None = None

    # One launch

    def run(self, original: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("warmup"):
            return original(function, *args, **kwargs)
        self.launch = Launch(function.__name__, function)
        self.tags: dict[int, int] = {}
        self.by_tag: dict[int, Argument] = {}
        self.shared: dict[int, list[Argument]] = {}
        self.program, self.started, self.order = 0, 0, None
        try:
            return original(function, *args, **kwargs)
        finally:
            self.finish()

    def arguments(self, original: Any, executor: GridExecutor, args_dev: Any, kwargs: Any) -> Any:
        args_host, kwargs_host = original(executor, args_dev, kwargs)
        for name, value in [*zip(executor.arg_names, args_host, strict=False), *kwargs_host.items()]:
            self.register(name, value)
        return args_host, kwargs_host

    def register(self, name: str, value: Any) -> None:
        if isinstance(value, tuple):
            for i, item in enumerate(value):
                self.register(f"{name}[{i}]", item)
        elif isinstance(value, triton_interpreter.TensorDescriptor):
            self.register(name, value.base)
        elif hasattr(value, "data_ptr"):
            tensor = triton_interpreter._unwrap_tensor(value)
            if not tensor.untyped_storage().nbytes():
                return
            key = tensor.untyped_storage().data_ptr()
            if key not in self.trace.storages:
                self.trace.storages[key] = Storage(tensor)
            argument = Argument(name, tensor, self.trace.storages[key])
            tag = len(self.by_tag) + 1
            self.tags[id(value)], self.by_tag[tag], self.launch.arguments[name] = tag, argument, argument
            self.shared.setdefault(key, []).append(argument)

    def convert(self, original: Any, value: Any) -> Any:
        converted = original(value)
        tag = self.tags.get(id(value)) if self.launch is not None else None
        if tag is not None and not isinstance(value, (tuple, int, float)):
            converted.handle.data = converted.handle.data | (np.uint64(tag) << _ABOVE)
        return converted

    def grid_dim(self, original: Any, builder: InterpreterBuilder, *dims: int) -> None:
        original(builder, *dims)
        self.launch.grid, self.started = dims, 0
        self.order = None if self.random is None else self.random.permutation(self.launch.programs)

    def grid_idx(self, original: Any, builder: InterpreterBuilder, *index: int) -> None:
        self.program = self.started if self.order is None else int(self.order[self.started])
        self.started += 1
        original(builder, *self.place(self.program))

    def place(self, program: int) -> tuple[int, int, int]:
        return tuple(int(i) for i in np.unravel_index(program, self.launch.grid))

    def finish(self) -> None:
        launch, self.launch = self.launch, None
        for arguments in self.shared.values():
            covers = [[a._loaded for a in arguments], [a._stored for a in arguments]]
            cells = sum(
                c[0].count if len(c) == 1 else int(np.logical_or.reduce([x.mask for x in c]).sum())
                for c in covers
            )
            launch.unique_bytes += cells * arguments[0].storage.cell
        for argument in self.by_tag.values():
            argument.finish()
            argument.storage.forget_launch()
        self.trace.launches.append(launch)

    # One access

    def touch(self, kind: str, pointers: np.ndarray, active: np.ndarray, width: int) -> np.ndarray:
        """Account for the active lanes, which access `width` bytes each; returns the lanes that may go on."""
        kind = self.kind or kind
        lanes = pointers[active]
        if not lanes.size:
            return active
        tags, addresses = lanes >> _ABOVE, lanes & _ADDRESS
        lost = np.zeros(lanes.size, bool)
        for tag in [tags[0]] if (tags == tags[0]).all() else np.unique(tags):
            chosen = np.flatnonzero(tags == tag)
            argument = self.by_tag.get(int(tag)) or self.behind(int(addresses[chosen[0]]))
            if argument is None:
                self.fault(
                    "out_of_bounds",
                    kind,
                    None,
                    f"{kind} through a pointer into no argument",
                    addresses[chosen],
                )
                lost[chosen] = True
                continue
            out = argument.out_of_bounds(addresses[chosen], width)
            if out.any():
                size = argument.storage.nbytes
                self.fault(
                    "out_of_bounds",
                    kind,
                    argument,
                    f"{kind} outside its storage of {size} bytes",
                    addresses[chosen[out]],
                )
                lost[chosen[out]] = True
                chosen = chosen[~out]
            if chosen.size:
                self.inside(kind, argument, addresses[chosen], width)
        if not lost.any():
            return active
        allowed = active.copy()
        allowed[active] = ~lost
        return allowed

    def inside(self, kind: str, argument: Argument, addresses: np.ndarray, width: int) -> None:
        outside = argument.outside_view(kind, addresses, width)
        if outside.any():
            shape = f"view {list(argument.size)} with strides {list(argument.stride)}"
            beyond = "beyond the extent of" if kind == "load" else "to no element of"
            self.fault("outside_view", kind, argument, f"{kind} {beyond} its {shape}", addresses[outside])
        storage = argument.storage
        cells = storage.cells_of(addresses, width)
        argument.count(kind, cells, addresses.size * width)
        if self.launch.programs > 1:
            race = storage.conflict(kind, cells, self.program)
            if race is not None:
                raced, rival, other = race
                verb = {"load": "load", "store": "store to", "atomic": "atomically update"}[rival]
                who = "other programs" if other == MANY else f"program {self.place(other)} too"
                self.fault("race", kind, argument, f"race: {kind} of what {who} {verb}", raced)

    def behind(self, address: int) -> Argument | None:
        """The argument into whose storage a pointer leads that came from none (one that was loaded from memory)."""
        inside = (a for a in self.by_tag.values() if a.storage.address <= address < a.storage.end)
        return next(inside, None)

    def fault(
        self, kind: str, access: str, argument: Argument | None, what: str, addresses: np.ndarray
    ) -> None:
        name = "a pointer" if argument is None else argument.name
        known = self.launch.faults.get((kind, access, name))
        if known is not None:
            known.lanes += addresses.size
            return
        element = None if argument is None else (int(addresses[0]) - argument.address) // argument.itemsize
        self.launch.faults[kind, access, name] = Fault(
            kind, self.launch.kernel, name, access, self.place(self.program), element, what, addresses.size
        )

    def load(
        self, original: Any, builder: Any, ptrs: TensorHandle, mask: Any, other: Any, *policy: Any, **kw: Any
    ) -> TensorHandle:
        element, active = ptrs.get_element_ty(), _lanes(mask, ptrs)
        poison = np.nan if triton_interpreter._get_np_dtype(element).kind == "f" else 0
        if other is None and not active.all() and self.kind is None:
            idle = ptrs.data[~active]
            argument = self.by_tag.get(int(idle[0] >> _ABOVE))
            self.fault("maskless", "load", argument, "masked load without other", idle & _ADDRESS)
            other = TensorHandle(
                np.full(ptrs.data.shape, poison, triton_interpreter._get_np_dtype(element)), element
            )
        allowed = self.touch("load", ptrs.data, active, _width(element))
        result = original(builder, _plain(ptrs), TensorHandle(allowed, tl.int1), other, *policy, **kw)
        if allowed is not active:
            result.data = np.where(active & ~allowed, np.asarray(poison, result.data.dtype), result.data)
        return result

    def store(
        self, original: Any, builder: Any, ptrs: TensorHandle, value: Any, mask: Any, *policy: Any, **kw: Any
    ) -> Any:
        allowed = self.touch("store", ptrs.data, _lanes(mask, ptrs), _width(ptrs.get_element_ty()))
        return original(builder, _plain(ptrs), value, TensorHandle(allowed, tl.int1), *policy, **kw)

    def atomic_rmw(
        self, original: Any, builder: Any, op: Any, ptr: TensorHandle, value: Any, mask: Any, *order: Any
    ) -> Any:
        allowed = self.touch("atomic", ptr.data, _lanes(mask, ptr), _width(ptr.get_element_ty()))
        return original(builder, op, _plain(ptr), value, TensorHandle(allowed, tl.int1), *order)

    def atomic_cas(
        self,
        original: Any,
        builder: Any,
        ptr: TensorHandle,
        cmp: TensorHandle,
        value: TensorHandle,
        *order: Any,
    ) -> Any:
        active = np.ones(ptr.data.shape, bool)
        allowed = self.touch("atomic", ptr.data, active, _width(ptr.get_element_ty()))
        if allowed is active:
            return original(builder, _plain(ptr), cmp, value, *order)
        some = [
            TensorHandle(np.broadcast_to(h.data, active.shape)[allowed], h.dtype)
            for h in (_plain(ptr), cmp, value)
        ]
        result = np.zeros(active.shape, cmp.data.dtype)
        if allowed.any():
            result[allowed] = original(builder, *some, *order).data
        return TensorHandle(result, cmp.dtype)

    def atomically(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.kind = "atomic"
        try:
            return original(*args, **kwargs)
        finally:
            self.kind = None


def _lanes(mask: Any, ptrs: TensorHandle) -> np.ndarray:
    return np.broadcast_to(np.asarray(mask.data), ptrs.data.shape)


def _plain(ptrs: TensorHandle) -> TensorHandle:
    return TensorHandle(ptrs.data & _ADDRESS, ptrs.dtype)


def _width(element: tl.dtype) -> int:
    return max(1, element.primitive_bitwidth // 8)
