"""The MLP block's two directions as sequences of matrix products and elementwise passes; fast/swiglu.py explains them.

Backward works on slices of the ffn width: dh, dgate, dup (and gate and up, where they are computed again) of one slice are the
only temporaries as long as M beside dx, which is summed over slices in fp32. dw is written slice by slice, each in one product.
Forward has slices only where cuBLAS multiplies: computing gate and up again for the same slice gives the same bits.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fast._swiglu_gemm import fused, gate_up
from fast._swiglu_kernels import swiglu_bwd, swiglu_fwd
from fast._triton.device import interpreting
from fast._triton.launch import cdiv
from fast._triton.matmul import add_matmul, matmul

# A slice has at most this many columns, or elements if it is few rows. In the interpreter small inputs have several slices, too.
COLUMNS, ELEMENTS = (32, 2**8) if interpreting() else (1920, 2**23)

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
    """Gradients of x and the parameters, empty where not needed. saved: gate and up, or nothing; emptied when they are done."""
    w_gate, w_up, w_down, *_ = parameters
    (M, _), F, whole = x.shape, w_gate.shape[0], fused(x, w_gate, w_up) is not None
    wanted = [p if need else None for p, need in zip(parameters, needed[1:], strict=True)]
    grads = [
        None if p is None else torch.empty_like(p, memory_format=torch.contiguous_format) for p in wanted
    ]
    dw_gate, dw_up, dw_down, db_gate, db_up, db_down = grads
    need_gate, need_up = needed[0] or needed[1] or needed[4], needed[0] or needed[2] or needed[5]
    dx = None
    with _exact(x):
        for part in slices(M, F) if need_gate or need_up or needed[3] else []:
            dh = x.new_empty(M, part.stop - part.start)
            if saved:
                gate, up = (_columns(t, part, whole) for t in saved)
            else:
                gate, up = torch.empty_like(dh), torch.empty_like(dh)
                _gate_up(x, parameters, part, gate, up, dh, options)
            matmul(dy, w_down[:, part], out=dh)
            dgate, dup = (torch.empty_like(dh) if need else None for need in (need_gate, need_up))
            swiglu_bwd(dh, gate, up, dgate, dup, needed[3], *options)
            del gate, up
            if part.stop == F:
                saved.clear()
            if dw_down is not None:
                matmul(dy.T, dh, out=dw_down[:, part])  # dh holds h now
            del dh
            for cotangent, weight, dw, db in ((dgate, w_gate, dw_gate, db_gate), (dup, w_up, dw_up, db_up)):
                if dw is not None:
                    matmul(cotangent.T, x, out=dw[part])
                if db is not None:
                    db[part] = cotangent.sum(0, dtype=torch.float32)
                if needed[0]:
                    dx = add_matmul(dx, cotangent, weight[part])
            del dgate, dup, cotangent
        if db_down is not None:
            db_down.copy_(dy.sum(0, dtype=torch.float32))
    return [x.new_empty(0) if g is None else g for g in (None if dx is None else dx.to(x.dtype), *grads)]


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
