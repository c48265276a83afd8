"""fast/_lora_linear_matmul.py's product for Hopper, in Gluon: the adapter is the first steps of the same K loop.

T and U are written out as 16-bit numbers first: t = hi + lo, u = hi + lo, side by side, so that

    t·u ≈ t_hi·u_hi + t_lo·u_hi + t_hi·u_lo        [t_hi | t_lo | t_hi] · [u_hi | u_hi | u_lo]

is an ordinary product of 3·R columns (2·R where U has x's dtype: u_lo = 0), which the accumulator starts from.
fast/_triton/hopper.py has the parts. Triton's interpreter does not run Gluon: verified on a GPU only, and compiled everywhere.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from fast._lora_linear_skinny import split
from fast._triton.device import num_sms
from fast._triton.gemm import grouped_tile
from fast._triton.hopper import (
    accumulator,
    addressable,
    descriptor,
    multiply,
    quarters,
    slots,
    store_tile,
)
from fast._triton.hopper_products import _fetch
from fast._triton.launch import cdiv, launch
from fast._triton.tuning import Config, Table, config

# By M·N, so that few rows still make a tile for every SM; None: the portable kernel. An element has the same bits in each.
HOPPER = Table(
    "lora_linear_hopper",
    {
        80: [(1, None)],
        90: [
            (2**20, config(BLOCK_M=128, BLOCK_N=64, BLOCK_K=64, GROUP_M=8, SLOTS=8, num_warps=4)),
            (2**21, config(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, GROUP_M=4, SLOTS=6, num_warps=4)),
            (2**62, config(BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, GROUP_M=4, SLOTS=4, num_warps=4)),
        ],
        100: [(1, None)],
    },
)
WIDEN = Table(
    "lora_linear_widen",
    {
        80: [
            (16, config(BLOCK_I=32, BLOCK_R=16, num_warps=4)),
            (256, config(BLOCK_I=32, BLOCK_R=64, num_warps=4)),
        ]
    },
)


# fmt: off
@gluon.jit
def _lora_linear_hopper(
    T,       # [M, K1]        in    descriptor, tiles [BLOCK_M, BLOCK_K]
    U,       # [K1, N]        in    descriptor, tiles [BLOCK_K, BLOCK_N]; where K_MAJOR [N, K1], [BLOCK_N, BLOCK_K]
    A,       # [M, K]         in    likewise
    B,       # [K, N]         in    likewise
    C,       # [N]      fp32  in    or None
    BIAS,    # [N]            in    or None
    ACC,     # [M, N]   fp32  in    rows of stride N, or None
    PRE,     # [M, N]         out   descriptor, tiles [BLOCK_M / 2, BLOCK_N / 4], or None
    OUT,     # [M, N]         out   likewise; None: TOTAL is written
    TOTAL,   # [M, N]   fp32  out   rows of stride N, or None
    M, N, K1, K,
    ACTIVATION: gl.constexpr, K_MAJOR: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, SLOTS: gl.constexpr,
):
    # fmt: on
    B_ROWS: gl.constexpr = BLOCK_N if K_MAJOR else BLOCK_K
    B_COLUMNS: gl.constexpr = BLOCK_K if K_MAJOR else BLOCK_N
    a_tiles = gl.allocate_shared_memory(A.dtype, [SLOTS, BLOCK_M, BLOCK_K], A.layout)
    b_tiles = gl.allocate_shared_memory(A.dtype, [SLOTS, B_ROWS, B_COLUMNS], B.layout)
    full, free = slots(SLOTS)
    if OUT is None:
        out = a_tiles
    else:
        out = gl.allocate_shared_memory(A.dtype, [4, BLOCK_M // 2, BLOCK_N // 4], OUT.layout)
    # fmt: off
    gl.warp_specialize([
        (_multiply, (a_tiles, b_tiles, out, full, free, C, BIAS, ACC, PRE, OUT, TOTAL, M, N, K1, K, ACTIVATION, K_MAJOR,
                     BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, SLOTS, gl.constexpr(0))),
        (_multiply, (a_tiles, b_tiles, out, full, free, C, BIAS, ACC, PRE, OUT, TOTAL, M, N, K1, K, ACTIVATION, K_MAJOR,
                     BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, SLOTS, gl.constexpr(1))),
        (_fetch, (T, U, A, B, a_tiles, b_tiles, full, free, M, N, K1, K, gl.constexpr(False), K_MAJOR,
                 BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, SLOTS)),
    ], [4, 1], [240, 24])
    # fmt: on


# fmt: off
@gluon.jit
def _multiply(
    a_tiles, b_tiles, out, full, free, C, BIAS, ACC, PRE, OUT, TOTAL, M, N, K1, K,
    ACTIVATION: gl.constexpr, K_MAJOR: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, SLOTS: gl.constexpr,
    HALF: gl.constexpr,
):
    """A warpgroup: multiply what has come, then store."""
    # fmt: on
    tiles_m, tiles_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    steps = gl.cdiv(K1, BLOCK_K) + gl.cdiv(K, BLOCK_K)
    ROWS: gl.constexpr = BLOCK_M // 2
    layout: gl.constexpr = accumulator(BLOCK_N, gl.num_warps())
    step = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        m, n = tile_m * BLOCK_M + HALF * ROWS, tile_n * BLOCK_N
        offs_m = m + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        offs_n = n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
        mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
        where = offs_m.to(gl.int64)[:, None] * N + offs_n[None, :]
        if ACC is None:
            acc = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
        else:
            acc = gl.load(ACC + where, mask=mask, other=0.0)
        acc, step = multiply(a_tiles, b_tiles, full, free, acc, ACC is not None, step, steps, HALF, K_MAJOR, SLOTS)
        if TOTAL is not None:
            gl.store(TOTAL + where, acc, mask=mask)
        else:
            parts = quarters(acc)
            for part in gl.static_range(4):
                first = n + part * (BLOCK_N // 4)
                # ptxas moves one part's arithmetic up before another's, until it spills, but not over a branch.
                if first < N:
                    _store(parts[part], C, BIAS, PRE, OUT, out.index(2 * HALF + part % 2), m, first, N, ACTIVATION)
    if TOTAL is None:
        tma.store_wait(0)


@gluon.jit
def _store(u, C, BIAS, PRE, OUT, buffer, m, first, N, ACTIVATION: gl.constexpr):
    """u, then activation(c · u + bias), of some columns."""
    if PRE is not None:
        store_tile(PRE, u.to(PRE.dtype), buffer, m, first)
        tma.store_wait(0)  # the same buffer is written next
    offs_n = first + gl.arange(0, u.shape[1], layout=gl.SliceLayout(0, u.type.layout))
    if C is not None:
        u *= gl.load(C + offs_n, mask=offs_n < N, other=0.0)[None, :]
    if BIAS is not None:
        u += gl.load(BIAS + offs_n, mask=offs_n < N, other=0.0).to(gl.float32)[None, :]
    if ACTIVATION == "silu":
        u = u / (1.0 + gl.exp(-u))
    store_tile(OUT, u.to(OUT.dtype), buffer, m, first)


# fmt: off
@triton.jit
def _lora_linear_widen(
    X, stride_xi, stride_xr,      # [rows, R]           in
    OUT, stride_oi, stride_or,    # [rows, PARTS · R]   out   hi | lo | hi, or hi | hi | lo where TWICE
    rows, R,
    PARTS: tl.constexpr, TWICE: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr,
):
    # fmt: on
    offs_i = tl.program_id(0).to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)
    offs_r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = (offs_i < rows)[:, None] & (offs_r < R)[None, :]
    x = tl.load(X + offs_i[:, None] * stride_xi + offs_r[None, :].to(tl.int64) * stride_xr, mask=mask, other=0.0)
    hi, lo = split(x, OUT.dtype.element_ty)
    out = OUT + offs_i[:, None] * stride_oi + offs_r[None, :].to(tl.int64) * stride_or
    tl.store(out, hi, mask=mask)
    tl.store(out + R * stride_or, hi if TWICE else lo, mask=mask)
    if PARTS == 3:
        tl.store(out + 2 * R * stride_or, lo if TWICE else hi, mask=mask)


def widened(
    x: Tensor, dtype: torch.dtype, parts: int, twice: bool, device: torch.device, rows_last: bool = False
) -> Tensor:
    """x [rows, R] as [rows, parts · R] of dtype, columns padded by zeros to whole 8s; stored transposed with rows_last."""
    rows, R = x.shape
    width = cdiv(parts * R, 8) * 8
    shape = (width, rows) if rows_last else (rows, width)
    stored = x.new_empty(shape, dtype=dtype) if width == parts * R else x.new_zeros(shape, dtype=dtype)
    out = stored.T if rows_last else stored
    tile = WIDEN.pick(R, device)
    launch(
        _lora_linear_widen, (cdiv(rows, tile["BLOCK_I"]), cdiv(R, tile["BLOCK_R"])), device,
        x, *x.stride(), out, *out.stride(), rows, R, PARTS=parts, TWICE=twice, **tile.options,
    )  # fmt: skip
    return stored


def hopper_tile(a: Tensor, b: Tensor, k_major: bool, device: torch.device) -> Config | None:
    """The configuration for a [M, K] · b [K, N] ([N, K] with k_major); None: not this kernel."""
    N = b.shape[0] if k_major else b.shape[1]
    tile = HOPPER.pick(a.shape[0] * N, device)
    return tile if tile is not None and N % 8 == 0 and addressable(a, b) else None


def hopper_matmul(
    a: Tensor,
    b: Tensor,
    t: Tensor | None,
    u: Tensor | None,
    out: Tensor,
    device: torch.device,
    tile: Config,
    *,
    k_major: bool,
    c: Tensor | None = None,
    bias: Tensor | None = None,
    acc: Tensor | None = None,
    pre: Tensor | None = None,
    activation: str | None = None,
) -> None:
    """As `matmul` of fast/_lora_linear_matmul.py; b and u [K, N] and [R, N], with k_major [N, K] and [N, R]; c [N]."""
    (M, K), N = a.shape, out.shape[1]
    block_m, block_n, block_k = tile["BLOCK_M"], tile["BLOCK_N"], tile["BLOCK_K"]
    b_tile = (block_n, block_k) if k_major else (block_k, block_n)
    t_wide, u_wide, K1 = a, b, 0
    if t is not None:
        parts = 2 if u.dtype == a.dtype else 3
        t_wide = widened(t, a.dtype, parts, twice=False, device=device)
        u_wide = widened(u if k_major else u.T, a.dtype, parts, twice=True, device=device, rows_last=not k_major)
        K1 = t_wide.shape[1]
    wide = out.dtype == torch.float32
    part = block_m // 2, block_n // 4
    launch(
        _lora_linear_hopper, (min(num_sms(device), cdiv(M, block_m) * cdiv(N, block_n)),), device,
        descriptor(t_wide, block_m, block_k), descriptor(u_wide, *b_tile),
        descriptor(a, block_m, block_k), descriptor(b, *b_tile),
        c, bias, acc, descriptor(pre, *part), None if wide else descriptor(out, *part), out if wide else None,
        M, N, K1, K, ACTIVATION=activation, K_MAJOR=k_major, **tile.options,
    )  # fmt: skip
