"""Every step of every fusion ladder is the operation, and each costs less than the one before, or says why not."""

from importlib import import_module

import pytest
import torch
from torch import Tensor

from equivalence_tests.harness import bounds
from equivalence_tests.harness.interpreter import interpreting
from experiments._ladder import Ladder, Step, metered, unexplained
from experiments._work import DTYPES, experiment, operations

LADDERS = [ladder for op in operations() for ladder in experiment(op).ladders()]
STEPS = [
    pytest.param(ladder, step, id=f"{ladder.op}-{ladder.phase}-{step.name}")
    for ladder in LADDERS
    for step in ladder.steps
]
DEVICE = "cpu" if interpreting() else "cuda"


def truths(ladder: Ladder, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, list]]:
    """The float64 reference's values and gradients on the same rounded inputs, and the majorants of their errors."""
    reference = import_module(f"reference.{ladder.op}")
    inputs = {name: tensor.cpu() for name, tensor in inputs.items()}
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    args = [name for name in ("x", "weight") if name in inputs]
    cotangents = (inputs.get("dy", torch.ones_like(inputs["x"])),)
    y = getattr(reference, ladder.op)(*(wide[name] for name in args))
    gradients = getattr(reference, f"{ladder.op}_backward")(
        (cotangents[0].double(),), *(wide[name] for name in args)
    )
    majorants = getattr(reference, f"{ladder.op}_majorant")(cotangents, *(inputs[name] for name in args))
    return {"y": y} | {f"d{name}": gradient for name, gradient in gradients.items()}, majorants


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("shape", ["37×300", "1×1", "5×4096"])
@pytest.mark.parametrize(("ladder", "step"), STEPS)
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
def test_bytes_fall_or_the_step_says_why(ladder: Ladder):
    records = metered(ladder, "bf16", "64×512")
    assert unexplained(records) == []
    assert records[-1]["times_floor"] < 1.3  # the partial sums of a small matrix are not nothing
    assert records[0]["times_floor"] > 3 * records[-1]["times_floor"]


def test_a_rising_step_without_a_reason_is_found():
    steps = [{"step": "a", "bytes": 10, "rises": ""}, {"step": "b", "bytes": 10, "rises": ""}]
    assert unexplained(steps) == ["b: 10 B after 10 B, and no reason"]
    assert unexplained([steps[0], steps[1] | {"rises": "recomputed"}]) == []
