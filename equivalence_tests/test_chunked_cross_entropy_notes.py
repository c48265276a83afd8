"""The exercises of paper_notes/chunked_cross_entropy.md have the solutions that it prints."""

import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from equivalence_tests.harness.operations import operation
from equivalence_tests.harness.oracle import Judgement, Sample, judge

NOTES = Path(__file__).resolve().parent.parent / "paper_notes"
START = (NOTES / "exercises" / "chunked_cross_entropy.py").read_text()
ROUNDED, UNCOUNTED, UNSMOOTHED = (
    textwrap.dedent(block)
    for block in re.findall(
        r"```python\n(.*?)```", (NOTES / "chunked_cross_entropy.md").read_text(), re.DOTALL
    )
)
END, RESULT = "        return dlogits, None, None\n", "        return definition(logits, target, **options)\n"


def verdict(old: str, new: str, logits: torch.Tensor, target: torch.Tensor, **options) -> Judgement:
    """On the starting point with one change."""
    assert not old or START.count(old) == 1
    names: dict[str, Callable] = {}
    exec(START.replace(old, new) if old else START, names)
    given = (logits, target), options, (torch.tensor(1.25),)
    return judge(Sample.of_tensors(operation("cross_entropy"), *given), names["cross_entropy"])


def refused(judgement: Judgement) -> set[str]:
    return {name for name, found in judgement.verdicts.items() if not found.ok}


def before_end(block: str) -> tuple[str, str]:
    return END, textwrap.indent(block, " " * 8) + END


def rows(dtype: torch.dtype = torch.float32, ignored: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(60, (40,), generator=generator)
    target[::4] = -100 if ignored else 3
    return torch.randn(40, 60, generator=generator).to(dtype), target


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_starting_point_is_right(dtype: torch.dtype):
    for options in ({}, {"label_smoothing": 0.1}, {"reduction": "sum", "z_loss": 0.1}):
        assert verdict("", "", *rows(dtype, ignored=True), **options).findings == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_p_rounded_first_loses_a_certain_token_in_16_bits(dtype: torch.dtype):
    logits, target = torch.zeros(1, 65, dtype=dtype), torch.tensor([7])
    logits[0, 7] = 12.0
    found = refused(verdict(*before_end(ROUNDED), logits, target, reduction="sum"))
    assert found == ({"dlogits"} if dtype == torch.bfloat16 else set())


def test_a_divisor_of_all_tokens_shows_where_some_are_ignored():
    change = RESULT, textwrap.indent(UNCOUNTED, " " * 8)
    assert refused(verdict(*change, *rows())) == set()
    assert "loss" in refused(verdict(*change, *rows(ignored=True)))


def test_smoothing_forgotten_in_the_gradient_keeps_the_sum_at_zero():
    logits, target = rows()
    assert refused(verdict(*before_end(UNSMOOTHED), logits, target, label_smoothing=0.1)) == {"dlogits"}
