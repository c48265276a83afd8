"""What numbers a test tensor holds, by tag. None is all ones, which would hide a missing factor."""

from collections.abc import Callable

import torch
from torch import Tensor

# 2^±k of tiny and huge numbers: far from 1, yet squares and third powers stay finite in fp32; fp16 itself ends at 65504.
EXPONENT = {torch.float32: 30, torch.bfloat16: 30, torch.float16: 10}


def normal(z: Tensor, exponent: int) -> Tensor:
    return z


def mean(z: Tensor, exponent: int) -> Tensor:
    """Far from zero on average: what is formed as a difference cancels."""
    return z + min(8, 2**exponent)


def tiny(z: Tensor, exponent: int) -> Tensor:
    return z * 2.0**-exponent


def huge(z: Tensor, exponent: int) -> Tensor:
    return z * 2.0**exponent


def zero_rows(z: Tensor, exponent: int) -> Tensor:
    """Every third row (or element of a vector) zero."""
    rows = z.view(-1, z.shape[-1]) if z.dim() > 1 else z
    rows[::3] = 0
    return z


def outlier(z: Tensor, exponent: int) -> Tensor:
    """One element of each row a thousand times the others, as real activations have."""
    z[..., z.shape[-1] // 2] *= min(1000, 2**exponent)
    return z


def constant(z: Tensor, exponent: int) -> Tensor:
    return z.flatten()[0].expand_as(z)


def signs(z: Tensor, exponent: int) -> Tensor:
    """±½: exact in every dtype."""
    return z.sign() / 2


CONTENTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    f.__name__: f for f in (normal, mean, outlier, zero_rows, signs, constant, tiny, huge)
}
# What a weight may hold: of mean zero and one size, so that products with it keep the other factor's.
OF_WEIGHTS = ("normal", "normal", "normal", "signs", "zero_rows")
# Drawn on the device itself past this size: slower to move than to make.
_LARGE = 2**24


def values(
    content: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int,
    exponent: int,
    scale: float = 1.0,
) -> Tensor:
    """Random numbers [shape] of `dtype`, `scale` times those of the content. Up to 2²⁴ elements the same on every device."""
    numel = torch.Size(shape).numel()
    at = device if numel > _LARGE else "cpu"
    generator = torch.Generator(at).manual_seed(seed)
    z = torch.randn(shape or (1,), generator=generator, device=at)
    z = CONTENTS[content](z, exponent) * scale if numel else z
    return z.reshape(shape).to(device=device, dtype=dtype)
