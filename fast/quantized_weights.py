"""NF4 weights and fake quantisation in Triton. The definition is reference/quantized_weights.py.

Math        NF4: w ≈ TABLE[code]·s, s one fp32 number a block, or MAP[c]·a + offset with a one number for 256 blocks
            fake_quantize: scale from a group's extent;  level = rint(x·(1/scale)) + zero;  y = (clamp(level) − zero)·scale
Backward    NF4 weights are frozen. fake_quantize: dx = dy itself; clipped, 0 where the clamp acted, by levels computed again
Saved       nothing; with clip_gradient x, which the caller holds
Fusion      eager                                            here
            codes ─ nibbles ─ int64 ─ table ─┐               codes, scales ─ _nf4_dequantize ─ w          1 launch
            scales ─ repeated ───────────────┴ mul ─ cast    no scale and no nibble reaches memory
            x ─ |x| ─ max ─ scale ─ x/scale ─ rint ─ …       x ─ _fake_quantize ─ y                       1 launch, 2 passes
Floor       4096 × 14336, block 64, doubly quantised, to bf16: 29.4 MB of codes, 0.9 of scales, 117 written. At the rate of a copy
            on an H200, 4281 GB/s (experiments/results/h200), 34.5 µs. fake_quantize: two passes over x.
Tiles       A program takes BLOCK_B blocks of NF4: bytes of codes come in one contiguous load, each gives two neighbours, which
            leave in one contiguous store. Or BLOCK_M groups of fake_quantize, in registers; groups longer than a tile are read
            twice. Groups are read where they lie: rows may have gaps.
Rounding    fp32 inside, without fused multiply-adds, divisions rounded to nearest: the bits of the reference on the same device.
            The offset is the mean that torch computes, stored once; its bits depend on the device, those of the rest do not.
Determinism no atomics, no sums: the same bits always.
Limits      fp32, fp16, bf16; a dequantised weight may be float64, too. x whose leading dims need more than two strides (groups
            count as one) is copied first. Quantising waits once for the device, to refuse inf and NaN; nothing else does.
"""

from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd import Function

import reference.quantized_weights as definition
from fast import _quantized_weights_nf4 as nf4
from fast._quantized_weights_fake import FAKE
from fast._quantized_weights_fake import fake_quantize as launch_fake
from fast._quantized_weights_nf4 import DEQUANTIZE, QUANTIZE, SCALES
from fast._triton.launch import check_supported
from fast._triton.registration import define
from reference._quantized_weights_tables import MAP_BLOCK
from reference.quantized_weights import Bits, Group, Per, X, check_fake_quantize, check_out

__all__ = ["DEQUANTIZE", "FAKE", "QUANTIZE", "SCALES", "FakeQuantWeight", "NF4Weight", "fake_quantize"]


def nf4_quantize(w: Tensor, table: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of w [N]."""
    codes, absmax = found = _codes(w, table, block)
    nf4.nf4_quantize(w.contiguous(), table, codes, absmax, block)
    return found


def nf4_quantize_scales(absmax: Tensor, offset: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of the scales, and scales of those."""
    absmax_codes, absmax2 = found = _scale_codes(absmax, offset, code)
    nf4.nf4_quantize_scales(absmax, offset, code, absmax_codes, absmax2)
    return found


def nf4_dequantize(
    codes: Tensor,
    table: Tensor,
    absmax: Tensor | None,
    absmax_codes: Tensor | None,
    absmax2: Tensor | None,
    code: Tensor | None,
    offset: Tensor | None,
    shape: list[int],
    block: int,
    dtype: torch.dtype,
) -> Tensor:
    """The weight [*shape]."""
    out = codes.new_empty(shape, dtype=dtype)
    nf4.nf4_dequantize(out, codes, table, absmax, absmax_codes, absmax2, code, offset, block)
    return out


def fake_quantize_run(x: Tensor, dy: Tensor | None, bits: int, group: int | None, symmetric: bool) -> Tensor:
    """y like x, or with dy the clipped gradient."""
    out = _like(x, dy, bits, group, symmetric)
    launch_fake(x, dy, out, bits, group, symmetric)
    return out


def _codes(w, table, block):
    codes = w.new_empty(-(-w.numel() // 2), dtype=torch.uint8)
    return codes, w.new_empty(-(-w.numel() // block), dtype=torch.float32)


def _scale_codes(absmax, offset, code):
    return torch.empty_like(absmax, dtype=torch.uint8), absmax.new_empty(-(-absmax.numel() // MAP_BLOCK))


def _weight(codes, table, absmax, absmax_codes, absmax2, code, offset, shape, block, dtype):
    return codes.new_empty(shape, dtype=dtype)


def _like(x, dy, bits, group, symmetric):
    return x.new_empty(x.shape)


_STATE = "Tensor codes, Tensor table, Tensor? absmax, Tensor? absmax_codes, Tensor? absmax2, Tensor? code, Tensor? offset"
_quantize_op = define(
    "nf4_quantize(Tensor w, Tensor table, int block) -> (Tensor, Tensor)", nf4_quantize, _codes
)
_scales_op = define(
    "nf4_quantize_scales(Tensor absmax, Tensor offset, Tensor code) -> (Tensor, Tensor)",
    nf4_quantize_scales,
    _scale_codes,
)
_dequantize_op = define(
    f"nf4_dequantize({_STATE}, int[] shape, int block, ScalarType dtype) -> Tensor", nf4_dequantize, _weight
)
_dequantize_out_op = define(
    f"nf4_dequantize_out(Tensor(a!) out, {_STATE}, int block) -> ()",
    nf4.nf4_dequantize,
    lambda *given: None,
)
_fake_op = define(
    "fake_quantize(Tensor x, Tensor? dy, int bits, int? group, bool symmetric) -> Tensor",
    fake_quantize_run,
    _like,
)


class NF4Weight(definition.NF4Weight):
    """`reference.NF4Weight` with quantisation and dequantisation in one kernel each (scales in a second); the same bits.

    `NF4Weight.of(weight)` is a reference weight as this class, without a copy.
    """

    @classmethod
    def _quantize(cls, flat: Tensor, table: Tensor, code: Tensor | None, *, shape: Any, block: int) -> Self:
        check_supported("NF4Weight.quantize", w=flat)
        codes, absmax = _quantize_op(flat, table, block)
        given = {"shape": shape, "block": block, "dtype": flat.dtype}
        if code is None:
            return cls(codes, table, absmax=absmax, **given)
        offset = absmax.mean() if len(absmax) else absmax.new_zeros(())
        absmax_codes, absmax2 = _scales_op(absmax, offset, code)
        return cls(
            codes, table, absmax_codes=absmax_codes, absmax2=absmax2, code=code, offset=offset, **given
        )

    def dequantize(self, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        """The weight in `dtype` (default: that of `out`, or that it had), written to `out` (contiguous) where that is given.

        Never waits for the device: it can be captured in a CUDA graph and compiled. No gradient.
        """
        dtype = check_out(self, dtype, out)
        check_supported("NF4Weight.dequantize", table=self.table)
        state = self.codes, self.table, self.absmax, self.absmax_codes, self.absmax2, self.code, self.offset
        if out is None:
            return _dequantize_op(*state, self.shape, self.block, dtype)
        _dequantize_out_op(out, *state, self.block)
        return out


class _FakeQuantize(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bits: int, group: int | None, symmetric: bool, clip: bool) -> Tensor:
        ctx.options = bits, group, symmetric
        ctx.clip = clip
        if clip:
            ctx.save_for_backward(x)
        return _fake_op(x, None, bits, group, symmetric)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.clip:
            return dy, None, None, None, None
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            bits, group, symmetric = ctx.options
            options = {"bits": bits, "group": group, "symmetric": symmetric, "clip_gradient": True}
            dx = definition.fake_quantize_backward((dy,), x, **options)["x"]
        else:
            dx = _fake_op(x, dy, *ctx.options)
        return dx, None, None, None, None


def fake_quantize(
    x: X,
    *,
    bits: Bits = 8,
    per: Per = "token",
    group: Group = None,
    symmetric: bool = True,
    clip_gradient: bool = False,
) -> Tensor:
    """y like x [*, N]: `reference.fake_quantize` in one kernel; same arguments, result, rounding points and errors.

    The result is contiguous. Nothing is saved, with clip_gradient x. Differentiable twice; nothing is written to.
    Raises TypeError for other dtypes than fp32, fp16 and bf16, ValueError for an x that is not on a CUDA device and for shapes
    and options.
    """
    check_fake_quantize("fake_quantize", x, bits, per, group, symmetric, clip_gradient)
    check_supported("fake_quantize", x=x)
    if torch.is_grad_enabled():
        return _FakeQuantize.apply(x, bits, group, symmetric, clip_gradient)
    return _fake_op(x, None, bits, group, symmetric)


class FakeQuantWeight(definition.FakeQuantWeight):
    """`reference.FakeQuantWeight` by `fast.fake_quantize`; the same bits."""

    _fake_quantize = staticmethod(fake_quantize)
