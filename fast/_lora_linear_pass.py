"""fast/_lora_linear_skinny.py's products for Hopper, in Gluon: P = Z · U and Q = Zᵀ · V in one pass over Z, in bf16.

A program takes 128 · PAIRS columns of Z and ROWS of its rows, in tiles of 128 × 128 that TMA brings: U's columns stay in shared
memory, Q's in registers. Both warpgroups multiply each tile: half of its rows by U, and half of its columns by V.
U and V enter as their digits. A product by 16 columns takes as long as one by 32, for it waits for Z. So narrow ones enter side
by side, [hi | mid | lo | 0], and the accumulators' blocks are added in the end; wider ones one after the other.
fast/_triton/hopper.py has the parts. Triton's interpreter does not run Gluon: verified on a GPU only, and compiled everywhere.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from fast._lora_linear_digits import HI, LO, MID, NONE, spread
from fast._triton.device import num_sms
from fast._triton.hopper import (
    accumulator,
    addressable,
    barrier,
    claim,
    descriptor,
    quarters,
    slots,
    tma_load,
)
from fast._triton.launch import cdiv, launch
from fast._triton.tuning import Config, Table, config

# By the rank over all adapters; None: the portable kernel.
PASS = Table(
    "lora_linear_pass",
    {
        80: [(256, None)],
        90: [
            (16, config(BLOCK_R=16, PAIRS=2, SLOTS=4, DIGITS=1, num_warps=4)),
            (32, config(BLOCK_R=32, PAIRS=2, SLOTS=3, DIGITS=3, num_warps=4)),
            (64, config(BLOCK_R=64, PAIRS=2, SLOTS=3, DIGITS=3, num_warps=4)),
            (256, None),
        ],
        100: [(256, None)],
    },
)


# fmt: off
@gluon.jit
def _lora_linear_pass(
    Z,   # [M, C]             in   descriptor, tiles [128, 64]
    U,   # [DIGITS · W, C]    in   descriptor, tiles [W, 64], or None; W is BLOCK_R, 4 · BLOCK_R where DIGITS is 1
    V,   # [M, DIGITS · W]    in   descriptor, tiles [128, W], or None
    P,   # [parts, M, BLOCK_R]  out  fp32; one part for every 128 · PAIRS columns; or None
    Q,   # [parts, C, BLOCK_R]  out  fp32; one part for every ROWS rows; or None
    M, C, ROWS,
    BLOCK_R: gl.constexpr, PAIRS: gl.constexpr, SLOTS: gl.constexpr, DIGITS: gl.constexpr,
):
    # fmt: on
    W: gl.constexpr = 4 * BLOCK_R if DIGITS == 1 else BLOCK_R
    z_tiles = gl.allocate_shared_memory(Z.dtype, [2 * SLOTS, 128, 64], Z.layout)
    full, free = slots(SLOTS)
    u_full, _ = slots(1)
    v_full, v_free = slots(2)
    u_tiles = z_tiles
    v_tiles = z_tiles
    if U is not None:
        u_tiles = gl.allocate_shared_memory(Z.dtype, [2 * PAIRS * DIGITS, W, 64], U.layout)
    if V is not None:
        v_tiles = gl.allocate_shared_memory(Z.dtype, [2 * DIGITS, 128, W], V.layout)
    # fmt: off
    gl.warp_specialize([
        (_multiply, (z_tiles, u_tiles, v_tiles, full, free, u_full, v_full, v_free, P, Q, M, C, ROWS,
                     BLOCK_R, PAIRS, SLOTS, DIGITS, gl.constexpr(0))),
        (_multiply, (z_tiles, u_tiles, v_tiles, full, free, u_full, v_full, v_free, P, Q, M, C, ROWS,
                     BLOCK_R, PAIRS, SLOTS, DIGITS, gl.constexpr(1))),
        (_fetch, (Z, U, V, z_tiles, u_tiles, v_tiles, full, free, u_full, v_full, v_free, M, ROWS, PAIRS, SLOTS, DIGITS)),
    ], [4, 1], [240, 24])
    # fmt: on


# fmt: off
@gluon.jit
def _fetch(
    Z, U, V, z_tiles, u_tiles, v_tiles, full, free, u_full, v_full, v_free, M, ROWS,
    PAIRS: gl.constexpr, SLOTS: gl.constexpr, DIGITS: gl.constexpr,
):
    """One warp: U once, then row after row of tiles, and V's rows with them."""
    # fmt: on
    c, first = gl.program_id(0) * (128 * PAIRS), gl.program_id(1) * ROWS
    if U is not None:
        mbarrier.expect(u_full.index(0), 2 * PAIRS * DIGITS * u_tiles.shape[1] * 64 * 2)
        for i in gl.static_range(2 * PAIRS):
            for digit in gl.static_range(DIGITS):
                at = [digit * u_tiles.shape[1], c + i * 64]
                tma_load(U, at, u_full.index(0), u_tiles.index(i * DIGITS + digit))
    step = 0
    for row in range(0, gl.minimum(ROWS, M - first), 128):
        if V is not None:
            slot, ready = claim(v_full, v_free, row // 128, 2, DIGITS * 128 * v_tiles.shape[2] * 2)
            for digit in gl.static_range(DIGITS):
                tma_load(V, [first + row, digit * v_tiles.shape[2]], ready, v_tiles.index(slot * DIGITS + digit))
        for pair in range(PAIRS):
            slot, ready = claim(full, free, step, SLOTS, 128 * 128 * 2)
            tma_load(Z, [first + row, c + pair * 128], ready, z_tiles.index(2 * slot))
            tma_load(Z, [first + row, c + pair * 128 + 64], ready, z_tiles.index(2 * slot + 1))
            step += 1


# fmt: off
@gluon.jit
def _multiply(
    z_tiles, u_tiles, v_tiles, full, free, u_full, v_full, v_free, P, Q, M, C, ROWS,
    BLOCK_R: gl.constexpr, PAIRS: gl.constexpr, SLOTS: gl.constexpr, DIGITS: gl.constexpr, HALF: gl.constexpr,
):
    """A warpgroup. Of several digits the last comes first: small addends before large ones."""
    # fmt: on
    W: gl.constexpr = 4 * BLOCK_R if DIGITS == 1 else BLOCK_R
    layout: gl.constexpr = accumulator(W, gl.num_warps())
    c, first = gl.program_id(0) * (128 * PAIRS), gl.program_id(1) * ROWS
    if P is not None:
        mbarrier.wait(u_full.index(0), 0)
    zero = gl.zeros([64, W], gl.float32, layout)
    q = ()
    if Q is not None:
        for _ in gl.static_range(PAIRS):
            q = q + (zero,)
    step = 0
    for row in range(0, gl.minimum(ROWS, M - first), 128):
        p = zero
        v_slot = row // 128 % 2
        if Q is not None:
            mbarrier.wait(v_full.index(v_slot), row // 256 & 1)
        summed = ()
        for pair in gl.static_range(PAIRS):
            slot = step % SLOTS
            mbarrier.wait(full.index(slot), step // SLOTS & 1)
            # Tensor cores cut sums off where others round: each tile has its own addend of Q, whose sums are long.
            added = zero
            if P is not None:
                for digit in gl.static_range(DIGITS - 1, -1, -1):
                    for side in gl.static_range(2):
                        rows = z_tiles.index(2 * slot + side).slice(64 * HALF, 64)
                        u = u_tiles.index((2 * pair + side) * DIGITS + digit).permute((1, 0))
                        p = warpgroup_mma(rows, u, p, is_async=True)
            if Q is not None:
                columns = z_tiles.index(2 * slot + HALF).permute((1, 0))
                for digit in gl.static_range(DIGITS - 1, -1, -1):
                    added = warpgroup_mma(columns, v_tiles.index(v_slot * DIGITS + digit), added, is_async=True)
            p, added = warpgroup_mma_wait(0, deps=[p, added])
            if Q is not None:
                summed = summed + (q[pair] + added,)
            barrier()
            mbarrier.arrive(free.index(slot))
            step += 1
        if Q is not None:
            q = summed
            mbarrier.arrive(v_free.index(v_slot))
        if P is not None:
            part = P + gl.program_id(0).to(gl.int64) * M * BLOCK_R
            _store(p, part, first + row + 64 * HALF, M, DIGITS)
    if Q is not None:
        part = Q + gl.program_id(1).to(gl.int64) * C * BLOCK_R
        for pair in gl.static_range(PAIRS):
            _store(q[pair], part, c + pair * 128 + 64 * HALF, C, DIGITS)


@gluon.jit
def _store(acc, OUT, first, rows, DIGITS: gl.constexpr):
    """OUT [rows, BLOCK_R] from `first` on = acc; of digits side by side the sum of its first three quarters."""
    total = acc
    if DIGITS == 1:
        hi, mid, lo, _ = quarters(acc)
        total = lo + mid + hi
    offs_i = gl.arange(0, total.shape[0], layout=gl.SliceLayout(1, total.type.layout))
    offs_r = gl.arange(0, total.shape[1], layout=gl.SliceLayout(0, total.type.layout))
    start = OUT + first.to(gl.int64) * total.shape[1]
    gl.store(start + offs_i[:, None] * total.shape[1] + offs_r[None, :], total, mask=(offs_i < rows - first)[:, None])


def pass_tile(z: Tensor, R: int, device: torch.device) -> Config | None:
    """The configuration for z [M, C] and rank R; None: not this kernel."""
    tile = PASS.pick(R, device)
    return tile if tile is not None and tile["BLOCK_R"] >= R and z.dtype == torch.bfloat16 and addressable(z) else None


def hopper_pass(
    z: Tensor, u: Tensor | None, v: Tensor | None, device: torch.device, tile: Config
) -> tuple[Tensor | None, Tensor | None]:
    """As `skinny` of fast/_lora_linear_skinny.py, without dropout."""
    if tile["BLOCK_R"] > 32 and u is not None and v is not None:
        # The digits of both do not fit in shared memory.
        return hopper_pass(z, u, None, device, tile)[0], hopper_pass(z, None, v, device, tile)[1]
    (M, C), R = z.shape, (u if u is not None else v).shape[1]
    form = (HI, MID, LO, NONE) if tile["DIGITS"] == 1 else (HI, MID, LO)
    width = len(form) * tile["BLOCK_R"] // tile["DIGITS"]
    jobs = [(x, form, x is u) for x in (u, v) if x is not None]
    wide = iter(spread(jobs, z.dtype, tile["BLOCK_R"], device))
    u_wide, v_wide = (None if x is None else next(wide) for x in (u, v))
    blocks = cdiv(C, 128 * tile["PAIRS"])
    rows = _rows(cdiv(M, 128), blocks, num_sms(device)) * 128
    p = None if u is None else z.new_empty(blocks, M, tile["BLOCK_R"], dtype=torch.float32)
    q = None if v is None else z.new_empty(cdiv(M, rows), C, tile["BLOCK_R"], dtype=torch.float32)
    launch(
        _lora_linear_pass, (blocks, cdiv(M, rows)), device,
        descriptor(z, 128, 64), descriptor(u_wide, width, 64), descriptor(v_wide, 128, width), p, q,
        M, C, rows, **tile.options,
    )  # fmt: skip
    return tuple(None if parts is None else parts[:, :, :R] for parts in (p, q))


def _rows(tiles: int, blocks: int, programs: int) -> int:
    """Tiles of rows for each program, so that all of them are done soonest: whole waves of `programs`, few parts."""
    return min(range(1, tiles + 1), key=lambda n: (cdiv(cdiv(tiles, n) * blocks, programs) * n, -n))
