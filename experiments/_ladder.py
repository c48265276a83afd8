"""A fusion ladder: the same function in runnable steps, each with what it costs and why it costs less than the one before.

Launches and bytes are metered in Triton's interpreter on the CPU, where every access can be seen; times need a GPU and a
process of their own, so on a GPU the metering runs in a second process.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments import _meter
from experiments._work import DTYPES, experiment


@dataclass(frozen=True)
class Step:
    """run(**inputs) -> the outputs, in the ladder's order. rises: why neither bytes nor memory fall here, or why bytes rise."""

    name: str
    why: str
    run: Callable[..., tuple[Tensor, ...]] = field(repr=False)
    rises: str = ""


@dataclass(frozen=True)
class Ladder:
    """make(sizes, dtype, device, generator) -> the inputs by name; work(inputs) -> what any version must do (reference.COST).

    phase: unique in the operation. metered_at: small enough for the interpreter; bytes over the floor hardly depend on the size.
    function: of the operation, where it has several.
    """

    op: str
    phase: str
    outputs: tuple[str, ...]
    make: Callable[..., dict[str, Tensor]] = field(repr=False)
    work: Callable[[dict[str, Tensor]], Any] = field(repr=False)
    steps: tuple[Step, ...] = field(repr=False)
    metered_at: str = "256×1024"
    timed_at: str = "16384×4096"
    function: str = ""

    def inputs(self, shape: str, dtype: torch.dtype, device: str, seed: int = 0) -> dict[str, Tensor]:
        generator = torch.Generator(device).manual_seed(seed)
        return self.make([int(size) for size in shape.split("×")], dtype, torch.device(device), generator)


def metered(ladder: Ladder, dtype: str, shape: str | None = None) -> list[dict[str, Any]]:
    """One record per step: launches, bytes moved (each byte once per launch and direction), × floor, peak memory."""
    records, shape = [], shape or ladder.metered_at
    for step in ladder.steps:
        inputs = ladder.inputs(shape, DTYPES[dtype], "cpu")
        found = _meter.metered(step.run, inputs)
        records.append(
            {
                "op": ladder.op,
                "function": ladder.function or ladder.op,
                "ladder": ladder.phase,
                "step": step.name,
                "why": step.why,
                "rises": step.rises,
                "shape": shape,
                "dtype": dtype,
                "launches": found.launches,
                "bytes": found.bytes,
                "times_floor": found.bytes / ladder.work(inputs).bytes,
                "peak_bytes": found.peak_bytes,
            }
        )
    return records


def timed(ladder: Ladder, dtype: str, shape: str | None = None) -> dict[str, dict[str, Any]]:
    """Figures by step name on the current GPU: µs, % of the limit by a copy and a GEMM measured in the same race, peak MiB."""
    from experiments import _timing

    device, stream = torch.device("cuda", torch.cuda.current_device()), torch.cuda.Stream()
    torch.cuda.set_stream(stream)
    shape = shape or ladder.timed_at
    sets = [ladder.inputs(shape, DTYPES[dtype], "cuda", seed) for seed in range(4)]
    work, figures = ladder.work(sets[0]), {}
    entrants = {"copy": _timing.copy_contestant(device), "gemm": _timing.gemm_contestant(device)}
    for step in ladder.steps:
        thunks = [lambda step=step, inputs=inputs: step.run(**inputs) for inputs in sets]
        figures[step.name] = {"timed_shape": shape, "peak_mib": _timing.peak_mib(thunks[0], stream)}
        entrants[step.name] = _timing.captured(thunks, stream)
    timing = _timing.race(entrants, stream)
    copy_gbps, gemm_tflops = _timing.copy_gbps(timing["copy"]), _timing.gemm_tflops(timing["gemm"])
    limit_ms = max(work.bytes / copy_gbps / 1e6, work.flops / gemm_tflops / 1e9)
    for name, found in figures.items():
        ms = timing[name].ms
        found |= {"us": 1e3 * ms, "percent_of_limit": 100 * limit_ms / ms}
        found |= {"copy_gbps": copy_gbps, "gemm_tflops": gemm_tflops}
    return figures


def show(records: list[dict[str, Any]]) -> None:
    """A table per ladder on the terminal."""
    from rich.console import Console
    from rich.table import Table

    for phase in dict.fromkeys(record["ladder"] for record in records):
        chosen = [record for record in records if record["ladder"] == phase]
        view = Table(title=f"{chosen[0]['op']} {phase}: bytes at {chosen[0]['shape']} {chosen[0]['dtype']}")
        for name in ("step", "launches", "MB", "× floor", "peak MB", "µs", "% of limit", "why"):
            view.add_column(name, justify="left" if name in ("step", "why") else "right")
        for r in chosen:
            times = (f"{r['us']:.1f}", f"{r['percent_of_limit']:.1f}") if "us" in r else ("", "")
            why = f"{r['why']} {r['rises']}".strip()
            view.add_row(
                r["step"],
                str(r["launches"]),
                f"{r['bytes'] / 1e6:.2f}",
                f"{r['times_floor']:.2f}",
                f"{r['peak_bytes'] / 1e6:.2f}",
                *times,
                why,
            )
        Console(width=150).print(view)


def main(op: str, argv: list[str] | None = None) -> int:
    """Meter the operation's ladders, time them where there is a GPU, print them; --json writes a record per step."""
    parser = argparse.ArgumentParser(prog=f"python -m experiments.{op}", description=main.__doc__)
    parser.add_argument("--dtype", default="bf16", choices=list(DTYPES))
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"]
    )
    given = parser.parse_args(argv)
    if given.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        records = [r for ladder in experiment(op).ladders() for r in metered(ladder, given.dtype)]
    else:
        records = _metered_elsewhere(op, given.dtype)
        from experiments._environment import stamp

        environment = stamp(torch.device("cuda", torch.cuda.current_device()))
        found = {ladder.phase: timed(ladder, given.dtype) for ladder in experiment(op).ladders()}
        records = [r | found[r["ladder"]][r["step"]] | {"environment": environment} for r in records]
    if given.json:
        given.json.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
    show(records)
    return 0


def _metered_elsewhere(op: str, dtype: str) -> list[dict[str, Any]]:
    from experiments._environment import read_records

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metered.jsonl"
        command = [
            sys.executable,
            "-m",
            f"experiments.{op}",
            "--device",
            "cpu",
            "--dtype",
            dtype,
            "--json",
            str(path),
        ]
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "TRITON_INTERPRET": "1"}
        )
        return read_records(path)


def unexplained(records: list[dict[str, Any]]) -> list[str]:
    """A line for each step that moves no fewer bytes than the one before, needs no less memory, and does not say why."""
    return [
        f"{after['step']}: {after['bytes']} B after {before['bytes']} B, and no reason"
        for before, after in itertools.pairwise(records)
        if after["bytes"] >= before["bytes"]
        and after["peak_bytes"] >= before["peak_bytes"]
        and not after["rises"]
    ]
