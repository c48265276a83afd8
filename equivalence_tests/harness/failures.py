"""Files that say exactly what failed, so that `--replay` can run it again."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DIRECTORY = Path("failures")


@dataclass(frozen=True)
class Failure:
    """kind and text: of the finding. words: the case. replay: what `--replay` needs, as JSON has it. file: where it was saved."""

    kind: str
    text: str
    words: str
    replay: Mapping[str, Any]
    file: str | None = None

    def __str__(self) -> str:
        again = f"\n  again: python -m equivalence_tests --replay {self.file}" if self.file else ""
        return f"{self.text}\n  {self.words}{again}"


def save(failure: Failure, directory: Path = DIRECTORY) -> Failure:
    """Write failures/<function>-<dtype>-<hash>.json; the same failure goes to the same file, another never does.

    A directory that cannot be written costs the file, not the verdict: the failure comes back without one.
    """
    text = json.dumps(
        {"kind": failure.kind, "text": failure.text, "words": failure.words, **failure.replay}, indent=1
    )
    name = f"{failure.replay['function']}-{failure.replay['dtype']}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text + "\n")
    except OSError as error:
        return Failure(failure.kind, failure.text, f"{failure.words}\n  (not saved: {error})", failure.replay)
    return Failure(failure.kind, failure.text, failure.words, failure.replay, str(directory / name))


def load(path: Path) -> dict[str, Any]:
    """What was saved. Raises ValueError for a file that cannot be read or holds no failure."""
    try:
        record = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot be read: {error}") from error
    texts = ("function", "dtype", "impl", "device", "what", "words")
    if not isinstance(record, dict) or not all(isinstance(record.get(name), str) for name in texts):
        raise ValueError("no failure that this command saved")
    return record
