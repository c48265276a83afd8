"""Error majorant of fake_quantize: what fp32 roundings can do to a value, and to the level that it falls on.

With scale, 1/scale and their products rounded, x · (1/scale) is off by 3 roundings of it, at most 2^bits levels; a step of
an asymmetric group has one more. Where that much carries it across a half, the level is another one: one whole scale is in
doubt, and with clip_gradient the gradient. The element of largest magnitude of a symmetric group lies at ±(2^(bits−1) − ½)
levels, always: a negative one is in doubt; a positive one is clamped whichever way it is rounded, which leaves its gradient
in doubt.
"""

import torch
from torch import Tensor

from reference._numerics import Term
from reference._quantized_weights_groups import grouped, quantised, scale_and_zero

_FP32 = 2.0**-24
_ROUNDINGS = 4


def fake_quantize_majorant(
    cotangents: tuple[Tensor, ...],
    x: Tensor,
    *,
    bits: int = 8,
    per: str = "token",
    group: int | None = None,
    symmetric: bool = True,
    clip_gradient: bool = False,
) -> dict[str, list[Term]]:
    """Error majorants of "y" and "dx"; inputs in float64, dtypes as in the call."""
    groups = grouped(x.double(), group)
    scale, zero = scale_and_zero(groups, bits, symmetric)
    y, _ = quantised(groups, bits, symmetric)
    t = groups * (1 / scale)
    crossing = _doubtful(t, bits)
    # At the top of the range both neighbours are clamped to one level.
    moved = crossing & (torch.floor(t) + zero < 2 ** (bits - 1) - 1)
    if not symmetric:
        # Another zero point moves both ends of the range by a level, and what lies there with them.
        edge = (torch.round(t) + zero + 0.5).abs() >= 2 ** (bits - 1) - 1.5
        edge = edge & _doubtful(groups.amin(-1, keepdim=True).clamp(max=0) / scale, bits)
        crossing, moved = crossing | edge, moved | edge
    dy = cotangents[0].double().abs()
    # One operation's κ/(1 − κ), times 2²⁴, is 1 and a little.
    step = Term((moved * scale / _FP32).view(x.shape), ops=1)
    across = [Term(dy * crossing.view(x.shape) / _FP32, ops=1)] if clip_gradient else []
    return {"y": [Term(y.abs().view(x.shape), ops=3), step], "dx": across}


def _doubtful(t: Tensor, bits: int) -> Tensor:
    """Where rounding t to an integer could go either way."""
    return (t - torch.floor(t) - 0.5).abs() <= _ROUNDINGS * _FP32 * 2**bits
