"""The exercises of paper_notes/quantized_weights.md have the solutions that the note gives."""

import re
from pathlib import Path

import pytest
import torch

from equivalence_tests.harness.operations import operation
from equivalence_tests.harness.oracle import Judgement, Sample, judge

NOTES = Path(__file__).resolve().parent.parent / "paper_notes"
RIGHT = (NOTES / "exercises" / "quantized_weights.py").read_text()
ROUNDED, THROUGH_SCALE, HALVES_UP = re.findall(
    r"```python\n(.*?)```", (NOTES / "quantized_weights.md").read_text(), re.DOTALL
)
SCALE = "    scale, zero = scale_and_zero(groups.detach(), bits, symmetric)\n"
LEVEL = "    level = torch.round(groups.detach() * (1 / scale)) + zero\n"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def verdict(old: str, new: str, dtype: torch.dtype, **options) -> Judgement:
    """Of the starting point with one change."""
    assert RIGHT.count(old) == 1
    names: dict = {}
    exec(RIGHT.replace(old, new), names)
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(64, 96, generator=generator).to(dtype) for _ in range(2))
    return judge(Sample.of_tensors(operation("fake_quantize"), (x,), options, (dy,)), names["fake_quantize"])


def refused(judgement: Judgement) -> set[str]:
    return {name for name, found in judgement.verdicts.items() if not found.ok}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_starting_point_is_right(dtype: torch.dtype, symmetric: bool):
    options = {"per": "group", "group": 32, "bits": 4, "symmetric": symmetric}
    for clip in (False, True):
        assert verdict(SCALE, SCALE, dtype, **options, clip_gradient=clip).findings == []


def test_a_rounded_scale_is_refused_in_16_bits_only():
    wanted = [set(), {"y"}, {"y"}]
    assert [refused(verdict(SCALE, SCALE + ROUNDED, dtype)) for dtype in DTYPES] == wanted


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_through_the_scale_is_refused(dtype: torch.dtype):
    assert refused(verdict(SCALE, THROUGH_SCALE, dtype)) == {"dx"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_halves_up_are_accepted(dtype: torch.dtype):
    assert verdict(LEVEL, HALVES_UP, dtype).findings == []
