"""Dropout masks from a counter-based generator, so that a mask is made anew wherever it is needed and never stored.

Philox-4x32-10 (Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405): four 32-bit numbers from a 64-bit key and a counter.
Element (m, k) takes number k mod 4 of the counter (⌊k / 4⌋, m, 0, 0) under the key `seed`, and is kept where it is ≥ p·2³².
"""

import torch
from torch import Tensor

_KEYS, _ROUNDS = (0x9E3779B9, 0xBB67AE85), (0xD2511F53, 0xCD9E8D57)
_MASK = 0xFFFFFFFF


def dropout_mask(seed: Tensor, M: int, K: int, p: float, device: torch.device) -> Tensor:
    """Which elements of [M, K] are kept, each with probability 1 − p. seed: one int64."""
    counters = torch.arange(-(-K // 4), device=device).expand(M, -1), torch.arange(M, device=device)[:, None]
    c = [*torch.broadcast_tensors(*counters), torch.zeros((), dtype=torch.int64, device=device)]
    c = [c[0], c[1], c[2].expand_as(c[0]), c[2].expand_as(c[0])]
    key = [seed & _MASK, (seed >> 32) & _MASK]
    for _ in range(10):
        (high0, low0), (high1, low1) = _product(_ROUNDS[0], c[0]), _product(_ROUNDS[1], c[2])
        c = [high1 ^ c[1] ^ key[0], low1, high0 ^ c[3] ^ key[1], low0]
        key = [(k + step) & _MASK for k, step in zip(key, _KEYS, strict=True)]
    return torch.stack(c, dim=-1).flatten(1)[:, :K] >= dropout_threshold(p)


def dropout_threshold(p: float) -> int:
    """p·2³² as an integer."""
    return min(round(p * 2**32), _MASK)


def _product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 × 32-bit product, without leaving int64."""
    low, high = (b & 0xFFFF) * a, (b >> 16) * a
    return (high + (low >> 16)) >> 16, (low + ((high & 0xFFFF) << 16)) & _MASK
