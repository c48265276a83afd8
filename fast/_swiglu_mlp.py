"""The MLP block's two directions as sequences of matrix products and elementwise passes; fast/swiglu.py explains them.

Both work on slices of the ffn width. A slice's dh, h, gate and up are the only temporaries that are as long as M; a group of
slices shares one dgate and one dup, so that the products that sum over M or give rows of dw have a good size. dx is summed over
groups in fp32. The slices depend on M and F alone, so computing gate and up again gives the bits that were saved.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fast._swiglu_kernels import swiglu_bwd, swiglu_fwd
from fast._triton.device import interpreting
from fast._triton.launch import cdiv
from fast._triton.matmul import add_matmul, matmul

# A slice has 2048 columns, or as many as make 2²⁴ elements. In the interpreter small inputs have several, too.
SLICE, SLICE_ELEMENTS, GROUPS = (32, 2**8, 4) if interpreting() else (2048, 2**24, 4)

Parameters = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def slices(M: int, F: int) -> list[list[slice]]:
    """The columns [0, F) in groups of slices."""
    width = SLICE * max(1, SLICE_ELEMENTS // (SLICE * max(1, M)))
    found = [slice(start, min(start + width, F)) for start in range(0, F, width)]
    size = cdiv(len(found), GROUPS)
    return [found[i : i + size] for i in range(0, len(found), size)]


def swiglu_mlp_fwd(
    x: Tensor, parameters: Parameters, activation: str, alpha: float, limit: float | None, up_offset: float, save: bool
) -> tuple[Tensor, list[Tensor]]:
    """y [M, D] of x [M, D]; with `save` gate and up of each slice in turn, too."""
    w_gate, w_up, w_down, b_gate, b_up, b_down = parameters
    h, saved = x.new_empty(x.shape[0], w_gate.shape[0]), []
    for group in slices(*h.shape):
        for part in group:
            gate, up = _gate_up(x, parameters, part)
            swiglu_fwd(gate, up, h[:, part], activation, alpha, limit, up_offset)
            saved += [gate, up] if save else []
    return matmul(h, w_down.T, bias=b_down), saved


def swiglu_mlp_bwd(
    dy: Tensor,
    saved: list[Tensor],
    x: Tensor,
    parameters: Parameters,
    activation: str,
    alpha: float,
    limit: float | None,
    up_offset: float,
    needed: list[bool],
) -> list[Tensor]:
    """Gradients of x and the parameters, empty where not needed. `saved` is emptied: each slice's gate and up go when done."""
    w_gate, w_up, w_down = parameters[:3]
    shapes = (x.shape, *(None if p is None else p.shape for p in parameters))
    grads = [x.new_empty(shape if need else 0) for shape, need in zip(shapes, needed, strict=True)]
    dx, dw_gate, dw_up, dw_down, db_gate, db_up, db_down = (g if need else None for g, need in zip(grads, needed, strict=True))
    through_gate, through_up = (any(n is not None for n in (dx, *those)) for those in ((dw_gate, db_gate), (dw_up, db_up)))
    total = None
    saved.reverse()
    for group in slices(x.shape[0], w_gate.shape[0]):
        start, whole = group[0].start, slice(group[0].start, group[-1].stop)
        size = (x.shape[0], whole.stop - start)
        dgate, dup = (x.new_empty(size) if wanted else None for wanted in (through_gate, through_up))
        for part in group:
            if not (through_gate or through_up or needed[3]):
                break
            gate, up = (saved.pop(), saved.pop()) if saved else _gate_up(x, parameters, part)
            dh, columns = matmul(dy, w_down[:, part]), slice(part.start - start, part.stop - start)
            outputs = (None if t is None else t[:, columns] for t in (dgate, dup))
            swiglu_bwd(dh, gate, up, *outputs, needed[3], activation, alpha, limit, up_offset)
            del gate, up
            if needed[3]:
                matmul(dy.T, dh, out=dw_down[:, part])  # dh holds h now
        for cotangent, weight, dw, db in ((dgate, w_gate, dw_gate, db_gate), (dup, w_up, dw_up, db_up)):
            if dx is not None:
                total = add_matmul(total, cotangent, weight[whole])
            if dw is not None:
                matmul(cotangent.T, x, out=dw[whole])
            if db is not None:
                db[whole] = cotangent.sum(0, dtype=torch.float32)
    if dx is not None:
        dx.copy_(total)
    if db_down is not None:
        db_down.copy_(dy.sum(0, dtype=torch.float32))
    return grads


def _gate_up(x: Tensor, parameters: Parameters, part: slice) -> Iterator[Tensor]:
    """gate and up of a slice of columns, rounded to x's dtype."""
    w_gate, w_up, _, b_gate, b_up, _ = parameters
    pairs = ((w_gate, b_gate), (w_up, b_up))
    return (matmul(x, w[part].T, bias=None if b is None else b[part]) for w, b in pairs)
