"""bf16 in numpy, which has none: float32 arrays whose elements are bf16 numbers, and their 16 bits."""

import numpy as np


def round_to_bf16(x: np.ndarray) -> np.ndarray:
    """fp32 (or wider) → nearest bf16, ties to even, as float32; NaN stays NaN, bf16 numbers keep their bits."""
    x = np.asarray(x)
    x = x if x.dtype == np.float32 else x.astype(np.float32)
    bits = x.view(np.uint32)
    if not (bits & 0xFFFF).any():
        return x
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) & np.uint32(0xFFFF0000)
    # Of a NaN whose upper half alone would read as infinity, the quiet bit must be set.
    quiet = (bits | np.uint32(0x00400000)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x) & ((bits & 0xFFFF) != 0), quiet, rounded).view(np.float32)


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """The 16 bits of each bf16 number of a float32 array, uint16."""
    return (np.ascontiguousarray(x).view(np.uint32).reshape(np.shape(x)) >> 16).astype(np.uint16)


def from_bf16_bits(bits: np.ndarray) -> np.ndarray:
    """uint16 bits of bf16 numbers → float32."""
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def fma_bf16(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x·y + z of bf16 numbers, rounded once.

    The product is exact in fp64; sum and narrowing round to odd, so that no later rounding sees a false tie.
    """
    product, z = np.multiply(x, y, dtype=np.float64), np.asarray(z, np.float64)
    total = product + z
    back = total - product
    error = (product - (total - back)) + (z - back)  # total + error = product + z, exactly (Knuth)
    total = _round_to_odd(total, error)
    narrow = total.astype(np.float32)
    return round_to_bf16(_round_to_odd(narrow, total - narrow.astype(np.float64)))


def _round_to_odd(x: np.ndarray, error: np.ndarray) -> np.ndarray:
    """x, the nearest to an exact x + error, moved to the odd one of the two neighbours that enclose the exact value."""
    bits = x.view(np.int64 if x.dtype == np.float64 else np.int32)
    away = np.where((error > 0) == (x > 0), 1, -1).astype(bits.dtype)
    move = np.isfinite(x) & (x != 0) & np.isfinite(error) & (error != 0) & (bits & 1 == 0)
    return np.where(move, bits + away, bits).view(x.dtype)
