"""Gate, up and h of the MLP in one kernel of plain Triton: the step between cuBLAS with an elementwise kernel and the
warp-specialised kernel of fast/_swiglu_gemm.py.

    gate = round(x·w_gateᵀ + b_gate),  up = round(x·w_upᵀ + b_up),  h = round(activation(gate, up))

Persistent programs walk over tiles [BLOCK_M, BLOCK_F] of h. Tensor descriptors (TMA on Hopper, pointers before) load and store;
past the ends they load zeros and store nothing. Weights in one storage (a packed [2F, K], whatever the order of its rows) are one
descriptor [2, F, K], so that one product [BLOCK_M, 2·BLOCK_F] makes both. Others take two products a step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fast._swiglu_activation import activation_value
from fast._triton.device import arch, num_sms
from fast._triton.gemm import grouped_tile
from fast._triton.launch import cdiv, launch
from fast._triton.tuning import Config


# fmt: off
@triton.jit
def _swiglu_mlp_fwd(
    X, stride_xm,         # [M, K]     in    here and below: HAS_TMA: a descriptor, tiles [BLOCK_M, BLOCK_K]; else a pointer
    WG, stride_gf,        # [F, K]     in    tiles [BLOCK_F, BLOCK_K];  both weights, [2, F, K], where WU is None (HAS_TMA only)
    WU, stride_uf,        # [F, K]     in    tiles [BLOCK_F, BLOCK_K], or None
    BG,                   # [F]        in    or None
    BU,                   # [F]        in    or None
    GATE, stride_gatem,   # [M, F]     out   tiles [BLOCK_M, BLOCK_F / PARTS], or None
    UP, stride_upm,       # [M, F]     out   likewise
    H, stride_hm,         # [M, F]     out   likewise, not None
    M, F, K, alpha, limit, up_offset,
    ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr, HAS_TMA: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PARTS: tl.constexpr, FLATTEN: tl.constexpr,
):
    # fmt: on
    PART: tl.constexpr = BLOCK_F // PARTS
    if not HAS_TMA:
        # Made here, a descriptor has the alignment of its arguments; of one made on the host, single elements would be loaded.
        X = tl.make_tensor_descriptor(X, [M, K], [stride_xm, 1], [BLOCK_M, BLOCK_K])
        WG = tl.make_tensor_descriptor(WG, [F, K], [stride_gf, 1], [BLOCK_F, BLOCK_K])
        WU = tl.make_tensor_descriptor(WU, [F, K], [stride_uf, 1], [BLOCK_F, BLOCK_K])
        H = tl.make_tensor_descriptor(H, [M, F], [stride_hm, 1], [BLOCK_M, PART])
        if GATE is not None:
            GATE = tl.make_tensor_descriptor(GATE, [M, F], [stride_gatem, 1], [BLOCK_M, PART])
        if UP is not None:
            UP = tl.make_tensor_descriptor(UP, [M, F], [stride_upm, 1], [BLOCK_M, PART])
    tiles_m, tiles_f = tl.cdiv(M, BLOCK_M), tl.cdiv(F, BLOCK_F)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_f, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_f = grouped_tile(tile, tiles_m, tiles_f, GROUP_M)
        m, f = tile_m * BLOCK_M, tile_f * BLOCK_F
        if WU is None:
            gate, up = _products_of_both(X, WG, m, f, K, PRECISION, BLOCK_M, BLOCK_F, BLOCK_K)
        else:
            gate, up = _products(X, WG, WU, m, f, K, PRECISION, BLOCK_M, BLOCK_F, BLOCK_K)
        if PARTS == 1:
            _store_tile(gate, up, BG, BU, GATE, UP, H, m, f, F, alpha, limit, up_offset, ACTIVATION, HAS_LIMIT)
        else:
            gate_0, gate_1 = _halves(gate)
            up_0, up_1 = _halves(up)
            _store_tile(gate_0, up_0, BG, BU, GATE, UP, H, m, f, F, alpha, limit, up_offset, ACTIVATION, HAS_LIMIT)
            f += PART
            _store_tile(gate_1, up_1, BG, BU, GATE, UP, H, m, f, F, alpha, limit, up_offset, ACTIVATION, HAS_LIMIT)


# fmt: off
@triton.jit
def _products(
    X, WG, WU, m, f, K,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr,
):
    # fmt: on
    acc_gate = tl.zeros([BLOCK_M, BLOCK_F], tl.float32)
    acc_up = tl.zeros([BLOCK_M, BLOCK_F], tl.float32)
    for k in range(0, K, BLOCK_K):
        x = X.load([m, k])
        acc_gate = tl.dot(x, WG.load([f, k]).T, acc_gate, input_precision=PRECISION)
        acc_up = tl.dot(x, WU.load([f, k]).T, acc_up, input_precision=PRECISION)
    return acc_gate, acc_up


# fmt: off
@triton.jit
def _products_of_both(
    X, W, m, f, K,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr,
):
    # fmt: on
    acc = tl.zeros([BLOCK_M, 2 * BLOCK_F], tl.float32)
    for k in range(0, K, BLOCK_K):
        w = W.load([0, f, k]).reshape(2 * BLOCK_F, BLOCK_K)
        acc = tl.dot(X.load([m, k]), w.T, acc, input_precision=PRECISION)
    return _halves(acc)


@triton.jit
def _halves(acc):
    """The left and the right half of the columns."""
    return acc.reshape(acc.shape[0], 2, acc.shape[1] // 2).permute(0, 2, 1).split()


# fmt: off
@triton.jit
def _store_tile(
    acc_gate, acc_up, BG, BU, GATE, UP, H, m, f, F, alpha, limit, up_offset,
    ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr,
):
    # fmt: on
    offs_f = f + tl.arange(0, acc_gate.shape[1])
    if BG is not None:
        acc_gate += tl.load(BG + offs_f, mask=offs_f < F, other=0.0).to(tl.float32)[None, :]
    if BU is not None:
        acc_up += tl.load(BU + offs_f, mask=offs_f < F, other=0.0).to(tl.float32)[None, :]
    gate, up = acc_gate.to(H.dtype), acc_up.to(H.dtype)
    if GATE is not None:
        GATE.store([m, f], gate)
    if UP is not None:
        UP.store([m, f], up)
    h = activation_value(gate.to(tl.float32), up.to(tl.float32), alpha, limit, up_offset, ACTIVATION, HAS_LIMIT)
    H.store([m, f], h.to(H.dtype))


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
    activation: str = "silu",
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    both: bool = True,
    per_sm: int = 1,
) -> None:
    """Write h [M, F], and gate and up [M, F] where given, from x [M, K], weights [F, K] and biases [F].

    All matrices of one dtype and `describable`, the biases contiguous; the outputs may be columns of wider buffers.
    both: multiply by both weights at once where they lie in one storage.
    """
    (M, K), F, device = x.shape, w_gate.shape[0], x.device
    block_m, block_f, block_k = tile["BLOCK_M"], tile["BLOCK_F"], tile["BLOCK_K"]
    part = block_m, block_f // tile["PARTS"]
    weights = stacked(w_gate, w_up) if both and has_tma(device) else None
    launch(
        _swiglu_mlp_fwd, (min(per_sm * num_sms(device), cdiv(M, block_m) * cdiv(F, block_f)),), device,
        describe(x, block_m, block_k), x.stride(0),
        describe(w_gate, block_f, block_k) if weights is None else describe(weights, 2, block_f, block_k), w_gate.stride(0),
        describe(w_up, block_f, block_k) if weights is None else None, w_up.stride(0),
        b_gate, b_up,
        describe(gate, *part), 0 if gate is None else gate.stride(0),
        describe(up, *part), 0 if up is None else up.stride(0),
        describe(h, *part), h.stride(0),
        M, F, K, alpha, 0.0 if limit is None else limit, up_offset,
        ACTIVATION=activation, HAS_LIMIT=limit is not None, HAS_TMA=has_tma(device), PRECISION=input_precision(), **tile.options,
    )  # fmt: skip


def stacked(w_gate: Tensor, w_up: Tensor) -> Tensor | None:
    """[2, F, K] over both weights where they are views of one storage, w_gate before w_up; else None."""
    apart = w_up.storage_offset() - w_gate.storage_offset()
    one_storage = w_gate.untyped_storage().data_ptr() == w_up.untyped_storage().data_ptr()
    if not one_storage or w_gate.stride() != w_up.stride() or apart <= 0 or apart * w_gate.element_size() % 16:
        return None
    return w_gate.as_strided((2, *w_gate.shape), (apart, *w_gate.stride()))


def has_tma(device: torch.device) -> bool:
    """Whether kernels get descriptors made on the host (also in the interpreter), or pointers to make their own from."""
    return arch(device) >= 90


def describe(x: Tensor | None, *block: int) -> TensorDescriptor | Tensor | None:
    """x as a kernel argument: a descriptor of such tiles where `has_tma`, else x itself."""
    if x is None or not has_tma(x.device):
        return x
    unit = 16 // x.element_size()  # the stride of a dim of size 1 is never used, but is checked
    outer = (s if n > 1 else unit for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True))
    return TensorDescriptor(x, list(x.shape), [*outer, 1], list(block))


def input_precision() -> str:
    """tl.dot's input_precision for fp32 operands: "tf32" where the caller let PyTorch's own products use it, else "ieee"."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
