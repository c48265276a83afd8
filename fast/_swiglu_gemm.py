"""Gate, up and h of the MLP in one kernel for Hopper, in Gluon: each tile of x is read once for both products.

    gate = round(x·w_gateᵀ + b_gate),  up = round(x·w_upᵀ + b_up),  h = round(activation(gate, up))

Tiles       Persistent programs walk over tiles [BLOCK_M, BLOCK_F] of h. One warp loads tiles of x and of both weights by TMA into
            SLOTS slots of shared memory; two warpgroups multiply half of the rows each, by both weights at once (m64n256k16), and
            wait for the loads alone: one may activate and store its rows while the other multiplies. Past the ends TMA
            loads zeros and stores nothing, so M, F and K are arbitrary.
Registers   gate and up leave in quarters of the columns, rounded first, each quarter behind a branch: else the activations spill.
Bits        An element's products are added in ascending k, whatever the tile around it: gate and up computed again for some of
            the columns have the bits that were stored.

Triton's interpreter does not run Gluon: this kernel is verified on a GPU only, and compiled everywhere.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from fast._swiglu_activation import activation_value
from fast._triton.device import num_sms
from fast._triton.gemm import grouped_tile
from fast._triton.hopper import (
    accumulator,
    addressable,
    claim,
    descriptor,
    halves,
    multiply,
    quarters,
    slots,
    store_tile,
    tma_load,
)
from fast._triton.launch import cdiv, launch
from fast._triton.tuning import Config, Table, config

# By the smaller of M and 2·K; None: products by cuBLAS, and an elementwise kernel. Time on an H200 over the time of those, by
# (M, K, F): 0.99 at (8192, 4096, 14336), 0.92 at (16384, 2048, 5632), 0.97 at (4096, 2048, 5632); but 1.02 at
# (1024, 4096, 14336), 1.35 at (256, 4096, 14336), 1.6 at (8192, 576, 1536), where the host takes longer than the GPU.
GATE_UP = Table(
    "swiglu_gate_up",
    {
        80: [(1, None)],
        90: [
            (512, None),
            (1024, config(BLOCK_M=128, BLOCK_F=128, BLOCK_K=64, GROUP_M=16, SLOTS=4, num_warps=4)),
        ],
        100: [(1, None)],
    },
)


# fmt: off
@gluon.jit
def _swiglu_gate_up(
    X,       # [M, K]     in    descriptor, tiles [BLOCK_M, BLOCK_K]
    WG,      # [F, K]     in    descriptor, tiles [BLOCK_F, BLOCK_K]
    WU,      # [F, K]     in    likewise
    BG,      # [F]        in    or None
    BU,      # [F]        in    or None
    GATE,    # [M, F]     out   descriptor, tiles [BLOCK_M / 2, BLOCK_F / 4], or None
    UP,      # [M, F]     out   likewise
    H,       # [M, F]     out   likewise, not None
    M, F, K, alpha, limit, up_offset,
    ACTIVATION: gl.constexpr, HAS_LIMIT: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_F: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
    SLOTS: gl.constexpr,
):
    # fmt: on
    xs = gl.allocate_shared_memory(X.dtype, [SLOTS, BLOCK_M, BLOCK_K], X.layout)
    ws = gl.allocate_shared_memory(X.dtype, [SLOTS, 2 * BLOCK_F, BLOCK_K], WG.layout)
    out = gl.allocate_shared_memory(H.dtype, [4, BLOCK_M // 2, BLOCK_F // 4], H.layout)
    full, free = slots(SLOTS)
    # fmt: off
    gl.warp_specialize([
        (_multiply, (xs, ws, out, full, free, BG, BU, GATE, UP, H, M, F, K, alpha, limit, up_offset,
                     ACTIVATION, HAS_LIMIT, BLOCK_M, BLOCK_F, BLOCK_K, GROUP_M, SLOTS, gl.constexpr(0))),
        (_multiply, (xs, ws, out, full, free, BG, BU, GATE, UP, H, M, F, K, alpha, limit, up_offset,
                     ACTIVATION, HAS_LIMIT, BLOCK_M, BLOCK_F, BLOCK_K, GROUP_M, SLOTS, gl.constexpr(1))),
        (_fetch, (X, WG, WU, xs, ws, full, free, M, F, K, BLOCK_M, BLOCK_F, BLOCK_K, GROUP_M, SLOTS)),
    ], [4, 1], [240, 24])
    # fmt: on


# fmt: off
@gluon.jit
def _fetch(
    X, WG, WU, xs, ws, full, free, M, F, K,
    BLOCK_M: gl.constexpr, BLOCK_F: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, SLOTS: gl.constexpr,
):
    """One warp: keep the slots full, from tile to tile without a pause."""
    # fmt: on
    tiles_m, tiles_f = gl.cdiv(M, BLOCK_M), gl.cdiv(F, BLOCK_F)
    BYTES: gl.constexpr = (BLOCK_M + 2 * BLOCK_F) * BLOCK_K * X.dtype.primitive_bitwidth // 8
    step = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_f, gl.num_programs(0)):
        tile_m, tile_f = grouped_tile(tile, tiles_m, tiles_f, GROUP_M)
        m, f = tile_m * BLOCK_M, tile_f * BLOCK_F
        for k in range(0, K, BLOCK_K):
            slot, ready = claim(full, free, step, SLOTS, BYTES)
            tma_load(X, [m, k], ready, xs.index(slot))
            w = ws.index(slot)
            tma_load(WG, [f, k], ready, w.slice(0, BLOCK_F))
            tma_load(WU, [f, k], ready, w.slice(BLOCK_F, BLOCK_F))
            step += 1


# fmt: off
@gluon.jit
def _multiply(
    xs, ws, out, full, free, BG, BU, GATE, UP, H, M, F, K, alpha, limit, up_offset,
    ACTIVATION: gl.constexpr, HAS_LIMIT: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_F: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, SLOTS: gl.constexpr,
    HALF: gl.constexpr,
):
    """A warpgroup: multiply what has come, free a slot once the product after it has been started, then activate and store."""
    # fmt: on
    tiles_m, tiles_f = gl.cdiv(M, BLOCK_M), gl.cdiv(F, BLOCK_F)
    ROWS: gl.constexpr = BLOCK_M // 2
    acc = gl.zeros([ROWS, 2 * BLOCK_F], gl.float32, accumulator(2 * BLOCK_F, gl.num_warps()))
    step = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_f, gl.num_programs(0)):
        tile_m, tile_f = grouped_tile(tile, tiles_m, tiles_f, GROUP_M)
        m, f = tile_m * BLOCK_M + HALF * ROWS, tile_f * BLOCK_F
        acc, step = multiply(xs, ws, full, free, acc, False, step, gl.cdiv(K, BLOCK_K), HALF, True, SLOTS)
        gate, up = halves(acc)
        offs_f = f + gl.arange(0, BLOCK_F, layout=gl.SliceLayout(0, gate.type.layout))
        if BG is not None:
            gate += gl.load(BG + offs_f, mask=offs_f < F, other=0.0).to(gl.float32)[None, :]
        if BU is not None:
            up += gl.load(BU + offs_f, mask=offs_f < F, other=0.0).to(gl.float32)[None, :]
        gates, ups = quarters(gate.to(H.dtype)), quarters(up.to(H.dtype))
        for part in gl.static_range(4):
            # ptxas moves one part's arithmetic up before another's, until it spills, but not over a branch.
            if f + part * (BLOCK_F // 4) < F:
                # fmt: off
                _store(GATE, UP, H, gates[part], ups[part], out, 2 * HALF + part % 2, 2 * HALF + (part + 1) % 2,
                       m, f + part * (BLOCK_F // 4), alpha, limit, up_offset, ACTIVATION, HAS_LIMIT)
                # fmt: on
    tma.store_wait(0)


# fmt: off
@gluon.jit
def _store(
    GATE, UP, H, gate, up, buffers, first, second, m, f, alpha, limit, up_offset,
    ACTIVATION: gl.constexpr, HAS_LIMIT: gl.constexpr,
):
    """Through two buffers in turn, so that one is on its way while the other is written."""
    # fmt: on
    if GATE is not None:
        store_tile(GATE, gate, buffers.index(first), m, f)
        store_tile(UP, up, buffers.index(second), m, f)
    h = activation_value(gate.to(gl.float32), up.to(gl.float32), alpha, limit, up_offset, ACTIVATION, HAS_LIMIT)
    store_tile(H, h.to(H.dtype), buffers.index(first), m, f)


def fused(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Config | None:
    """The kernel's configuration; None where the table has none, or what it lacks: Hopper, 16 bits, TMA's strides."""
    tile = GATE_UP.pick(min(x.shape[0], 2 * x.shape[1]), x.device)
    return tile if tile is not None and w_gate.shape[0] % 8 == 0 and addressable(x, w_gate, w_up) else None


def gate_up(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    gate: Tensor | None,
    up: Tensor | None,
    h: Tensor,
    tile: Config,
    activation: str,
    alpha: float,
    limit: float | None,
    up_offset: float,
) -> None:
    """Write h [M, F], and gate and up [M, F] where both are given, from x [M, K], weights [F, K] and contiguous biases [F]."""
    (M, K), F = x.shape, w_gate.shape[0]
    block_m, block_f, block_k = tile["BLOCK_M"], tile["BLOCK_F"], tile["BLOCK_K"]
    part = block_m // 2, block_f // 4
    launch(
        _swiglu_gate_up, (min(num_sms(x.device), cdiv(M, block_m) * cdiv(F, block_f)),), x.device,
        descriptor(x, block_m, block_k), descriptor(w_gate, block_f, block_k), descriptor(w_up, block_f, block_k),
        b_gate, b_up, descriptor(gate, *part), descriptor(up, *part), descriptor(h, *part),
        M, F, K, alpha, limit or 0.0, up_offset,
        ACTIVATION=activation, HAS_LIMIT=limit is not None, **tile.options,
    )  # fmt: skip
