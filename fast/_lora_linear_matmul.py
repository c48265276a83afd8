"""Large products with adapters inside, in one pass: out = activation(c · (Σ A·B + factor ∘ (T·U) + acc) + bias).

Both directions are this kernel:    forward   A = x, B = Wᵀ, T = scale · S, U = lora_bᵀ
                                    dx        A = du, B = W of each layer, T = dS, U = lora_a of all, factor = mask / (1 − p)
T·U comes first, into the accumulator that A·B is then added to: a second one would not fit beside it. T and U enter as
hi + lo. On Hopper fast/_lora_linear_hopper.py is faster, where it can.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fast._lora_linear_digits import split
from fast._lora_linear_hopper import hopper_matmul, hopper_tile
from fast._triton.dropout import kept
from fast._triton.gemm import grouped_tile
from fast._triton.launch import cdiv, launch
from fast._triton.tuning import Table, config

# By K; SCALED where there is a magnitude, whose rows of c need registers.
_SMALL = config(BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, GROUP_M=8, num_warps=4, num_stages=2)
MATMUL = Table(
    "lora_linear_matmul",
    {
        80: [
            (64, _SMALL),
            (65, config(BLOCK_M=128, BLOCK_N=64, BLOCK_K=32, GROUP_M=8, num_warps=8, num_stages=3)),
        ],
        90: [
            (64, _SMALL),
            (65, config(BLOCK_M=128, BLOCK_N=64, BLOCK_K=64, GROUP_M=8, num_warps=8, num_stages=3)),
        ],
    },
)
MATMUL_SCALED = Table(
    "lora_linear_matmul_scaled",
    {80: [(1, config(BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, GROUP_M=8, num_warps=8, num_stages=2))]},
)
MATMUL_FP32 = Table(
    "lora_linear_matmul_fp32",
    {80: [(1, config(BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, GROUP_M=8, num_warps=4, num_stages=2))]},
)


# fmt: off
@triton.jit
def _lora_linear_matmul(
    A, stride_am, stride_ak,               # [M, K]        in
    B, stride_bk, stride_bn,               # [K, N]        in
    A1, stride_am1, stride_ak1,            # [M, K1]       in    of a second product, or None
    B1, stride_bk1, stride_bn1,            # [K1, N]       in    or None
    A2, stride_am2, stride_ak2,            # [M, K2]       in    of a third, or None
    B2, stride_bk2, stride_bn2,            # [K2, N]       in    or None
    T, stride_tm,                          # [M, R]  in    fp32, or None
    U, stride_ur, stride_un,               # [R, N]        in
    KEPT, stride_km,                       # [M, ⌈N/32⌉]   in    bits, the mask of T·U; or None
    C,                                     # [G, N]  in    fp32, or None
    ADAPTER,                               # [M]  in    int, which row of C; None is the first
    BIAS,                                  # [N]           in    or None
    ACC,                                   # [M, N]  in    fp32, another addend, rows of stride N; or None
    OUT, PRE,                              # [M, N]        out   rows of stride N; PRE: A·B + T·U, or None
    M, N, K, K1, K2, R, G, keep_scale,
    ACTIVATION: tl.constexpr, DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_R: tl.constexpr,
):
    # fmt: on
    tile_m, tile_n = grouped_tile(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    offs_m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < M, offs_n < N
    mask = mask_m[:, None] & mask_n[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if T is not None:
        offs_r = tl.arange(0, BLOCK_R)
        for r in range(0, R, BLOCK_R):
            mask_r = r + offs_r < R
            t = tl.load(T + offs_m[:, None] * stride_tm + r + offs_r[None, :], mask=mask_m[:, None] & mask_r[None, :], other=0.0)
            u = tl.load(
                U + (r + offs_r)[:, None].to(tl.int64) * stride_ur + offs_n[None, :] * stride_un,
                mask=mask_r[:, None] & mask_n[None, :], other=0.0,
            )  # fmt: skip
            t_hi, t_lo = split(t, DOT)
            u_hi, u_lo = split(u, DOT)
            acc = tl.dot(t_hi, u_hi, acc, input_precision="ieee")
            if tl.float32 != DOT:
                acc = tl.dot(t_lo, u_hi, acc, input_precision="ieee")
                if U.dtype.element_ty != DOT:
                    acc = tl.dot(t_hi, u_lo, acc, input_precision="ieee")
        if KEPT is not None:
            acc = tl.where(kept(KEPT, stride_km, offs_m, offs_n, mask), acc * keep_scale, 0.0)
    places = offs_m[:, None] * N + offs_n[None, :]
    if ACC is not None:
        acc += tl.load(ACC + places, mask=mask, other=0.0)
    acc = added(acc, A, stride_am, stride_ak, B, stride_bk, stride_bn, offs_m, offs_n, mask_m, mask_n, K, DOT, BLOCK_K)
    if A1 is not None:
        acc = added(acc, A1, stride_am1, stride_ak1, B1, stride_bk1, stride_bn1, offs_m, offs_n, mask_m, mask_n, K1, DOT, BLOCK_K)
    if A2 is not None:
        acc = added(acc, A2, stride_am2, stride_ak2, B2, stride_bk2, stride_bn2, offs_m, offs_n, mask_m, mask_n, K2, DOT, BLOCK_K)
    if PRE is not None:
        tl.store(PRE + places, acc.to(PRE.dtype.element_ty), mask=mask)
    z = affine(acc, C, ADAPTER, BIAS, offs_m, offs_n, mask_m, mask_n, N, G)
    if ACTIVATION == "silu":
        z = z * tl.sigmoid(z)
    tl.store(OUT + places, z.to(OUT.dtype.element_ty), mask=mask)


# fmt: off
@triton.jit
def added(
    acc, A, stride_am, stride_ak, B, stride_bk, stride_bn, offs_m, offs_n, mask_m, mask_n, K,
    DOT: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """acc + A·B of a tile."""
    # fmt: on
    offs_k = tl.arange(0, BLOCK_K)
    a_ptrs = A + offs_m[:, None] * stride_am + offs_k[None, :].to(tl.int64) * stride_ak
    b_ptrs = B + offs_k[:, None].to(tl.int64) * stride_bk + offs_n[None, :] * stride_bn
    done = tl.zeros((), tl.int64)
    for k in range(0, K, BLOCK_K):
        mask_k = k + offs_k < K
        a = tl.load(a_ptrs + done * stride_ak, mask=mask_m[:, None] & mask_k[None, :], other=0.0).to(DOT)
        b = tl.load(b_ptrs + done * stride_bk, mask=mask_k[:, None] & mask_n[None, :], other=0.0).to(DOT)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        done += BLOCK_K
    return acc


@triton.jit
def affine(u, C, ADAPTER, BIAS, offs_m, offs_n, mask_m, mask_n, N, G):
    """c · u + bias of a tile."""
    if C is not None:
        u *= row_scale(C, ADAPTER, offs_m, offs_n, mask_m, mask_n, N, G)
    if BIAS is not None:
        u += tl.load(BIAS + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    return u


@triton.jit
def row_scale(C, ADAPTER, offs_m, offs_n, mask_m, mask_n, N, G):
    """The rows of C [G, N] that the adapters of some rows of u have; 1 for no adapter."""
    if ADAPTER is None:
        scale = tl.load(C + offs_n, mask=mask_n, other=1.0)[None, :]
    else:
        own = tl.load(ADAPTER + offs_m, mask=mask_m, other=-1).to(tl.int64)
        there = (own >= 0) & (own < G)
        scale = tl.load(C + own[:, None] * N + offs_n[None, :], mask=there[:, None] & mask_n[None, :], other=1.0)
    return scale


PRODUCTS = 3  # of one launch
NO_DROPOUT = None, 1.0


def matmul(
    pairs: list[tuple[Tensor, Tensor]],
    t: Tensor | None,
    u: Tensor | None,
    out: Tensor,
    device: torch.device,
    *,
    dropout: tuple[Tensor | None, float] = NO_DROPOUT,
    **epilogue: Any,
) -> None:
    """Write out [M, N] from the sum of a·b over pairs of a [M, K] and b [K, N], and of t [M, R] fp32 times u [R, N].

    dropout: bits of a mask on t·u, and what is kept is multiplied by. epilogue: c [G, N] fp32, adapter [M], bias [N],
    activation, and pre [M, N], which is written.
    """
    (M, _), (_, N) = pairs[0][0].shape, pairs[0][1].shape
    acc = None
    while len(pairs) > PRODUCTS:
        total = out.new_empty(M, N, dtype=torch.float32)
        _matmul(pairs[:PRODUCTS], t, u, total, device, dropout, acc)
        pairs, t, u, dropout, acc = pairs[PRODUCTS:], None, None, NO_DROPOUT, total
    _matmul(pairs, t, u, out, device, dropout, acc, **epilogue)


def _matmul(
    pairs: list[tuple[Tensor, Tensor]],
    t: Tensor | None,
    u: Tensor | None,
    out: Tensor,
    device: torch.device,
    dropout: tuple[Tensor | None, float],
    acc: Tensor | None,
    c: Tensor | None = None,
    adapter: Tensor | None = None,
    bias: Tensor | None = None,
    pre: Tensor | None = None,
    activation: str | None = None,
) -> None:
    """One launch."""
    (M, K), (_, N) = pairs[0][0].shape, pairs[0][1].shape
    if M == 0:
        return
    if c is None or adapter is None:
        k_major = all(b.stride(0) == 1 and len(b) > 1 for _, b in pairs)
        operands = [(a, b.T if k_major else b) for a, b in pairs]
        if tile := hopper_tile(operands, k_major, device):
            u, c = u.T if k_major and u is not None else u, None if c is None else c[0]
            epilogue = {"c": c, "bias": bias, "acc": acc, "pre": pre, "activation": activation}
            hopper_matmul(operands, t, u, out, device, tile, dropout, k_major=k_major, **epilogue)
            return
    dot = functools.reduce(torch.promote_types, (operand.dtype for pair in pairs for operand in pair))
    table = MATMUL_FP32 if dot == torch.float32 else MATMUL if c is None else MATMUL_SCALED
    tile = table.pick(K, device)
    R = 0 if t is None else t.shape[1]
    absent = [(None, 0, 0, None, 0, 0)] * (PRODUCTS - len(pairs))
    operands = [(a, *a.stride(), b, *b.stride()) for a, b in pairs] + absent
    lengths = [len(b) for _, b in pairs] + [0] * len(absent)
    bits, keep_scale = dropout
    launch(
        _lora_linear_matmul, (cdiv(M, tile["BLOCK_M"]) * cdiv(N, tile["BLOCK_N"]),), device,
        *(field for fields in operands for field in fields),
        t, 0 if t is None else t.stride(0), u, *((0, 0) if u is None else u.stride()),
        bits, 0 if bits is None else bits.stride(0), c, adapter, bias, acc, out, pre,
        M, N, *lengths, R, 1 if c is None else c.shape[0], keep_scale, ACTIVATION=activation,
        DOT={torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dot],
        BLOCK_R=16 if R <= 16 or dot == torch.float32 else 32, **tile.options,
    )  # fmt: skip
