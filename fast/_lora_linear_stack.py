"""Several adapted layers of one x, forward and backward, as launches; fast/lora_linear.py explains them.

All layers share the passes over x: one makes every S, one every dA, and one product is the dx of all.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fast._lora_linear_epilogue import bwd_epilogue, weight_norms
from fast._lora_linear_matmul import NO_DROPOUT, matmul
from fast._lora_linear_skinny import skinny, summed
from fast._triton.dropout import dropout_bits
from fast._triton.matmul import add_matmul
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

    def mask(self, x: Tensor) -> tuple[Tensor | None, float]:
        """For skinny and matmul: bits of x's mask, factor of what is kept."""
        if self.seed is None:
            return NO_DROPOUT
        return dropout_bits(self.seed, x, dropout_threshold(self.p)), 1 / (1 - self.p)


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
        epilogue = {"c": c, "adapter": adapter, "bias": layer.bias, "pre": pre, "activation": activation}
        matmul([(x, layer.weight.T)], out=y, device=x.device, **own, **epilogue)
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
    grads, pairs = [], []
    for i, (layer, columns, dy, need) in enumerate(zip(layers, _places(layers), dys, needed, strict=True)):
        if dy is None:
            grads.append([None] * 5)
            continue
        need_w, need_a, need_b, need_bias, need_magnitude = need
        du, dbias, dmagnitude, norm = dy, None, None, saved.norms[i]
        c = None if norm is None else layer.magnitude.float() / norm
        if saved.pre[i] is not None:
            du, dbias, dmagnitude = bwd_epilogue(
                dy, saved.pre[i], c, adapter, layer.bias, activation, need_bias, need_magnitude, x.device
            )
            dmagnitude = None if dmagnitude is None else (dmagnitude / norm).to(layer.magnitude.dtype)
        elif need_bias:
            dbias = dy.sum(0, dtype=torch.float32)
        db = None
        if layer.a is not None:
            # With a magnitude alone the adapters' du is c · dy, unrounded: c enters B, and dB once it is summed.
            scaled = layer.magnitude is not None and not activation
            rank, t, up = layer.a.shape[1], saved.t[:, columns], layer.up()
            columns_c = c.T.repeat_interleave(rank, dim=1) if scaled else None
            up = up * columns_c if scaled else up
            parts, sums = skinny(
                dy if scaled else du, up if need_x or need_a else None, t if need_b else None, x.device
            )
            if parts is not None:
                summed(parts, dt[:, columns], rank, x.device, layer.scale, adapter)
            if sums is not None:
                own = sums.new_empty(sums.shape[1:], dtype=torch.float32 if scaled else layer.b.dtype)
                db = summed(sums, own, rank, x.device)
                db = _by_adapter(db * columns_c if scaled else db, len(layer.b)).to(layer.b.dtype)
        pairs.append((du, layer.weight))
        dw = _weight_gradient(du, x, layer.weight) if need_w else None
        grads.append([dw, None, db, None if dbias is None else dbias.to(layer.bias.dtype), dmagnitude])
    need_down = any(need[1] for need in needed)
    mask = dropout.mask(x) if dt.shape[1] and (need_x or need_down) else NO_DROPOUT
    if need_down:
        _down_gradients(x, layers, dt, mask, needed, grads)
    dx = None
    if need_x and not pairs:
        dx = torch.zeros_like(x)
    elif need_x:
        dx = x.new_empty(x.shape)
        through = {"t": None, "u": None}
        if dt.shape[1]:
            through = {"t": dt, "u": _down_weights(layers), "dropout": mask}
        matmul(pairs, out=dx, device=x.device, **through)
    return dx, grads


def _down(x: Tensor, layers: list[Layer], dropout: Dropout, adapter: Tensor | None) -> Tensor:
    """T = scale · x̃ · Aᵀ of all layers, [M, Σ columns] fp32; 0 in adapters that are not a row's. One pass over x."""
    t = x.new_empty(len(x), sum(layer.columns for layer in layers), dtype=torch.float32)
    if not t.shape[1]:
        return t
    parts, _ = skinny(x, _down_weights(layers).T, None, x.device, *dropout.mask(x))
    for layer, columns in zip(layers, _places(layers), strict=True):
        if layer.a is not None:
            summed(parts[:, :, columns], t[:, columns], layer.a.shape[1], x.device, layer.scale, adapter)
    return t


def _down_weights(layers: list[Layer]) -> Tensor:
    """A of all layers, [Σ columns, K]."""
    stacked = [layer.a.flatten(0, 1) for layer in layers if layer.a is not None]
    return stacked[0] if len(stacked) == 1 else torch.cat(stacked)


def _down_gradients(
    x: Tensor, layers: list[Layer], dt: Tensor, mask: tuple, needed: list[list[bool]], grads: list
) -> None:
    """dA of all layers. One pass over x."""
    _, sums = skinny(x, None, dt, x.device, *mask)
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
    # cuBLAS may count elements in 32 bits; asked for 16-bit results, it may add parts that it has rounded to 16 bits.
    du, x = (t.contiguous() if max(t.stride()) >= 2**24 else t for t in (du, x))
    return add_matmul(None, du.T, x).to(weight.dtype)
