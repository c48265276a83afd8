"""How far a result may lie from the truth, derived from the roundings that the reference admits to.

Elementwise. A result that is computed in fp32 and rounded once to the output's dtype obeys

    |got − truth| ≤ u_out·|truth| + (1 + u_out) · Σ_terms κ/(1 − κ) · value + underflow

where the terms are the operation's majorant (reference._numerics.Term) and κ adds up the roundings on the way:
    each fp32 sum of n addends    γ̃(n) = min(n, 8√n) · 2⁻²⁴
    each other fp32 operation     2⁻²⁴
    each rounding to less         u of that dtype
1/(1 − κ) covers every product of these: Π(1 + δᵢ) − 1 ≤ κ/(1 − κ) (Higham, Accuracy and Stability, lemma 3.1).
n·u is the bound of any order of summation. For large n nothing comes near it: with rounding errors of mean zero the error
exceeds λ√n·u with a probability of 2·exp(−λ²/2) at most (Higham & Mary 2019, https://doi.org/10.1137/18M1226312); λ = 8
makes that 3·10⁻¹⁴ an element.

Underflow. What is smaller than the smallest normal number of fp32 or bf16 may be flushed to zero, as GPUs do; fp16 has to
round to its subnormals. An intermediate that is rounded underflows the same way; Term.unit says how much of that arrives.
Overflow. A truth that rounds to ±inf (or lies within the bound of doing so) may be ±inf or the largest finite number of that
sign. NaN is right where the truth is NaN, and nowhere else; so is ±inf.

Normwise. Worst-case bounds add u's up; the errors themselves behave like random numbers. Rounding to nearest moves a number
by δ·|number| with δ in ±u, of variance u²/3 at most, so with n ≥ 1024 elements

    ‖got − truth‖ ≤ max(1.5 · ‖baseline − truth‖,  ‖fp32 part + √(Σ (u·value or rms)² / 3) + underflow‖)

where rms takes value's place in terms that add up intermediates rounded one by one (Term.rms), and the baseline is the
reference in the working dtype. The right side is what lets bf16 results be told from × 1.01 of
themselves although three roundings in the worst case add up to more than that.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from reference._numerics import Term

LARGE = 1024
_FP32 = 2.0**-24
_LAMBDA = 8


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to nearest."""
    return torch.finfo(dtype).eps / 2


def gamma(n: int) -> float:
    """Relative error of an fp32 sum of n addends against the sum of their magnitudes."""
    return min(n, _LAMBDA * n**0.5) * _FP32


def underflow(dtype: torch.dtype) -> float:
    """Absolute error that a result near zero may have."""
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps / 2 if dtype is torch.float16 else info.smallest_normal


def factor(term: Term) -> float:
    """κ/(1 − κ) of the term."""
    kappa = _fp32(term) + sum(unit_roundoff(d) for d in term.rounded)
    return kappa / (1 - kappa)


def subnormal(term: Term) -> Tensor | float:
    """What the underflow of the term's rounded intermediates may add."""
    return 0.0 if term.unit is None else term.unit * sum(underflow(d) for d in set(term.rounded))


def elementwise(truth: Tensor, terms: list[Term], dtype: torch.dtype) -> Tensor:
    """The largest error allowed of each element; truth float64, dtype that of the output."""
    u = unit_roundoff(dtype)
    return (
        truth.abs() * u
        + sum((factor(t) * t.value + subnormal(t) for t in terms), torch.zeros(())) * (1 + u)
        + underflow(dtype)
    )


def typical(truth: Tensor, terms: list[Term], dtype: torch.dtype) -> Tensor:
    """The root mean square error to expect of each element, with the fp32 part at its worst."""
    variance = truth.square() * unit_roundoff(dtype) ** 2
    fp32 = torch.full_like(truth, underflow(dtype))
    for term in terms:
        fp32 = fp32 + _fp32(term) / (1 - _fp32(term)) * term.value + subnormal(term)
        spread = term.value if term.rms is None else term.rms
        variance = variance + sum(unit_roundoff(d) ** 2 for d in term.rounded) * spread.square()
    return fp32 + (variance / 3).sqrt()


def _fp32(term: Term) -> float:
    return sum(gamma(n) for n in term.sums) + term.ops * _FP32


@dataclass(frozen=True)
class Wrong:
    """The first element outside its bound."""

    index: tuple[int, ...]
    truth: float
    got: float
    bound: float

    def __str__(self) -> str:
        at, error = list(self.index), abs(self.got - self.truth)
        return f"element {at}: truth {self.truth:.9g}, got {self.got:.9g}, error {error:.3g}, allowed {self.bound:.3g}"


@dataclass(frozen=True)
class Norms:
    """Mean squares over the n finite elements of one output, each relative to the truth's; they add up over cases."""

    n: int
    error: float
    baseline: float
    allowed: float
    zeros: float
    scaled: float

    def __add__(self, other: "Norms") -> "Norms":
        n = self.n + other.n
        mean = ((getattr(self, f) * self.n + getattr(other, f) * other.n) / max(1, n) for f in _MEANS)
        return Norms(n, *mean)

    @property
    def limit(self) -> float:
        return max(2.25 * self.baseline, self.allowed)

    @property
    def ok(self) -> bool:
        return self.n < LARGE or self.error <= self.limit

    @property
    def over_bound(self) -> float:
        return _ratio(self.error, self.limit) ** 0.5

    @property
    def over_baseline(self) -> float:
        """‖got − truth‖ ÷ ‖baseline − truth‖."""
        return _ratio(self.error, self.baseline) ** 0.5

    @property
    def sees(self) -> bool:
        """Whether an error of 1 % would be too much; else these elements say nothing about smaller ones."""
        return self.scaled > self.limit

    def rejects(self, planted: str) -> bool:
        """Whether `zeros` or `scaled` (the result × 1.01) would have failed here."""
        return self.n >= LARGE and getattr(self, planted) > self.limit


_MEANS = ("error", "baseline", "allowed", "zeros", "scaled")
NOTHING = Norms(0, 0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Verdict:
    """One output of one case. ratio: worst error ÷ bound. rejects: which planted results the same bounds refuse;
    exempt: which they cannot refuse on this case because the truth is zero or within the bound."""

    output: str
    ratio: float
    norms: Norms
    wrong: Wrong | None
    rejects: frozenset[str]
    exempt: frozenset[str]

    @property
    def ok(self) -> bool:
        return self.wrong is None and self.norms.ok

    def __str__(self) -> str:
        if self.wrong:
            return f"{self.output} {self.wrong}"
        times = f"{self.norms.over_bound:.3g} times what is allowed"
        return f"{self.output}: the norm of the error is {times}, though no element is outside its own bound"


def compare(
    output: str,
    got: Tensor,
    truth: Tensor,
    baseline: Tensor,
    terms: list[Term],
    unused: bool = False,
    repeated: int = 1,
) -> Verdict:
    """Judge one output (any shape, got.dtype is the output's) against the float64 truth.

    unused: it is a gradient, and the loss does not use every output. At a singular point (a row of zeros, eps = 0) what flows
    back from such an output is 0 · ∞: autograd leaves it out, a kernel may not, and elements without a finite majorant are
    not judged. Otherwise a majorant that is not finite where the truth is raises ValueError.
    repeated: how many rows may be equal, and so rounded alike; the norms count as many elements for one.
    """
    dtype, got, baseline = got.dtype, got.detach().double(), baseline.detach().double()
    bound = elementwise(truth, terms, dtype)
    largest = torch.finfo(dtype).max
    error = _error(got, truth, bound, largest)
    defined = truth.isfinite() & (truth.abs() < largest)
    singular = defined & ~bound.isfinite()
    if singular.any() and not unused:
        raise ValueError(f"the majorant of {output} is not finite where the truth is")
    defined &= ~singular
    right = singular | torch.where(
        truth.isfinite(), error <= bound, (got == truth) | (got.isnan() & truth.isnan())
    )
    power = {"zeros": truth.abs(), "scaled": (1.01 * got - truth).abs()}
    usable = defined & got.isfinite() & baseline.isfinite()
    norms = _norms(usable, truth, error, baseline, typical(truth, terms, dtype), power)
    norms = replace(norms, n=-(-norms.n // repeated))
    rejects = {name for name, e in power.items() if (defined & (e > bound)).any() or norms.rejects(name)}
    hopeless = {
        name
        for name, part in (("zeros", 1.0), ("scaled", 0.01))
        if not (defined & (part * truth.abs() > 2.1 * bound)).any()
    }
    return Verdict(
        output=output,
        ratio=float((error / bound)[usable].max()) if usable.any() else 0.0,
        norms=norms,
        wrong=_first(~right, truth, got, bound),
        rejects=frozenset(rejects),
        exempt=frozenset(hopeless - rejects),
    )


def _error(got: Tensor, truth: Tensor, bound: Tensor, largest: float) -> Tensor:
    """|got − truth|, 0 for an overflow that is allowed, inf where only one of the two is infinite."""
    error = torch.where(got == truth, 0.0, (got - truth).abs())
    overflow = (
        (truth.abs() + bound > largest)
        & (got.abs() >= largest)
        & (got.sign() == truth.sign())
        & truth.isfinite()
    )
    return torch.where(overflow, 0.0, error)


def _norms(
    usable: Tensor, truth: Tensor, error: Tensor, baseline: Tensor, allowed: Tensor, power: dict[str, Tensor]
) -> Norms:
    n = int(usable.sum())
    scale = float(_mean(truth, usable)) if n else 0.0
    # Without a truth to measure by, an output says nothing about relative errors; its elements were judged one by one.
    if scale == 0.0:
        return NOTHING
    parts = (error, baseline - truth, allowed, power["zeros"], power["scaled"])
    return Norms(n, *(float(_mean(part, usable)) / scale for part in parts))


def _mean(part: Tensor, usable: Tensor) -> Tensor:
    return torch.where(usable, part, 0.0).square().sum() / usable.sum()


def _first(outside: Tensor, truth: Tensor, got: Tensor, bound: Tensor) -> Wrong | None:
    if not outside.any():
        return None
    at = tuple(int(i) for i in outside.nonzero()[0])
    return Wrong(at, float(truth[at]), float(got[at]), float(bound[at]))


def _ratio(error: float, limit: float) -> float:
    return error / limit if limit else (0.0 if error == 0.0 else float("inf"))
