"""What a launch compiles to for a GPU that need not be here: registers, spills, shared memory, wgmma.

`recorded()` stands where launches happen and keeps each one instead of running it, specialised exactly as Triton's own launch
would be (16-byte aligned pointers, sizes divisible by 16, ones folded); `build` then takes it down to a cubin for a named chip.
Neither touches a device: `pretend(chip)` lets an operation choose as it would on that chip, given CPU tensors that say, by
`on_gpu`, that they are on one. All need a process without TRITON_INTERPRET.
"""

import contextlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature

from fast._triton import device as device_facts
from fast._triton.tuning import Table

REGISTERS_PER_SM, WARPS_PER_SM = 65536, {80: 64, 86: 48, 89: 48, 90: 64}


@dataclass(frozen=True)
class Chip:
    """A compile target: compute capability and the shared memory that one program may have, in bytes."""

    capability: int
    shared_limit: int

    @property
    def name(self) -> str:
        return f"sm_{self.capability}"


CHIPS = {chip.name: chip for chip in (Chip(80, 166912), Chip(86, 101376), Chip(89, 101376), Chip(90, 232448))}


@dataclass(frozen=True)
class Launch:
    """One kernel launch: kernel, grid and the arguments as given (by name, constexprs included), and the launch options."""

    kernel: JITFunction = field(repr=False)
    grid: tuple[int, ...]
    arguments: dict[str, Any] = field(repr=False)
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.__name__

    def constexprs(self) -> dict[str, Any]:
        return {
            p.name: self.arguments[p.name]
            for p in self.kernel.params
            if p.is_constexpr and p.name in self.arguments
        }

    def label(self) -> str:
        """The configuration in one line: constexprs and options."""
        return " ".join(f"{k}={v}" for k, v in (self.constexprs() | self.options).items())

    def source(self, chip: Chip) -> tuple[ASTSource, dict[str, Any], tuple]:
        """What Triton's launch would hand to its compiler on that chip, the options, and a key that two equal sources share."""
        backend = make_backend(GPUTarget("cuda", chip.capability, 32))
        bind = create_function_from_signature(self.kernel.signature, self.kernel.params, backend)
        given = {**self.arguments, **self.options, "debug": False}
        bound, specialization, extra = bind(**given)
        options, signature, constexprs, attrs = self.kernel._pack_args(
            backend, given, bound, specialization, extra
        )
        kind = GluonASTSource if self.kernel.is_gluon() else ASTSource
        source = kind(self.kernel, signature, constexprs, attrs)
        return (
            source,
            options.__dict__,
            (self.name, str(signature), str(constexprs), str(attrs), str(self.options)),
        )

    def signature(self, chip: Chip) -> str:
        """Types of the run-time arguments, pointers first to last, without what is folded away."""
        kinds = self.source(chip)[0].signature.values()
        return ",".join(kind for kind in kinds if kind != "constexpr")

    def with_options(self, **options: Any) -> "Launch":
        """The same launch under other launch options or constexprs (what a tuning experiment varies)."""
        names = {p.name for p in self.kernel.params}
        arguments = self.arguments | {k: v for k, v in options.items() if k in names}
        return Launch(
            self.kernel,
            self.grid,
            arguments,
            self.options | {k: v for k, v in options.items() if k not in names},
        )


@dataclass(frozen=True)
class Compiled:
    """Resources of one launch on one chip. spills and stack in bytes per thread, shared in bytes per program."""

    launch: Launch
    chip: Chip
    registers: int
    spills: int
    stack: int
    shared: int
    wgmma: bool
    dots: tuple[str, ...]

    @property
    def warps_per_sm(self) -> int:
        """Warps that registers alone let live on one SM at a time."""
        warps = self.launch.options.get("num_warps", 4)
        per_program = -(-self.registers // 8) * 8 * 32 * warps
        return min(WARPS_PER_SM[self.chip.capability], REGISTERS_PER_SM // per_program * warps)

    def faults(self) -> list[str]:
        """Why this configuration must not ship; empty when it may."""
        where = f"{self.launch.name} [{self.launch.label()}] on {self.chip.name}"
        found = []
        if self.spills or self.stack:
            found.append(f"{where}: {self.spills} B spilled, {self.stack} B of stack per thread")
        if self.shared > self.chip.shared_limit:
            found.append(
                f"{where}: {self.shared} B of shared memory, at most {self.chip.shared_limit} B allowed"
            )
        if self.chip.capability >= 90 and any(_wants_wgmma(dot) for dot in self.dots) and not self.wgmma:
            found.append(f"{where}: a 16-bit dot with 64 rows or more compiled without wgmma")
        return found


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Collect every launch made inside instead of running it. Outputs stay unwritten.

    Raises RuntimeError in a process where kernels are interpreted: what is launched there cannot be compiled.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError(
            "recorded(): TRITON_INTERPRET is set, so kernels are no compilable functions here; unset it"
        )
    launches: list[Launch] = []

    def keep(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = [p.name for p in self.params]
        arguments = {p.name: p.default for p in self.params if p.has_default}
        arguments |= dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
        options = {k: v for k, v in kwargs.items() if k not in names}
        size = grid(arguments) if callable(grid) else grid
        launches.append(Launch(self, tuple(size), arguments, options))

    run = JITFunction.run
    JITFunction.run = keep
    try:
        yield launches
    finally:
        JITFunction.run = run


class _OnGpu(torch.Tensor):
    """CPU memory that nobody touches, and a device that is not here."""

    device = property(lambda _: torch.device("cuda", 0))


def on_gpu(tensor: Tensor) -> Tensor:
    """A leaf with the tensor's memory, layout and requires_grad that says it is on a GPU; what is made from it says so, too."""
    return tensor.detach().as_subclass(_OnGpu).requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def pretend(chip: Chip) -> Iterator[None]:
    """Make torch.cuda describe that chip, with an H200's number of SMs."""
    properties = SimpleNamespace(
        multi_processor_count=132, major=chip.capability // 10, minor=chip.capability % 10
    )
    stand_ins = {
        "get_device_capability": lambda *_: divmod(chip.capability, 10),
        "get_device_properties": lambda *_: properties,
        "device": lambda *_: contextlib.nullcontext(),
    }
    # What was looked up for another chip: all of them are cuda:0.
    remembered = [
        value
        for value in (*vars(device_facts).values(), *vars(Table).values())
        if hasattr(value, "cache_clear")
    ]
    with contextlib.ExitStack() as stack:
        for name, value in stand_ins.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for fact in remembered:
            fact.cache_clear()
            stack.callback(fact.cache_clear)
        yield


def build(launch: Launch, chip: Chip) -> Compiled:
    """Compile for the chip and read ptxas's resource report. Raises what Triton raises when it does not compile."""
    source, options, _ = launch.source(chip)
    log = io.StringIO()
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        triton.knobs.compilation.always_compile = True
        triton.knobs.nvidia.dump_ptxas_log = True
        kernel = triton.compile(source, target=GPUTarget("cuda", chip.capability, 32), options=options)
    report = log.getvalue()
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", report))
    return Compiled(
        launch,
        chip,
        registers=_reported(r"Used (\d+) registers", report),
        spills=spills,
        stack=_reported(r"(\d+) bytes stack frame", report),
        shared=kernel.metadata.shared,
        wgmma="wgmma" in kernel.asm["ptx"],
        dots=tuple(re.findall(r"tt\.dot .*", kernel.asm.get("ttir", ""))),  # Gluon starts below it
    )


def distinct(launches: list[Launch], chip: Chip) -> list[Launch]:
    """One launch for each thing there is to compile on that chip, in order."""
    return list({launch.source(chip)[2]: launch for launch in launches}.values())


def _reported(pattern: str, report: str) -> int:
    found = re.search(pattern, report)
    if found is None:
        raise RuntimeError(f"ptxas's report has no {pattern!r}; its text was: {report[:500]!r}")
    return int(found.group(1))


def _wants_wgmma(dot: str) -> bool:
    """A line of Triton IR such as `tt.dot %a, %b, %c : tensor<64x32xbf16> * tensor<32x64xbf16> -> …`."""
    rows = re.search(r": tensor<(\d+)x\d+x(?:bf16|f16)>", dot)
    return rows is not None and int(rows.group(1)) >= 64
