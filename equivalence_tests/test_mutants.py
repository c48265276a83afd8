"""Every planted bug of every operation is refused; and the machinery that plants them works on functions, methods and kernels."""

import importlib
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

from equivalence_tests.harness.cases import Case
from equivalence_tests.harness.interpreter import interpreting
from equivalence_tests.harness.mutants import Mutant, killed, planted
from equivalence_tests.harness.operations import Operation, operations, suite
from equivalence_tests.harness.peers import implementation
from equivalence_tests.harness.strategies import PROFILES, sample

DEVICE = "cpu" if interpreting() else "cuda"
MUTANTS = [
    (o, m) for o in operations() for m in getattr(suite(o.op), "MUTANTS", ()) if m.of in (None, o.function)
]


def cases(mutant: Mutant, operation: Operation) -> list[Case]:
    """Examples and drawn cases in one dtype, those with many tensors first."""
    dtype, function = mutant.dtypes[-1], operation.function
    found = [
        c for c in getattr(suite(operation.op), "EXAMPLES", ()) if (c.function, c.dtype) == (function, dtype)
    ]
    found += islice(sample(operation, dtype, PROFILES["ci"], seed=0), PROFILES["ci"].examples)
    return sorted(found, key=lambda c: -sum(spec is not None for _, spec in c.tensors))


@pytest.mark.parametrize(("operation", "mutant"), MUTANTS, ids=[f"{o.function}-{m.name}" for o, m in MUTANTS])
def test_mutant_is_killed(operation, mutant):
    dead, reason, _ = killed(mutant, implementation("fast", operation), cases(mutant, operation), DEVICE)
    assert dead, f"{mutant.name} lives: no case refused {mutant.old!r} → {mutant.new!r}"
    assert reason


def test_every_operation_has_mutants():
    assert {o.op for o in operations()} == {o.op for o, _ in MUTANTS}


SOURCE = """
import torch, triton
import triton.language as tl

def add(a, b):
    return a + b

held = add

class Adder:
    @staticmethod
    def apply(a, b):
        return a + b

@triton.jit
def _one(x):
    return x + 1

@triton.jit
def _kernel(X, Y, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(Y + offs, _one(tl.load(X + offs)))

def run(x):
    y = torch.empty_like(x)
    _kernel[(1,)](x, y, x.numel())
    return y
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A module with functions and kernels of its own, in the package fast, where kernels are looked for."""
    file = tmp_path / "planted_here.py"
    file.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("fast.planted_here", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fast.planted_here", module)
    spec.loader.exec_module(module)
    return module


def test_a_function_is_mutated_wherever_it_is_held(module):
    with planted(Mutant("m", "fast.planted_here:add", "a + b", "a - b")):
        assert module.add(5, 3) == module.held(5, 3) == 2
    assert module.add(5, 3) == module.held(5, 3) == 8


def test_a_method_is_mutated(module):
    with planted(Mutant("m", "fast.planted_here:Adder.apply", "a + b", "a - b")):
        assert module.Adder.apply(5, 3) == 2
    assert module.Adder.apply(5, 3) == 8


@pytest.mark.parametrize(
    ("function", "old", "new"), [("_one", "x + 1", "x + 2"), ("_kernel", "(tl.load(", "(1 + tl.load(")]
)
def test_a_kernel_and_its_helper_are_mutated(module, function, old, new):
    x = torch.arange(16.0, device=DEVICE)
    assert torch.equal(module.run(x), x + 1)
    with planted(Mutant("m", f"fast.planted_here:{function}", old, new)):
        assert torch.equal(module.run(x), x + 2)
    assert torch.equal(module.run(x), x + 1)


@pytest.mark.parametrize(
    ("where", "old", "complaint"),
    [
        ("add", "c", "found 0"),
        ("add", "a", "found 3"),
        ("gone", "a", "has no gone"),
        ("Adder.gone", "a", "has no Adder.gone"),
    ],
)
def test_a_mutant_that_does_not_fit_its_source_is_an_error(module, where, old, complaint):
    with (
        pytest.raises(ValueError, match=complaint),
        planted(Mutant("m", f"fast.planted_here:{where}", old, "")),
    ):
        pytest.fail("planted")
