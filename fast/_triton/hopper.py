"""Parts of warp-specialised matrix products for Hopper, in Gluon: one warp loads tiles by TMA, two warpgroups multiply them.

A program has SLOTS slots of shared memory. Slot i holds a tile of A [BLOCK_M, BLOCK_K] and a tile of B, and two barriers say
when it is full and when both warpgroups, which take half of the rows each, are done with it. Past the ends of a tensor TMA loads
zeros and stores nothing, so all sizes are arbitrary. Triton's interpreter does not run Gluon.
"""

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fast._triton.device import arch, interpreting
from fast._triton.gemm import aligned, describable

# Triton renamed these between 3.6 and 3.9.
barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


def addressable(*operands: Tensor) -> bool:
    """Whether these kernels can multiply them: on a Hopper GPU, 16 bits, strides that TMA has."""
    device, dtype = operands[0].device, operands[0].dtype
    if interpreting() or dtype not in (torch.bfloat16, torch.float16) or arch(device) // 10 != 9:
        return False
    return all(x.dtype == dtype and describable(x) for x in operands)


def descriptor(x: Tensor | None, rows: int, columns: int) -> Any:
    """Of a 2-D tensor in 16 bits, in tiles [rows, columns]."""
    if x is None:
        return None
    x = aligned(x)
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
    return TensorDescriptor(
        x, list(x.shape), [x.stride(0) if x.shape[0] > 1 else 8 * columns, 1], [rows, columns], layout
    )


@gluon.constexpr_function
def accumulator(columns, warps):
    """Whole warpgroups, one above the other."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, columns, 16])


@gluon.jit
def slots(SLOTS: gl.constexpr):
    """The barriers `full` and `free` of all slots."""
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(free.index(slot), count=2)
    return full, free


@gluon.jit
def claim(full, free, step, SLOTS: gl.constexpr, BYTES: gl.constexpr):
    """Wait until the slot of this step is free, and announce what will be loaded into it."""
    slot = step % SLOTS
    mbarrier.wait(free.index(slot), (step // SLOTS & 1) ^ 1)
    mbarrier.expect(full.index(slot), BYTES)
    return slot, full.index(slot)


@gluon.jit
def multiply(
    a_tiles,
    b_tiles,
    full,
    free,
    acc,
    use_acc,
    step,
    steps,
    HALF: gl.constexpr,
    K_MAJOR: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """acc (+)= this warpgroup's rows of A · B over `steps` slots from `step` on; each is free once the next product has begun."""
    ROWS: gl.constexpr = a_tiles.shape[1] // 2
    for k in range(steps):
        slot = step % SLOTS
        mbarrier.wait(full.index(slot), step // SLOTS & 1)
        b = b_tiles.index(slot)
        if K_MAJOR:
            b = b.permute((1, 0))
        acc = warpgroup_mma(
            a_tiles.index(slot).slice(HALF * ROWS, ROWS), b, acc, use_acc=(k > 0) | use_acc, is_async=True
        )
        acc = warpgroup_mma_wait(1, deps=[acc])
        barrier()
        mbarrier.arrive(free.index((step + SLOTS - 1) % SLOTS), pred=k > 0)
        step += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    barrier()
    mbarrier.arrive(free.index((step + SLOTS - 1) % SLOTS), pred=steps > 0)
    return acc, step


@gluon.jit
def halves(x):
    """The left and the right half of the columns."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute(0, 2, 1).split()


@gluon.jit
def quarters(x):
    left, right = halves(x)
    return halves(left) + halves(right)


@gluon.jit
def store_tile(OUT, value, buffer, m, n):
    """Start to store through a buffer of shared memory; at most one store before it is still under way then."""
    tma.store_wait(1)
    buffer.store(value)
    fence_async_shared()
    tma_store(OUT, [m, n], buffer)
