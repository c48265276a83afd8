"""Every step of every fusion ladder is the operation, and each moves or needs less than the one before, or says why not."""

from importlib import import_module
from inspect import signature

import pytest
import torch
from torch import Tensor

from equivalence_tests.harness import bounds
from equivalence_tests.harness.interpreter import interpreting
from experiments import _meter
from experiments._ladder import Ladder, Step, metered, unexplained
from experiments._work import DTYPES, experiment, operations

LADDERS = [ladder for op in operations() for ladder in experiment(op).ladders()]
DEVICE = "cpu" if interpreting() else "cuda"


def function(ladder: Ladder) -> str:
    return ladder.function or ladder.op


def truths(ladder: Ladder, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, list]]:
    """The float64 reference's values and gradients on the same rounded inputs, and the majorants of their errors."""
    reference = import_module(f"reference.{ladder.op}")
    definition, backward, majorant = (
        getattr(reference, function(ladder) + suffix) for suffix in ("", "_backward", "_majorant")
    )
    inputs = {name: tensor.cpu() for name, tensor in inputs.items()}
    given = {name: inputs[name] for name in signature(definition).parameters if name in inputs}
    wide = {name: t.double() if t.is_floating_point() else t for name, t in given.items()}
    y = definition(**wide)
    cotangent = next((inputs[name] for name in ("dy", "dh") if name in inputs), torch.ones_like(y))
    gradients = backward((cotangent.double(),), **wide)
    truth = {f"d{name}": gradient for name, gradient in gradients.items()}
    return {ladder.outputs[0]: y} | truth, majorant((cotangent,), **given)


SHAPES = {2: ["37×300", "1×1", "5×4096"], 3: ["37×40×72", "8×8×8", "130×128×264"]}  # by the number of sizes
CASES = [
    pytest.param(ladder, step, shape, id=f"{ladder.op}-{ladder.phase}-{step.name}-{shape}")
    for ladder in LADDERS
    if "." not in function(ladder)  # a method has no float64 reference; its own tests compare bits
    for step in ladder.steps
    for shape in SHAPES[ladder.metered_at.count("×") + 1]
]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("ladder", "step", "shape"), CASES)
def test_step_is_the_operation(ladder: Ladder, step: Step, shape: str, dtype: str):
    inputs = ladder.inputs(shape, DTYPES[dtype], DEVICE)
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    got = step.run(**inputs)
    baseline = ladder.steps[0].run(**before)
    truth, majorants = truths(ladder, inputs)
    for name, found, base in zip(ladder.outputs, got, baseline, strict=True):
        assert found.dtype == DTYPES[dtype]
        verdict = bounds.compare(name, found.cpu(), truth[name], base.cpu(), majorants[name])
        assert verdict.ok, str(verdict)
    assert all(torch.equal(inputs[name], before[name]) for name in inputs), "a step wrote to its input"


@pytest.mark.skipif(not interpreting(), reason="bytes are metered in the interpreter")
@pytest.mark.parametrize("ladder", LADDERS, ids=lambda ladder: f"{ladder.op}-{ladder.phase}")
def test_bytes_or_memory_fall_or_the_step_says_why(ladder: Ladder):
    block = ladder.metered_at.count("×") == 2
    records = metered(ladder, "bf16", "128×64×224" if block else "64×512")
    assert unexplained(records) == []
    assert all(r["peak_bytes"] > 0 for r in records)
    assert records[0]["times_floor"] > 3 * records[-1]["times_floor"]
    assert records[-1]["peak_bytes"] < records[0]["peak_bytes"]
    if not block:  # between the products of a block something has to be in memory
        assert records[-1]["times_floor"] < 1.3  # the partial sums of a small matrix are not nothing


@pytest.mark.skipif(not interpreting(), reason="bytes are metered in the interpreter")
def test_memory_counts_what_lives_at_one_time():
    def run(x: Tensor) -> Tensor:
        once = x + 1  # 1 KiB each, two at most beside the input
        once = once * 2
        once = once * 2
        return once[:1]

    found = _meter.metered(run, {"x": torch.zeros(256)})
    assert (found.launches, found.bytes, found.peak_bytes) == (3, 6144, 2048)


@pytest.mark.skipif(not interpreting(), reason="bytes are metered in the interpreter")
def test_a_product_counts_as_a_gpu_has_it():
    from fast._triton import matmul

    def run(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return matmul.add_matmul(None, a, b), matmul.matmul(a, b)

    a, b = torch.ones(8, 16, dtype=torch.bfloat16), torch.ones(16, 4, dtype=torch.bfloat16)
    found = _meter.metered(run, {"a": a, "b": b})
    assert (found.launches, found.peak_bytes) == (2, 8 * 4 * (4 + 2))
    assert found.bytes == 2 * 2 * (8 * 16 + 16 * 4) + 8 * 4 * (4 + 2)


def test_a_rising_step_without_a_reason_is_found():
    step = {"step": "a", "bytes": 10, "peak_bytes": 5, "rises": ""}
    again = step | {"step": "b"}
    assert unexplained([step, again]) == ["b: 10 B after 10 B, and no reason"]
    assert unexplained([step, again | {"rises": "recomputed"}]) == []
    assert unexplained([step, again | {"bytes": 11, "peak_bytes": 4}]) == []
    assert unexplained([step, again | {"bytes": 9, "peak_bytes": 6}]) == []
