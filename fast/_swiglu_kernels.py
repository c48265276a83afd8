"""The elementwise kernels of swiglu and what launches them; fast/swiglu.py explains them."""

import triton
import triton.language as tl
from torch import Tensor

from fast._swiglu_activation import activation_gradients, activation_value
from fast._triton.launch import cdiv, launch
from fast._triton.rows import RowView, as_rows, row_offsets
from fast._triton.tuning import Config, Table, config

# By the length of a row; 1 for tensors that are taken as one long row. On an H200 (16384 × 14336, bf16) programs of 16 elements
# a thread forward and 4 backward come within 1 % of a copy, whole rows or halves; more a thread are slower by 3 to 20 %.
# maxnreg: left to itself, ptxas takes 96 registers for gelu, and spills.
FWD = Table(
    "swiglu_fwd",
    {
        80: [
            (1, config(BLOCK_M=1, BLOCK_F=2048, num_warps=4, maxnreg=128)),
            (64, config(BLOCK_M=32, BLOCK_F=64, num_warps=4)),
            (256, config(BLOCK_M=8, BLOCK_F=256, num_warps=4)),
            (1024, config(BLOCK_M=2, BLOCK_F=1024, num_warps=4)),
        ]
    },
)
BWD = Table(
    "swiglu_bwd",
    {
        80: [
            (1, config(BLOCK_M=1, BLOCK_F=512, num_warps=4)),
            (64, config(BLOCK_M=8, BLOCK_F=64, num_warps=4)),
            (256, config(BLOCK_M=2, BLOCK_F=256, num_warps=4)),
            (1024, config(BLOCK_M=1, BLOCK_F=512, num_warps=4)),
        ]
    },
)


# fmt: off
@triton.jit
def _swiglu_fwd(
    GATE, stride_go, stride_gi, stride_gf,   # [M, F]  in    rows: (m // inner)·outer + (m % inner)·inner stride
    UP, stride_uo, stride_ui, stride_uf,     # [M, F]  in    None: GATE is [M, 2F], gate and up in turn
    H, stride_hm,                            # [M, F]  out
    M, F, g_inner, u_inner, alpha, limit, up_offset,
    ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr,
):
    # fmt: on
    first, first_f = _tile(F, BLOCK_M, BLOCK_F)
    offs_m, offs_f = first + tl.arange(0, BLOCK_M), first_f + tl.arange(0, BLOCK_F)
    mask = (offs_m < M)[:, None] & (offs_f < F)[None, :]
    g_rows = row_offsets(first, stride_go, stride_gi, g_inner, BLOCK_M)[:, None]
    if UP is None:
        gate, up = _load_pair(GATE + g_rows, offs_m < M, first_f, F, BLOCK_M, BLOCK_F)
    else:
        u_rows = row_offsets(first, stride_uo, stride_ui, u_inner, BLOCK_M)[:, None]
        gate = tl.load(GATE + g_rows + offs_f * stride_gf, mask=mask, other=0.0)
        up = tl.load(UP + u_rows + offs_f * stride_uf, mask=mask, other=0.0)
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    h = activation_value(gate, up, alpha, limit, up_offset, ACTIVATION, HAS_LIMIT)
    tl.store(H + offs_m[:, None] * stride_hm + offs_f, h.to(H.dtype.element_ty), mask=mask)


# fmt: off
@triton.jit
def _swiglu_bwd(
    DH, stride_dho, stride_dhi,              # [M, F]  inout cotangent of h; becomes h where EMIT_H
    GATE, stride_go, stride_gi, stride_gf,   # [M, F]  in
    UP, stride_uo, stride_ui, stride_uf,     # [M, F]  in    None: GATE is [M, 2F], gate and up in turn
    DGATE, stride_dgm,                       # [M, F]  out   or None
    DUP, stride_dum,                         # [M, F]  out   or None
    M, F, dh_inner, g_inner, u_inner, alpha, limit, up_offset,
    ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr, EMIT_H: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr,
):
    # fmt: on
    first, first_f = _tile(F, BLOCK_M, BLOCK_F)
    offs_m, offs_f = first + tl.arange(0, BLOCK_M), first_f + tl.arange(0, BLOCK_F)
    mask = (offs_m < M)[:, None] & (offs_f < F)[None, :]
    dh_ptrs = DH + row_offsets(first, stride_dho, stride_dhi, dh_inner, BLOCK_M)[:, None] + offs_f
    g_rows = row_offsets(first, stride_go, stride_gi, g_inner, BLOCK_M)[:, None]
    dh = tl.load(dh_ptrs, mask=mask, other=0.0).to(tl.float32)
    if UP is None:
        gate, up = _load_pair(GATE + g_rows, offs_m < M, first_f, F, BLOCK_M, BLOCK_F)
    else:
        u_rows = row_offsets(first, stride_uo, stride_ui, u_inner, BLOCK_M)[:, None]
        gate = tl.load(GATE + g_rows + offs_f * stride_gf, mask=mask, other=0.0)
        up = tl.load(UP + u_rows + offs_f * stride_uf, mask=mask, other=0.0)
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    dgate, dup, h = activation_gradients(gate, up, dh, alpha, limit, up_offset, ACTIVATION, HAS_LIMIT)
    if DGATE is not None:
        tl.store(DGATE + offs_m[:, None] * stride_dgm + offs_f, dgate.to(DGATE.dtype.element_ty), mask=mask)
    if DUP is not None:
        tl.store(DUP + offs_m[:, None] * stride_dum + offs_f, dup.to(DUP.dtype.element_ty), mask=mask)
    if EMIT_H:
        tl.store(dh_ptrs, h.to(DH.dtype.element_ty), mask=mask)


@triton.jit
def _tile(F, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr):
    """First row and first column of this program's tile."""
    columns = tl.cdiv(F, BLOCK_F)
    pid = tl.program_id(0)
    return (pid // columns).to(tl.int64) * BLOCK_M, (pid % columns).to(tl.int64) * BLOCK_F


@triton.jit
def _load_pair(rows, mask_m, first_f, F, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr):
    """Two tensors whose columns alternate in memory, in one contiguous load."""
    offs = 2 * first_f + tl.arange(0, 2 * BLOCK_F)
    both = tl.load(rows + offs, mask=mask_m[:, None] & (offs < 2 * F)[None, :], other=0.0)
    return tl.split(tl.reshape(both, [BLOCK_M, BLOCK_F, 2]))


def swiglu_fwd(
    gate: Tensor, up: Tensor, h: Tensor, activation: str, alpha: float, limit: float | None, up_offset: float
) -> None:
    """Write h, whose rows have unit stride; gate and up as they are."""
    if h.numel() == 0:
        return
    M, F, (gs, us, hs), tile = _views(FWD, gate, up, h)
    launch(
        _swiglu_fwd, (cdiv(M, tile["BLOCK_M"]) * cdiv(F, tile["BLOCK_F"]),), h.device,
        gs.tensor, gs.outer_stride, gs.inner_stride, gs.column_stride,
        us.tensor, us.outer_stride, us.inner_stride, us.column_stride,
        hs.tensor, hs.outer_stride, M, F, gs.inner, us.inner, alpha, limit or 0.0, up_offset,
        ACTIVATION=activation, HAS_LIMIT=limit is not None, **tile.options,
    )  # fmt: skip


def swiglu_bwd(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    dgate: Tensor | None,
    dup: Tensor | None,
    emit_h: bool,
    activation: str,
    alpha: float,
    limit: float | None,
    up_offset: float,
) -> None:
    """Write dgate and dup (rows of unit stride; None is not computed); with emit_h, turn dh into h."""
    outputs = [t for t in (dgate, dup) if t is not None]
    if dh.numel() == 0:
        return
    M, F, (gs, us, dhs, *rest), tile = _views(BWD, gate, up, dh, *outputs)
    dgs = rest[0] if dgate is not None else None
    dus = rest[-1] if dup is not None else None
    launch(
        _swiglu_bwd, (cdiv(M, tile["BLOCK_M"]) * cdiv(F, tile["BLOCK_F"]),), dh.device,
        dhs.tensor, dhs.outer_stride, dhs.inner_stride,
        gs.tensor, gs.outer_stride, gs.inner_stride, gs.column_stride,
        us.tensor, us.outer_stride, us.inner_stride, us.column_stride,
        *((None, 0) if dgs is None else (dgs.tensor, dgs.outer_stride)),
        *((None, 0) if dus is None else (dus.tensor, dus.outer_stride)),
        M, F, dhs.inner, gs.inner, us.inner, alpha, limit or 0.0, up_offset,
        ACTIVATION=activation, HAS_LIMIT=limit is not None, EMIT_H=emit_h, **tile.options,
    )  # fmt: skip


def _views(table: Table, gate: Tensor, up: Tensor, *others: Tensor) -> tuple[int, int, list[RowView], Config]:
    """M, F, a RowView of each tensor, and the tile. Where gate and up alternate in memory, gate's is of both and up's of None."""
    F = gate.shape[-1]
    if F % 16 and all(t.is_contiguous() for t in (gate, up, *others)):
        # As rows they would not be aligned.
        F = gate.numel()
        return 1, F, [RowView(t, F, 0, 1) for t in (gate, up, *others)], table.pick(1, gate.device)
    gs, us = (as_rows(t, any_column_stride=True) for t in (gate, up))
    if _alternating(gs, us):
        both = gate.as_strided((*gate.shape[:-1], 2 * F), (*gate.stride()[:-1], 1))
        gs, us = gs._replace(tensor=both), us._replace(tensor=None)
    return gate.numel() // F, F, [gs, us, *map(as_rows, others)], table.pick(F, gate.device)


def _alternating(gate: RowView, up: RowView) -> bool:
    """Whether each element of up lies right behind gate's."""
    behind = gate.tensor.data_ptr() + gate.tensor.element_size() == up.tensor.data_ptr()
    return gate.column_stride == 2 and gate[1:] == up[1:] and gate.tensor.dtype == up.tensor.dtype and behind
