"""Products of a large matrix Z [M, C] with matrices of few columns, in one pass over Z.

    P = Z · U    [M, R] for U [C, R]          S = x̃ · Aᵀ and dS = du · B
    Q = Zᵀ · V   [C, R] for V [M, R]          dA = (x̃ᵀ · dS)ᵀ and dB = duᵀ · S

A program takes BLOCK_C columns of Z and ROWS of its rows, and reads each of their elements once, for both products. It
leaves its addends of P and Q in fp32; `_lora_linear_sum` adds them in a fixed order, whichever program came first.
U and V may have more digits than Z: `digits` says how they enter as several numbers of Z's dtype, into one accumulator.
On Hopper fast/_lora_linear_pass.py is faster, where it can.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fast._lora_linear_digits import digits
from fast._lora_linear_pass import hopper_pass, pass_tile
from fast._triton.dropout import kept
from fast._triton.launch import cdiv, launch
from fast._triton.tuning import Table, config

# By the rank over all adapters. RAGGED where rows of Z are not aligned: there, and before Hopper (digits of U are in registers),
# half as many columns, or they spill.
SKINNY = Table(
    "lora_linear_skinny",
    {
        80: [
            (16, config(BLOCK_M=64, BLOCK_C=64, BLOCK_R=16, ROWS=256, num_warps=4, num_stages=3)),
            (32, config(BLOCK_M=64, BLOCK_C=64, BLOCK_R=32, ROWS=512, num_warps=8, num_stages=3)),
            (256, config(BLOCK_M=32, BLOCK_C=64, BLOCK_R=64, ROWS=512, num_warps=8, num_stages=3)),
        ],
        90: [
            (16, config(BLOCK_M=64, BLOCK_C=128, BLOCK_R=16, ROWS=256, num_warps=4, num_stages=3)),
            (32, config(BLOCK_M=64, BLOCK_C=64, BLOCK_R=32, ROWS=512, num_warps=4, num_stages=3)),
            (256, config(BLOCK_M=32, BLOCK_C=64, BLOCK_R=64, ROWS=512, num_warps=8, num_stages=3)),
        ],
    },
)
SKINNY_RAGGED = Table(
    "lora_linear_skinny_ragged",
    {
        80: [
            (16, config(BLOCK_M=64, BLOCK_C=64, BLOCK_R=16, ROWS=512, num_warps=8, num_stages=3)),
            (32, config(BLOCK_M=64, BLOCK_C=64, BLOCK_R=32, ROWS=512, num_warps=8, num_stages=3)),
            (256, config(BLOCK_M=32, BLOCK_C=64, BLOCK_R=64, ROWS=512, num_warps=8, num_stages=3)),
        ],
    },
)
SKINNY_FP32 = Table(
    "lora_linear_skinny_fp32",
    {80: [(256, config(BLOCK_M=32, BLOCK_C=64, BLOCK_R=16, ROWS=512, num_warps=4, num_stages=2))]},
)
SUM = Table(
    "lora_linear_sum",
    {
        80: [
            (16, config(BLOCK_P=16, BLOCK_I=16, BLOCK_R=16, num_warps=4)),
            (256, config(BLOCK_P=16, BLOCK_I=4, BLOCK_R=64, num_warps=4)),
        ],
    },
)


# fmt: off
@triton.jit
def _lora_linear_skinny(
    Z, stride_zm, stride_zc,   # [M, C]              in
    U, stride_uc, stride_ur,   # [C, R]              in    or None
    V, stride_vm,              # [M, R]         in    fp32; or None
    P,                         # [parts, M, R]  out   fp32; one part for every BLOCK_C columns; or None
    Q,                         # [parts, C, R]  out   fp32; one part for every ROWS rows; or None
    KEPT, stride_km,           # [M, ⌈C/32⌉]    in    bits, the mask of Z; or None
    M, C, R, keep_scale,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, ROWS: tl.constexpr,
):
    # fmt: on
    pid_c, pid_m, pid_r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    offs_c = pid_c.to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_r = pid_r * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_c, mask_r = offs_c < C, offs_r < R
    u_hi = tl.zeros([BLOCK_C, BLOCK_R], Z.dtype.element_ty)
    u_mid, u_lo, u_unit = u_hi, u_hi, tl.full([BLOCK_R], 1.0, tl.float32)
    if U is not None:
        mask_u = mask_c[:, None] & mask_r[None, :]
        u = tl.load(U + offs_c[:, None] * stride_uc + offs_r[None, :].to(tl.int64) * stride_ur, mask=mask_u, other=0.0)
        u_hi, u_mid, u_lo, u_unit = digits(u, Z.dtype.element_ty)
    q = tl.zeros([BLOCK_C, BLOCK_R], tl.float32)
    first = pid_m.to(tl.int64) * ROWS
    for start in range(0, tl.minimum(ROWS, M - first), BLOCK_M):
        offs_m = first + start + tl.arange(0, BLOCK_M)
        mask_m = offs_m < M
        mask_z = mask_m[:, None] & mask_c[None, :]
        z = tl.load(Z + offs_m[:, None] * stride_zm + offs_c[None, :] * stride_zc, mask=mask_z, other=0.0)
        if KEPT is not None:
            z = tl.where(kept(KEPT, stride_km, offs_m, offs_c, mask_z), z, 0.0).to(z.dtype)
        ranks = offs_m[:, None] * R + offs_r[None, :]
        mask = mask_m[:, None] & mask_r[None, :]
        if U is not None:
            p = multiplied(z, u_hi, u_mid, u_lo, U.dtype.element_ty) * u_unit[None, :]
            tl.store(P + pid_c.to(tl.int64) * M * R + ranks, p * keep_scale, mask=mask)
        if V is not None:
            v = tl.load(V + offs_m[:, None] * stride_vm + offs_r[None, :], mask=mask, other=0.0)
            v_hi, v_mid, v_lo, v_unit = digits(v, Z.dtype.element_ty)
            q += multiplied(tl.trans(z), v_hi, v_mid, v_lo, V.dtype.element_ty) * v_unit[None, :]
    if V is not None:
        places = offs_c[:, None] * R + offs_r[None, :]
        tl.store(Q + pid_m.to(tl.int64) * C * R + places, q * keep_scale, mask=mask_c[:, None] & mask_r[None, :])


@triton.jit
def multiplied(z, hi, mid, lo, GIVEN: tl.constexpr):
    """z · (hi + mid + lo): what the digits of a GIVEN need, the last ones first."""
    product = tl.zeros([z.shape[0], hi.shape[1]], tl.float32)
    if z.dtype != GIVEN:
        if z.dtype == tl.bfloat16:
            product = tl.dot(z, lo, product, input_precision="ieee")
        product = tl.dot(z, mid, product, input_precision="ieee")
    return tl.dot(z, hi, product, input_precision="ieee")


# fmt: off
@triton.jit
def _lora_linear_sum(
    PARTS, stride_pp, stride_pi,  # [parts, rows, R]  in    fp32
    OUT, stride_oi, stride_or,    # [rows, R]         out
    SCALE,                        # [G]               in    of each adapter, or None
    ADAPTER,                      # [rows]            in    int; what is not of the row's adapter becomes 0; or None
    parts, rows, R, rank, scale,
    BLOCK_P: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr,
):
    # fmt: on
    offs_i = tl.program_id(0).to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)
    offs_r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_i, mask_r = offs_i < rows, offs_r < R
    mask = mask_i[:, None] & mask_r[None, :]
    offs_p = tl.arange(0, BLOCK_P).to(tl.int64)
    ptrs = PARTS + (offs_i[:, None] * stride_pi + offs_r[None, :])[None, :, :]
    acc = tl.zeros([BLOCK_I, BLOCK_R], tl.float32)
    for first in range(0, parts, BLOCK_P):
        part = first + offs_p
        there = (part < parts)[:, None, None] & mask[None, :, :]
        addends = tl.load(ptrs + (part * stride_pp)[:, None, None], mask=there, other=0.0)
        acc += tl.sum(addends, axis=0)
    owner = offs_r // rank
    if SCALE is None:
        acc *= scale
    else:
        acc *= tl.load(SCALE + owner, mask=mask_r, other=0.0).to(tl.float32)[None, :]
    if ADAPTER is not None:
        own = tl.load(ADAPTER + offs_i, mask=mask_i, other=-1)
        acc = tl.where(own[:, None] == owner[None, :], acc, 0.0)
    out_ptrs = OUT + offs_i[:, None] * stride_oi + offs_r[None, :].to(tl.int64) * stride_or
    tl.store(out_ptrs, acc.to(OUT.dtype.element_ty), mask=mask)


def skinny(
    z: Tensor,
    u: Tensor | None,
    v: Tensor | None,
    device: torch.device,
    bits: Tensor | None = None,
    keep_scale: float = 1.0,
) -> tuple[Tensor | None, Tensor | None]:
    """Parts of z·u [parts, M, R] and of zᵀ·v [parts, C, R], fp32, of z [M, C], u [C, R] and v [M, R] (fp32).
    With bits, of fast/_triton/dropout.py, z's mask is applied first, and both results are multiplied by keep_scale."""
    if u is None and v is None:
        return None, None
    (M, C), R = z.shape, (u if u is not None else v).shape[1]
    if M and bits is None and (tile := pass_tile(z, R, device)):
        return hopper_pass(z, u, v, device, tile)
    ragged = z.data_ptr() % 16 or z.stride(0) % 16 or z.stride(1) != 1
    table = SKINNY_FP32 if z.dtype == torch.float32 else SKINNY_RAGGED if ragged else SKINNY
    tile = table.pick(R, device)
    grid = cdiv(C, tile["BLOCK_C"]), cdiv(M, tile["ROWS"]), cdiv(R, tile["BLOCK_R"])
    p = None if u is None else z.new_empty(grid[0], M, R, dtype=torch.float32)
    q = None if v is None else z.new_empty(grid[1], C, R, dtype=torch.float32)
    if M:
        launch(
            _lora_linear_skinny, grid, device, z, *z.stride(), u, *(u.stride() if u is not None else (0, 0)),
            v, v.stride(0) if v is not None else 0, p, q, bits, bits.stride(0) if bits is not None else 0,
            M, C, R, keep_scale, **tile.options,
        )  # fmt: skip
    return p, q


def summed(
    parts: Tensor,
    out: Tensor,
    rank: int,
    device: torch.device,
    scale: Tensor | float = 1.0,
    adapter: Tensor | None = None,
) -> Tensor:
    """out [rows, R] = scale · Σ parts [parts, rows, R], rounded; scale a number or [R / rank], adapter [rows]."""
    count, rows, R = parts.shape
    tile = SUM.pick(R, device)
    given = scale if isinstance(scale, Tensor) else None
    if out.numel():
        launch(
            _lora_linear_sum, (cdiv(rows, tile["BLOCK_I"]), cdiv(R, tile["BLOCK_R"])), device,
            parts, *parts.stride()[:2], out, *out.stride(), given, adapter,
            count, rows, R, rank, 1.0 if given is not None else scale, **tile.options,
        )  # fmt: skip
    return out
