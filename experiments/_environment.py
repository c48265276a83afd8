"""Where a figure was measured, where its results lie, and whether the operation was verified there."""

import json
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def slug(device: str) -> str:
    """The directory name of a GPU: "NVIDIA H200" → "h200"."""
    return device.lower().removeprefix("nvidia ").replace(" ", "-")


def stamp(device: torch.device) -> dict[str, Any]:
    """GPU, driver and versions; the same for every record of a run."""
    from equivalence_tests.harness.report import environment

    properties = torch.cuda.get_device_properties(device)
    chip = {"sms": properties.multi_processor_count, "l2_mib": properties.L2_cache_size / 2**20}
    return environment("cuda") | chip


def read_records(path: Path) -> list[dict[str, Any]]:
    """A JSON-lines file, or a JSON array. Raises ValueError naming the file and line that is neither."""
    text = path.read_text()
    if text.lstrip().startswith("["):
        return json.loads(text)
    records = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number} is no JSON record: {error}") from None
    return records


def unverified(op: str, function: str, dtype: str, device: str, path: Path) -> str | None:
    """Why fast.<function> does not count as verified on this device in this dtype; None when it does."""
    from equivalence_tests.harness.report import digest

    if not path.is_file():
        return f"there is no verification record {path}"
    records = [
        r for r in read_records(path) if (r["operation"], r["function"], r["dtype"]) == (op, function, dtype)
    ]
    records = [r for r in records if r["impl"] == "fast" and r["environment"]["device"] == device]
    if not records:
        return f"{path} has no record of fast.{function} in {dtype} on {device}"
    if records[-1]["verdict"] != "pass":
        return f"its last verdict in {path} is {records[-1]['verdict']!r}"
    if records[-1]["digest"] != digest(op):
        return f"{path} judged other sources than these"
    return None
