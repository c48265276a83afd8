"""The only timing driver: operation × shape × dtype × implementation × phase, one JSON record per figure.

    python -m experiments.bench [OP …] [--shape SHAPE …] [--dtype bf16 …] [--impl NAME …] [--phase fwd …]
                                [--json FILE] [--verified FILE] [--seed N]

Implementations: reference (eager), compile (torch.compile of the reference), fast, and the peers of experiments/<op>.py.
`fast` is timed only where a verification record says that these very sources pass on this GPU:
    python -m equivalence_tests OP --profile gpu --json experiments/results/<gpu>/verify.jsonl
Exit status 0 when every figure was taken or has a stated reason, 2 for bad usage, no GPU, or an unverified operation.
"""

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
import torch._dynamo
import torch._functorch.config

from experiments import _timing
from experiments._environment import RESULTS, slug, stamp, unverified
from experiments._timing import Contestant, Thunk, Timing
from experiments._work import DTYPES, PHASES, Call, Row, experiment, named, operations

ROTATED_BYTES = 2**29  # inputs and outputs of one cycle over the sets: far more than any L2 holds
# A peer farther than this from the reference, normwise, computes something else and is not timed.
AGREEMENT = 0.02
CORE = ("reference", "compile", "fast")
FIGURES = ("kernel_ms", "host_us", "gbps", "tflops", "peak_mib", "percent_of_limit", "spread")


def functions(op: str, name: str) -> Callable[[str], Callable]:
    """maker(impl) → the function of that implementation; raises ImportError where its package is missing.

    compile is that of the reference, or of the peer "compile" where the reference is no fair start.
    """
    peers = experiment(op).PEERS

    def make(impl: str) -> Callable:
        if impl == "reference":
            return named("reference", name)
        if impl == "compile":
            torch._dynamo.reset()
            plain = peers["compile"][name]() if name in peers.get("compile", {}) else named("reference", name)
            return torch.compile(plain, fullgraph=True, dynamic=False)
        if impl == "fast":
            return named("fast", name)
        return peers[impl][name]()

    return make


def thunks(function: Callable, phase: str, calls: list[Call]) -> list[Thunk]:
    """One thunk per set of inputs; for "bwd" the forward is done here, once."""
    if phase == "fwd":
        return [lambda call=call: call.outputs(function) for call in calls]
    if phase == "fwd+bwd":
        return [partial(call.step, function) for call in calls]
    return [partial(call.gradients, call.outputs(function)) for call in calls]


def disagreement(function: Callable, truth: Callable, call: Call) -> float:
    """The largest ‖got − reference‖ / ‖reference‖ over outputs and gradients."""
    again, pairs = restoring([call]), []
    for f in (function, truth):
        pairs.append([t.detach().clone() for t in call.step(f)])  # a gradient may lie in an input
        again()
    norm = torch.linalg.vector_norm
    errors = [(norm(a.double() - b.double()) / norm(b.double())).item() for a, b in zip(*pairs, strict=True)]
    return max(errors)


def restoring(calls: list[Call]) -> Thunk:
    """What gives the calls' tensors their present contents again: some peers write gradients into them."""
    tensors = [t.data for call in calls for t in call.tensors]  # .data: unseen by autograd's version counters
    kept = [t.clone() for t in tensors]
    return partial(torch._foreach_copy_, tensors, kept)


@contextmanager
def donating() -> Iterator[None]:
    """Backwards compiled inside free what was saved as they go, as in training; such a graph cannot be asked twice."""
    torch._dynamo.reset()
    with torch._functorch.config.patch(donated_buffer=True):
        yield
    torch._dynamo.reset()


class Bench:
    """One run on one device: limits once, then row by row."""

    def __init__(self, device: torch.device, seed: int):
        self.device, self.stream = device, torch.cuda.Stream(device)
        # Of all that follows: autograd runs a backward where its forward ran.
        torch.cuda.set_stream(self.stream)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.copy = _timing.copy_contestant(device)
        gemm = _timing.gemm_contestant(device)
        timing = _timing.race({"copy": self.copy, "gemm": gemm}, self.stream)
        self.copy_gbps = _timing.copy_gbps(timing["copy"])
        self.gemm_tflops = _timing.gemm_tflops(timing["gemm"])

    def measure(self, row: Row, dtype: str, impls: list[str], phases: list[str]) -> Iterator[dict[str, Any]]:
        """A record per implementation and phase; where no figure could be taken, one with a reason in its place."""
        call = row.make(DTYPES[dtype], self.device, self.generator)
        cost = row.cost(call)
        sets = max(2, -(-ROTATED_BYTES // cost.forward.bytes))
        calls = [call, *(row.make(DTYPES[dtype], self.device, self.generator) for _ in range(sets - 1))]
        work = {
            "fwd": (cost.forward.flops, cost.forward.bytes),
            "bwd": (cost.backward.flops, cost.backward.bytes),
            "fwd+bwd": (cost.forward.flops + cost.backward.flops, cost.forward.bytes + cost.backward.bytes),
        }
        restore = restoring(calls)
        ready, reasons = self._ready(row, impls, call)
        for phase in (p for p in phases if p in row.phases):
            entrants, figures = {}, {}
            for impl, function in ready.items():
                try:
                    restore()
                    entrants[impl], figures[impl] = self._enter(function, phase, calls)
                except Exception as error:
                    # A peer may fail in any way (memory, compiler, capture); the table then says so instead of stopping.
                    reasons[impl, phase] = why(error)
            # Peers that write gradients into what they were given would go on from their own results.
            timing = _timing.race({"copy": self.copy, **entrants}, self.stream, before_each=restore)
            for impl in impls:
                reason = reasons.get((impl, phase)) or reasons.get(impl)
                key = {"op": row.op, "function": row.function, "shape": row.shape, "dtype": dtype}
                key |= {"impl": impl, "phase": phase}
                found = {"reason": reason} if reason else figures[impl]
                record = self._record(*work[phase], timing["copy"], timing.get(impl), found)
                yield key | record | self._note(row, impl)
            del entrants, timing
            gc.collect()
            torch.cuda.empty_cache()

    def _ready(self, row: Row, impls: list[str], call: Call) -> tuple[dict[str, Callable], dict[Any, str]]:
        make, ready, reasons = functions(row.op, row.function), {}, {}
        for impl in impls:
            try:
                function = make(impl)
                error = disagreement(function, make("reference"), call)
                if not error <= AGREEMENT:
                    raise ValueError(f"differs from the reference by {error:.2g} of its norm")
                ready[impl] = function
            except Exception as error:
                reasons[impl] = why(error)
        torch.cuda.empty_cache()
        return ready, reasons

    def _enter(
        self, function: Callable, phase: str, calls: list[Call]
    ) -> tuple[Contestant, dict[str, float]]:
        with donating() if phase == "fwd+bwd" else nullcontext():
            return self._figures(thunks(function, phase, calls))

    def _figures(self, ready: list[Thunk]) -> tuple[Contestant, dict[str, float]]:
        figures = {
            "peak_mib": _timing.peak_mib(ready[0], self.stream),
            "host_us": _timing.host_us(ready[0], self.stream),
        }
        return _timing.captured(ready, self.stream), figures

    def _record(
        self, flops: int, nbytes: int, copy: Timing, timing: Timing | None, found: dict[str, Any]
    ) -> dict[str, Any]:
        copy_gbps = _timing.copy_gbps(copy)
        floors = {"copy": nbytes / copy_gbps / 1e6, "gemm": flops / self.gemm_tflops / 1e9}
        limit = max(floors, key=floors.get)
        record = dict.fromkeys(FIGURES) | found
        if timing is not None:
            record |= {
                "kernel_ms": timing.ms,
                "gbps": nbytes / timing.ms / 1e6,
                "tflops": flops / timing.ms / 1e9,
                "percent_of_limit": 100 * floors[limit] / timing.ms,
                "spread": timing.spread,
            }
        record["limit"] = {"kind": limit, "copy_gbps": copy_gbps, "gemm_tflops": self.gemm_tflops}
        record["floor"] = {"bytes": nbytes, "flops": flops}
        return record

    @staticmethod
    def _note(row: Row, impl: str) -> dict[str, str]:
        notes = experiment(row.op).NOTES
        return {"note": notes[impl]} if impl in notes else {}


def why(error: Exception) -> str:
    """The reason that a record or a table gives: its kind and its first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def selected(given: argparse.Namespace) -> list[tuple[Row, str]]:
    """The (row, dtype) pairs asked for. Raises ValueError for a shape that is none of the operations' rows."""
    rows = [row for op in given.op or operations() for row in experiment(op).ROWS]
    known = {row.shape for row in rows}
    if unknown := [shape for shape in given.shape or [] if shape not in known]:
        raise ValueError(f"--shape must be of {', '.join(sorted(known))}; got {', '.join(unknown)}")
    return [
        (row, dtype) for row in rows if not given.shape or row.shape in given.shape for dtype in given.dtype
    ]


def refused(work: list[tuple[Row, str]], path: Path, device: str) -> list[str]:
    """A line for each function and dtype that has no verdict on this device. Classes, and functions composed of others, have no
    verdicts: their own tests judge them, and the digest of the operation's judged functions says that these are the sources."""
    from equivalence_tests.harness import operations as harness

    judged = [(o.op, o.function) for o in harness.operations()]
    stand_in = dict(judged)
    asked = dict.fromkeys(
        (row.op, row.function if (row.op, row.function) in judged else stand_in[row.op], dtype)
        for row, dtype in work
    )
    found = (
        (function, dtype, unverified(op, function, dtype, device, path)) for op, function, dtype in asked
    )
    return [
        f"fast.{function} in {dtype} is not verified on this GPU: {why}"
        for function, dtype, why in found
        if why
    ]


def table(records: list[dict[str, Any]]) -> None:
    """A line per figure on the terminal."""
    from rich.console import Console
    from rich.table import Table

    view = Table(title="experiments.bench")
    for name in (
        "function",
        "shape",
        "dtype",
        "phase",
        "impl",
        "ms",
        "GB/s",
        "TFLOP/s",
        "% of limit",
        "host µs",
        "peak MiB",
    ):
        view.add_column(
            name, justify="left" if name in ("function", "shape", "dtype", "phase", "impl") else "right"
        )
    for r in records:
        if "reason" in r:
            figures = [r["reason"], *[""] * 5]
        else:
            figures = [
                f"{r['kernel_ms']:.4f}",
                f"{r['gbps']:.0f}",
                f"{r['tflops']:.1f}",
                f"{r['percent_of_limit']:.1f}",
            ]
            figures += [f"{r['host_us']:.1f}", f"{r['peak_mib']:.1f}"]
        view.add_row(r["function"], r["shape"], r["dtype"], r["phase"], r["impl"], *figures)
    Console(width=150).print(view)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m experiments.bench", description=__doc__.split("\n")[0])
    parser.add_argument(
        "op", nargs="*", metavar="OP", help=f"operations to time (all: {', '.join(operations())})"
    )
    parser.add_argument("--shape", nargs="+", help="only these rows, written as in the tables")
    parser.add_argument("--dtype", nargs="+", default=["bf16"], choices=list(DTYPES))
    parser.add_argument("--impl", nargs="+", help="only these implementations")
    parser.add_argument("--phase", nargs="+", default=list(PHASES), choices=PHASES)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write JSON lines, one record per figure")
    parser.add_argument(
        "--verified",
        type=Path,
        metavar="FILE",
        help="verification record (experiments/results/<gpu>/verify.jsonl)",
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    given = arguments(argv)
    try:
        work = selected(given)
        known = list(dict.fromkeys([*CORE, *(peer for row, _ in work for peer in experiment(row.op).PEERS)]))
        impls = given.impl or known
        if unknown := [impl for impl in impls if impl not in known]:
            raise ValueError(f"--impl must be of {', '.join(known)}; got {', '.join(unknown)}")
    except ValueError as error:
        return _usage(str(error))
    if not torch.cuda.is_available():
        return _usage("no CUDA GPU is visible, and only a GPU's time means anything here")
    device = torch.device("cuda", torch.cuda.current_device())
    environment = stamp(device)
    if "fast" in impls:
        path = given.verified or RESULTS / slug(environment["device"]) / "verify.jsonl"
        if reasons := refused(work, path, environment["device"]):
            return _usage(
                "\n".join(
                    [*reasons, f"python -m equivalence_tests --profile gpu --json {path} writes that record"]
                )
            )
    try:
        file = given.json.open("w") if given.json else None
    except OSError as error:
        return _usage(f"--json: {error}")
    return run(device, work, impls, given.phase, given.seed, environment, file)


def run(
    device: torch.device,
    work: list[tuple[Row, str]],
    impls: list[str],
    phases: list[str],
    seed: int,
    environment: dict[str, Any],
    file: IO[str] | None,
) -> int:
    # torch.compile would free what a second backward on the same graph needs.
    torch._functorch.config.donated_buffer = False
    bench, records = Bench(device, seed), []
    print(
        f"{environment['device']}: copy {bench.copy_gbps:.0f} GB/s, bf16 GEMM {bench.gemm_tflops:.0f} TFLOP/s",
        flush=True,
    )
    for row, dtype in work:
        offered = [
            impl for impl in impls if impl in CORE or row.function in experiment(row.op).PEERS.get(impl, {})
        ]
        for record in bench.measure(row, dtype, offered, phases):
            record["environment"] = environment
            records.append(record)
            if file is not None:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                file.flush()
        print(f"{row.function} {row.shape} {dtype}", flush=True)
    if file is not None:
        file.close()
    table(records)
    return 0


def _usage(message: str) -> int:
    print(f"bench: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
