"""Run a Hugging Face Transformers model (or any torch model) on `fast` operations, one model instance at a time, reversibly.

    report = patch(model)          # print(report) shows what was replaced, and what was not and why
    unpatch(model)                 # every module's __dict__ is as it was
    with patched(model): ...

Only the forward of module *instances* is replaced: no class, no other model, no parameter and no state_dict changes, so
checkpoints, deepcopy, pickle and save_pretrained work as before. A module is recognised by what it computes, not by its name:
DETECTORS has one function per operation. Load the weights first, patch, then wrap (compile, FSDP). torch.nn.DataParallel
is not supported: its replicas share the `__dict__` of the module they are made from.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from fast.integrations import _causal_loss, _rms_norm, _swiglu_mlp
from fast.integrations._forward import Forward, install, rebound, restore, standing, wrapper_of_replacement


@dataclass(frozen=True)
class Detector:
    """looks_for: what, in words. detect: the replacement, or the reason why not, or None for a module of another kind.
    unasked: whether `patch` looks for it where no operations are named."""

    looks_for: str
    detect: Callable[[nn.Module], Forward | str | None]
    unasked: bool = True


DETECTORS: dict[str, Detector] = {
    "rms_norm": Detector(_rms_norm.LOOKS_FOR, _rms_norm.detect),
    "swiglu_mlp": Detector(_swiglu_mlp.LOOKS_FOR, _swiglu_mlp.detect),
    # It changes what a model returns: in training the logits are None.
    "chunked_cross_entropy": Detector(_causal_loss.LOOKS_FOR, _causal_loss.detect, unasked=False),
}


@dataclass(frozen=True)
class Entry:
    """One module that was looked at. replaced: it runs the fast operation now. reason: why not, or what is special."""

    path: str
    module: str
    operation: str
    replaced: bool
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """What `patch` did. `str(report)` is a table with one line for each kind of module."""

    model: str
    looked_for: dict[str, str]
    entries: tuple[Entry, ...]

    @property
    def counts(self) -> dict[str, int]:
        """How many modules run each operation that was asked for."""
        return {op: sum(e.replaced for e in self.entries if e.operation == op) for op in self.looked_for}

    def __str__(self) -> str:
        kinds = Counter(
            (
                re.sub(r"\d+", "*", e.path) or "(the model)",
                e.module,
                e.operation,
                "replaced" if e.replaced else "left",
                e.reason,
            )
            for e in self.entries
        )
        lines = [("module", "class", "operation", "count", "result", "reason")]
        lines += [
            (path, cls, op, str(count), result, reason)
            for (path, cls, op, result, reason), count in kinds.items()
        ]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = [
            "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        totals = [
            f"{self.model}: {n} modules run fast.{op} (looked for {self.looked_for[op]})"
            for op, n in self.counts.items()
        ]
        return "\n".join(table + totals)


def patch(model: nn.Module, *, ops: Iterable[str] | str | None = None) -> Report:
    """Replace, in this model instance, what the operations `ops` (default: those of DETECTORS that leave results as they are)
    can compute. "chunked_cross_entropy" takes a causal language model's loss, in training, from its hidden states.

    Patching again is allowed: modules that are patched stay so and are reported as such.
    Raises TypeError for what is no torch.nn.Module; ValueError for an unknown operation, and where no module at all could be
    replaced (nothing is changed then).
    """
    return _patch(model, ops)[0]


def unpatch(model: nn.Module) -> None:
    """Take every replacement out of this model instance.

    Raises ValueError where there is none; RuntimeError, with nothing changed, where one is hidden inside a wrapper that
    someone else put around it and that only they can take off.
    """
    if not _restore(model.modules()):
        raise ValueError(f"unpatch: no module of this {type(model).__name__} is patched")


@contextmanager
def patched(model: nn.Module, *, ops: Iterable[str] | str | None = None) -> Iterator[Report]:
    """`patch` inside the with block; afterwards what was patched before is still patched, and nothing else."""
    report, replacements = _patch(model, ops)
    mine = [replacement.module for replacement in replacements]
    before = {module for module in model.modules() if standing(module)} - set(mine)
    try:
        yield report
    finally:
        # Also modules that left the model inside the block, and copies of patched ones that came into it.
        _restore(module for module in dict.fromkeys([*mine, *model.modules()]) if module not in before)


def _patch(model: nn.Module, ops: Iterable[str] | str | None) -> tuple[Report, list[Forward]]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch: model must be a torch.nn.Module, got {type(model).__name__}")
    report, replacements = _plan(model, _chosen(ops))
    if not any(entry.replaced for entry in report.entries):
        raise ValueError(f"patch: nothing was replaced in {report.model}\n{report}")
    for replacement in replacements:
        install(replacement)
    return report, replacements


def _restore(modules: Iterable[nn.Module]) -> int:
    modules = list(modules)
    for module in modules:
        if standing(module) is None and wrapper_of_replacement(module) is not None:
            raise RuntimeError(
                f"unpatch: {wrapper_of_replacement(module)!r} wraps the patched forward of a {type(module).__name__}; "
                "take that wrapper off first"
            )
    patched_modules = [module for module in modules if standing(module)]
    for module in patched_modules:
        restore(module)
    return len(patched_modules)


def _chosen(ops: Iterable[str] | str | None) -> list[str]:
    usual = [name for name, detector in DETECTORS.items() if detector.unasked]
    names = usual if ops is None else [ops] if isinstance(ops, str) else list(ops)
    unknown = [name for name in names if name not in DETECTORS]
    if unknown or not names:
        raise ValueError(f"patch: ops must name operations among {list(DETECTORS)}, got {unknown or names}")
    return names


def _plan(model: nn.Module, ops: list[str]) -> tuple[Report, list[Forward]]:
    entries, replacements = [], []
    for path, module in model.named_modules():
        for op in ops:
            found, present = _look(module, op), standing(module)
            if found is None:
                continue
            reason = found if isinstance(found, str) else "was patched before" if present else ""
            entries.append(Entry(path, type(module).__name__, op, isinstance(found, Forward), reason))
            if isinstance(found, Forward):
                if present is None:
                    replacements.append(found)
                break  # one forward, one operation
    looked_for = {op: DETECTORS[op].looks_for for op in ops}
    return Report(type(model).__name__, looked_for, tuple(entries)), replacements


def _look(module: nn.Module, op: str) -> Forward | str | None:
    present = standing(module)
    if present is not None:
        why = present.changed()
        found = present if why is None else f"was patched before, and since then {why}: unpatch first"
        return found if present.operation == op else None
    found = DETECTORS[op].detect(module)
    if isinstance(found, Forward) and rebound(module):
        return f"its forward is already re-bound on this instance, to {rebound(module)}"
    return found
