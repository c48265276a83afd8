"""Plots of bench's records as SVG. Each file carries a digest of what it shows, so that staleness needs no pixel compared."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments._work import operations

Record = dict[str, Any]
COLOURS = {
    "fast": "#c1121f",
    "quack": "#1d3557",
    "liger": "#2a9d8f",
    "compile": "#e9a23b",
    "torch": "#8d99ae",
}
STYLE = {
    "svg.hashsalt": "tandem-kernels",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
}


def update(records: list[Record], gpu: str, folder: Path, *, write: bool) -> list[Path]:
    """Draw what is missing or shows other data; return the stale files' paths (written, or only found)."""
    taken = [r for r in records if "phase" in r and r.get("kernel_ms") is not None]
    stale = []
    for op in operations():
        chosen = [r for r in taken if r["op"] == op]
        for name, draw in ((f"{op}_{gpu}.svg", _by_shape), (f"{op}_roofline_{gpu}.svg", _roofline)):
            shown = chosen if draw is _roofline else [r for r in chosen if r["limit"]["kind"] == "copy"]
            path, mark = folder / name, _digest(shown)
            if shown and mark not in _marks(path):
                stale.append(path)
                if write:
                    folder.mkdir(parents=True, exist_ok=True)
                    _draw(draw, shown, path, mark)
    return stale


def _draw(draw: Callable, records: list[Record], path: Path, mark: str) -> None:
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figure = draw(records)
        place = records[0]["environment"]["device"]
        title = (records[0]["op"], ", ".join(sorted({r["dtype"] for r in records})), place)
        figure.suptitle(", ".join(title), fontsize=10)
        figure.savefig(path, format="svg", metadata={"Date": None, "Description": f"data sha256 {mark}"})


def _digest(records: list[Record]) -> str:
    """Of the measured figures and the place, in an order of their own."""
    keys = ("shape", "dtype", "impl", "phase", "gbps", "tflops", "limit", "floor")
    lines = sorted(json.dumps([r[k] for k in keys] + [r["environment"]["device"]]) for r in records)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _marks(path: Path) -> list[str]:
    return re.findall(r"data sha256 ([0-9a-f]{64})", path.read_text()) if path.is_file() else []


def _by_shape(records: list[Record]) -> Any:
    """GB/s of the compulsory bytes for every shape that a copy limits, one line per implementation."""
    from matplotlib.figure import Figure

    phases = [phase for phase in ("fwd", "bwd") if any(r["phase"] == phase for r in records)]
    figure = Figure(figsize=(5 * len(phases), 4), layout="constrained")
    for phase, axes in zip(phases, figure.subplots(1, len(phases), squeeze=False)[0], strict=True):
        found = [r for r in records if r["phase"] == phase]
        shapes = list(dict.fromkeys(r["shape"] for r in found))
        for impl in dict.fromkeys(r["impl"] for r in found):
            points = [(shapes.index(r["shape"]), r["gbps"]) for r in found if r["impl"] == impl]
            axes.plot(*zip(*points, strict=True), marker="o", label=impl, color=COLOURS.get(impl, "#444444"))
        axes.axhline(max(r["limit"]["copy_gbps"] for r in found), color="black", linestyle="--", label="copy")
        axes.set_xticks(range(len(shapes)), shapes, rotation=40, ha="right")
        axes.set(title=phase, ylabel="GB/s of compulsory bytes")
        axes.set_ylim(bottom=0)
    figure.axes[0].legend(fontsize=8, loc="lower left", ncols=2)
    return figure


def _roofline(records: list[Record]) -> Any:
    """FLOPs per compulsory byte against TFLOP/s, under the roofs that copy and GEMM of the same run make."""
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    copy = max(r["limit"]["copy_gbps"] for r in records)
    gemm = max(r["limit"]["gemm_tflops"] for r in records)
    intensity = np.logspace(-1, 4, 200)
    axes.loglog(
        intensity, np.minimum(intensity * copy / 1e3, gemm), color="black", linestyle="--", label="limit"
    )
    for impl in dict.fromkeys(r["impl"] for r in records):
        points = [
            (r["floor"]["flops"] / r["floor"]["bytes"], r["tflops"]) for r in records if r["impl"] == impl
        ]
        axes.scatter(*zip(*points, strict=True), s=14, label=impl, color=COLOURS.get(impl, "#444444"))
    axes.set(xlabel="FLOPs per compulsory byte", ylabel="TFLOP/s")
    axes.legend(fontsize=8)
    return figure
