"""What surrounds the products where a layer has an activation or a magnitude: DoRA's norms, and backward through c · u + bias."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fast._lora_linear_matmul import affine, row_scale
from fast._lora_linear_skinny import skinny, summed
from fast._triton.launch import cdiv, launch
from fast._triton.tuning import Table, config

# One form for all shapes.
EPILOGUE = Table("lora_linear_epilogue", {80: [(1, config(BLOCK_M=8, BLOCK_N=64, ROWS=256, num_warps=4))]})


# fmt: off
@triton.jit
def _lora_linear_bwd_epilogue(
    DY, stride_dym, stride_dyn,   # [M, N]                  in
    U,                            # [M, N]                  in    rows of stride N
    C,                            # [G, N]  in    fp32, or None
    ADAPTER,                      # [M]  in    int, or None
    BIAS,                         # [N]                     in    or None
    DU,                           # [M, N]                  out   rows of stride N
    DBIAS,                        # [parts, N]  out   fp32, or None
    DC,                           # [parts, G, N]  out   fp32, or None: Σ dz · u; a program for each g, and g = 0 writes DU
    M, N, G,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):
    # fmt: on
    part, g = tl.program_id(0).to(tl.int64), tl.program_id(2)
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    first = part * ROWS
    dbias, dc = tl.zeros([BLOCK_N], tl.float32), tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, tl.minimum(ROWS, M - first), BLOCK_M):
        offs_m = first + start + tl.arange(0, BLOCK_M)
        mask_m = offs_m < M
        mask = mask_m[:, None] & mask_n[None, :]
        places = offs_m[:, None] * N + offs_n[None, :]
        dz = tl.load(DY + offs_m[:, None] * stride_dym + offs_n[None, :] * stride_dyn, mask=mask, other=0.0).to(tl.float32)
        u = tl.load(U + places, mask=mask, other=0.0).to(tl.float32)
        if ACTIVATION == "silu":
            z = affine(u, C, ADAPTER, BIAS, offs_m, offs_n, mask_m, mask_n, N, G)
            dz *= tl.sigmoid(z) * (1.0 + z * tl.sigmoid(-z))
        if DC is not None:
            product = dz * u
            if ADAPTER is not None:
                own = tl.load(ADAPTER + offs_m, mask=mask_m, other=-1)
                product = tl.where((own == g)[:, None], product, 0.0)
            dc += tl.sum(product, axis=0)
        dbias += tl.sum(dz, axis=0)
        if C is not None:
            dz *= row_scale(C, ADAPTER, offs_m, offs_n, mask_m, mask_n, N, G)
        if g == 0:
            tl.store(DU + places, dz.to(DU.dtype.element_ty), mask=mask)
    if DC is not None:
        tl.store(DC + (part * G + g) * N + offs_n, dc, mask=mask_n)
    if DBIAS is not None:
        # Every g has the same.
        tl.store(DBIAS + part * N + offs_n, dbias, mask=mask_n)


def bwd_epilogue(
    dy: Tensor,
    u: Tensor,
    c: Tensor | None,
    adapter: Tensor | None,
    bias: Tensor | None,
    activation: str | None,
    need_bias: bool,
    need_c: bool,
    device: torch.device,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """du [M, N] in u's dtype, Σ dz [N] and Σ dz · u [G, N] in fp32 where needed."""
    M, N = u.shape
    tile = EPILOGUE.pick(N, device)
    parts, G, du = max(1, cdiv(M, tile["ROWS"])), 1 if c is None else c.shape[0], torch.empty_like(u)
    dbias = u.new_zeros(parts, N, dtype=torch.float32) if need_bias else None
    dc = u.new_zeros(parts, G, N, dtype=torch.float32) if need_c else None
    if M:
        launch(
            _lora_linear_bwd_epilogue, (parts, cdiv(N, tile["BLOCK_N"]), G if need_c else 1), device,
            dy, *dy.stride(), u, c, adapter, bias, du, dbias, dc,
            M, N, G, ACTIVATION=activation, **tile.options,
        )  # fmt: skip
    return du, *(None if t is None else t.sum(0) for t in (dbias, dc))


def weight_norms(
    weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: Tensor | float, device: torch.device
) -> Tensor:
    """‖W + scale · B · A‖ of each row and adapter, [G, N] fp32, NaN for 0, without a matrix of W's size:
    ‖W‖² + Σ_r B · (2 · scale · W·Aᵀ + scale² · B·(A·Aᵀ))."""
    G, R, K = lora_a.shape
    parts, _ = skinny(weight, lora_a.reshape(G * R, K).T, None, device)
    across = summed(parts, weight.new_empty(len(weight), G * R, dtype=torch.float32), R, device)
    across = across.view(-1, G, R).transpose(0, 1).double()
    a, b = lora_a.double(), lora_b.double()
    s = scale.double().reshape(-1, 1, 1) if isinstance(scale, Tensor) else scale
    added = (b * (2 * s * across + s * s * (b @ (a @ a.mT)))).sum(-1)
    squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).double().square()
    norms = (squares + added).clamp_min(0).sqrt().float()
    return norms.where(norms > 0, torch.nan)
