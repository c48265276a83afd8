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
            63 and 95 µs at 4.26 TB/s; 6 and 13 FLOPs an element are 0.4 and 0.9 GFLOP, nothing beside it.
Tiles       N ≤ WIDEST: a program holds BLOCK_M whole rows in registers, so nothing is read twice. Backward programs are
            persistent: each strides over the rows and keeps its partial of dw in registers until its last row.
            N > WIDEST: forward loops over the columns twice (the second read hits L2); backward takes c in one kernel,
            and a second one walks down the rows with a tile of columns.
Rounding    fp32 inside; the points where values are rounded are the reference's.
Determinism dw and db: fp32 partials, one per program, added in a fixed order by a second kernel; no atomics. The tile
            depends on N alone, so a row's bits do not depend on how many rows there are.
Limits      fp32, fp16, bf16; leading dims that need more than two strides, and rows without unit stride, are copied first.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from fast._triton.device import num_sms
from fast._triton.launch import as_rows, check_supported, launch
from fast._triton.registration import define
from fast._triton.tuning import Table, config
from reference.rms_norm import Casting, Columns, Eps, Offset, Residual, Rows, check_rms_norm, result_dtype, rms_norm_backward

# A row is held whole by one program while N ≤ BLOCK_N; the last configuration of each table is that of the column loops.
FWD = Table(
    "rms_norm_fwd",
    {
        80: [
            (64, config(BLOCK_M=64, BLOCK_N=64, num_warps=4)),
            (128, config(BLOCK_M=32, BLOCK_N=128, num_warps=4)),
            (256, config(BLOCK_M=16, BLOCK_N=256, num_warps=4)),
            (512, config(BLOCK_M=8, BLOCK_N=512, num_warps=4)),
            (1024, config(BLOCK_M=4, BLOCK_N=1024, num_warps=4)),
            (2048, config(BLOCK_M=2, BLOCK_N=2048, num_warps=4)),
            (4096, config(BLOCK_M=1, BLOCK_N=4096, num_warps=4)),
            (8192, config(BLOCK_M=1, BLOCK_N=8192, num_warps=8)),
            (16384, config(BLOCK_M=1, BLOCK_N=16384, num_warps=16)),
            (32768, config(BLOCK_M=1, BLOCK_N=32768, num_warps=32)),
            (65536, config(BLOCK_M=1, BLOCK_N=8192, num_warps=16)),
        ],
    },
)
BWD = Table(
    "rms_norm_bwd",
    {
        80: [
            (64, config(BLOCK_M=64, BLOCK_N=64, num_warps=4)),
            (128, config(BLOCK_M=32, BLOCK_N=128, num_warps=4)),
            (256, config(BLOCK_M=16, BLOCK_N=256, num_warps=4)),
            (512, config(BLOCK_M=8, BLOCK_N=512, num_warps=4)),
            (1024, config(BLOCK_M=4, BLOCK_N=1024, num_warps=4)),
            (2048, config(BLOCK_M=2, BLOCK_N=2048, num_warps=4)),
            (4096, config(BLOCK_M=1, BLOCK_N=4096, num_warps=8)),
            (8192, config(BLOCK_M=1, BLOCK_N=8192, num_warps=8)),
            (16384, config(BLOCK_M=1, BLOCK_N=16384, num_warps=16)),
            (32768, config(BLOCK_M=4, BLOCK_N=1024, num_warps=4)),
        ],
    },
)
DOT = Table("rms_norm_bwd_dot", {80: [(1, config(BLOCK_N=8192, num_warps=16))]})
BWD_SUM = Table("rms_norm_bwd_sum", {80: [(1, config(BLOCK_P=32, BLOCK_N=64, num_warps=4))]})
PROGRAMS_PER_SM = 4


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
    x = tl.load(X + _row_offsets(first, stride_xo, stride_xi, x_inner, BLOCK_M)[:, None] + offs_n, mask=mask, other=0.0)
    s = x.to(tl.float32)
    if RESIDUAL is not None:
        r_rows = _row_offsets(first, stride_ro, stride_ri, r_inner, BLOCK_M)[:, None]
        s += tl.load(RESIDUAL + r_rows + offs_n, mask=mask, other=0.0).to(tl.float32)
        rounded = s.to(S.dtype.element_ty)
        tl.store(S + offs_m[:, None] * N + offs_n, rounded, mask=mask)
        s = rounded.to(tl.float32)
    rstd = _rstd(tl.sum(s * s, axis=1), N, eps)
    tl.store(RSTD + offs_m, rstd, mask=mask_m)
    y = _scale(s * rstd[:, None], W, B, offs_n[None, :], offs_n[None, :] < N, offset, X.dtype.element_ty, IS_LLAMA)
    tl.store(Y + offs_m[:, None] * N + offs_n, y.to(Y.dtype.element_ty), mask=mask)


# fmt: off
@triton.jit
def _rms_norm_fwd_wide(
    X, stride_xo, stride_xi,          # [M, N]  in
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
    m = tl.program_id(0).to(tl.int64)
    X += tl.sum(_row_offsets(m, stride_xo, stride_xi, x_inner, 1))
    Y += m * N
    if RESIDUAL is not None:
        RESIDUAL += tl.sum(_row_offsets(m, stride_ro, stride_ri, r_inner, 1))
        S += m * N
    acc = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask = offs_n < N
        s = tl.load(X + offs_n, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if RESIDUAL is not None:
            s += tl.load(RESIDUAL + offs_n, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
            s = s.to(S.dtype.element_ty).to(tl.float32)
        acc += s * s
    rstd = _rstd(tl.sum(acc), N, eps)
    tl.store(RSTD + m, rstd)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask = offs_n < N
        s = tl.load(X + offs_n, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if RESIDUAL is not None:
            s += tl.load(RESIDUAL + offs_n, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            rounded = s.to(S.dtype.element_ty)
            tl.store(S + offs_n, rounded, mask=mask)
            s = rounded.to(tl.float32)
        y = _scale(s * rstd, W, B, offs_n, mask, offset, X.dtype.element_ty, IS_LLAMA)
        tl.store(Y + offs_n, y.to(Y.dtype.element_ty), mask=mask)


# fmt: off
@triton.jit
def _rms_norm_bwd(
    DY, stride_yo, stride_yi,   # [M, N]  in    cotangent of y
    DS, stride_so, stride_si,   # [M, N]  in    cotangent of residual_out, or None
    S, stride_xo, stride_xi,    # [M, N]  in
    W,                          # [N]     in    or None
    RSTD,                       # [M]     in
    C,                          # [M]     in    mean(g ∘ x̂); None where the tile holds whole rows
    DX,                         # [M, N]  out   in x's dtype, or None
    DRES,                       # [M, N]  out   in residual's dtype, or None
    DW,                         # [P, N]  out, fp32   or None
    DB,                         # [P, N]  out, fp32   or None
    M, N, y_inner, s_inner, x_inner, offset,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    # fmt: on
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    gain = _gain(W, offs_n, mask_n, offset)[None, :]
    acc_dw = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_db = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for tile in range(tl.program_id(1), tl.cdiv(M, BLOCK_M), tl.num_programs(1)):
        first = tl.cast(tile, tl.int64) * BLOCK_M
        offs_m = first + tl.arange(0, BLOCK_M)
        mask_m = offs_m < M
        mask = mask_m[:, None] & mask_n[None, :]
        rstd = tl.load(RSTD + offs_m, mask=mask_m, other=0.0)[:, None]
        dy_rows = _row_offsets(first, stride_yo, stride_yi, y_inner, BLOCK_M)[:, None]
        dy = tl.load(DY + dy_rows + offs_n, mask=mask, other=0.0).to(tl.float32)
        s_rows = _row_offsets(first, stride_xo, stride_xi, x_inner, BLOCK_M)[:, None]
        xhat = tl.load(S + s_rows + offs_n, mask=mask, other=0.0).to(tl.float32) * rstd
        if DX is not None or DRES is not None:
            g = dy * gain
            if C is None:
                c = tl.sum(g * xhat, axis=1) / N
            else:
                c = tl.load(C + offs_m, mask=mask_m, other=0.0)
            ds = rstd * (g - xhat * c[:, None])
            if DS is not None:
                ds_rows = _row_offsets(first, stride_so, stride_si, s_inner, BLOCK_M)[:, None]
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
def _rms_norm_bwd_dot(
    DY, stride_yo, stride_yi,   # [M, N]  in
    S, stride_xo, stride_xi,    # [M, N]  in
    W,                          # [N]     in    or None
    RSTD,                       # [M]     in
    C,                          # [M]     out, fp32   mean(g ∘ x̂)
    N, y_inner, x_inner, offset,
    BLOCK_N: tl.constexpr,
):
    # fmt: on
    m = tl.program_id(0).to(tl.int64)
    DY += tl.sum(_row_offsets(m, stride_yo, stride_yi, y_inner, 1))
    S += tl.sum(_row_offsets(m, stride_xo, stride_xi, x_inner, 1))
    rstd = tl.load(RSTD + m)
    acc = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask = offs_n < N
        g = tl.load(DY + offs_n, mask=mask, other=0.0).to(tl.float32) * _gain(W, offs_n, mask, offset)
        acc += g * (tl.load(S + offs_n, mask=mask, other=0.0).to(tl.float32) * rstd)
    tl.store(C + m, tl.sum(acc) / N)


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


@triton.jit
def _row_offsets(first, outer_stride, inner_stride, inner, BLOCK_M: tl.constexpr):
    """Element offsets of rows first … first + BLOCK_M − 1; one 64-bit division a program, 32-bit ones after it."""
    within = (first % inner).to(tl.int32) + tl.arange(0, BLOCK_M)
    outer = first // inner + within // inner
    return outer * outer_stride + (within % inner).to(tl.int64) * inner_stride


@triton.jit
def _rstd(sum_of_squares, N, eps):
    # sqrt_rn, not rsqrt: the approximate rsqrt flushes subnormal means to zero.
    return 1.0 / tl.sqrt_rn(sum_of_squares / N + eps)


@triton.jit
def _gain(W, offs_n, mask_n, offset):
    if W is None:
        return tl.full(offs_n.shape, 1.0, tl.float32)
    return tl.load(W + offs_n, mask=mask_n, other=0.0).to(tl.float32) + offset


@triton.jit
def _scale(xhat, W, B, offs_n, mask_n, offset, dtype: tl.constexpr, IS_LLAMA: tl.constexpr):
    if IS_LLAMA:
        xhat = xhat.to(dtype).to(tl.float32)
    y = xhat * _gain(W, offs_n, mask_n, offset)
    if B is not None:
        y += tl.load(B + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    return y


def rms_norm_fwd(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor, Tensor]:
    """y, residual_out (empty without a residual), rstd [*] fp32."""
    y, s, rstd = _fwd_outputs(x, weight, bias, residual, eps, offset, casting)
    if x.numel() == 0:
        return y, s, rstd
    M, N = rstd.numel(), x.shape[-1]
    tile = FWD.pick(N, x.device)
    xs, rs = as_rows(x), as_rows(x if residual is None else residual)
    whole = tile["BLOCK_N"] >= N
    kernel, grid = (_rms_norm_fwd, (triton.cdiv(M, tile["BLOCK_M"]),)) if whole else (_rms_norm_fwd_wide, (M,))
    launch(
        kernel, grid, x.device,
        xs.tensor, xs.outer_stride, xs.inner_stride,
        None if residual is None else rs.tensor, rs.outer_stride, rs.inner_stride,
        _flat(weight), _flat(bias), y, None if residual is None else s, rstd,
        M, N, xs.inner, rs.inner, eps, offset, IS_LLAMA=casting == "llama", **tile.options(),
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
    M, N = rstd.numel(), s.shape[-1]
    if M == 0:
        for parameter in (dw, db):
            parameter.zero_()
        return grads
    tile = BWD.pick(N, s.device)
    whole = tile["BLOCK_N"] >= N
    columns = 1 if whole else triton.cdiv(N, tile["BLOCK_N"])
    programs = min(triton.cdiv(M, tile["BLOCK_M"]), max(1, PROGRAMS_PER_SM * num_sms(s.device) // columns))
    ys, ss, xs = as_rows(dy), as_rows(s if ds is None else ds), as_rows(s)
    weight = _flat(weight)
    c = None if whole or dx_dtype is dres_dtype is None else torch.empty_like(rstd)
    if c is not None:
        launch(
            _rms_norm_bwd_dot, (M,), s.device,
            ys.tensor, ys.outer_stride, ys.inner_stride, xs.tensor, xs.outer_stride, xs.inner_stride,
            weight, rstd, c, N, ys.inner, xs.inner, offset, **DOT.pick(N, s.device).options(),
        )  # fmt: skip
    partials = [None if dtype is None else rstd.new_empty(programs, N) for dtype in (dw_dtype, db_dtype)]
    launch(
        _rms_norm_bwd, (columns, programs), s.device,
        ys.tensor, ys.outer_stride, ys.inner_stride,
        None if ds is None else ss.tensor, ss.outer_stride, ss.inner_stride,
        xs.tensor, xs.outer_stride, xs.inner_stride,
        weight, rstd, c, None if dx_dtype is None else dx, None if dres_dtype is None else dres, *partials,
        M, N, ys.inner, ss.inner, xs.inner, offset, **tile.options(),
    )  # fmt: skip
    summing = BWD_SUM.pick(N, s.device)
    for partial, out in zip(partials, (dw, db), strict=True):
        if partial is not None:
            grid = (triton.cdiv(N, summing["BLOCK_N"]),)
            launch(_rms_norm_bwd_sum, grid, s.device, partial, out, programs, N, **summing.options())
    return grads


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
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float, offset: float, casting: str
    ) -> Tensor | tuple[Tensor, Tensor]:
        y, s, rstd = _fwd_op(x, weight, bias, residual, eps, offset, casting)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x if residual is None else s, weight, bias, rstd)
        ctx.eps, ctx.offset, ctx.x_dtype = eps, offset, x.dtype
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
        return dx if need_x else None, dw if need_w else None, db if need_b else None, (dx if same else dres) if need_res else None, *[None] * 3


def _differentiable_backward(ctx: Any, dy: Tensor, ds: Tensor | None, s: Tensor, weight: Tensor | None, bias: Tensor | None):
    """The reference's gradients, for create_graph=True. s is residual_out itself, so its graph leads on to x and residual."""
    grads = rms_norm_backward((dy,), s, weight, bias=bias, eps=ctx.eps, weight_offset=ctx.offset)
    total = grads["x"] if ds is None else grads["x"] + ds
    return total.to(ctx.x_dtype), grads.get("weight"), grads.get("bias"), total, None, None, None


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
    return _RMSNorm.apply(x, weight, bias, residual, float(eps), float(weight_offset), casting)
