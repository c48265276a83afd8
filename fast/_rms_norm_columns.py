"""RMSNorm of rows that no program can hold: loops over tiles of columns. Used by fast/rms_norm.py, which explains the tiling."""

import triton
import triton.language as tl

from fast._triton.rows import row_offsets


# fmt: off
@triton.jit
def _rms_norm_fwd_columns(
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
    X += tl.sum(row_offsets(m, stride_xo, stride_xi, x_inner, 1))
    Y += m * N
    if RESIDUAL is not None:
        RESIDUAL += tl.sum(row_offsets(m, stride_ro, stride_ri, r_inner, 1))
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
    rstd = inverse_rms(tl.sum(acc), N, eps)
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
        y = scaled(s * rstd, W, B, offs_n, N, offset, X.dtype.element_ty, IS_LLAMA)
        tl.store(Y + offs_n, y.to(Y.dtype.element_ty), mask=mask)


# fmt: off
@triton.jit
def _rms_norm_bwd_dot(
    DY, stride_dyo, stride_dyi,   # [M, N]  in
    S, stride_so, stride_si,      # [M, N]  in
    W,                            # [N]     in    or None
    RSTD,                         # [M]     in, fp32
    C,                            # [M]     out, fp32   mean(g ∘ x̂)
    N, dy_inner, s_inner, offset,
    BLOCK_N: tl.constexpr,
):
    # fmt: on
    m = tl.program_id(0).to(tl.int64)
    DY += tl.sum(row_offsets(m, stride_dyo, stride_dyi, dy_inner, 1))
    S += tl.sum(row_offsets(m, stride_so, stride_si, s_inner, 1))
    rstd = tl.load(RSTD + m)
    acc = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask = offs_n < N
        g = tl.load(DY + offs_n, mask=mask, other=0.0).to(tl.float32) * gain(W, offs_n, N, offset)
        acc += g * (tl.load(S + offs_n, mask=mask, other=0.0).to(tl.float32) * rstd)
    tl.store(C + m, tl.sum(acc) / N)


@triton.jit
def inverse_rms(sum_of_squares, N, eps):
    # sqrt_rn, not rsqrt: the approximate rsqrt flushes subnormal means to zero.
    return 1.0 / tl.sqrt_rn(sum_of_squares / N + eps)


@triton.jit
def gain(W, offs_n, N, offset):
    # One return: Triton 3.6 compiles what follows a return in a branch that is taken, too.
    if W is None:
        w = tl.full(offs_n.shape, 1.0, tl.float32)
    else:
        w = tl.load(W + offs_n, mask=offs_n < N, other=0.0).to(tl.float32) + offset
    return w


@triton.jit
def scaled(xhat, W, B, offs_n, N, offset, dtype: tl.constexpr, IS_LLAMA: tl.constexpr):
    """x̂ · (w + offset) + b, with x̂ first rounded to x's dtype under casting="llama"."""
    if IS_LLAMA:
        xhat = xhat.to(dtype).to(tl.float32)
    y = xhat * gain(W, offs_n, N, offset)
    if B is not None:
        y += tl.load(B + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
    return y
