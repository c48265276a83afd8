"""Bytes that autograd keeps from forward to backward: one forward of each implementation, nothing is timed.

    python -m experiments.saved OP [--shape SHAPE …] [--dtype bf16] [--impl NAME …] [--device cpu] [--json FILE]

Shapes are written as the operation's rows; without --shape, the first row of each function whose first argument is x.
Implementations: compile, fast, and the peers of experiments/<op>.py. Bytes depend on shapes and dtypes alone, so small shapes do
on the CPU, in Triton's interpreter. Exit status 2 for bad usage.
"""

import argparse
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from experiments._environment import stamp
from experiments._work import DTYPES, Call, Row, experiment, named, operations

OURS = ("compile", "fast")  # for every function; the reference, all in fp32, is nobody's candidate


def kept(function: Callable, call: Call) -> tuple[int, int]:
    """Bytes of x (the first argument) that autograd keeps, and of what is no argument. A storage counts whole, and once."""
    storages = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage  # alive, so that no other gets its place
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        call.outputs(function)
    x = storages.get(call.args[0].untyped_storage()._cdata)
    given = {t.untyped_storage()._cdata for t in call.tensors}
    others = sum(storage.nbytes() for place, storage in storages.items() if place not in given)
    return 0 if x is None else x.nbytes(), others


def measured(row: Row, dtype: str, impl: str, device: torch.device) -> dict[str, Any]:
    """The record of one implementation; one with a reason where it cannot compute the row."""
    # Imports Triton, which has to know by then whether it interprets.
    from experiments.bench import functions, why

    record = {"op": row.op, "function": row.function, "shape": row.shape, "dtype": dtype, "impl": impl}
    call = row.make(DTYPES[dtype], device, torch.Generator(device).manual_seed(0))
    try:
        of_x, others = kept(functions(row.op, row.function)(impl), call)
    except Exception as error:
        # As in bench: a peer may fail in any way.
        return record | {"reason": why(error)}
    x_bytes = call.args[0].nbytes
    return record | {
        "x_bytes": x_bytes,
        "saved_x_bytes": of_x,
        "saved_other_bytes": others,
        "times_x": others / x_bytes,
    }


def has_x(row: Row) -> bool:
    """Whether its function's first argument is x."""
    return next(iter(inspect.signature(named("reference", row.function)).parameters)) == "x"


def selected(op: str, shapes: list[str] | None) -> list[Row]:
    """The rows asked for. Raises ValueError for a shape that cannot be read and for a function without x."""
    module = experiment(op)
    if shapes:
        rows = [module.row(shape) for shape in shapes]
        if without := [row.function for row in rows if not has_x(row)]:
            raise ValueError(f"the first argument must be x; that of {', '.join(without)} is not")
        return rows
    first: dict[str, Row] = {}
    for row in filter(has_x, module.ROWS):
        first.setdefault(row.function, row)
    return list(first.values())


def table(records: list[dict[str, Any]]) -> None:
    """A line per implementation on the terminal."""
    from rich.console import Console
    from rich.table import Table

    view = Table(title="experiments.saved: bytes kept for the backward pass, parameters not counted")
    for name in ("function", "shape", "dtype", "impl", "x itself", "beyond x", "beyond x ÷ x"):
        view.add_column(name, justify="right" if "x" in name else "left")
    for r in records:
        key = (r["function"], r["shape"], r["dtype"], r["impl"])
        if "reason" in r:
            view.add_row(*key, "", r["reason"], "")
        else:
            view.add_row(
                *key, f"{r['saved_x_bytes']:,}", f"{r['saved_other_bytes']:,}", f"{r['times_x']:.3f}"
            )
    Console(width=150).print(view)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.saved", description=__doc__.split("\n")[0])
    parser.add_argument("op", metavar="OP", choices=operations())
    parser.add_argument("--shape", nargs="+", help="shapes as the operation's rows are written")
    parser.add_argument("--dtype", default="bf16", choices=list(DTYPES))
    parser.add_argument("--impl", nargs="+", help="only these implementations")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write JSON lines, one record per figure")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"]
    )
    given = parser.parse_args(argv)
    peers = experiment(given.op).PEERS
    known = list(dict.fromkeys([*peers, *OURS]))
    try:
        if unknown := [impl for impl in given.impl or [] if impl not in known]:
            raise ValueError(f"--impl must be of {', '.join(known)}; got {', '.join(unknown)}")
        if given.device == "cpu" and not given.shape:
            raise ValueError(
                "on the CPU --shape must name shapes that are small enough for Triton's interpreter"
            )
        rows = selected(given.op, given.shape)
    except ValueError as error:
        print(f"saved: {error}", file=sys.stderr)
        return 2
    if given.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    from equivalence_tests.harness.report import environment

    device = torch.device(given.device)
    where, records = stamp(device) if device.type == "cuda" else environment("cpu"), []
    for row in rows:
        offered = [i for i in given.impl or known if i in OURS or row.function in peers[i]]
        records += [measured(row, given.dtype, impl, device) | {"environment": where} for impl in offered]
    if given.json:
        given.json.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
    table(records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
