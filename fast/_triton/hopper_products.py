"""out = acc + A1·B1 + A2·B2 in one kernel for Hopper: two matrix products that share an accumulator.

Persistent programs walk over tiles [BLOCK_M, BLOCK_N] of out; fast/_triton/hopper.py has the parts. The products are either
summed one after the other, or in turns, BLOCK_K columns of A1 and of A2 at a time: then the bits do not depend on whether the
columns come in one call or in several that hand on acc in fp32, if each has whole blocks.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from fast._triton.device import num_sms
from fast._triton.gemm import grouped_tile
from fast._triton.hopper import (
    accumulator,
    claim,
    descriptor,
    multiply,
    quarters,
    slots,
    store_tile,
    tma_load,
)
from fast._triton.launch import cdiv, launch
from fast._triton.tuning import Config


# fmt: off
@gluon.jit
def _products(
    A1,      # [M, K1]        in    descriptor, tiles [BLOCK_M, BLOCK_K]
    B1,      # [K1, N]        in    descriptor, tiles [BLOCK_K, BLOCK_N]; where K_MAJOR [N, K1], [BLOCK_N, BLOCK_K]
    A2,      # [M, K2]        in    likewise
    B2,      # [K2, N]        in    likewise
    ACC,     # [M, N]  fp32   in    rows of stride N, or None
    OUT,     # [M, N]         out   descriptor, tiles [BLOCK_M / 2, BLOCK_N / 4], or None: TOTAL is written
    TOTAL,   # [M, N]  fp32   out   rows of stride N, or None
    M, N, K1, K2,
    IN_TURNS: gl.constexpr, K_MAJOR: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
    SLOTS: gl.constexpr,
):
    # fmt: on
    B_ROWS: gl.constexpr = BLOCK_N if K_MAJOR else BLOCK_K
    B_COLUMNS: gl.constexpr = BLOCK_K if K_MAJOR else BLOCK_N
    a_tiles = gl.allocate_shared_memory(A1.dtype, [SLOTS, BLOCK_M, BLOCK_K], A1.layout)
    b_tiles = gl.allocate_shared_memory(A1.dtype, [SLOTS, B_ROWS, B_COLUMNS], B1.layout)
    full, free = slots(SLOTS)
    out = gl.allocate_shared_memory(A1.dtype, [4, BLOCK_M // 2, BLOCK_N // 4], A1.layout)
    # fmt: off
    gl.warp_specialize([
        (_multiply, (a_tiles, b_tiles, out, full, free, ACC, OUT, TOTAL, M, N, K1, K2, K_MAJOR,
                     BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, SLOTS, gl.constexpr(0))),
        (_multiply, (a_tiles, b_tiles, out, full, free, ACC, OUT, TOTAL, M, N, K1, K2, K_MAJOR,
                     BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, SLOTS, gl.constexpr(1))),
        (_fetch, (A1, B1, A2, B2, a_tiles, b_tiles, full, free, M, N, K1, K2, IN_TURNS, K_MAJOR,
                  BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, SLOTS)),
    ], [4, 1], [240, 24])
    # fmt: on


# fmt: off
@gluon.jit
def _fetch(
    A1, B1, A2, B2, a_tiles, b_tiles, full, free, M, N, K1, K2, IN_TURNS: gl.constexpr, K_MAJOR: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, SLOTS: gl.constexpr,
):
    """One warp: keep the slots full, from tile to tile without a pause."""
    # fmt: on
    tiles_m, tiles_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    steps1 = gl.cdiv(K1, BLOCK_K)
    steps = steps1 + gl.cdiv(K2, BLOCK_K)
    BYTES: gl.constexpr = (BLOCK_M + BLOCK_N) * BLOCK_K * A1.dtype.primitive_bitwidth // 8
    step = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        m, n = tile_m * BLOCK_M, tile_n * BLOCK_N
        for i in range(steps):
            slot, ready = claim(full, free, step, SLOTS, BYTES)
            if IN_TURNS:
                second = i % 2 == 1
                k = i // 2 * BLOCK_K
            else:
                second = i >= steps1
                k = gl.where(second, i - steps1, i) * BLOCK_K
            if second:
                tma_load(A2, [m, k], ready, a_tiles.index(slot))
                _load_b(B2, n, k, ready, b_tiles.index(slot), K_MAJOR)
            else:
                tma_load(A1, [m, k], ready, a_tiles.index(slot))
                _load_b(B1, n, k, ready, b_tiles.index(slot), K_MAJOR)
            step += 1


@gluon.jit
def _load_b(B, n, k, ready, tile, K_MAJOR: gl.constexpr):
    if K_MAJOR:
        tma_load(B, [n, k], ready, tile)
    else:
        tma_load(B, [k, n], ready, tile)


# fmt: off
@gluon.jit
def _multiply(
    a_tiles, b_tiles, out, full, free, ACC, OUT, TOTAL, M, N, K1, K2, K_MAJOR: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, SLOTS: gl.constexpr,
    HALF: gl.constexpr,
):
    """A warpgroup: multiply what has come, then store."""
    # fmt: on
    tiles_m, tiles_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    steps = gl.cdiv(K1, BLOCK_K) + gl.cdiv(K2, BLOCK_K)
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
            parts = quarters(acc.to(OUT.dtype))
            for part in gl.static_range(4):
                store_tile(OUT, parts[part], out.index(2 * HALF + part % 2), m, n + part * (BLOCK_N // 4))
    if TOTAL is None:
        tma.store_wait(0)


def products(
    a1: Tensor,
    b1: Tensor,
    a2: Tensor,
    b2: Tensor,
    out: Tensor,
    tile: Config,
    *,
    acc: Tensor | None = None,
    k_major: bool = False,
    in_turns: bool = False,
) -> None:
    """Write out [M, N] = acc + a1·b1 + a2·b2; b [K, N], with k_major [N, K].

    out: 16 bits, rounded once, or fp32 and contiguous; acc: fp32 and contiguous, may be out. in_turns: a1 and a2 of one shape.
    """
    (M, K1), N = a1.shape, out.shape[1]
    block_m, block_n, block_k = tile["BLOCK_M"], tile["BLOCK_N"], tile["BLOCK_K"]
    b_tile = (block_n, block_k) if k_major else (block_k, block_n)
    wide = out.dtype == torch.float32
    launch(
        _products, (min(num_sms(out.device), cdiv(M, block_m) * cdiv(N, block_n)),), out.device,
        descriptor(a1, block_m, block_k), descriptor(b1, *b_tile),
        descriptor(a2, block_m, block_k), descriptor(b2, *b_tile),
        acc, None if wide else descriptor(out, block_m // 2, block_n // 4), out if wide else None,
        M, N, K1, a2.shape[1], IN_TURNS=in_turns, K_MAJOR=k_major, **tile.options,
    )  # fmt: skip
