"""RMSNorm in Triton: one pass over the row forward, one pass backward. The definition is reference/rms_norm.py.

Math        s = x + residual;  r = rsqrt(mean(s²) + eps);  x̂ = s·r;  y = x̂·(w + offset) + b
Backward    g = dy·(w + offset);  c = mean(g·x̂);  ds = r·(g − x̂·c) + dresidual_out;  dw = Σ_m dy·x̂;  db = Σ_m dy
Saved       s (x itself, or residual_out, which the caller holds anyway), w, and r: 4 bytes a row

Fusion      eager, bf16                                  here
            x → fp32 → pow → mean → + eps → rsqrt        x ─┐
              → mul → bf16 → · w        8 launches          ├─ _rms_norm_fwd ──── y, r          1 launch
                                                         w ─┘
            autograd's chain of the same, twice over     dy, s, r, w ─ _rms_norm_bwd ─ ds, DW[P, N]
                                                         DW[P, N] ─ _rms_norm_bwd_sum ─ dw     2 launches
Floor       forward M·N·(in + out) bytes, backward M·N·(dy + s + ds). At 16384 × 4096 in bf16 268 MB and 403 MB:
            63 and 94 µs at the rate of a copy, 4281 GB/s (experiments/results/h200); 6 and 13 FLOPs an element are 0.4 and
            0.9 GFLOP, nothing beside it.
Tiles       A program holds BLOCK_M whole rows in registers, so nothing is read twice. Backward programs are persistent: each
            strides over the rows, the next ones on their way (STAGES), and keeps its partial of dw in registers to the end.
            Rows too long for that pass through shared memory (fast/_rms_norm_ring.py), or, where they do not fit or the
            ring lacks something (residual; N no multiple of 16), in loops over tiles of columns (fast/_rms_norm_columns.py):
            forward reads the row again, from L2; backward takes c in a kernel of its own, then the tiles walk down the rows.
Rounding    fp32 inside, without fused multiply-adds; the points where values are rounded are the reference's.
Determinism dw and db: fp32 partials, one per program, added in a fixed order by a second kernel; no atomics. The tile
            depends on the row alone (N, dtype), so a row's bits do not depend on how many rows there are.
Limits      fp32, fp16, bf16; leading dims that need more than two strides, and rows without unit stride, are copied first.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from fast._rms_norm_columns import _rms_norm_bwd_dot, _rms_norm_fwd_columns, gain, inverse_rms, scaled
from fast._rms_norm_ring import _rms_norm_bwd_ring, _rms_norm_fwd_ring
from fast._triton.device import interpreting, num_sms, shared_memory
from fast._triton.launch import cdiv, check_supported, launch
from fast._triton.registration import define
from fast._triton.rows import RowView, as_rows, row_offsets
from fast._triton.tuning import Config, Table, config
from reference.rms_norm import (
    Casting,
    Columns,
    Eps,
    Offset,
    Residual,
    Rows,
    check_rms_norm,
    result_dtype,
    rms_norm_backward,
)

# Which rows a program holds whole (N ≤ BLOCK_N); the last configuration of each table is that of the column loops.
# *_ODD: rows that are no multiple of 16 elements are loaded one by one, which takes more registers.
# maxnreg: registers that a thread may take where ptxas, left to itself, takes fewer and spills.
# *_RING: rows that pass through shared memory instead (fast/_rms_norm_ring.py); None where they do not.
_FWD = [
    (64, config(BLOCK_M=32, BLOCK_N=64, num_warps=4)),
    (128, config(BLOCK_M=16, BLOCK_N=128, num_warps=4)),
    (256, config(BLOCK_M=8, BLOCK_N=256, num_warps=4)),
    (512, config(BLOCK_M=4, BLOCK_N=512, num_warps=4)),
    (1024, config(BLOCK_M=2, BLOCK_N=1024, num_warps=4)),
    (2048, config(BLOCK_M=1, BLOCK_N=2048, num_warps=4)),
    (4096, config(BLOCK_M=1, BLOCK_N=4096, num_warps=8)),
    (8192, config(BLOCK_M=1, BLOCK_N=8192, num_warps=8)),
]
_FWD_COLUMNS = (65536, config(BLOCK_M=1, BLOCK_N=4096, num_warps=32))
FWD = Table(
    "rms_norm_fwd",
    {
        80: [*_FWD, (16384, config(BLOCK_M=1, BLOCK_N=16384, num_warps=32, maxnreg=64)), _FWD_COLUMNS],
        90: [*_FWD, (16384, config(BLOCK_M=1, BLOCK_N=16384, num_warps=16)), _FWD_COLUMNS],
    },
)
FWD_ODD = Table("rms_norm_fwd_odd", {80: [*_FWD, _FWD_COLUMNS]})
FWD_RING = Table(
    "rms_norm_fwd_ring",
    {80: [(16384, None), (65536, config(BLOCK_N=8192, HELD=2, num_warps=32)), (131072, None)]},
)
_BWD = [
    (64, config(BLOCK_M=128, BLOCK_N=64, STAGES=3, num_warps=8)),
    (128, config(BLOCK_M=64, BLOCK_N=128, STAGES=3, num_warps=8)),
    (256, config(BLOCK_M=32, BLOCK_N=256, STAGES=3, num_warps=8)),
    (512, config(BLOCK_M=16, BLOCK_N=512, STAGES=3, num_warps=8)),
    (1024, config(BLOCK_M=8, BLOCK_N=1024, STAGES=3, num_warps=8)),
    (2048, config(BLOCK_M=4, BLOCK_N=2048, STAGES=3, num_warps=8)),
    (4096, config(BLOCK_M=2, BLOCK_N=4096, STAGES=3, num_warps=8)),
    (8192, config(BLOCK_M=1, BLOCK_N=8192, STAGES=3, num_warps=8)),
]
BWD = Table(
    "rms_norm_bwd",
    {
        80: [*_BWD, (16384, config(BLOCK_M=4, BLOCK_N=2048, STAGES=3, num_warps=8))],
        90: [*_BWD, (16384, config(BLOCK_M=4, BLOCK_N=2048, STAGES=3, num_warps=8, maxnreg=192))],
    },
)
BWD_ODD = Table(
    "rms_norm_bwd_odd",
    {
        80: [
            (64, config(BLOCK_M=64, BLOCK_N=64, STAGES=3, num_warps=8)),
            (128, config(BLOCK_M=32, BLOCK_N=128, STAGES=3, num_warps=8)),
            (256, config(BLOCK_M=16, BLOCK_N=256, STAGES=3, num_warps=8)),
            (512, config(BLOCK_M=8, BLOCK_N=512, STAGES=3, num_warps=8, maxnreg=255)),
            (1024, config(BLOCK_M=4, BLOCK_N=1024, STAGES=3, num_warps=8, maxnreg=255)),
            (2048, config(BLOCK_M=2, BLOCK_N=2048, STAGES=3, num_warps=8)),
            (4096, config(BLOCK_M=1, BLOCK_N=4096, STAGES=3, num_warps=8)),
            (16384, config(BLOCK_M=4, BLOCK_N=2048, STAGES=3, num_warps=8)),
        ]
    },
)
BWD_RING = Table(
    "rms_norm_bwd_ring", {80: [(8192, None), (32768, config(BLOCK_N=8192, num_warps=32)), (65536, None)]}
)
BWD_DOT = Table("rms_norm_bwd_dot", {80: [(65536, config(BLOCK_N=8192, num_warps=16))]})
BWD_SUM = Table("rms_norm_bwd_sum", {80: [(65536, config(BLOCK_P=32, BLOCK_N=64, num_warps=4))]})


# fmt: off
@triton.jit
def _rms_norm_fwd(
    X, stride_xo, stride_xi,          # [M, N]  in    rows: (m // inner)·outer + (m % inner)·inner stride
    RESIDUAL, stride_ro, stride_ri,   # [M, N]  in    or None
    W,                                # [N]     in    or None
    B,                                # [N]     in    or None
    Y,                                # [M, N]  out
    S,                                # [M, N]  out   or None
    RSTD,                             # [M]     out, fp32
    M, N, x_inner, r_inner, eps, offset,
    IS_LLAMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    # fmt: on
    first = tl.program_id(0).to(tl.int64) * BLOCK_M
    offs_n = tl.arange(0, BLOCK_N)
    offs_m = first + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    mask = mask_m[:, None] & (offs_n < N)[None, :]
    x = tl.load(X + row_offsets(first, stride_xo, stride_xi, x_inner, BLOCK_M)[:, None] + offs_n, mask=mask, other=0.0)
    s = x.to(tl.float32)
    if RESIDUAL is not None:
        r_rows = row_offsets(first, stride_ro, stride_ri, r_inner, BLOCK_M)[:, None]
        s += tl.load(RESIDUAL + r_rows + offs_n, mask=mask, other=0.0).to(tl.float32)
        rounded = s.to(S.dtype.element_ty)
        tl.store(S + offs_m[:, None] * N + offs_n, rounded, mask=mask)
        s = rounded.to(tl.float32)
    rstd = inverse_rms(tl.sum(s * s, axis=1), N, eps)
    tl.store(RSTD + offs_m, rstd, mask=mask_m)
    y = scaled(s * rstd[:, None], W, B, offs_n[None, :], N, offset, X.dtype.element_ty, IS_LLAMA)
    tl.store(Y + offs_m[:, None] * N + offs_n, y.to(Y.dtype.element_ty), mask=mask)


# fmt: off
@triton.jit
def _rms_norm_bwd(
    DY, stride_dyo, stride_dyi,   # [M, N]  in    cotangent of y
    DS, stride_dso, stride_dsi,   # [M, N]  in    cotangent of residual_out, or None
    S, stride_so, stride_si,      # [M, N]  in
    W,                            # [N]     in    or None
    RSTD,                         # [M]     in, fp32
    C,                            # [M]     in, fp32   mean(g ∘ x̂); None where the tile holds whole rows
    DX,                           # [M, N]  out   in x's dtype, or None
    DRES,                         # [M, N]  out   in residual's dtype, or None
    DW,                           # [P, N]  out, fp32   or None
    DB,                           # [P, N]  out, fp32   or None
    M, N, dy_inner, ds_inner, s_inner, offset,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):
    # fmt: on
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    w = gain(W, offs_n, N, offset)[None, :]
    acc_dw = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_db = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(M, BLOCK_M), tl.num_programs(1), num_stages=STAGES):
        first = tl.cast(tile, tl.int64) * BLOCK_M
        offs_m = first + tl.arange(0, BLOCK_M)
        mask_m = offs_m < M
        mask = mask_m[:, None] & mask_n[None, :]
        rstd = tl.load(RSTD + offs_m, mask=mask_m, other=0.0)[:, None]
        dy_rows = row_offsets(first, stride_dyo, stride_dyi, dy_inner, BLOCK_M)[:, None]
        dy = tl.load(DY + dy_rows + offs_n, mask=mask, other=0.0).to(tl.float32)
        s_rows = row_offsets(first, stride_so, stride_si, s_inner, BLOCK_M)[:, None]
        xhat = tl.load(S + s_rows + offs_n, mask=mask, other=0.0).to(tl.float32) * rstd
        if DX is not None or DRES is not None:
            g = dy * w
            if C is None:
                c = tl.sum(g * xhat, axis=1) / N
            else:
                c = tl.load(C + offs_m, mask=mask_m, other=0.0)
            ds = rstd * (g - xhat * c[:, None])
            if DS is not None:
                ds_rows = row_offsets(first, stride_dso, stride_dsi, ds_inner, BLOCK_M)[:, None]
                ds += tl.load(DS + ds_rows + offs_n, mask=mask, other=0.0).to(tl.float32)
            if DX is not None:
                tl.store(DX + offs_m[:, None] * N + offs_n, ds.to(DX.dtype.element_ty), mask=mask)
            if DRES is not None:
                tl.store(DRES + offs_m[:, None] * N + offs_n, ds.to(DRES.dtype.element_ty), mask=mask)
        if DW is not None:
            acc_dw += dy * xhat
        if DB is not None:
            acc_db += dy
    partial = tl.program_id(1).to(tl.int64) * N + offs_n
    if DW is not None:
        tl.store(DW + partial, tl.sum(acc_dw, axis=0), mask=mask_n)
    if DB is not None:
        tl.store(DB + partial, tl.sum(acc_db, axis=0), mask=mask_n)


# fmt: off
@triton.jit
def _rms_norm_bwd_sum(
    PARTIAL,   # [P, N]  in
    OUT,       # [N]     out
    P, N,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):
    # fmt: on
    offs_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    for start in range(0, P, BLOCK_P):
        offs_p = start + tl.arange(0, BLOCK_P)
        mask = (offs_p < P)[:, None] & (offs_n < N)[None, :]
        acc += tl.load(PARTIAL + offs_p[:, None] * N + offs_n[None, :], mask=mask, other=0.0)
    tl.store(OUT + offs_n, tl.sum(acc, axis=0).to(OUT.dtype.element_ty), mask=offs_n < N)


def rms_norm_fwd(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor, Tensor]:
    """y, residual_out (empty without a residual), rstd [*] fp32."""
    y, s, rstd = _fwd_outputs(x, weight, bias, residual, eps, offset, casting)
    if x.numel() == 0:
        return y, s, rstd
    M, N, device = rstd.numel(), x.shape[-1], x.device
    xs, parameters, is_llama = as_rows(x), (_flat(weight), _flat(bias)), casting == "llama"
    ring = None if residual is not None else _ring(FWD_RING.pick(N, device), N, x)
    if ring is not None:
        xs = xs.aligned()
        launch(
            _rms_norm_fwd_ring, (min(M, num_sms(device)),), device,
            xs.tensor, xs.outer_stride, xs.inner_stride, *parameters, y, rstd,
            M, N, xs.inner, eps, offset, IS_LLAMA=is_llama, **ring.options,
        )  # fmt: skip
        return y, s, rstd
    tile = (FWD_ODD if N % 16 else FWD).pick(N, device)
    rs = xs if residual is None else as_rows(residual)
    whole = tile["BLOCK_N"] >= N
    kernel, grid = (_rms_norm_fwd, cdiv(M, tile["BLOCK_M"])) if whole else (_rms_norm_fwd_columns, M)
    launch(
        kernel, (grid,), device,
        xs.tensor, xs.outer_stride, xs.inner_stride,
        None if residual is None else rs.tensor, rs.outer_stride, rs.inner_stride,
        *parameters, y, None if residual is None else s, rstd,
        M, N, xs.inner, rs.inner, eps, offset, IS_LLAMA=is_llama, **tile.options,
    )  # fmt: skip
    return y, s, rstd


def rms_norm_bwd(
    dy: Tensor,
    ds: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    dx_dtype: torch.dtype | None,
    dres_dtype: torch.dtype | None,
    dw_dtype: torch.dtype | None,
    db_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx, dresidual, dweight, dbias in the dtypes asked for; empty where None is asked."""
    dx, dres, dw, db = grads = _bwd_outputs(dy, ds, s, weight, rstd, offset, dx_dtype, dres_dtype, dw_dtype, db_dtype)
    M, N, device = rstd.numel(), s.shape[-1], s.device
    if M == 0:
        return dx, dres, dw.zero_(), db.zero_()
    dys, ss, weight = as_rows(dy), as_rows(s), _flat(weight)
    outputs = (None if dx_dtype is None else dx, None if dres_dtype is None else dres)
    ring = None if ds is not None else _ring(BWD_RING.pick(N, device), N, dy, s)
    if ring is not None:
        programs = min(M, num_sms(device))
        dw_partial = _partial(dw_dtype, programs, rstd, N)
        dys16, ss16 = dys.aligned(), ss.aligned()
        launch(
            _rms_norm_bwd_ring, (programs,), device,
            dys16.tensor, dys16.outer_stride, dys16.inner_stride, ss16.tensor, ss16.outer_stride, ss16.inner_stride,
            weight, rstd, *outputs, dw_partial, M, N, dys16.inner, ss16.inner, offset, **ring.options,
        )  # fmt: skip
        _sum_partials(dw_partial, dw)
        outputs, dw_dtype = (None, None), None  # done; the tiles below add db where it is asked for
    if outputs == (None, None) and dw_dtype is db_dtype is None:
        return grads
    tile = _fit((BWD_ODD if N % 16 else BWD).pick(N, device), device, dy, s, ds)
    columns = cdiv(N, tile["BLOCK_N"])
    programs = min(cdiv(M, tile["BLOCK_M"]), cdiv(num_sms(device), columns))
    partials = _partial(dw_dtype, programs, rstd, N), _partial(db_dtype, programs, rstd, N)
    c = None if columns == 1 or outputs == (None, None) else _dot(dys, ss, weight, rstd, N, offset)
    dss = ss if ds is None else as_rows(ds)
    launch(
        _rms_norm_bwd, (columns, programs), device,
        dys.tensor, dys.outer_stride, dys.inner_stride,
        None if ds is None else dss.tensor, dss.outer_stride, dss.inner_stride,
        ss.tensor, ss.outer_stride, ss.inner_stride,
        weight, rstd, c, *outputs, *partials, M, N, dys.inner, dss.inner, ss.inner, offset, **tile.options,
    )  # fmt: skip
    for partial, out in zip(partials, (dw, db), strict=True):
        _sum_partials(partial, out)
    return grads


def _partial(dtype: torch.dtype | None, programs: int, rstd: Tensor, N: int) -> Tensor | None:
    return None if dtype is None else rstd.new_empty(programs, N)


def _sum_partials(partial: Tensor | None, out: Tensor) -> None:
    if partial is not None:
        P, N = partial.shape
        tile = BWD_SUM.pick(N, out.device)
        launch(_rms_norm_bwd_sum, (cdiv(N, tile["BLOCK_N"]),), out.device, partial, out, P, N, **tile.options)


def _dot(dys: RowView, ss: RowView, weight: Tensor | None, rstd: Tensor, N: int, offset: float) -> Tensor:
    """mean(g ∘ x̂) of every row, for tiles that do not hold one whole."""
    c = torch.empty_like(rstd)
    launch(
        _rms_norm_bwd_dot, (rstd.numel(),), rstd.device,
        dys.tensor, dys.outer_stride, dys.inner_stride, ss.tensor, ss.outer_stride, ss.inner_stride,
        weight, rstd, c, N, dys.inner, ss.inner, offset, **BWD_DOT.pick(N, rstd.device).options,
    )  # fmt: skip
    return c


def _ring(tile: Config | None, N: int, *streamed: Tensor) -> Config | None:
    """The ring's configuration; None where the table has none, a row does not fit into shared memory, or in the interpreter.

    A copy is 16 bytes, so N must be a multiple of 16 elements.
    """
    if tile is None or N % 16 or interpreting():
        return None
    chunks = cdiv(N, tile["BLOCK_N"])
    fits = chunks * tile["BLOCK_N"] * sum(t.element_size() for t in streamed) <= shared_memory(streamed[0].device) - 1024
    return tile.replace(CHUNKS=chunks) if fits else None


def _fit(tile: Config, device: torch.device, *streamed: Tensor | None) -> Config:
    """As many pipeline stages as shared memory holds beside one tile of fp32, which the last sum over rows may need."""
    elements = tile["BLOCK_M"] * tile["BLOCK_N"]
    stage = elements * sum(t.element_size() for t in streamed if t is not None)
    stages = (shared_memory(device) - 4 * elements) // stage
    return tile.replace(STAGES=max(1, min(tile["STAGES"], stages)))


def _flat(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()


def _fwd_outputs(x, weight, bias, residual, eps, offset, casting):
    y = x.new_empty(x.shape, dtype=result_dtype(x, weight, casting))
    s = x.new_empty(0) if residual is None else residual.new_empty(x.shape)
    return y, s, x.new_empty(x.shape[:-1], dtype=torch.float32)


def _bwd_outputs(dy, ds, s, weight, rstd, offset, dx_dtype, dres_dtype, dw_dtype, db_dtype):
    shapes = ((s.shape, dx_dtype), (s.shape, dres_dtype), (s.shape[-1:], dw_dtype), (s.shape[-1:], db_dtype))
    return tuple(s.new_empty(0 if dtype is None else shape, dtype=dtype) for shape, dtype in shapes)


_fwd_op = define(
    "rms_norm_fwd(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, float eps, float offset, str casting)"
    " -> (Tensor, Tensor, Tensor)",
    rms_norm_fwd,
    _fwd_outputs,
)
_bwd_op = define(
    "rms_norm_bwd(Tensor dy, Tensor? ds, Tensor s, Tensor? weight, Tensor rstd, float offset, ScalarType? dx_dtype,"
    " ScalarType? dres_dtype, ScalarType? dw_dtype, ScalarType? db_dtype) -> (Tensor, Tensor, Tensor, Tensor)",
    rms_norm_bwd,
    _bwd_outputs,
)


class _RMSNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        eps: float,
        offset: float,
        casting: str,
    ) -> Tensor | tuple[Tensor, Tensor]:
        y, s, rstd = _fwd_op(x, weight, bias, residual, eps, offset, casting)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x if residual is None else s, weight, bias, rstd)
        ctx.eps, ctx.offset, ctx.x_dtype = eps, offset, x.dtype
        if residual is not None and not (ctx.needs_input_grad[0] or ctx.needs_input_grad[3]):
            ctx.mark_non_differentiable(s)
        return y if residual is None else (y, s)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, ds: Tensor | None = None) -> tuple[Tensor | None, ...]:
        s, weight, bias, rstd = ctx.saved_tensors
        if dy is None:
            dy = torch.zeros_like(s)
        need_x, need_w, need_b, need_res = ctx.needs_input_grad[:4]
        if torch.is_grad_enabled():
            return _differentiable_backward(ctx, dy, ds, s, weight, bias)
        same = need_res and s.dtype == ctx.x_dtype
        dx, dres, dw, db = _bwd_op(
            dy, ds, s, weight, rstd, ctx.offset,
            ctx.x_dtype if need_x or same else None,
            s.dtype if need_res and not same else None,
            weight.dtype if need_w else None,
            bias.dtype if need_b else None,
        )  # fmt: skip
        # x and residual enter by their sum only: of one dtype, they share one gradient tensor.
        grads = (dx, need_x), (dw, need_w), (db, need_b), (dx if same else dres, need_res)
        return *(grad if needed else None for grad, needed in grads), None, None, None


def _differentiable_backward(
    ctx: Any, dy: Tensor, ds: Tensor | None, s: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The reference's gradients, for create_graph=True. s is residual_out itself, so its graph leads on to x and residual.

    s enters in fp32, so that nothing is rounded before ds is added, as in the kernel.
    """
    grads = rms_norm_backward((dy,), s.float(), weight, bias=bias, eps=ctx.eps, weight_offset=ctx.offset)
    total = grads["x"] if ds is None else grads["x"] + ds
    found = (total.to(ctx.x_dtype), grads.get("weight"), grads.get("bias"), total.to(s.dtype))
    needed = ctx.needs_input_grad[: len(found)]
    return *(grad if need else None for grad, need in zip(found, needed, strict=True)), None, None, None


def rms_norm(
    x: Rows,
    weight: Columns = None,
    *,
    bias: Columns = None,
    residual: Residual = None,
    eps: Eps = 1e-6,
    weight_offset: Offset = 0.0,
    casting: Casting = "llama",
) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm of each row of x [*, N]: `reference.rms_norm` in Triton; same arguments, result, rounding points and errors.

    Any strides (rows are copied first only where two row strides and a unit column stride cannot address them), fp32, fp16 or
    bf16 each. The result is contiguous. Differentiable twice; no input is written to; the same bits from run to run.
    Autocast changes nothing: the inputs' dtypes decide, as in transformers' modules.
    Raises TypeError for other dtypes, ValueError for tensors that are not on one CUDA device, shapes and options.
    """
    check_rms_norm(x, weight, bias, residual, eps, weight_offset, casting)
    check_supported("rms_norm", x=x, weight=weight, bias=bias, residual=residual)
    if residual is x:
        residual = x.view_as(x)  # torch.compile refuses one tensor as two inputs of a Function
    call = (x, weight, bias, residual, float(eps), float(weight_offset), casting)
    if torch.is_grad_enabled():
        return _RMSNorm.apply(*call)
    y, s, _ = _fwd_op(*call)
    return y if residual is None else (y, s)
