"""Small kernels whose results torch knows bit for bit; `interpreter.self_test` runs them after correcting the interpreter."""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# The integer that holds a float's bits, and the bits of infinity.
_BITS = {
    torch.float32: (torch.int32, 0x7F800000),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
}
_SIGN = {torch.int32: np.int32(-(2**31)), torch.int16: np.int16(-(2**15))}


@triton.jit
def _cast(X, Y, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(Y + offs, tl.load(X + offs).to(Y.dtype.element_ty))


@triton.jit
def _arithmetic(X, Z, Y, N: tl.constexpr):
    offs = tl.arange(0, N)
    x, z = tl.load(X + offs), tl.load(Z + offs)
    tl.store(Y + offs, x + z)
    tl.store(Y + N + offs, x - z)
    tl.store(Y + 2 * N + offs, x * z)
    tl.store(Y + 3 * N + offs, tl.minimum(x, z))
    tl.store(Y + 4 * N + offs, tl.maximum(x, z))
    tl.store(Y + 5 * N + offs, tl.where(x < z, x, z))
    tl.store(Y + 6 * N + offs, tl.where(x == z, -x, tl.abs(x)))
    tl.store(Y + 7 * N + offs, x * x - z * z)


@triton.jit
def _bits(X, Y, N: tl.constexpr):
    offs = tl.arange(0, N)
    flipped = tl.load(X + offs).to(tl.int16, bitcast=True) ^ -32768
    tl.store(Y + offs, flipped.to(X.dtype.element_ty, bitcast=True))


@triton.jit
def _dot(A, B, Y, K, BLOCK: tl.constexpr):
    rows, cols = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    acc = tl.full((BLOCK, BLOCK), 1.00390625, A.dtype.element_ty).to(tl.float32)
    for k in range(0, K, BLOCK):
        acc += tl.dot(
            tl.load(A + rows * K + k + cols), tl.load(B + (k + rows) * BLOCK + cols), input_precision="ieee"
        )
    tl.store(Y + rows * BLOCK + cols, acc)


def disagreements() -> list[str]:
    """What the interpreter computes otherwise than torch, in words; empty if all is well. About 0.1 s."""
    wrong: list[str] = []
    values = {torch.float32: _awkward_floats(), **{dtype: _all_of(dtype) for dtype in FLOATS[1:]}}
    for source in FLOATS:
        for target in FLOATS:
            x = values[source]
            y = torch.empty(x.shape, dtype=target)
            _cast[(1,)](x, y, x.numel())
            _compare(wrong, f"cast of {_name(source)} to {_name(target)}", y, x.to(target), x)
    for dtype in FLOATS:
        _arithmetic_of(wrong, dtype)
    for dtype in FLOATS[1:]:
        x = values[dtype]
        y = torch.empty_like(x)
        _bits[(1,)](x, y, x.numel())
        _compare(wrong, f"bitcast of {_name(dtype)}", y, (x.view(torch.int16) ^ -32768).view(dtype), x)
        a, b = ((torch.arange(512) * step % 17 - 8).to(dtype) for step in (5, 7))
        out = torch.empty(16, 16)
        _dot[(1,)](a, b, out, 32, 16)
        one = torch.tensor(1.00390625).to(dtype).float()  # a tie in bf16
        _compare(
            wrong,
            f"dot of {_name(dtype)}",
            out,
            a.view(16, 32).float() @ b.view(32, 16).float() + 2 * one - one,
            out,
        )
    return wrong


def _arithmetic_of(wrong: list[str], dtype: torch.dtype) -> None:
    names = ("x + z", "x - z", "x * z", "minimum", "maximum", "where(x < z)", "neg and abs", "x * x - z * z")
    generator = torch.Generator().manual_seed(0)
    x, z = (torch.randint(-(2**15), 2**15, (2048,), generator=generator) for _ in range(2))
    if dtype is torch.float32:
        x, z = x * 65537, z * 65539
    x, z = (t.to(_BITS[dtype][0]).view(dtype) for t in (x, z))
    z[::4] = x[::4]  # equal operands
    x[1::4] = z[1::4] * 0.5  # operands of one size, so that sums round
    # Which zero a minimum returns is nobody's promise.
    x, z = (torch.where(t == 0, torch.ones_like(t), t) for t in (x, z))
    got = torch.empty(len(names), x.numel(), dtype=dtype)
    _arithmetic[(1,)](x, z, got, x.numel())
    # Written out: torch.fmin and fmax answer a signalling NaN with NaN, a GPU with the number.
    least, most = (
        torch.where(x.isnan(), z, torch.where(z.isnan(), x, f(x, z))) for f in (torch.minimum, torch.maximum)
    )
    wants = (
        x + z,
        x - z,
        x * z,
        least,
        most,
        torch.where(x < z, x, z),
        torch.where(x == z, -x, x.abs()),
        x * x - z * z,
    )
    for name, y, want in zip(names, got, wants, strict=True):
        _compare(wrong, f"{name} of {_name(dtype)}", y, want, x)


def _awkward_floats() -> Tensor:
    """fp32 patterns around every rounding decision of bf16 and fp16: each sign and exponent, ties and their neighbours; 2^15."""
    upper = np.array([0x00, 0x01, 0x3F, 0x7E, 0x7F], np.uint32) << 16
    lower = np.array(
        [0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xF000, 0xFFFF], np.uint32
    )
    sign_exponent = np.arange(512, dtype=np.uint32) << 23
    bits = (sign_exponent[:, None, None] | upper[:, None] | lower).ravel()
    return torch.from_numpy(np.resize(bits, 1 << 15).view(np.float32).copy())


def _all_of(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def _compare(wrong: list[str], what: str, got: Tensor, want: Tensor, given: Tensor) -> None:
    """Bit for bit, but a NaN equals any NaN. In numpy: for arrays of this size torch spends its time on waking threads."""
    kind, infinity = _BITS[got.dtype]
    a, b = (t.to(got.dtype).view(kind).numpy() for t in (got, want))
    bad = a != b
    if bad.any():
        bad &= ((a & ~_SIGN[kind]) <= infinity) | ((b & ~_SIGN[kind]) <= infinity)
    if bad.any():
        i = tuple(int(axis[0]) for axis in bad.nonzero())
        wrong.append(
            f"{what} ({bad.sum()} of {bad.size}, first {given[i].item()!r} → {got[i].item()!r}, not {want[i].item()!r})"
        )


def _name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
