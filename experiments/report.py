"""Write the tables of README.md, experiments/README.md and paper_notes, and the figures, from experiments/results/<gpu>/*.jsonl.

    python -m experiments.report           rewrite what stands between the markers, and the figures
    python -m experiments.report --check   change nothing; exit status 1 when something is stale

A table stands between `<!-- table: OP [KIND] GPU -->` and `<!-- /table -->`. Without KIND it holds GB/s from bench; the other
kinds are those of `KINDS`. Every figure of a table or plot is in those results; none is typed.
"""

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments._environment import RESULTS, read_records

ROOT = Path(__file__).resolve().parent.parent
MARKED = re.compile(r"(<!-- table: (\S+)(?: (\S+))? (\S+) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)
# Known ones in this order, others behind them.
IMPLS = ("reference", "torch", "compile", "liger", "quack", "fast")

Record = dict[str, Any]


def load(gpu: str, results: Path = RESULTS) -> list[Record]:
    """All records of a GPU. Raises ValueError where two speak of the same figure."""
    records = [record for path in sorted((results / gpu).glob("*.jsonl")) for record in read_records(path)]
    seen: set[tuple] = set()
    for record in records:
        if "impl" in record and "phase" in record:
            key = tuple(record[k] for k in ("op", "function", "shape", "dtype", "impl", "phase"))
            if key in seen:
                raise ValueError(f"{results / gpu}: two records of {', '.join(key)}; keep one")
            seen.add(key)
    return records


def benched(records: list[Record], op: str) -> list[Record]:
    return [r for r in records if r.get("op") == op and "phase" in r]


def speed(records: list[Record], op: str) -> str:
    """Per shape, phase and implementation: GB/s of the bytes that must be moved; ms where products are the limit."""
    found = benched(records, op)
    by_products = {r["function"] for r in found if r["limit"]["kind"] == "gemm"}
    moving = [r for r in found if r["function"] not in by_products]
    tables = (
        _per_implementation(moving, "gbps", "GB/s of the bytes that must be moved", "{:.0f}"),
        _per_implementation([r for r in found if r not in moving], "kernel_ms", "ms", "{:.3f}"),
    )
    return "\n".join(filter(None, tables))


def host(records: list[Record], op: str) -> str:
    """µs of Python and launch work per call."""
    return _per_implementation(benched(records, op), "host_us", "host µs per call", "{:.0f}")


def memory(records: list[Record], op: str) -> str:
    """MiB needed beyond what was there, at the peak."""
    return _per_implementation(benched(records, op), "peak_mib", "peak MiB beyond the inputs", "{:.1f}")


def ladder(records: list[Record], op: str) -> str:
    """The steps of the fusion ladders; times where they were taken."""
    lines = []
    found = [r for r in records if r.get("op") == op and "ladder" in r]
    for phase in dict.fromkeys(r["ladder"] for r in found):
        steps = [r for r in found if r["ladder"] == phase]
        timed = "us" in steps[0]
        head = [
            "step",
            "launches",
            "MB",
            "× floor",
            *(["peak MB"] if "peak_bytes" in steps[0] else []),
            *(["µs", "% of the limit", "peak MiB"] if timed else []),
            "why",
        ]
        where = f"; times at {steps[0]['timed_shape']} on {_where(steps[0])}" if timed else ""
        lines += [f"**{phase}**, {steps[0]['dtype']}, bytes metered at {steps[0]['shape']}{where}", ""]
        rows = []
        for r in steps:
            times = (
                [f"{r['us']:.1f}", f"{r['percent_of_limit']:.1f}", f"{r['peak_mib']:.1f}"] if timed else []
            )
            cost = [str(r["launches"]), f"{r['bytes'] / 1e6:.3f}", f"{r['times_floor']:.2f}"]
            cost += [f"{r['peak_bytes'] / 1e6:.2f}"] if "peak_bytes" in r else []
            rows.append([r["step"], *cost, *times, f"{r['why']} {r['rises']}".strip()])
        lines += [*_table(head, rows), ""]
    return "\n".join(lines)


def verified(records: list[Record], op: str) -> str:
    """The verdicts of `python -m equivalence_tests` on that machine."""
    found = [r for r in records if r.get("operation") == op and "verdict" in r]
    if not found:
        return ""
    head = [
        "function",
        "dtype",
        "cases",
        "worst error ÷ bound",
        "÷ the reference's",
        "mutants killed",
        "verdict",
    ]
    rows = []
    for r in found:
        worst = f"{r['worst_over_bound']:.3f}", f"{r['worst_over_reference']:.3f}"
        mutants = f"{r['mutants_killed']}/{r['mutants_total']}" if r["mutants_total"] else "–"
        rows.append([r["function"], r["dtype"], str(r["cases"]), *worst, mutants, r["verdict"]])
    return "\n".join([f"On {_where(found[0])}", "", *_table(head, rows), ""])


def saved(records: list[Record], op: str) -> str:
    """What autograd keeps from forward to backward: x itself or not, and what is beyond it, in MiB and in x's bytes."""
    found = [r for r in records if r.get("op") == op and "saved_x_bytes" in r]
    if not found:
        return ""
    cells = {
        (r["shape"], r["dtype"], r["impl"]): f"{'x + ' if r['saved_x_bytes'] else ''}"
        f"{r['saved_other_bytes'] / 2**20:.1f} ({r['times_x']:.2f})"
        for r in found
    }
    impls = _impls(found)
    rows = [
        [*key, *(cells.get((*key, impl), "–") for impl in impls)]
        for key in dict.fromkeys(k[:2] for k in cells)
    ]
    unit = "MiB kept for the backward pass beyond parameters and x (÷ x's bytes), and whether x itself is"
    return "\n".join([f"On {_where(found[0])}; {unit}.", "", *_table(["shape", "dtype", *impls], rows), ""])


def registration(records: list[Record], op: str) -> str:
    """Host cost of the ways to register an operation; the same for every operation."""
    found = [r for r in records if "registration" in r]
    if not found:
        return ""
    head = ["way", "no gradients, µs", "forward", "forward and backward"]
    rows = [
        [r["registration"], *(f"{r[k]:.1f}" for k in ("no_grad_us", "fwd_us", "fwd_bwd_us"))] for r in found
    ]
    return "\n".join([f"On {_where(found[0])}", "", *_table(head, rows), ""])


KINDS: dict[str, Callable[[list[Record], str], str]] = {
    "speed": speed,
    "host": host,
    "memory": memory,
    "ladder": ladder,
    "verified": verified,
    "saved": saved,
    "registration": registration,
}


def _impls(records: list[Record]) -> list[str]:
    """In the order of the tables' columns."""
    found = {r["impl"] for r in records}
    return [*(i for i in IMPLS if i in found), *sorted(found - set(IMPLS))]


def _per_implementation(records: list[Record], field: str, unit: str, form: str) -> str:
    if not records:
        return ""
    impls = _impls(records)
    cells = {(r["shape"], r["dtype"], r["phase"], r["impl"]): r for r in records}
    head = ["shape", "dtype", "phase", *impls]
    limited = field in ("gbps", "kernel_ms") and any(r["impl"] == "fast" for r in records)
    if limited:
        head.append("fast, % of the limit")
    rows, reasons = [], defaultdict(list)
    for key in dict.fromkeys(key[:3] for key in cells):
        row = list(key)
        for impl in impls:
            record = cells.get((*key, impl))
            value = None if record is None else record[field]
            row.append("–" if value is None else form.format(value))
            if record is not None and "reason" in record:
                reasons[impl, record["reason"]].append(f"{key[0]} {key[2]}")
        if limited:
            share = cells.get((*key, "fast"), {}).get("percent_of_limit")
            row.append("–" if share is None else f"{share:.1f}")
        rows.append(row)
    copies, gemms = (sorted(r["limit"][kind] for r in records) for kind in ("copy_gbps", "gemm_tflops"))
    limit = {
        "gbps": f"; a device-to-device copy raced with them: {copies[len(copies) // 2]:.0f} GB/s (median)",
        "kernel_ms": f"; the limit is an 8192³ bf16 product through cuBLAS: {gemms[len(gemms) // 2]:.0f} TFLOP/s",
    }.get(field, "")
    missing = (
        f"{impl}, {where[0] if len(where) == 1 else f'{len(where)} figures'}: {reason}"
        for (impl, reason), where in reasons.items()
    )
    notes = dict.fromkeys(f"{r['impl']}: {r['note']}." for r in records if "note" in r)
    lines = [
        f"{_where(records[0])}; {unit}{limit}.",
        "",
        *_table(head, rows),
        "",
        *(f"- {n}" for n in (*notes, *missing)),
        "",
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def _where(record: Record) -> str:
    environment = record["environment"]
    packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items())
    return ", ".join(filter(None, (environment["device"], packages, environment["date"][:10])))


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    text = {"step", "why", "shape", "dtype", "phase", "function", "verdict", "way"}
    rule = ["---" if name in text else "---:" for name in head]
    return ["| " + " | ".join(cells).replace("\n", " ") + " |" for cells in (head, rule, *rows)]


def filled(text: str, results: Path = RESULTS) -> str:
    """The document with every marked table made anew. Raises ValueError for a kind of table that does not exist."""

    def table(match: re.Match) -> str:
        opening, op, kind, gpu, _, closing = match.groups()
        kind = kind or "speed"
        if kind not in KINDS:
            raise ValueError(f"{opening.strip()}: the kind must be one of {', '.join(KINDS)}, got {kind!r}")
        body = KINDS[kind](load(gpu, results), op) or f"No results for {gpu} yet.\n"
        return f"{opening}\n{body.rstrip()}\n\n{closing}"

    return MARKED.sub(table, text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.report", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 when a table or figure is stale"
    )
    given = parser.parse_args(argv)
    from experiments import _figures

    stale = []
    try:
        for path in (
            ROOT / "README.md",
            ROOT / "experiments" / "README.md",
            *sorted((ROOT / "paper_notes").glob("*.md")),
        ):
            before = path.read_text()
            after = filled(before)
            if after != before:
                stale.append(path)
                if not given.check:
                    path.write_text(after)
        for gpu in sorted(path.name for path in RESULTS.iterdir() if path.is_dir()):
            stale += _figures.update(load(gpu), gpu, ROOT / "paper_notes" / "figures", write=not given.check)
    except ValueError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    for path in stale:
        print(f"{'stale' if given.check else 'written'}: {path.relative_to(ROOT)}")
    return 1 if stale and given.check else 0


if __name__ == "__main__":
    sys.exit(main())
