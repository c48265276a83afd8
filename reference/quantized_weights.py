"""Weights in four bits (NF4), and fake quantisation for training that ends in four or eight. Dettmers et al. 2023,
https://arxiv.org/abs/2305.14314; straight-through estimator: Bengio et al. 2013, https://arxiv.org/abs/1308.3432

Dimension key: N elements of a weight (row-major, flat), L elements of a group, `*` leading dims.

NF4, block by block of the flat weight (row ends do not count):
    s = max |w|;  x = clamp(w · (1/s), ±1)          the last block, where it is shorter, w / s
    code = how many midpoints of neighbours in TABLE lie below x, two codes to a byte, the first in the high nibble
    w ≈ round(TABLE[code] · s)
with double quantisation, in blocks of 256 scales:
    offset = mean s;  d = s − offset;  a = max |d|;  c = how many midpoints of neighbours in MAP lie below d · (1/a)
    s ≈ MAP[c] · a + offset

fake_quantize, group by group of the last dim:
    symmetric     scale = max |x| / (2^(bits−1) − ½);  zero = 0
    asymmetric    scale = (max(x, 0) − min(x, 0)) / (2^bits − 1);  zero = clamp(lo − rint(min(x, 0) / scale))
    level = rint(x · (1/scale)) + zero;  q = clamp(level);  y = round((q − zero) · scale);  lo = −2^(bits−1), hi = −lo − 1
    dx = dy, or with clip_gradient 0 where level ≠ q

Where values are rounded: NF4 computes in fp32, every operation rounded by itself (MAP[c] · a + offset is no fused
multiply-add), and a dequantised weight once more, to its dtype: float64 gets the fp32 product, widened. fake_quantize
computes in fp32, or float64 of float64, and rounds y to x's dtype. rint is to nearest even.
"""

from math import prod
from typing import Annotated, Any, Self

import torch
from torch import Tensor

from reference import _quantized_weights_state as states
from reference._cost import Cost, Work, nbytes
from reference._quantized_weights_groups import check_fake_quantize, grouped, quantised
from reference._quantized_weights_majorant import fake_quantize_majorant
from reference._quantized_weights_tables import MAP_BLOCK, SMALLEST, dynamic_map, nf4_table
from reference._signature import Choices, Dims, promote

__all__ = ["FakeQuantWeight", "NF4Weight", "fake_quantize", "fake_quantize_majorant"]

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
SOURCES = (torch.float32, torch.float16, torch.bfloat16)


class NF4Weight:
    """A frozen weight in NF4, as bitsandbytes stores it.

    codes: uint8 [⌈N/2⌉], first element in the high nibble. table: fp32 [16], what a code stands for.
    absmax: fp32 [blocks], the scales; or, doubly quantised, None and in its place
    absmax_codes: uint8 [blocks], absmax2: fp32 [⌈blocks/256⌉], code: fp32 [256] (the map), offset: fp32 [], on the device.
    shape, dtype: those of the weight that was quantised. block: elements that share a scale.
    """

    def __init__(
        self,
        codes: Tensor,
        table: Tensor,
        *,
        shape: tuple[int, ...],
        block: int,
        dtype: torch.dtype,
        absmax: Tensor | None = None,
        absmax_codes: Tensor | None = None,
        absmax2: Tensor | None = None,
        code: Tensor | None = None,
        offset: Tensor | None = None,
    ) -> None:
        self.codes, self.table = codes, table
        self.shape, self.block, self.dtype = torch.Size(shape), block, dtype
        self.absmax, self.absmax_codes, self.absmax2 = absmax, absmax_codes, absmax2
        self.code, self.offset = code, offset
        check_state(self)

    @classmethod
    def quantize(cls, w: Tensor, *, block: int = 64, double_quant: bool = True) -> Self:
        """Quantise w [*] of any strides, fp32, fp16 or bf16, in blocks of 32 … 4096 elements.

        Raises TypeError for another dtype, ValueError for another block and for a w that is not finite everywhere; that check
        waits for the device, once for each weight.
        """
        check_source(w, block, double_quant)
        table, code = nf4_table(w.device), dynamic_map(w.device) if double_quant else None
        return cls._quantize(w.detach().reshape(-1), table, code, shape=w.shape, block=block)

    @classmethod
    def _quantize(cls, flat: Tensor, table: Tensor, code: Tensor | None, *, shape: Any, block: int) -> Self:
        absmax, x = _normalised(flat.to(torch.float32), block)
        high, low = _nearest(x, table)[: -(-len(flat) // 2) * 2].view(-1, 2).unbind(1)
        if len(flat) % block:
            absmax = torch.cat([absmax[:-1], absmax[-1:].clamp(min=SMALLEST)])
        given = {"shape": shape, "block": block, "dtype": flat.dtype}
        codes = high * 16 + low
        if code is None:
            return cls(codes, table, absmax=absmax, **given)
        offset = absmax.mean() if len(absmax) else absmax.new_zeros(())
        absmax2, d = _normalised(absmax - offset, MAP_BLOCK)
        quantised = {"absmax_codes": _nearest(d, code)[: len(absmax)], "absmax2": absmax2}
        return cls(codes, table, code=code, offset=offset, **quantised, **given)

    def dequantize(self, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        """The weight in `dtype` (default: that of `out`, or that it had), written to `out` (contiguous) where that is given.

        Never waits for the device. No gradient.
        """
        dtype = check_out(self, dtype, out)
        nibbles = torch.stack([self.codes >> 4, self.codes & 15], dim=1).flatten()[: prod(self.shape)]
        scales = self.scales().repeat_interleave(self.block)[: len(nibbles)]
        w = (self.table[nibbles.to(torch.int64)] * scales).to(dtype).view(self.shape)
        return w if out is None else out.copy_(w)

    def scales(self) -> Tensor:
        """The scale of each block, fp32 [blocks]."""
        if self.absmax is not None:
            return self.absmax
        a = self.absmax2.repeat_interleave(MAP_BLOCK)[: len(self.absmax_codes)]
        return self.code[self.absmax_codes.to(torch.int64)] * a + self.offset

    @classmethod
    def from_bitsandbytes(cls, params4bit: Tensor) -> Self:
        """The same weight, without a copy, from a quantised bitsandbytes Params4bit, whatever dtype its storage is viewed as.

        Raises ValueError for one that is not quantised, or not in NF4.
        """
        return cls(**states.of_params(params4bit))

    def to_state_dict(self, name: str = "weight") -> dict[str, Tensor]:
        """Entries that bitsandbytes reads, too. Waits for the device: the offset becomes text."""
        return states.written(self, name)

    @classmethod
    def from_state_dict(cls, state: dict[str, Tensor], name: str = "weight") -> Self:
        """From the entries of `to_state_dict`, or of a bitsandbytes Linear4bit; entries of other names are left alone."""
        return cls(**states.read(state, name))

    @classmethod
    def of(cls, other: "NF4Weight") -> Self:
        """The same weight, sharing memory, as this class."""
        return cls(**states.fields(other))

    def to(self, device: torch.device | str) -> Self:
        """On another device; itself where it is there."""
        if torch.empty(0, device=device).device == self.device:
            return self
        moved = {n: v.to(device) if isinstance(v, Tensor) else v for n, v in states.fields(self).items()}
        return type(self)(**moved)

    @property
    def device(self) -> torch.device:
        """Where the codes are; everything else is there as well."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        return nbytes(*(v for v in states.fields(self).values() if isinstance(v, Tensor)))

    def __repr__(self) -> str:
        scales = "double quant" if self.absmax is None else "fp32 scales"
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype}, block {self.block}, {scales}, {self.device})"


X = Annotated[Tensor, Dims("* N")]
Bits = Annotated[int, Choices((8, 4, 3))]
# Groups, which must divide N, are among the test file's own cases.
Per = Annotated[str, Choices(("token", "channel"))]
Group = Annotated[int | None, Choices((None,))]


def fake_quantize(
    x: X,
    *,
    bits: Bits = 8,
    per: Per = "token",
    group: Group = None,
    symmetric: bool = True,
    clip_gradient: bool = False,
) -> Tensor:
    """x [*, N] as it is after quantisation to `bits` (2 … 8) and back: y like x, with a straight-through gradient.

    per: "token" and "channel", one scale for each row x[…, :] (of an activation, of a weight); "group", one for each `group`
    elements of a row, where group divides N. symmetric: without a zero point.
    clip_gradient: no gradient where the clamp acted. Since a group's largest |x| lies at 2^(bits−1) − ½ steps, it acts on most
    maxima that are positive. By default the gradient passes everywhere.
    A group that holds inf or NaN becomes NaN. Raises TypeError for a dtype that is not floating point and an option of another
    type; ValueError for a shape or an option that is not allowed.
    """
    check_fake_quantize("fake_quantize", x, bits, per, group, symmetric, clip_gradient)
    groups = grouped(x.to(promote(x)), group)
    y, kept = quantised(groups.detach(), bits, symmetric)
    through = groups - groups.detach()  # 0, and all of the gradient
    if clip_gradient:
        through = torch.where(kept, through, 0.0)
    return (y + through).view(x.shape).to(x.dtype)


def fake_quantize_backward(
    cotangents: tuple[Tensor, ...],
    x: Tensor,
    *,
    bits: int = 8,
    per: str = "token",
    group: int | None = None,
    symmetric: bool = True,
    clip_gradient: bool = False,
) -> dict[str, Tensor]:
    """The gradient by name, from the cotangent (dy,); differentiable by dy. dx = dy, or [level = q] · dy."""
    dy = cotangents[0].to(x.dtype)
    if clip_gradient:
        _, kept = quantised(grouped(x.detach().to(promote(x)), group), bits, symmetric)
        dy = torch.where(kept.view(x.shape), dy, 0.0)
    return {"x": dy}


def fake_quantize_cost(
    x: Tensor,
    *,
    bits: int = 8,
    per: str = "token",
    group: int | None = None,
    symmetric: bool = True,
    clip_gradient: bool = False,
) -> Cost:
    """Only shapes and dtypes are read. Backward: dx is dy itself; clipped, it reads x and dy and writes dx."""
    backward = Work(8 * x.numel(), 3 * nbytes(x)) if clip_gradient else Work(0, 0)
    return Cost(Work(8 * x.numel(), 2 * nbytes(x)), backward, nbytes(x) if clip_gradient else 0)


def dequantize_cost(weight: NF4Weight, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Cost:
    """Codes and scales are read once, the weight is written once."""
    written = prod(weight.shape) * (dtype or weight.dtype).itemsize
    return Cost(Work(prod(weight.shape), weight.nbytes + written), Work(0, 0), 0)


COST = {"fake_quantize": fake_quantize_cost, "NF4Weight.dequantize": dequantize_cost}


class FakeQuantWeight:
    """A master weight whose users see its fake-quantised value, for quantisation-aware training.

    w [*, N]: what is trained, or frozen. group: elements of a row that share a scale; None: whole rows (output channels).
    shape, dtype, device: those of w.
    """

    def __init__(self, w: Tensor, *, bits: int = 4, group: int | None = 32, symmetric: bool = True) -> None:
        self.options = {"bits": bits, "per": "channel" if group is None else "group", "group": group}
        self.options["symmetric"] = symmetric
        check_fake_quantize("FakeQuantWeight", w, **self.options, clip_gradient=False, name="w")
        self.w = w
        self._kept: tuple[Any, Tensor] | None = None

    _fake_quantize = staticmethod(fake_quantize)

    def dequantize(self, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        """fake_quantize(w), rounded to w's dtype and then to `dtype` (default: that of `out`, or w's).

        While w is trained its gradient passes straight through to w, and `out` is refused. Of a frozen w the result is kept, and
        returned again until w changes: do not write to it. (Not kept: what torch.compile or inference mode make.)
        """
        dtype = check_out(self, dtype, out)
        if self.w.requires_grad and out is not None and torch.is_grad_enabled():
            raise ValueError("FakeQuantWeight.dequantize: out must be None while w requires a gradient")
        if self.w.requires_grad or torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            w = self._fake_quantize(self.w, **self.options).to(dtype)
        else:
            key = (dtype, self.w.data_ptr(), self.w._version)
            if self._kept is None or self._kept[0] != key:
                self._kept = key, self._fake_quantize(self.w, **self.options).to(dtype)
            w = self._kept[1]
        return w if out is None else out.copy_(w)

    @property
    def shape(self) -> torch.Size:
        """Of the master weight."""
        return self.w.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the master weight."""
        return self.w.dtype

    @property
    def device(self) -> torch.device:
        """Of the master weight."""
        return self.w.device


def check_source(w: Tensor, block: int, double_quant: bool) -> None:
    """Raise the error that names the argument of quantize; shared by both trees."""
    if not isinstance(w, Tensor):
        raise TypeError(f"NF4Weight.quantize: w must be a torch.Tensor, got {type(w).__name__}")
    if w.dtype not in SOURCES:
        raise TypeError(f"NF4Weight.quantize: w must be float32, float16 or bfloat16, got {w.dtype}")
    if block not in BLOCKS:
        raise ValueError(f"NF4Weight.quantize: block must be one of {BLOCKS}, got {block!r}")
    if not isinstance(double_quant, bool):
        raise TypeError(f"NF4Weight.quantize: double_quant must be a bool, got {double_quant!r}")
    if not w.isfinite().all():
        raise ValueError("NF4Weight.quantize: w must be finite everywhere; it holds inf or NaN")


def check_out(weight: Any, dtype: torch.dtype | None, out: Tensor | None) -> torch.dtype:
    """The dtype to dequantise to. Raises TypeError or ValueError where dtype is no floating one or `out` does not fit."""
    function = f"{type(weight).__name__}.dequantize"
    dtype = dtype or (weight.dtype if out is None else out.dtype)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"{function}: dtype must be a floating-point torch.dtype, got {dtype!r}")
    if out is not None:
        wanted, got = (
            (dtype, weight.shape, weight.device, True),
            (out.dtype, out.shape, out.device, out.is_contiguous()),
        )
        if wanted != got:
            raise ValueError(
                f"{function}: out must be a contiguous {dtype} tensor {list(weight.shape)} on {weight.device}, "
                f"got {out.dtype} {list(out.shape)} with strides {list(out.stride())} on {out.device}"
            )
    return dtype


def check_state(weight: NF4Weight) -> None:
    """Raise ValueError for tensors that do not make up a weight, naming the first one that does not fit."""
    blocks = -(-prod(weight.shape) // weight.block)
    wanted = {"codes": (torch.uint8, (-(-prod(weight.shape) // 2),)), "table": (torch.float32, (16,))}
    if weight.absmax is not None:
        wanted["absmax"] = torch.float32, (blocks,)
    else:
        wanted["absmax_codes"] = torch.uint8, (blocks,)
        wanted["absmax2"] = torch.float32, (-(-blocks // MAP_BLOCK),)
        wanted |= {"code": (torch.float32, (256,)), "offset": (torch.float32, ())}
    for name, (dtype, shape) in wanted.items():
        tensor = getattr(weight, name)
        if tensor is None or (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
            got = "None" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"NF4Weight: {name} must be {dtype} {list(shape)}, got {got}")
        if tensor.device != weight.codes.device or not tensor.is_contiguous():
            raise ValueError(
                f"NF4Weight: {name} must be contiguous and on {weight.codes.device}, as codes are"
            )


def _normalised(flat: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The largest magnitude of each block, and the elements as fractions of it, filled up with 0 to whole blocks."""
    short = len(flat) % block
    rows = torch.nn.functional.pad(flat, (0, block - short if short else 0)).view(-1, block)
    absmax = rows.abs().amax(1)
    safe = absmax.clamp(min=SMALLEST)[:, None]
    x = rows * (1 / safe)
    if short:
        x = torch.cat([x[:-1], rows[-1:] / safe[-1:]])
    return absmax, x.clamp(-1, 1).flatten()


def _nearest(x: Tensor, table: Tensor) -> Tensor:
    """How many midpoints of the ascending table lie below each x, uint8."""
    return torch.bucketize(x, (table[:-1] + table[1:]) / 2).to(torch.uint8)
