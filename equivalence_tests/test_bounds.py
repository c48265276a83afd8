"""Bounds: the formulas against their definition, and the edges of the number range."""

import math

import pytest
import torch

from equivalence_tests.harness.bounds import (
    NOTHING,
    Norms,
    compare,
    elementwise,
    factor,
    gamma,
    typical,
    underflow,
)
from reference._numerics import Term

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
INF, NAN = math.inf, math.nan


def judged(got: list[float], truth: list[float], dtype: torch.dtype = F32, terms: list[Term] | None = None):
    return compare(
        "y",
        torch.tensor(got).to(dtype),
        torch.tensor(truth, dtype=torch.float64),
        torch.tensor(got),
        terms or [],
    )


def test_gamma_is_the_deterministic_bound_for_short_sums_and_the_probabilistic_one_for_long():
    assert gamma(64) == 64 * 2**-24
    assert gamma(10_000) == 8 * 100 * 2**-24


def test_a_term_adds_up_its_roundings():
    value = torch.tensor([2.0], dtype=torch.float64)
    term = Term(value, sums=(10, 10), ops=3, rounded=(BF16,))
    kappa = 23 * 2**-24 + 2**-8
    assert factor(term) == pytest.approx(kappa / (1 - kappa))
    bound = elementwise(value, [term], BF16) - underflow(BF16)
    assert float(bound) == pytest.approx(2 * 2**-8 + 2 * kappa / (1 - kappa) * (1 + 2**-8))


def test_typical_errors_are_smaller_than_the_worst():
    value = torch.rand(100, dtype=torch.float64)
    terms = [Term(value, sums=(64,), ops=2, rounded=(BF16, BF16))]
    assert (typical(value, terms, BF16) < elementwise(value, terms, BF16)).all()


def test_rounding_to_nearest_never_leaves_the_bound_and_one_unit_more_does():
    for dtype in (F32, BF16, F16):
        truth = torch.logspace(-3, 3, 5000, dtype=torch.float64)
        got = truth.to(dtype)
        assert compare("y", got, truth, got, []).ok
        bits = got.view(torch.int32 if dtype is F32 else torch.int16)
        assert not compare("y", (bits + 1).view(dtype), truth, got, []).ok


@pytest.mark.parametrize(
    ("got", "truth", "dtype", "right"),
    [
        (NAN, 1.0, F32, False),
        (NAN, NAN, F32, True),
        (1.0, NAN, F32, False),
        (INF, INF, F32, True),
        (-INF, INF, F32, False),
        (3e38, INF, F32, False),
        (NAN, INF, F32, False),
        (INF, 1e300, F32, True),
        (-INF, 1e300, F32, False),
        (INF, 1e30, F32, False),
        (INF, 65520.0, F16, True),
        (65504.0, 65520.0, F16, True),
        (65504.0, 1e9, F16, True),
        (65472.0, 1e9, F16, False),
        (INF, 65000.0, F16, False),
        (0.0, 1e-39, F32, True),
        (0.0, 1e-37, F32, False),
        (0.0, 2**-26, F16, True),
        (0.0, 2**-20, F16, False),
    ],
)
def test_edges_of_the_number_range(got: float, truth: float, dtype: torch.dtype, right: bool):
    assert judged([1.0, got], [1.0, truth], dtype).ok is right


def test_the_first_wrong_element_is_named():
    verdict = judged([1.0, 2.0, 7.0, 9.0], [1.0, 2.0, 3.0, 4.0])
    assert verdict.wrong.index == (2,)
    assert (verdict.wrong.truth, verdict.wrong.got) == (3.0, 7.0)
    assert "y element [2]: truth 3, got 7" in str(verdict)


def test_planted_results_are_refused_or_exempt():
    plain = judged([1.0, 2.0], [1.0, 2.0])
    assert plain.rejects == {"zeros", "scaled"}
    assert not plain.exempt
    zero = judged([0.0, 0.0], [0.0, 0.0])
    assert zero.exempt == {"zeros", "scaled"}
    value = torch.tensor([1e3], dtype=torch.float64)
    loose = compare(
        "y", torch.tensor([1.0]), value / 1e3, torch.tensor([1.0]), [Term(value, rounded=(BF16,))]
    )
    assert loose.exempt == {"zeros", "scaled"}


def test_a_majorant_that_is_not_finite_is_an_error():
    with pytest.raises(ValueError, match="majorant of y is not finite"):
        judged([1.0], [1.0], terms=[Term(torch.tensor([INF], dtype=torch.float64), ops=1)])


def test_a_singular_element_of_a_gradient_is_not_judged_where_an_output_is_unused():
    truth = torch.tensor([1.0, 1.0], dtype=torch.float64)
    terms = [Term(torch.tensor([1.0, NAN], dtype=torch.float64), ops=1)]
    for got, right in (([1.0, NAN], True), ([1.0, 1.0], True), ([2.0, 1.0], False), ([NAN, 1.0], False)):
        assert compare("dx", torch.tensor(got), truth, torch.tensor(got), terms, unused=True).ok is right


def test_nothing_is_judged_of_an_empty_output():
    verdict = judged([], [])
    assert verdict.ok
    assert verdict.norms == NOTHING


def test_norms_add_up_over_cases_and_judge_when_there_are_enough():
    careless = Norms(n=600, error=4.0, baseline=1.0, allowed=1.0, zeros=100.0, scaled=9.0)
    careful = Norms(n=600, error=1.0, baseline=1.0, allowed=1.0, zeros=100.0, scaled=9.0)
    assert careless.ok, "600 elements are too few"
    assert not (careless + careless).ok
    assert (careful + careful).ok
    both = careless + careful
    assert both.error == pytest.approx(2.5)
    assert both.over_baseline == pytest.approx(2.5**0.5)
    assert both.rejects("zeros")
    assert both.rejects("scaled")
