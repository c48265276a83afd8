"""The MLP block's two directions as sequences of matrix products and elementwise passes; fast/swiglu.py explains them.

Backward works on slices of the ffn width, each with its own dh, which becomes h. Saved gate and up become dgate and dup where
nobody else can see them any more (else those get memory of their own), and dx is one pair of products at the end. Without them
gate and up of a slice are computed again and become its dgate and dup, and dx is summed over slices in fp32. Both ways run the
same products in the same order, so their bits are the same. dw is written slice by slice, each in one product.
Forward has slices only where cuBLAS multiplies: computing gate and up again for the same slice gives the same bits.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fast._swiglu_gemm import fused, gate_up
from fast._swiglu_kernels import swiglu_bwd, swiglu_fwd
from fast._triton.device import interpreting
from fast._triton.hopper_products import products
from fast._triton.launch import cdiv
from fast._triton.matmul import add_matmul, matmul
from fast._triton.ownership import held_alone
from fast._triton.tuning import Config, Table, config

# A slice has at most this many columns, or elements if it is few rows. In the interpreter small inputs have several slices, too.
COLUMNS, ELEMENTS = (32, 2**8) if interpreting() else (2048, 2**23)

# dx, by the smaller of M and 2·D; None: by cuBLAS.
DX = Table(
    "swiglu_mlp_dx",
    {
        80: [(1, None)],
        90: [
            (512, None),
            (1024, config(BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, GROUP_M=4, SLOTS=4, num_warps=4)),
        ],
        100: [(1, None)],
    },
)

Parameters = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
Activation = tuple[str, float, float | None, float]


def slices(M: int, F: int) -> list[slice]:
    """The columns [0, F) in slices of about one width, whole 128s."""
    count = cdiv(F, max(COLUMNS, ELEMENTS // max(1, M)))
    unit = 16 if interpreting() else 128
    width = cdiv(cdiv(F, count), unit) * unit
    return [slice(start, min(start + width, F)) for start in range(0, F, width)]


def swiglu_mlp_fwd(
    x: Tensor, parameters: Parameters, options: Activation, save: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y [M, D] of x [M, D]; with `save` gate and up [M, F] as `_columns` finds them, else two empty tensors."""
    w_gate, w_up, w_down, *_, b_down = parameters
    M, F = x.shape[0], w_gate.shape[0]
    h, whole = x.new_empty(M, F), fused(x, w_gate, w_up) is not None
    saved = [x.new_empty((M, F) if save else 0) for _ in range(2)]
    with _exact(x):
        for part in [slice(0, F)] if whole else slices(M, F):
            pair = (_columns(t, part, whole) if save else None for t in saved)
            _gate_up(x, parameters, part, *pair, h[:, part], options)
        return _linear(h, w_down, b_down), *saved


def swiglu_mlp_bwd(
    dy: Tensor,
    saved: list[Tensor],
    x: Tensor,
    parameters: Parameters,
    options: Activation,
    needed: list[bool],
) -> list[Tensor]:
    """Gradients of x and the parameters, empty where not needed. saved: gate and up, or nothing; emptied."""
    w_gate, w_up, w_down, *_ = parameters
    (M, D), F, whole = x.shape, w_gate.shape[0], fused(x, w_gate, w_up) is not None
    tile = DX.pick(min(M, 2 * D), x.device) if whole and D % 8 == 0 else None
    wanted = [p if need else None for p, need in zip(parameters, needed[1:], strict=True)]
    grads = [
        None if p is None else torch.empty_like(p, memory_format=torch.contiguous_format) for p in wanted
    ]
    dw_gate, dw_up, dw_down, db_gate, db_up, db_down = grads
    need = needed[0] or needed[1] or needed[4], needed[0] or needed[2] or needed[5]
    into = saved if held_alone(saved) else [torch.empty_like(t) for t in saved]  # dgate and dup
    dx = None
    with _exact(x):
        for part in slices(M, F) if any(need) or needed[3] else []:
            dh = x.new_empty(M, part.stop - part.start)
            if saved:
                gate, up = (_columns(t, part, whole) for t in saved)
                cotangents = [_columns(t, part, whole) for t in into]
            else:
                cotangents = gate, up = torch.empty_like(dh), torch.empty_like(dh)
                _gate_up(x, parameters, part, gate, up, dh, options)
            matmul(dy, w_down[:, part], out=dh)
            dgate, dup = (t if n else None for t, n in zip(cotangents, need, strict=True))
            swiglu_bwd(dh, gate, up, dgate, dup, needed[3], *options)
            if dw_down is not None:
                matmul(dy.T, dh, out=dw_down[:, part])  # dh holds h now
            del dh, gate, up, cotangents
            for cotangent, dw, db in ((dgate, dw_gate, db_gate), (dup, dw_up, db_up)):
                if dw is not None:
                    matmul(cotangent.T, x, out=dw[part])
                if db is not None:
                    db[part] = cotangent.sum(0, dtype=torch.float32)
            if needed[0] and not (saved and tile):
                dx = _add_dx(dx, dgate, dup, w_gate[part], w_up[part], tile, part.stop == F)
            del dgate, dup, cotangent
        if needed[0] and dx is None:
            dx = _add_dx(None, *into, w_gate, w_up, tile, True)
        saved.clear()
        if db_down is not None:
            db_down.copy_(dy.sum(0, dtype=torch.float32))
    return [x.new_empty(0) if g is None else g for g in (dx, *grads)]


def _add_dx(
    dx: Tensor | None,
    dgate: Tensor,
    dup: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    tile: Config | None,
    last: bool,
) -> Tensor:
    """dx + dgate · w_gate + dup · w_up: fp32 to be added to, the last sum in the working dtype."""
    if tile is None:
        dx = add_matmul(add_matmul(dx, dgate, w_gate), dup, w_up)
        return dx.to(dgate.dtype) if last else dx
    out = dx
    if last or dx is None:
        out = dgate.new_empty(len(dgate), w_gate.shape[1], dtype=dgate.dtype if last else torch.float32)
    products(dgate, w_gate, dup, w_up, out, tile, acc=dx, in_turns=True)
    return out


def _columns(saved: Tensor, part: slice, whole: bool) -> Tensor:
    """Some columns of a saved [M, F]: of the matrix that one kernel has written, or a matrix of its own, one behind the other."""
    if whole:
        return saved[:, part]
    M = saved.shape[0]
    return saved.view(-1)[M * part.start : M * part.stop].view(M, part.stop - part.start)


def _gate_up(
    x: Tensor,
    parameters: Parameters,
    part: slice,
    gate: Tensor | None,
    up: Tensor | None,
    h: Tensor,
    options: Activation,
) -> None:
    """Write h, and gate and up if given, of some columns."""
    w_gate, w_up, _, b_gate, b_up, _ = parameters
    weights = w_gate[part], w_up[part]
    biases = [None if b is None else b[part].contiguous() for b in (b_gate, b_up)]
    if tile := fused(x, w_gate, w_up):
        gate_up(x, *weights, *biases, gate, up, h, tile, *options)
    else:
        gate, up = (_linear(x, w, b, out) for w, b, out in zip(weights, biases, (gate, up), strict=True))
        swiglu_fwd(gate, up, h, *options)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """round(x · weightᵀ + bias). torch.addmm may round before it adds a bias, so the sum is made in fp32."""
    if bias is None:
        return matmul(x, weight.T, out)
    total = add_matmul(None, x, weight.T).add_(bias)
    return total.to(x.dtype) if out is None else out.copy_(total)


@contextmanager
def _exact(x: Tensor) -> Iterator[None]:
    """Products as they are written: no autocast, and 16-bit products summed in fp32 to the end (split sums, too)."""
    settings, before = torch.backends.cuda.matmul, {}
    for name in ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"):
        split = getattr(
            settings, f"{name}_split_k", None
        )  # newer versions of torch have two settings under one name
        before[name] = getattr(settings, name) if split is None else (getattr(settings, name), split)
        setattr(settings, name, False if split is None else (False, split))
    try:
        with torch.autocast(x.device.type, enabled=False):
            yield
    finally:
        for name, value in before.items():
            setattr(settings, name, value)
