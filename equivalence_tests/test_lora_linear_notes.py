"""The exercises of paper_notes/lora_linear.md have the solutions that it prints."""

import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from equivalence_tests.harness.operations import operation
from equivalence_tests.harness.oracle import Judgement, Sample, judge

NOTES = Path(__file__).resolve().parent.parent / "paper_notes"
START = (NOTES / "exercises" / "lora_linear.py").read_text()
UNMASKED, NARROW, UNSCALED = (
    textwrap.dedent(block)
    for block in re.findall(r"```python\n(.*?)```", (NOTES / "lora_linear.md").read_text(), re.DOTALL)
)
NAMES = '        names = ("x"'
RESULT = "        return definition(x, weight, lora_a, lora_b, bias=bias, magnitude=magnitude, **options)\n"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def verdict(
    old: str,
    new: str,
    dtype: torch.dtype,
    adapters: torch.dtype = torch.float32,
    fresh: bool = False,
    **options,
) -> Judgement:
    """On the starting point with one change; fresh: B = 0."""
    assert not old or START.count(old) == 1
    names: dict[str, Callable] = {}
    exec(START.replace(old, new) if old else START, names)
    generator = torch.Generator().manual_seed(0)
    x, weight, dy = (torch.randn(64, 64, generator=generator).to(dtype) for _ in range(3))
    a, b = (torch.randn(size, generator=generator).to(adapters) for size in ((16, 64), (64, 16)))
    b = torch.zeros_like(b) if fresh else b
    sample = Sample.of_tensors(operation("lora_linear"), (x, weight, a, b), options, (dy,))
    return judge(sample, names["lora_linear"])


def refused(judgement: Judgement) -> set[str]:
    return {name for name, found in judgement.verdicts.items() if not found.ok}


def before_names(block: str) -> tuple[str, str]:
    return NAMES, textwrap.indent(block, " " * 8) + NAMES


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_starting_point_is_right(dtype):
    for options in ({}, {"dropout_p": 0.3, "seed": 5}, {"scale": 2.0, "activation": "silu"}):
        assert verdict("", "", dtype, **options).findings == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mask_forgotten_in_dx_shows_in_dx_alone(dtype):
    assert refused(verdict(*before_names(UNMASKED), dtype, dropout_p=0.3, seed=5)) == {"dx"}
    assert verdict(*before_names(UNMASKED), dtype).findings == []


def test_rounded_adapters_are_refused_where_they_had_more_digits():
    change = RESULT, textwrap.indent(NARROW, " " * 8)
    assert refused(verdict(*change, torch.bfloat16)) == {"y"}
    assert refused(verdict(*change, torch.float16)) == {"y"}
    assert verdict(*change, torch.float32).findings == []
    assert verdict(*change, torch.bfloat16, adapters=torch.bfloat16).findings == []


def test_a_fresh_adapter_hides_a_forgotten_scale():
    change = before_names(UNSCALED)
    assert refused(verdict(*change, torch.bfloat16, scale=2.0)) == {"dlora_a"}
    assert verdict(*change, torch.bfloat16).findings == []
    assert verdict(*change, torch.bfloat16, fresh=True, scale=2.0).findings == []
