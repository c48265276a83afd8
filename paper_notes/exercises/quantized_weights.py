"""Starting point of the exercises in paper_notes/quantized_weights.md: right as it stands, and easily made wrong."""

import torch
from torch import Tensor

from reference._quantized_weights_groups import grouped, scale_and_zero
from reference._signature import promote


def fake_quantize(
    x: Tensor,
    *,
    bits: int = 8,
    per: str = "token",
    group: int | None = None,
    symmetric: bool = True,
    clip_gradient: bool = False,
) -> Tensor:
    """`reference.fake_quantize`, written out."""
    groups = grouped(x.to(promote(x)), group)
    scale, zero = scale_and_zero(groups.detach(), bits, symmetric)
    level = torch.round(groups.detach() * (1 / scale)) + zero
    q = level.clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    y = (q - zero) * scale
    through = groups - groups.detach()
    if clip_gradient:
        through = torch.where(level == q, through, 0.0)
    return (y + through).view(x.shape).to(x.dtype)
