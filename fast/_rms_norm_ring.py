"""RMSNorm of rows too long for registers, in Gluon: each row passes once through shared memory.

A column loop in plain Triton has to read a long row twice from L2. Here a persistent program copies its rows chunk by chunk
into as many slots (cp.async, so Ampere and newer), reads a row's chunks for the row sum, reads them again for the result, and
refills each slot behind itself, so that the next row is on its way while this one's results leave.

    slot      0         1         2         3
    sum       x₀ read   x₁ read   x₂ read   x₃ read        HELD = 2: x₀ and x₁ stay in registers, so that slots 0 and 1
    result    refilled  refilled  x₂ read   x₃ read        are refilled with the next row during the sum already

Which widths come here is in fast/rms_norm.py's tables. Triton's interpreter does not run Gluon: these kernels are verified
on a GPU only, and compiled everywhere.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

# Triton renamed the copy between 3.6 and 3.9; a call of the old name raises there.
_async_load = (
    async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
)


# fmt: off
@gluon.jit
def _rms_norm_fwd_ring(
    X, stride_xo, stride_xi,   # [M, N]  in
    W,                         # [N]     in   or None
    B,                         # [N]     in   or None
    Y,                         # [M, N]  out
    RSTD,                      # [M]     out, fp32
    M, N, x_inner, eps, offset,
    IS_LLAMA: gl.constexpr, BLOCK_N: gl.constexpr, CHUNKS: gl.constexpr, HELD: gl.constexpr,
):
    # fmt: on
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    ring = _allocate(X.dtype.element_ty, BLOCK_N, CHUNKS)
    offs_n = gl.arange(0, BLOCK_N, layout=layout)
    step = gl.num_programs(0)
    for c in gl.static_range(CHUNKS):
        _fetch(ring[c], X, stride_xo, stride_xi, x_inner, gl.program_id(0), M, 0, offs_n + c * BLOCK_N, N)
        async_copy.commit_group()
    for m in range(gl.program_id(0), M, step):
        held = ()
        acc = gl.zeros([BLOCK_N], gl.float32, layout)
        for c in gl.static_range(CHUNKS):
            offs_c = offs_n + c * BLOCK_N
            async_copy.wait_group(CHUNKS - 1 if c < HELD else CHUNKS - 1 - c + HELD)
            x = ring[c].load(layout)
            if c < HELD:
                held = held + (x,)
                _fetch(ring[c], X, stride_xo, stride_xi, x_inner, m + step, M, 0, offs_c, N)
                async_copy.commit_group()
            x = gl.where(offs_c < N, x.to(gl.float32), 0.0)
            acc += x * x
        rstd = 1.0 / gl.sqrt_rn(gl.sum(acc, axis=0) / N + eps)
        gl.store(RSTD + m, rstd)
        w_next = _load_weight(W, offs_n, N)
        for c in gl.static_range(CHUNKS):
            offs_c = offs_n + c * BLOCK_N
            w = w_next
            if c < CHUNKS - 1:
                w_next = _load_weight(W, offs_c + BLOCK_N, N)
            if c < HELD:
                xhat = held[c].to(gl.float32) * rstd
            else:
                xhat = ring[c].load(layout).to(gl.float32) * rstd
                _fetch(ring[c], X, stride_xo, stride_xi, x_inner, m + step, M, 0, offs_c, N)
                async_copy.commit_group()
            if IS_LLAMA:
                xhat = xhat.to(X.dtype.element_ty).to(gl.float32)
            if W is not None:
                xhat *= w.to(gl.float32) + offset
            if B is not None:
                xhat += gl.load(B + offs_c, mask=offs_c < N, other=0.0).to(gl.float32)
            gl.store(Y + m.to(gl.int64) * N + offs_c, xhat.to(Y.dtype.element_ty), mask=offs_c < N)


# fmt: off
@gluon.jit
def _rms_norm_bwd_ring(
    DY, stride_dyo, stride_dyi,   # [M, N]  in
    S, stride_so, stride_si,      # [M, N]  in
    W,                            # [N]     in    or None
    RSTD,                         # [M]     in, fp32
    DX,                           # [M, N]  out   in x's dtype, or None
    DRES,                         # [M, N]  out   in residual's dtype, or None
    DW,                           # [P, N]  out, fp32   or None
    M, N, dy_inner, s_inner, offset,
    BLOCK_N: gl.constexpr, CHUNKS: gl.constexpr,
):
    # fmt: on
    # dw alone takes half of the registers at four chunks. So a chunk is copied whole, but computed in halves; and each chunk of
    # the row sum is a branch (always taken: N > c · BLOCK_N), because ptxas moves the next chunk's loads up, but not over one.
    copied: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    HALF: gl.constexpr = BLOCK_N // 2
    ring_s = _allocate(S.dtype.element_ty, BLOCK_N, CHUNKS)
    ring_dy = _allocate(DY.dtype.element_ty, BLOCK_N, CHUNKS)
    offs_n = gl.arange(0, BLOCK_N, layout=copied)
    offs_h = gl.arange(0, HALF, layout=layout)
    step = gl.num_programs(0)
    dw = ()
    for c in gl.static_range(CHUNKS):
        start = c * BLOCK_N
        left = N - start if c == CHUNKS - 1 else BLOCK_N  # only the last chunk ends within its slot
        dw = dw + (gl.zeros([HALF], gl.float32, layout), gl.zeros([HALF], gl.float32, layout))
        _fetch(ring_s[c], S, stride_so, stride_si, s_inner, gl.program_id(0), M, start, offs_n, left)
        _fetch(ring_dy[c], DY, stride_dyo, stride_dyi, dy_inner, gl.program_id(0), M, start, offs_n, left)
        async_copy.commit_group()
    for m in range(gl.program_id(0), M, step):
        rstd = gl.load(RSTD + m)
        acc = gl.zeros([HALF], gl.float32, layout)
        for c in gl.static_range(CHUNKS):
            if c * BLOCK_N < N:
                async_copy.wait_group(CHUNKS - 1 - c)
                for h in gl.static_range(2):
                    start = c * BLOCK_N + h * HALF
                    mask = offs_h < (N - start if c == CHUNKS - 1 else HALF)
                    xhat = ring_s[c].slice(h * HALF, HALF).load(layout).to(gl.float32) * rstd
                    g = ring_dy[c].slice(h * HALF, HALF).load(layout).to(gl.float32)
                    if W is not None:
                        g *= gl.load(W + start + offs_h, mask=mask, other=0.0).to(gl.float32) + offset
                    acc += gl.where(mask, g * xhat, 0.0)
        mean = gl.sum(acc, axis=0) / N
        new_dw = ()
        for c in gl.static_range(CHUNKS):
            for h in gl.static_range(2):
                start = c * BLOCK_N + h * HALF
                mask = offs_h < (N - start if c == CHUNKS - 1 else HALF)
                xhat = ring_s[c].slice(h * HALF, HALF).load(layout).to(gl.float32) * rstd
                dy = ring_dy[c].slice(h * HALF, HALF).load(layout).to(gl.float32)
                if DW is not None:
                    new_dw = new_dw + (dw[2 * c + h] + dy * xhat,)
                if DX is not None or DRES is not None:
                    g = dy
                    if W is not None:
                        g = dy * (gl.load(W + start + offs_h, mask=mask, other=0.0).to(gl.float32) + offset)
                    ds = rstd * (g - xhat * mean)
                    row = m.to(gl.int64) * N + start
                    if DX is not None:
                        gl.store(DX + row + offs_h, ds.to(DX.dtype.element_ty), mask=mask)
                    if DRES is not None:
                        gl.store(DRES + row + offs_h, ds.to(DRES.dtype.element_ty), mask=mask)
            start = c * BLOCK_N
            left = N - start if c == CHUNKS - 1 else BLOCK_N
            _fetch(ring_s[c], S, stride_so, stride_si, s_inner, m + step, M, start, offs_n, left)
            _fetch(ring_dy[c], DY, stride_dyo, stride_dyi, dy_inner, m + step, M, start, offs_n, left)
            async_copy.commit_group()
        if DW is not None:
            dw = new_dw
    if DW is not None:
        for h in gl.static_range(2 * CHUNKS):
            start = h * HALF
            gl.store(DW + gl.program_id(0).to(gl.int64) * N + start + offs_h, dw[h], mask=offs_h < N - start)


@gluon.jit
def _allocate(dtype: gl.constexpr, BLOCK_N: gl.constexpr, CHUNKS: gl.constexpr):
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    ring = ()
    for i in gl.static_range(CHUNKS):
        ring = ring + (gl.allocate_shared_memory(dtype, [BLOCK_N], plain),)
    return ring


@gluon.jit
def _load_weight(W, offs_n, N):
    """As it is stored: converted where it is used, it takes half the registers while it waits."""
    if W is None:
        w = offs_n
    else:
        w = gl.load(W + offs_n, mask=offs_n < N, other=0.0)
    return w


@gluon.jit
def _fetch(slot, X, outer_stride, inner_stride, inner, m, M, start, offs_n, end):
    """Start the copy of row m's columns start + offs_n, those with offs_n < end; nothing is copied past the last row."""
    x = X + _row(m, outer_stride, inner_stride, inner) + start + offs_n
    _async_load(slot, x, mask=(offs_n < end) & (m < M))


@gluon.jit
def _row(m, outer_stride, inner_stride, inner):
    return (m // inner).to(gl.int64) * outer_stride + (m % inner).to(gl.int64) * inner_stride
