"""One pass over some columns of logits for statistics, one for their gradient; fast/chunked_cross_entropy.py explains them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fast._triton.launch import cdiv, launch
from fast._triton.tuning import Table, config

# By the number of columns. A program of the first takes a row, of the second a part of it.
STATS = Table(
    "cross_entropy_stats",
    {
        80: [(2**62, config(BLOCK_V=1024, num_warps=8))],
        90: [(1024, config(BLOCK_V=1024, num_warps=4)), (2**62, config(BLOCK_V=4096, num_warps=8))],
    },
)
DLOGITS = Table("cross_entropy_dlogits", {80: [(2**62, config(BLOCK_V=1024, num_warps=4))]})


@triton.jit
def capped(r, BIAS, offs_v, mask, scale, cap, HAS_CAP: tl.constexpr):
    """z of r, and tanh(scale · r / cap), 0 without a cap."""
    r = r.to(tl.float32)
    if BIAS is not None:
        r += tl.load(BIAS + offs_v, mask=mask, other=0.0).to(tl.float32)
    z = r * scale
    t = tl.zeros_like(z)
    if HAS_CAP:
        t = 2.0 * tl.sigmoid(2.0 * z / cap) - 1.0
        z = cap * t
    return z, t


# fmt: off
@triton.jit
def _cross_entropy_stats(
    R, stride_rm, stride_rv,  # [M, V]  in     some columns of the logits, before bias, scale and cap
    BIAS,                     # [V]     in     or None
    W,                        # [V]     in     class weights, or None
    LABEL,                    # [M]     in     int64; −1: left out
    MAX, SUM,                 # [M]     inout  of z, and of exp(z − MAX)
    Z_Y,                      # [M]     inout
    SMOOTH,                   # [M]     inout  Σ w · z, or None
    MIX,                      # [M]     inout  Σ exp(z − MAX) · z, or None
    BEST,                     # [M]     inout  int64, the first class with the largest z, or None
    V, first, scale, cap,
    HAS_CAP: tl.constexpr, IS_FIRST: tl.constexpr, BLOCK_V: tl.constexpr,
):
    # fmt: on
    m = tl.program_id(0).to(tl.int64)
    label = tl.load(LABEL + m)
    top, total, z_y = float("-inf"), 0.0, 0.0
    smooth, mix, best = 0.0, 0.0, tl.zeros((), tl.int64)
    if not IS_FIRST:
        top, total, z_y = tl.load(MAX + m), tl.load(SUM + m), tl.load(Z_Y + m)
        if SMOOTH is not None:
            smooth = tl.load(SMOOTH + m)
        if MIX is not None:
            mix = tl.load(MIX + m)
        if BEST is not None:
            best = tl.load(BEST + m)
    if label != -1:
        for start in range(0, V, BLOCK_V):
            offs_v = start + tl.arange(0, BLOCK_V)
            mask = offs_v < V
            r = tl.load(R + m * stride_rm + offs_v.to(tl.int64) * stride_rv, mask=mask, other=0.0)
            z, _ = capped(r, BIAS, offs_v, mask, scale, cap, HAS_CAP)
            # Columns beyond the last count as −∞, after the cap: it would make them finite.
            z = tl.where(mask, z, float("-inf"))
            highest = tl.max(z, axis=0)
            if BEST is not None:
                at = tl.min(tl.where((z == highest) & mask, offs_v, V), axis=0)
                best = tl.where((highest > top) & (at < V), first + at, best)
            new = tl.maximum(top, highest)
            base = tl.where(new == float("-inf"), 0.0, new)
            e = tl.exp(z - base)
            shrink = tl.exp(top - base)
            total = total * shrink + tl.sum(e, axis=0)
            if MIX is not None:
                mix = mix * shrink + tl.sum(tl.where(e > 0.0, e * z, 0.0), axis=0)
            if SMOOTH is not None:
                w = 1.0
                if W is not None:
                    w = tl.load(W + offs_v, mask=mask, other=0.0).to(tl.float32)
                smooth += tl.sum(tl.where(mask, w * z, 0.0), axis=0)
            z_y += tl.sum(tl.where((offs_v == label - first) & mask, z, 0.0), axis=0)
            top = new
    tl.store(MAX + m, top)
    tl.store(SUM + m, total)
    tl.store(Z_Y + m, z_y)
    if SMOOTH is not None:
        tl.store(SMOOTH + m, smooth)
    if MIX is not None:
        tl.store(MIX + m, mix)
    if BEST is not None:
        tl.store(BEST + m, best)


# fmt: off
@triton.jit
def _cross_entropy_dlogits(
    R, stride_rm, stride_rv,    # [M, V]  in    some columns of the logits
    BIAS,                       # [V]     in    or None
    W,                          # [V]     in    class weights, or None
    LABEL,                      # [M]     in    int64; negative: no gradient
    LSE,                        # [M]     in
    OF_P, OF_LABEL, OF_ALL,     # [M]     in    dz = OF_P · p − OF_LABEL at the label − OF_ALL · w
    UNIT,                       # []      in    that the result is multiplied by, or None
    DR, stride_drm,             # [M, V]  out
    V, first, scale, cap,
    HAS_CAP: tl.constexpr, BLOCK_V: tl.constexpr,
):
    # fmt: on
    m = tl.program_id(0).to(tl.int64)
    offs_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = offs_v < V
    label = tl.load(LABEL + m)
    dr = tl.zeros([BLOCK_V], tl.float32)
    if label >= 0:
        r = tl.load(R + m * stride_rm + offs_v.to(tl.int64) * stride_rv, mask=mask, other=0.0)
        z, t = capped(r, BIAS, offs_v, mask, scale, cap, HAS_CAP)
        dr = tl.load(OF_P + m) * tl.exp(z - tl.load(LSE + m))
        dr = tl.where(offs_v == label - first, dr - tl.load(OF_LABEL + m), dr)
        w = 1.0
        if W is not None:
            w = tl.load(W + offs_v, mask=mask, other=0.0).to(tl.float32)
        dr = (dr - tl.load(OF_ALL + m) * w) * scale
        if HAS_CAP:
            dr *= 1.0 - t * t
        if UNIT is not None:
            dr *= tl.load(UNIT)
    tl.store(DR + m * stride_drm + offs_v, dr.to(DR.dtype.element_ty), mask=mask)


class Stats:
    """Statistics of rows [M] that come from their columns bit by bit: add() them in order, from the first class on."""

    def __init__(self, label: Tensor, smooth: bool, details: bool):
        def state(dtype: torch.dtype = torch.float32) -> Tensor:
            return label.new_empty(label.shape, dtype=dtype)

        self.label, self.top, self.total, self.z_y = label, state(), state(), state()
        self.smooth = state() if smooth else None
        self.mix, self.best = (state(), state(torch.int64)) if details else (None, None)
        self.first = 0

    def add(
        self,
        r: Tensor,
        bias: Tensor | None,
        class_weight: Tensor | None,
        scale: float,
        cap: float | None,
        device: torch.device,
    ) -> None:
        """The next columns of r [M, V], with their biases and class weights [V]."""
        M, V = r.shape
        tile = STATS.pick(V, device)
        if M:
            launch(
                _cross_entropy_stats, (M,), device, r, *r.stride(), bias, class_weight, self.label,
                self.top, self.total, self.z_y, self.smooth, self.mix, self.best,
                V, self.first, scale, 1.0 if cap is None else cap,
                HAS_CAP=cap is not None, IS_FIRST=self.first == 0, **tile.options,
            )  # fmt: skip
        self.first += V

    def results(self) -> list[Tensor]:
        """lse, z_y, and Σ w · z, entropy and prediction where asked for; 0 and −1 in rows that are left out."""
        kept = self.label != -1
        lse = torch.where(kept, self.top + self.total.log(), 0.0)
        found = [lse, torch.where(kept, self.z_y, 0.0)]
        found.append(lse.new_empty(0) if self.smooth is None else torch.where(kept, self.smooth, 0.0))
        if self.mix is None:
            return [*found, lse.new_empty(0), lse.new_empty(0, dtype=torch.int64)]
        entropy = torch.where(kept, lse - self.mix / self.total, 0.0)
        return [*found, entropy, torch.where(kept, self.best, -1)]


def dlogits(
    r: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    label: Tensor,
    lse: Tensor,
    factors: tuple[Tensor, Tensor, Tensor],
    unit: Tensor | None,
    first: int,
    scale: float,
    cap: float | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The gradient [M, V], times unit, of columns r [M, V] of the logits from class `first` on; factors: of p, of the label and
    of every class."""
    M, V = r.shape
    dr = r.new_empty(M, V, dtype=dtype)
    tile = DLOGITS.pick(V, device)
    if M:
        launch(
            _cross_entropy_dlogits, (M, cdiv(V, tile["BLOCK_V"])), device, r, *r.stride(), bias, class_weight, label, lse,
            *factors, unit, dr, dr.stride(0), V, first, scale, 1.0 if cap is None else cap,
            HAS_CAP=cap is not None, **tile.options,
        )  # fmt: skip
    return dr
