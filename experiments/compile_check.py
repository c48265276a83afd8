"""Compile an operation's launches for chips that are not here, and print registers, spills and shared memory.

    python -m experiments.compile_check rms_norm [--chip sm_90 …] [--shape 16384×4096 …] [--dtype bf16 …]
                                        [--kernel NAME …] [--set num_warps=8 …] [--random N] [--per-kernel N] [--json FILE]

Exit status 0 when every launch compiled without spills and within the chip's shared memory, 1 otherwise, 2 for bad usage.
Without --shape: the rows that reach every configuration of the operation's tuning tables.
"""

import argparse
import json
import os
import random
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from experiments._work import DTYPES, Row, experiment, named, operations

LINE = (
    "{chip} {registers:4} regs {spills:5} B spilled {shared:7} B shared {warps_per_sm:3} warps/SM  "
    "{kernel} {configuration} ({arguments})"
)


def launches(rows: list[Row], dtypes: list[str], chip: Any) -> list:
    """What the rows' functions launch on that chip, forward and backward, each distinct launch once; nothing runs."""
    from equivalence_tests.harness import compiled

    with compiled.recorded() as found, compiled.pretend(chip):
        for row in rows:
            for dtype in dtypes:
                made = row.make(DTYPES[dtype], torch.device("cpu"), None)
                call = made.each(compiled.on_gpu)
                call.gradients(call.outputs(named("fast", row.function)))
    return compiled.distinct(found, chip)


def spread(found: list, limit: int) -> list:
    """At most `limit` launches of each kernel, evenly over its list, the last (widest) always among them."""
    by_kernel = defaultdict(list)
    for launch in found:
        by_kernel[launch.name].append(launch)
    chosen = []
    for same in by_kernel.values():
        step = max(1, -(-len(same) // limit))
        chosen += same[::-1][::step][::-1]
    return chosen


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.compile_check", description=__doc__.split("\n")[0]
    )
    parser.add_argument("op", choices=operations())
    parser.add_argument(
        "--chip", nargs="+", default=["sm_80", "sm_86", "sm_90"], choices=["sm_80", "sm_86", "sm_89", "sm_90"]
    )
    parser.add_argument("--shape", nargs="+", help="shapes as the operation's rows are written")
    parser.add_argument("--dtype", nargs="+", default=["bf16", "fp32"], choices=list(DTYPES))
    parser.add_argument("--kernel", nargs="+", help="only kernels of these names")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=INT", help="launch options or constexprs to override"
    )
    parser.add_argument("--random", type=int, metavar="N", help="N random shapes in place of --shape")
    parser.add_argument(
        "--per-kernel", type=int, help="at most this many configurations of each kernel on each chip"
    )
    parser.add_argument("--json", type=Path, help="write one line per launch and chip")
    given = parser.parse_args(argv)
    os.environ.pop("TRITON_INTERPRET", None)  # compiling needs the real functions; triton is imported below
    from equivalence_tests.harness import compiled

    override = {name: int(value) for name, value in (item.split("=") for item in given.set)}
    module, records, faults = experiment(given.op), [], []
    for name in given.chip:
        chip = compiled.CHIPS[name]
        if given.random:
            generator = random.Random(0)
            rows = [module.row(module.random_shape(generator)) for _ in range(given.random)]
        elif given.shape:
            rows = [module.row(shape) for shape in given.shape]
        else:
            rows = list(module.compiled(chip.capability))
        found = [
            x for x in launches(rows, given.dtype, chip) if given.kernel is None or x.name in given.kernel
        ]
        for launch in spread(found, given.per_kernel) if given.per_kernel else found:
            launch = launch.with_options(**override)
            result = compiled.build(launch, chip)
            records.append(
                {
                    "kernel": launch.name,
                    "configuration": launch.label(),
                    "arguments": launch.signature(chip),
                    "chip": name,
                    "registers": result.registers,
                    "spills": result.spills,
                    "shared": result.shared,
                    "wgmma": result.wgmma,
                    "warps_per_sm": result.warps_per_sm,
                    "faults": result.faults(),
                }
            )
            faults += result.faults()
            print(LINE.format(**records[-1]), flush=True)
    if given.json:
        given.json.write_text("".join(json.dumps(record) + "\n" for record in records))
    print(f"{len(records)} compiled, {len(faults)} faults", *faults, sep="\n")
    return 1 if faults or not records else 0


if __name__ == "__main__":
    sys.exit(main())
