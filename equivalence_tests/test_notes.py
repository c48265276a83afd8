"""The exercises of paper_notes/rms_norm.md have the solutions that the note gives."""

import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from equivalence_tests.harness.operations import Operation
from equivalence_tests.harness.oracle import Judgement, Sample, judge

NOTES = Path(__file__).resolve().parent.parent / "paper_notes"
RIGHT = (NOTES / "exercises" / "rms_norm.py").read_text()
CONSTANT_R, CHUNKED_DW = (
    textwrap.dedent(block)
    for block in re.findall(r"```python\n(.*?)```", (NOTES / "rms_norm.md").read_text(), re.DOTALL)
)
RETURN = '        return grads["x"]'


def implementation(old: str = "", new: str = "") -> Callable:
    """The exercises' starting point with one change."""
    assert not old or RIGHT.count(old) == 1
    names: dict[str, Callable] = {}
    exec(RIGHT.replace(old, new) if old else RIGHT, names)
    return names["rms_norm"]


def inserted(block: str) -> Callable:
    return implementation(RETURN, textwrap.indent(block, " " * 8) + RETURN)


def verdict(
    impl: Callable, M: int, N: int, dtype: torch.dtype, weight_dtype: torch.dtype | None = None
) -> Judgement:
    generator = torch.Generator().manual_seed(0)
    x, dy, w = (torch.randn(size, generator=generator) for size in ((M, N), (M, N), (N,)))
    tensors = (
        x.to(dtype),
        w.to(weight_dtype or dtype),
        dy.to(torch.promote_types(dtype, weight_dtype or dtype)),
    )
    return judge(Sample.of_tensors(Operation("rms_norm", "rms_norm"), tensors[:2], {}, tensors[2:]), impl)


def refused(judgement: Judgement) -> set[str]:
    return {name for name, found in judgement.verdicts.items() if not found.ok}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_starting_point_is_right(dtype: torch.dtype):
    assert verdict(implementation(), 64, 1024, dtype).findings == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("M", "N"), [(8, 64), (4, 16384), (2, 131072)])
def test_a_constant_r_is_refused_in_dx_alone(M: int, N: int, dtype: torch.dtype):
    assert refused(verdict(inserted(CONSTANT_R), M, N, dtype)) == {"dx"}


def test_a_wide_row_hides_a_constant_r_from_norms():
    dx = verdict(inserted(CONSTANT_R), 2, 131072, torch.bfloat16).verdicts["dx"]
    assert dx.norms.ok
    assert dx.wrong is not None


def test_one_rounding_less_is_accepted_and_its_dtype_is_not():
    once = implementation("**options)\n\n    @static", '**(options | {"casting": "gemma"}))\n\n    @static')
    assert verdict(once, 64, 1024, torch.bfloat16).findings == []
    assert not verdict(once, 64, 1024, torch.bfloat16, weight_dtype=torch.float32).ok


def test_a_sum_in_bf16_is_refused_and_one_in_fp32_is_not():
    chunked = inserted(CHUNKED_DW)
    assert refused(verdict(chunked, 64, 1024, torch.bfloat16)) == {"dweight"}
    assert verdict(chunked, 64, 1024, torch.bfloat16).verdicts["dweight"].norms.ok
    assert not verdict(chunked, 2048, 1024, torch.bfloat16).verdicts["dweight"].norms.ok
    assert verdict(chunked, 2048, 1024, torch.float32).findings == []


SWIGLU = (NOTES / "exercises" / "swiglu.py").read_text()
BOUND, ACTIVATED, OVERWRITTEN = (
    textwrap.dedent(block)
    for block in re.findall(r"```python\n(.*?)```", (NOTES / "swiglu.md").read_text(), re.DOTALL)
)
BEFORE_RETURN, RESULT = (
    '        return grads["gate"]',
    "        return definition(gate, up, **options)\n\n    @static",
)


def gated(
    old: str, new: str, dtype: torch.dtype, limit: float | None = None, scale: float = 1.0
) -> Judgement:
    """The verdict on the second note's starting point with one change."""
    assert not old or SWIGLU.count(old) == 1
    names: dict[str, Callable] = {}
    exec(SWIGLU.replace(old, new) if old else SWIGLU, names)
    generator = torch.Generator().manual_seed(0)
    gate, up, dh = (torch.randn(64, 64, generator=generator).mul(scale).to(dtype) for _ in range(3))
    operation = Operation("swiglu", "swiglu")
    return judge(Sample.of_tensors(operation, (gate, up), {"limit": limit}, (dh,)), names["swiglu"])


def before_return(block: str) -> tuple[str, str]:
    return BEFORE_RETURN, textwrap.indent(block, " " * 8) + BEFORE_RETURN


def test_a_forgotten_bound_shows_where_something_is_bounded():
    assert gated("", "", torch.float32, limit=0.5).findings == []
    assert refused(gated(*before_return(BOUND), torch.float32, limit=0.5)) == {"dgate", "dup"}
    assert gated(*before_return(BOUND), torch.float32, limit=7.0).findings == []


def test_a_rounded_activation_is_refused_in_16_bits_only():
    block = textwrap.indent(ACTIVATED, " " * 8) + "\n    @static"
    assert refused(gated(RESULT, block, torch.bfloat16)) == {"h"}
    assert refused(gated(RESULT, block, torch.float16)) == {"h"}
    assert gated(RESULT, block, torch.float32).findings == []


def test_gradients_over_inputs_are_refused_though_they_are_right():
    judgement = gated(*before_return(OVERWRITTEN), torch.float32)
    assert {"input written", "second backward"} <= judgement.kinds
    assert judgement.verdicts["dgate"].ok
