"""fast/_lora_linear_matmul.py's product for Hopper, in Gluon: the adapter is the first steps of the same K loop.

T and U are written out as 16-bit numbers first: t = hi + lo, u = hi + lo, side by side, so that

    t·u ≈ t_hi·u_hi + t_lo·u_hi + t_hi·u_lo        [t_hi | t_lo | t_hi] · [u_hi | u_hi | u_lo]

is an ordinary product of 3·R columns (2·R where U has x's dtype: u_lo = 0), which the accumulator starts from.
fast/_triton/hopper.py has the parts. Triton's interpreter does not run Gluon: verified on a GPU only, and compiled everywhere.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from fast._lora_linear_digits import HI, MID, spread
from fast._triton.device import num_sms
from fast._triton.gemm import grouped_tile
from fast._triton.hopper import (
    accumulator,
    addressable,
    claim,
    descriptor,
    multiply,
    quarters,
    slots,
    store_tile,
    tma_load,
)
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


# fmt: off
@gluon.jit
def _lora_linear_hopper(
    T,       # [M, KT]        in    descriptor, tiles [BLOCK_M, BLOCK_K]; or None
    U,       # [KT, N]        in    descriptor, tiles [BLOCK_K, BLOCK_N]; where K_MAJOR [N, KT], [BLOCK_N, BLOCK_K]
    A,       # [M, K]         in    like T
    B,       # [K, N]         in    like U
    A1,      # [M, K1]        in    of a second product, or None
    B1,      # [K1, N]        in
    A2,      # [M, K2]        in    of a third, or None
    B2,      # [K2, N]        in
    KEPT, stride_km,  # [M, ⌈N/32⌉]  in  bits, the mask of T·U; or None
    C,       # [N]      fp32  in    or None
    BIAS,    # [N]            in    or None
    ACC,     # [M, N]   fp32  in    rows of stride N, or None
    PRE,     # [M, N]         out   descriptor, tiles [BLOCK_M / 2, BLOCK_N / 4], or None
    OUT,     # [M, N]         out   likewise; None: TOTAL is written
    TOTAL,   # [M, N]   fp32  out   rows of stride N, or None
    M, N, KT, K, K1, K2, keep_scale,
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
    first = gl.cdiv(KT, BLOCK_K)
    steps = gl.cdiv(K, BLOCK_K) + gl.cdiv(K1, BLOCK_K) + gl.cdiv(K2, BLOCK_K)
    # fmt: off
    gl.warp_specialize([
        (_multiply, (a_tiles, b_tiles, out, full, free, KEPT, stride_km, C, BIAS, ACC, PRE, OUT, TOTAL, M, N, first, steps,
                     keep_scale, ACTIVATION, K_MAJOR, BLOCK_M, BLOCK_N, GROUP_M, SLOTS, gl.constexpr(0))),
        (_multiply, (a_tiles, b_tiles, out, full, free, KEPT, stride_km, C, BIAS, ACC, PRE, OUT, TOTAL, M, N, first, steps,
                     keep_scale, ACTIVATION, K_MAJOR, BLOCK_M, BLOCK_N, GROUP_M, SLOTS, gl.constexpr(1))),
        (_fetch, (T, U, A, B, A1, B1, A2, B2, a_tiles, b_tiles, full, free, M, N, KT, K, K1, K2, K_MAJOR,
                  BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, SLOTS)),
    ], [4, 1], [240, 24])
    # fmt: on


# fmt: off
@gluon.jit
def _fetch(
    T, U, A, B, A1, B1, A2, B2, a_tiles, b_tiles, full, free, M, N, KT, K, K1, K2, K_MAJOR: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, SLOTS: gl.constexpr,
):
    """One warp: keep the slots full, from product to product and from tile to tile without a pause."""
    # fmt: on
    tiles_m, tiles_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    step = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        m, n = tile_m * BLOCK_M, tile_n * BLOCK_N
        if T is not None:
            step = _fetch_product(T, U, a_tiles, b_tiles, full, free, m, n, step, KT, K_MAJOR, BLOCK_K, SLOTS)
        step = _fetch_product(A, B, a_tiles, b_tiles, full, free, m, n, step, K, K_MAJOR, BLOCK_K, SLOTS)
        if A1 is not None:
            step = _fetch_product(A1, B1, a_tiles, b_tiles, full, free, m, n, step, K1, K_MAJOR, BLOCK_K, SLOTS)
        if A2 is not None:
            step = _fetch_product(A2, B2, a_tiles, b_tiles, full, free, m, n, step, K2, K_MAJOR, BLOCK_K, SLOTS)


# fmt: off
@gluon.jit
def _fetch_product(
    A, B, a_tiles, b_tiles, full, free, m, n, step, K,
    K_MAJOR: gl.constexpr, BLOCK_K: gl.constexpr, SLOTS: gl.constexpr,
):
    # fmt: on
    BYTES: gl.constexpr = (a_tiles.shape[1] * a_tiles.shape[2] + b_tiles.shape[1] * b_tiles.shape[2]) * 2
    for k in range(0, K, BLOCK_K):
        slot, ready = claim(full, free, step, SLOTS, BYTES)
        tma_load(A, [m, k], ready, a_tiles.index(slot))
        if K_MAJOR:
            tma_load(B, [n, k], ready, b_tiles.index(slot))
        else:
            tma_load(B, [k, n], ready, b_tiles.index(slot))
        step += 1
    return step


# fmt: off
@gluon.jit
def _multiply(
    a_tiles, b_tiles, out, full, free, KEPT, stride_km, C, BIAS, ACC, PRE, OUT, TOTAL, M, N, first, steps, keep_scale,
    ACTIVATION: gl.constexpr, K_MAJOR: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr,
    SLOTS: gl.constexpr, HALF: gl.constexpr,
):
    """A warpgroup: multiply what has come, the first steps of each tile being T·U, then store."""
    # fmt: on
    tiles_m, tiles_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
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
        acc = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
        if KEPT is not None:
            acc, step = multiply(a_tiles, b_tiles, full, free, acc, False, step, first, HALF, K_MAJOR, SLOTS)
            acc = _dropped(acc, KEPT, stride_km, m, n, M, N, keep_scale)
            if ACC is not None:
                acc += gl.load(ACC + where, mask=mask, other=0.0)
            acc, step = multiply(a_tiles, b_tiles, full, free, acc, True, step, steps, HALF, K_MAJOR, SLOTS)
        else:
            if ACC is not None:
                acc = gl.load(ACC + where, mask=mask, other=0.0)
            acc, step = multiply(a_tiles, b_tiles, full, free, acc, ACC is not None, step, first + steps, HALF, K_MAJOR, SLOTS)
        if TOTAL is not None:
            gl.store(TOTAL + where, acc, mask=mask)
        else:
            parts = quarters(acc)
            for part in gl.static_range(4):
                first_n = n + part * (BLOCK_N // 4)
                # ptxas moves one part's arithmetic up before another's, until it spills, but not over a branch.
                if first_n < N:
                    _store(parts[part], C, BIAS, PRE, OUT, out.index(2 * HALF + part % 2), m, first_n, N, ACTIVATION)
    if TOTAL is None:
        tma.store_wait(0)


@gluon.jit
def _dropped(acc, KEPT, stride_km, m, n, M, N, keep_scale):
    """acc ∘ kept · keep_scale. Every thread has some columns of each word of its rows."""
    ROWS: gl.constexpr = acc.shape[0]
    WORDS: gl.constexpr = acc.shape[1] // 32
    wide = acc.reshape([ROWS, WORDS, 32])
    layout: gl.constexpr = wide.type.layout
    of_words: gl.constexpr = gl.SliceLayout(2, layout)
    rows = m + gl.arange(0, ROWS, layout=gl.SliceLayout(1, of_words))
    words = n // 32 + gl.arange(0, WORDS, layout=gl.SliceLayout(0, of_words))
    mask = (rows < M)[:, None] & (32 * words < N)[None, :]
    word = gl.load(KEPT + rows.to(gl.int64)[:, None] * stride_km + words[None, :], mask=mask, other=0)
    i = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    bit = (word.expand_dims(2) >> i[None, :].expand_dims(0)) & 1
    wide = gl.where(bit != 0, wide * keep_scale, 0.0)
    return gl.convert_layout(wide.reshape([ROWS, 32 * WORDS]), acc.type.layout, assert_trivial=True)


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


def hopper_tile(pairs: list[tuple[Tensor, Tensor]], k_major: bool, device: torch.device) -> Config | None:
    """The configuration for products a [M, K] · b [K, N] ([N, K] with k_major); None: not this kernel."""
    (M, _), N = pairs[0][0].shape, pairs[0][1].shape[0 if k_major else 1]
    tile = HOPPER.pick(M * N, device)
    return tile if tile is not None and N % 8 == 0 and addressable(*(t for pair in pairs for t in pair)) else None


def hopper_matmul(
    pairs: list[tuple[Tensor, Tensor]],
    t: Tensor | None,
    u: Tensor | None,
    out: Tensor,
    device: torch.device,
    tile: Config,
    dropout: tuple[Tensor | None, float],
    *,
    k_major: bool,
    c: Tensor | None = None,
    bias: Tensor | None = None,
    acc: Tensor | None = None,
    pre: Tensor | None = None,
    activation: str | None = None,
) -> None:
    """As `_matmul` of fast/_lora_linear_matmul.py, with acc [M, N] fp32; b and u [K, N] and [R, N], with k_major [N, K] and
    [N, R]; c [N]."""
    dtype, (M, N) = pairs[0][0].dtype, out.shape
    block_m, block_n, block_k = tile["BLOCK_M"], tile["BLOCK_N"], tile["BLOCK_K"]
    b_tile = (block_n, block_k) if k_major else (block_k, block_n)
    if t is None:
        operands = [(None, None)]
    else:
        of_t, of_u = ((HI, MID), (HI, HI)) if u.dtype == dtype else ((HI, MID, HI), (HI, HI, MID))
        jobs = [(t, of_t, False), (u if k_major else u.T, of_u, not k_major)]
        operands = [tuple(spread(jobs, dtype, cdiv(t.shape[1], 8) * 8, device))]
    operands += [*pairs, *[(None, None)] * (3 - len(pairs))]
    lengths = [0 if a is None else a.shape[1] for a, _ in operands]
    wide = out.dtype == torch.float32
    part, (bits, keep_scale) = (block_m // 2, block_n // 4), dropout
    tiles = ((descriptor(a, block_m, block_k), descriptor(b, *b_tile)) for a, b in operands)
    launch(
        _lora_linear_hopper, (min(num_sms(device), cdiv(M, block_m) * cdiv(N, block_n)),), device,
        *(operand for pair in tiles for operand in pair), bits, 0 if bits is None else bits.stride(0),
        c, bias, acc, descriptor(pre, *part), None if wide else descriptor(out, *part), out if wide else None,
        M, N, *lengths, keep_scale, ACTIVATION=activation, K_MAJOR=k_major, **tile.options,
    )  # fmt: skip
