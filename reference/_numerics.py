"""How an operation describes its rounding errors; equivalence_tests/harness/bounds.py turns the description into a bound."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Term:
    """One addend of an error majorant: `value` times the relative error that the listed roundings can cause.

    value:   |terms| summed, every minus made plus; float64, the shape of the output it bounds
    sums:    length of each fp32 sum on the way, once for every time its error enters
    ops:     the other fp32 roundings on the way
    rounded: dtype of every intermediate that is rounded to less than fp32 on the way, once for each time it enters
    unit:    how much of an absolute error of those intermediates reaches the output; where one of them is subnormal, rounding
             it moves it by up to half the subnormals' spacing, however small it is
    rms:     where `value` adds up intermediates that were rounded independently of each other, the root of the sum of their
             squares; None where one rounding moves all of them at once
    """

    value: Tensor
    sums: tuple[int, ...] = ()
    ops: int = 0
    rounded: tuple[torch.dtype, ...] = ()
    unit: Tensor | None = None
    rms: Tensor | None = None


def times(terms: list[Term], slope: Tensor) -> list[Term]:
    """Errors of an intermediate [*] as errors of what depends on it with derivative `slope` [*] (its magnitude counts)."""
    slope = slope.abs()

    def scaled(part: Tensor | None) -> Tensor | None:
        return None if part is None else part * slope

    return [replace(t, value=t.value * slope, unit=scaled(t.unit), rms=scaled(t.rms)) for t in terms]


def contracted(
    terms: list[Term], product: Callable[[Tensor], Tensor], squares: Callable[[Tensor], Tensor]
) -> list[Term]:
    """Errors of an intermediate as errors of a matrix product with it: `product` multiplies by the other factor's magnitudes,
    `squares` by their squares. Roundings of different elements are independent; the errors of sums are taken to be one."""

    def summed(t: Term) -> Term:
        spread = t.rms if t.rms is not None else t.value if t.rounded and not t.sums else None
        return replace(
            t,
            value=product(t.value),
            unit=None if t.unit is None else product(t.unit),
            rms=None if spread is None else squares(spread.square()).sqrt(),
        )

    return [summed(t) for t in terms]
