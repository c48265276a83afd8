"""The arithmetic of fake_quantize, and what it refuses; reference/quantized_weights.py has the formulas."""

import torch
from torch import Tensor

from reference._signature import check

TINY = 2.0**-126  # the smallest scale: a group of zeros gets it


def grouped(x: Tensor, group: int | None) -> Tensor:
    """x [*, N] as [*, N / group, group]; whole rows without a group."""
    return x.unflatten(-1, (-1, group or x.shape[-1]))


def quantised(groups: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """y of groups [*, L], and where the clamp changed nothing."""
    lo, hi = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    scale, zero = scale_and_zero(groups, bits, symmetric)
    level = torch.round(groups * (1 / scale)) + zero
    q = level.clamp(lo, hi)
    return (q - zero) * scale, level == q


def scale_and_zero(groups: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """The step of each group and the level that stands for 0, [*, 1]."""
    if symmetric:
        scale = _divided(groups.abs().amax(-1, keepdim=True), 2 ** (bits - 1) - 0.5)
        return scale.clamp(min=TINY), torch.zeros_like(scale)
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    scale, lo = _divided(high - low, 2**bits - 1).clamp(min=TINY), -(2 ** (bits - 1))
    return scale, (lo - torch.round(low / scale)).clamp(lo, -lo - 1)


def _divided(x: Tensor, number: float) -> Tensor:
    """x / number, rounded once. On a GPU torch multiplies by the reciprocal of a Python number, which is not that."""
    return x / torch.full_like(x, number)


def check_fake_quantize(
    function: str,
    x: Tensor,
    bits: int,
    per: str,
    group: int | None,
    symmetric: bool,
    clip_gradient: bool,
    name: str = "x",
) -> None:
    """Raise the error that names the argument; shared by both trees. name: what the caller calls its tensor."""
    N = check(function, {name: (x, "* N")})["N"]
    if N == 0:
        raise ValueError(f"{function}: {name} must have a last dimension of at least 1, got {list(x.shape)}")
    for option, value in (("bits", bits), ("group", 1 if group is None else group)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{function}: {option} must be an int, got {value!r}")
    if not 2 <= bits <= 8:
        raise ValueError(f"{function}: bits must be 2 to 8, got {bits}")
    if per not in ("token", "channel", "group"):
        raise ValueError(f"{function}: per must be 'token', 'channel' or 'group', got {per!r}")
    if (per == "group") != (group is not None):
        raise ValueError(
            f"{function}: group must be given with per='group' and only then, got {group!r} with {per!r}"
        )
    if group is not None and (group < 1 or N % group):
        raise ValueError(f"{function}: group must divide {name}'s last dimension {N}, got {group}")
    for option, value in (("symmetric", symmetric), ("clip_gradient", clip_gradient)):
        if not isinstance(value, bool):
            raise TypeError(f"{function}: {option} must be a bool, got {value!r}")
