"""How an operation describes its rounding errors; equivalence_tests/harness/bounds.py turns the description into a bound."""

from dataclasses import dataclass

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
    """

    value: Tensor
    sums: tuple[int, ...] = ()
    ops: int = 0
    rounded: tuple[torch.dtype, ...] = ()
    unit: Tensor | None = None
