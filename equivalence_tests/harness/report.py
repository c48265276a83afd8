"""What a run showed: a table for people, JSON and HTML for others, and the digest that says which sources were judged."""

import ast
import hashlib
import html
import importlib.util
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from equivalence_tests.harness.result import Result
from equivalence_tests.harness.runner import Advance

_ROOT = Path(importlib.util.find_spec("reference").origin).parent.parent
_PACKAGES = ("torch", "triton", "numpy", "transformers", "liger-kernel", "quack-kernels")
COLUMNS = {
    "operation": "operation",
    "function": "function",
    "dtype": "dtype",
    "cases": "cases",
    "worst_over_bound": "worst error ÷ bound",
    "worst_over_reference": "worst error ÷ reference",
    "gradients": "gradients",
    "determinism": "determinism",
    "mutants": "mutants killed",
    "verdict": "verdict",
}
# Columns of text that the table takes.
WIDTH = 130


def digest(op: str) -> str:
    """sha256 over the sources that a verdict on fast.<op> is about: both its modules and all that they import of this project.

    The harness is left out: a better judge does not make a verdict stale.
    """
    files, found = [], [f"reference.{op}", f"fast.{op}"]
    for module in found:  # grows as it is walked
        path = _ROOT.joinpath(*module.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        files.append(file)
        found += [name for name in _imports(file) if name not in found]
    total = hashlib.sha256()
    for file in sorted(files):
        total.update(
            f"{file.relative_to(_ROOT).as_posix()}\0{len(file.read_bytes())}\0".encode() + file.read_bytes()
        )
    return total.hexdigest()


def _imports(file: Path) -> list[str]:
    """The modules of both trees that a file imports, but for the trees themselves, which only collect names."""
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
    ours = (name for name in names if name.startswith(("reference.", "fast.")) and _is_module(name))
    return list(dict.fromkeys(ours))


def _is_module(name: str) -> bool:
    path = _ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def environment(device: str) -> dict[str, Any]:
    """Where the verdict was given: versions, device, driver, date."""
    cuda = device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if cuda else "CPU (Triton's interpreter)",
        "driver": _driver() if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def records(results: list[Result]) -> list[dict[str, Any]]:
    """One JSON record for each operation × function × dtype."""
    return [_record(result) for result in results]


def _record(result: Result) -> dict[str, Any]:
    job = result.job
    return {
        "operation": job.operation.op,
        "function": job.operation.function,
        "dtype": job.dtype,
        "impl": job.impl,
        "profile": job.profile.name,
        "seed": job.seed,
        "cases": result.cases,
        "unsupported": dict(result.unsupported),
        "outputs": result.outputs,
        "exempt": {planted: result.exempt[planted] for planted in ("zeros", "scaled")},
        "worst_over_bound": result.worst,
        "worst_over_reference": result.over_baseline,
        "gradients": "pass" if result.gradients else "fail",
        "determinism": "pass" if result.determinism else "fail",
        "real": result.real,
        "mutants_killed": len(result.killed),
        "mutants_total": len(result.killed) + len(result.survived),
        "mutants_survived": result.survived,
        "verdict": "pass" if result.ok else "fail",
        "kinds": dict(result.kinds),
        "failures": [
            {"kind": f.kind, "text": f.text, "case": f.words, "file": f.file, "replay": dict(f.replay)}
            for f in result.failures
        ],
        "seconds": round(result.seconds, 1),
        "environment": environment(job.device),
        "digest": digest(job.operation.op),
    }


def row(record: dict[str, Any]) -> list[str]:
    """The cells of the table, in the order of COLUMNS."""
    texts = {
        **record,
        "worst_over_bound": f"{record['worst_over_bound']:.3f}",
        "worst_over_reference": f"{record['worst_over_reference']:.3f}",
        "mutants": f"{record['mutants_killed']}/{record['mutants_total']}"
        if record["mutants_total"]
        else "–",
    }
    return [str(texts[name]) for name in COLUMNS]


def table(found: list[dict[str, Any]]) -> Table:
    view = Table(title=f"{found[0]['impl']} on {found[0]['environment']['device']}" if found else None)
    for name, title in COLUMNS.items():
        view.add_column(title, justify="right" if name.startswith(("cases", "worst", "mutants")) else "left")
    for record in found:
        style = {"pass": "green", "fail": "bold red"}
        view.add_row(*(f"[{style[cell]}]{cell}[/]" if cell in style else cell for cell in row(record)))
    return view


def page(path: Path, found: list[dict[str, Any]]) -> str:
    """A self-contained HTML page of the same, for `path`."""
    cells = "".join(
        f"<tr>{''.join(f'<td class={c!r}>{html.escape(c)}</td>' for c in row(r))}</tr>\n" for r in found
    )
    heads = "".join(f"<th>{html.escape(title)}</th>" for title in COLUMNS.values())
    told = [(f"{r['function']} {r['dtype']}: {f['text']}", f["case"]) for r in found for f in r["failures"]]
    failed = "".join(f"<h2>{html.escape(title)}</h2><pre>{html.escape(case)}</pre>\n" for title, case in told)
    stamp = html.escape(json.dumps(found[0]["environment"], indent=1, ensure_ascii=False)) if found else ""
    digests = html.escape("\n".join(dict.fromkeys(f"{r['operation']} {r['digest']}" for r in found)))
    return (
        "<!doctype html><meta charset=utf-8><title>Equivalence tests</title>\n"
        "<style>body{font:15px/1.5 system-ui;margin:2em}td,th{padding:.3em .8em;text-align:left;border-bottom:1px solid #ccc}"
        "table{border-collapse:collapse}td.pass{color:#070}td.fail{color:#b00;font-weight:bold}pre{background:#f4f4f4;padding:1em}</style>\n"
        f"<h1>Equivalence tests</h1>\n<table><tr>{heads}</tr>\n{cells}</table>\n{failed}"
        f"<h2>Environment</h2><pre>{stamp}</pre><h2>Sources (sha256)</h2><pre>{digests}</pre>\n"
    )


def write(path: Path, text: str) -> None:
    """Replace the file at once, so that nobody reads half of it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def dumps(path: Path, found: list[dict[str, Any]]) -> str:
    """JSON lines for a .jsonl file, else one array."""
    if path.suffix == ".jsonl":
        return "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in found)
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


@contextmanager
def progress(console: Console, total: int) -> Iterator[Advance]:
    """A bar on a terminal, nothing elsewhere (the caller prints a line when a row is done)."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda text: bar.update(task, advance=1, description=text)


def _driver() -> str | None:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None  # some containers have no nvidia-smi; nothing depends on it


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
