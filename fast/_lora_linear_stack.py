"""Several adapted layers of one x, forward and backward, as launches; fast/lora_linear.py explains them.

All layers share the passes over x: one makes every S, one every dA. dx is summed over layers in fp32 and rounded once.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fast._lora_linear_epilogue import bwd_epilogue, weight_norms
from fast._lora_linear_matmul import matmul
from fast._lora_linear_skinny import skinny, summed
from fast._triton.matmul import add_matmul
from fast._triton.matmul import matmul as plain_matmul
from reference._philox import dropout_threshold


class Layer(NamedTuple):
    """weight [N, K], a [G, R, K] and b [G, N, R] or neither, scale a number or [G], bias [N], magnitude [G, N]."""

    weight: Tensor
    a: Tensor | None
    b: Tensor | None
    scale: Tensor | float
    bias: Tensor | None
    magnitude: Tensor | None

    @property
    def columns(self) -> int:
        """Of T: the ranks of all adapters."""
        return 0 if self.a is None else self.a.shape[0] * self.a.shape[1]

    def up(self) -> Tensor:
        """b as [N, G·R]."""
        return self.b[0] if len(self.b) == 1 else self.b.permute(1, 0, 2).reshape(self.b.shape[1], -1)


class Dropout(NamedTuple):
    seed: Tensor | None
    p: float

    def of_rows(self) -> tuple:
        """For skinny and matmul: seed, threshold, factor of what is kept."""
        return (
            (None, 0, 1.0) if self.seed is None else (self.seed, dropout_threshold(self.p), 1 / (1 - self.p))
        )


class Saved(NamedTuple):
    """t [M, Σ columns]: scale · S of all layers. pre: u of each layer, and norm [G, N], where backward needs them."""

    t: Tensor
    pre: list[Tensor | None]
    norms: list[Tensor | None]


def stack_fwd(
    x: Tensor,
    layers: list[Layer],
    dropout: Dropout,
    adapter: Tensor | None,
    activation: str | None,
    save: bool,
) -> tuple[list[Tensor], Saved]:
    """y [M, N] of each layer for x [M, K]."""
    t = _down(x, layers, dropout, adapter)
    outputs, pres, norms = [], [], []
    for layer, columns in zip(layers, _places(layers), strict=True):
        y = x.new_empty(len(x), len(layer.weight))
        norm = c = None
        if layer.magnitude is not None:
            norm = weight_norms(layer.weight, layer.a, layer.b, layer.scale, x.device)
            c = layer.magnitude.float() / norm
        pre = torch.empty_like(y) if save and (activation or c is not None) else None
        own = {"t": None, "u": None} if layer.a is None else {"t": t[:, columns], "u": layer.up().T}
        matmul(
            x,
            layer.weight.T,
            out=y,
            device=x.device,
            c=c,
            adapter=adapter,
            bias=layer.bias,
            pre=pre,
            activation=activation,
            **own,
        )
        outputs.append(y)
        pres.append(pre)
        norms.append(norm if save else None)
    return outputs, Saved(t, pres, norms)


def stack_bwd(
    dys: list[Tensor | None],
    x: Tensor,
    layers: list[Layer],
    saved: Saved,
    dropout: Dropout,
    adapter: Tensor | None,
    activation: str | None,
    need_x: bool,
    needed: list[list[bool]],
) -> tuple[Tensor | None, list[list[Tensor | None]]]:
    """dx, and of each layer the gradients of weight, a, b, bias and magnitude where needed."""
    dt = torch.zeros_like(saved.t)
    grads, dx = [], None
    last = max((i for i, dy in enumerate(dys) if dy is not None), default=-1)
    for i, (layer, columns, dy, need) in enumerate(zip(layers, _places(layers), dys, needed, strict=True)):
        if dy is None:
            grads.append([None] * 5)
            continue
        need_w, need_a, need_b, need_bias, need_magnitude = need
        du, dbias, dmagnitude, norm = dy, None, None, saved.norms[i]
        if saved.pre[i] is not None:
            c = None if norm is None else layer.magnitude.float() / norm
            du, dbias, dmagnitude = bwd_epilogue(
                dy, saved.pre[i], c, adapter, layer.bias, activation, need_bias, need_magnitude, x.device
            )
            dmagnitude = None if dmagnitude is None else (dmagnitude / norm).to(layer.magnitude.dtype)
        elif need_bias:
            dbias = dy.sum(0, dtype=torch.float32)
        db, through = None, {"t": None, "u": None}
        if layer.a is not None:
            rank, t = layer.a.shape[1], saved.t[:, columns]
            parts, sums = skinny(
                du, layer.up() if need_x or need_a else None, t if need_b else None, x.device
            )
            if parts is not None:
                dt_own = summed(parts, dt[:, columns], rank, x.device, layer.scale, adapter)
                through = {"t": dt_own, "u": layer.a.flatten(0, 1)}
            if sums is not None:
                db = _by_adapter(
                    summed(sums, du.new_empty(sums.shape[1:], dtype=layer.b.dtype), rank, x.device),
                    len(layer.b),
                )
        if need_x:
            seed, threshold, factor = dropout.of_rows()
            out = x.new_empty(x.shape, dtype=x.dtype if i == last else torch.float32)
            seed = seed if through["t"] is not None else None
            matmul(
                du, layer.weight, out=out, device=x.device, acc=dx, seed=seed, threshold=threshold, keep_scale=factor, **through
            )  # fmt: skip
            dx = out
        dw = _weight_gradient(du, x, layer.weight) if need_w else None
        grads.append([dw, None, db, None if dbias is None else dbias.to(layer.bias.dtype), dmagnitude])
    if any(need[1] for need in needed):
        _down_gradients(x, layers, dt, dropout, needed, grads)
    if need_x and dx is None:
        dx = torch.zeros_like(x)
    return dx, grads


def _down(x: Tensor, layers: list[Layer], dropout: Dropout, adapter: Tensor | None) -> Tensor:
    """T = scale · x̃ · Aᵀ of all layers, [M, Σ columns] fp32; 0 in adapters that are not a row's. One pass over x."""
    t = x.new_empty(len(x), sum(layer.columns for layer in layers), dtype=torch.float32)
    if not t.shape[1]:
        return t
    stacked = [layer.a.flatten(0, 1) for layer in layers if layer.a is not None]
    a = stacked[0] if len(stacked) == 1 else torch.cat(stacked)
    parts, _ = skinny(x, a.T, None, x.device, *dropout.of_rows())
    for layer, columns in zip(layers, _places(layers), strict=True):
        if layer.a is not None:
            summed(parts[:, :, columns], t[:, columns], layer.a.shape[1], x.device, layer.scale, adapter)
    return t


def _down_gradients(
    x: Tensor, layers: list[Layer], dt: Tensor, dropout: Dropout, needed: list[list[bool]], grads: list
) -> None:
    """dA of all layers. One pass over x."""
    _, sums = skinny(x, None, dt, x.device, *dropout.of_rows())
    for layer, columns, need, found in zip(layers, _places(layers), needed, grads, strict=True):
        if need[1]:
            da = torch.empty_like(layer.a, memory_format=torch.contiguous_format)
            found[1] = da
            summed(sums[:, :, columns], da.flatten(0, 1).T, layer.a.shape[1], x.device)


def _places(layers: list[Layer]) -> list[slice]:
    """Which columns of T are whose."""
    places, start = [], 0
    for layer in layers:
        places.append(slice(start, start + layer.columns))
        start += layer.columns
    return places


def _by_adapter(columns: Tensor, G: int) -> Tensor:
    """[N, G·R] as [G, N, R]."""
    return columns.view(len(columns), G, -1).transpose(0, 1).contiguous()


def _weight_gradient(du: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    # cuBLAS may count elements in 32 bits.
    du, x = (t.contiguous() if max(t.stride()) >= 2**24 else t for t in (du, x))
    if weight.dtype == x.dtype:
        return plain_matmul(du.T, x)
    return add_matmul(None, du.T, x).to(weight.dtype)
