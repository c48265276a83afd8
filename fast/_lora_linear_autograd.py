"""Autograd of fast/lora_linear.py: the operators for a stack of layers of one x, and the Functions that use them."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fast._lora_linear_stack import Dropout, Layer, Saved, stack_bwd, stack_fwd
from fast._triton.registration import define
from fast.swiglu import _bwd_op as swiglu_bwd_op
from fast.swiglu import _fwd_op as swiglu_fwd_op
from reference.lora_linear import lora_linear_backward, seed_tensor
from reference.quantized_weights import FakeQuantWeight
from reference.swiglu import swiglu as reference_swiglu
from reference.swiglu import swiglu_backward

_PLAIN = 1.0, None, 0.0  # alpha, limit and up_offset of swiglu

# One list entry for each layer; what a layer lacks is a tensor without dimensions.
_LAYERS = (
    "Tensor x, Tensor[] weights, Tensor[] a, Tensor[] b, Tensor[] scales, float[] factors, Tensor[] biases, Tensor[] magnitudes, "
    "Tensor? seed, Tensor? adapter, float dropout_p, str? activation"
)


def lora_stack_fwd(
    x: Tensor,
    weights: list[Tensor],
    a: list[Tensor],
    b: list[Tensor],
    scales: list[Tensor],
    factors: list[float],
    biases: list[Tensor],
    magnitudes: list[Tensor],
    seed: Tensor | None,
    adapter: Tensor | None,
    dropout_p: float,
    activation: str | None,
    save: bool,
) -> list[Tensor]:
    """y of each layer, then t, then u of each layer and the norms of each (empty where backward needs none)."""
    layers = _layers(weights, a, b, scales, factors, biases, magnitudes)
    outputs, saved = stack_fwd(x, layers, Dropout(seed, dropout_p), adapter, activation, save)
    return [*outputs, saved.t, *(_full(x, t) for t in (*saved.pre, *saved.norms))]


def lora_stack_bwd(
    dys: list[Tensor],
    saved: list[Tensor],
    x: Tensor,
    weights: list[Tensor],
    a: list[Tensor],
    b: list[Tensor],
    scales: list[Tensor],
    factors: list[float],
    biases: list[Tensor],
    magnitudes: list[Tensor],
    seed: Tensor | None,
    adapter: Tensor | None,
    dropout_p: float,
    activation: str | None,
    needed: list[bool],
) -> list[Tensor]:
    """dx, then of each layer the gradients of weight, a, b, bias and magnitude; empty where not needed or not given."""
    layers, count = _layers(weights, a, b, scales, factors, biases, magnitudes), len(weights)
    t, *others = saved
    kept = Saved(t, [_given(u) for u in others[:count]], [_given(n) for n in others[count:]])
    wanted = [needed[1 + 5 * i : 6 + 5 * i] for i in range(count)]
    dx, grads = stack_bwd(
        [_given(dy) for dy in dys],
        x,
        layers,
        kept,
        Dropout(seed, dropout_p),
        adapter,
        activation,
        needed[0],
        wanted,
    )
    return [_full(x, g) for g in (dx if needed[0] else None, *(g for layer in grads for g in layer))]


def _layers(weights, a, b, scales, factors, biases, magnitudes) -> list[Layer]:
    given = zip(weights, a, b, scales, factors, biases, magnitudes, strict=True)
    return [
        Layer(w, _given(a), _given(b), f if _given(s) is None else s, _given(bias), _given(m))
        for w, a, b, s, f, bias, m in given
    ]


def _given(t: Tensor) -> Tensor | None:
    return t if t.dim() else None


def _full(x: Tensor, t: Tensor | None) -> Tensor:
    return x.new_empty(()) if t is None else t


def _fwd_shapes(
    x, weights, a, b, scales, factors, biases, magnitudes, seed, adapter, dropout_p, activation, save
):
    M, columns = len(x), sum(t.shape[0] * t.shape[1] for t in a if t.dim())
    ys = [x.new_empty(M, len(w)) for w in weights]
    pres = [
        x.new_empty((M, len(w)) if save and (activation or m.dim()) else ())
        for w, m in zip(weights, magnitudes, strict=True)
    ]
    norms = [
        m.new_empty(m.shape if save and m.dim() else (), dtype=torch.float32 if save and m.dim() else x.dtype)
        for m in magnitudes
    ]
    return [*ys, x.new_empty(M, columns, dtype=torch.float32), *pres, *norms]


def _bwd_shapes(
    dys,
    saved,
    x,
    weights,
    a,
    b,
    scales,
    factors,
    biases,
    magnitudes,
    seed,
    adapter,
    dropout_p,
    activation,
    needed,
):
    tensors = [x, *(t for layer in zip(weights, a, b, biases, magnitudes, strict=True) for t in layer)]
    return [
        torch.empty_like(t, memory_format=torch.contiguous_format) if need and t.dim() else x.new_empty(())
        for t, need in zip(tensors, needed, strict=True)
    ]


_fwd_op = define(f"lora_stack_fwd({_LAYERS}, bool save) -> Tensor[]", lora_stack_fwd, _fwd_shapes)
_bwd_op = define(
    f"lora_stack_bwd(Tensor[] dys, Tensor[] saved, {_LAYERS}, bool[] needed) -> Tensor[]",
    lora_stack_bwd,
    _bwd_shapes,
)


class _Call:
    """What a stack of layers is called with besides tensors: scale and quantised weight of each layer (None: a tensor)."""

    def __init__(self, factors: list[float], quantized: list[Any], dropout_p: float, activation: str | None):
        self.factors, self.quantized = factors, quantized
        self.dropout_p, self.activation = dropout_p, activation

    def operands(
        self, x: Tensor, seed: Tensor | None, adapter: Tensor | None, tensors: tuple[Tensor | None, ...]
    ) -> tuple:
        """The operators' arguments from x on, weights made dense."""
        weights, a, b, scales, biases, magnitudes = (list(tensors[i::6]) for i in range(6))
        weights = [
            w if q is None else q.dequantize(x.dtype) for w, q in zip(weights, self.quantized, strict=True)
        ]
        lists = ([_full(x, t) for t in found] for found in (a, b, scales))
        more = ([_full(x, t) for t in found] for found in (biases, magnitudes))
        return x, weights, *lists, self.factors, *more, seed, adapter, self.dropout_p, self.activation


class _LoraStack(Function):
    @staticmethod
    def forward(
        ctx: Any, call: _Call, x: Tensor, seed: Tensor | None, adapter: Tensor | None, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        found = _fwd_op(*call.operands(x, seed, adapter, tensors), True)
        count = len(call.factors)
        ctx.call = call
        ctx.save_for_backward(x, seed, adapter, *tensors, *map(_given, found[count:]))
        ctx.set_materialize_grads(False)
        return tuple(found[:count])

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        count, (x, seed, adapter, *others) = len(dys), ctx.saved_tensors
        tensors, saved = others[: 6 * count], [_full(x, t) for t in others[6 * count :]]
        wanted = ctx.needs_input_grad
        needed = [wanted[1], *(wanted[4 + 6 * i + k] for i in range(count) for k in (0, 1, 2, 4, 5))]
        if torch.is_grad_enabled():
            grads = _differentiable_backward(dys, ctx.call, x, seed, adapter, tensors)
        else:
            operands = ctx.call.operands(x, seed, adapter, tensors)
            grads = _bwd_op([_full(x, dy) for dy in dys], saved, *operands, needed)
        grads = [
            g if need and g is not None and g.dim() else None for g, need in zip(grads, needed, strict=True)
        ]
        layers = ((*grads[1 + 5 * i : 4 + 5 * i], None, *grads[4 + 5 * i : 6 + 5 * i]) for i in range(count))
        return None, grads[0], None, None, *(g for layer in layers for g in layer)


class _GatedLora(Function):
    """One adapted layer of h = swiglu(gate, up), which is made again in backward."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, activation: str, gate: Tensor, up: Tensor, seed: Tensor | None, adapter: Tensor | None,
        *tensors: Tensor | None,
    ) -> Tensor:  # fmt: skip
        h = swiglu_fwd_op(gate, up, activation, *_PLAIN)
        y, *saved = _fwd_op(*call.operands(h, seed, adapter, tensors), True)
        ctx.call, ctx.activation = call, activation
        ctx.save_for_backward(gate, up, seed, adapter, *tensors, *map(_given, saved))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, seed, adapter, *others = ctx.saved_tensors
        tensors, wanted = others[:6], ctx.needs_input_grad
        needed = [wanted[2] or wanted[3], *(wanted[6 + k] for k in (0, 1, 2, 4, 5))]
        dgate = dup = None
        if torch.is_grad_enabled():
            h = reference_swiglu(gate, up, activation=ctx.activation)
            grads = _differentiable_backward((dy,), ctx.call, h, seed, adapter, tensors)
            dgate, dup = swiglu_backward((grads[0],), gate, up, activation=ctx.activation).values()
        else:
            h = swiglu_fwd_op(gate, up, ctx.activation, *_PLAIN)
            saved = [_full(h, t) for t in others[6:]]
            grads = _bwd_op([dy], saved, *ctx.call.operands(h, seed, adapter, tensors), needed)
            if needed[0]:
                dgate, dup = swiglu_bwd_op(grads[0], gate, up, ctx.activation, *_PLAIN, wanted[2], wanted[3])
        found = [
            g if need and g is not None and g.dim() else None for g, need in zip(grads, needed, strict=True)
        ]
        halves = (dgate if wanted[2] else None, dup if wanted[3] else None)
        return None, None, *halves, None, None, *found[1:4], None, *found[4:6]


def _differentiable_backward(
    dys: tuple[Tensor | None, ...],
    call: _Call,
    x: Tensor,
    seed: Tensor | None,
    adapter: Tensor | None,
    tensors: list[Tensor | None],
) -> list[Tensor | None]:
    """The reference's backward, layer by layer."""
    grads: list[Tensor | None] = [None]
    for i, dy in enumerate(dys):
        weight, a, b, scale, bias, magnitude = tensors[6 * i : 6 * i + 6]
        if dy is None:
            grads += [None] * 5
            continue
        weight = call.quantized[i] if weight is None else weight
        given = (
            (torch.zeros(1, 1, x.shape[1], device=x.device), torch.zeros(1, len(weight), 1, device=x.device))
            if a is None
            else (a, b)
        )
        found = lora_linear_backward(
            (dy,), x, weight, *given, scale=call.factors[i] if scale is None else scale, bias=bias, dropout_p=call.dropout_p,
            seed=seed, magnitude=magnitude, adapter=adapter, activation=call.activation,
        )  # fmt: skip
        grads[0] = found["x"] if grads[0] is None else grads[0] + found["x"]
        grads += [found.get(name) for name in ("weight", "lora_a", "lora_b", "bias", "magnitude")]
    return grads


def _call(layers: list[tuple], dropout_p: float, activation: str | None) -> tuple[_Call, list[Tensor | None]]:
    """Of layers (weight, lora_a, lora_b, scale, bias, magnitude), lora_a and lora_b None for none: what is no tensor, and the
    tensors."""
    tensors, factors, quantized = [], [], []
    for weight, a, b, scale, bias, magnitude in layers:
        if isinstance(weight, FakeQuantWeight) and weight.w.requires_grad:
            weight = weight.dequantize()  # the master's gradient flows through it
        dense = isinstance(weight, Tensor)
        a, b = (t if t is None or t.dim() == 3 else t[None] for t in (a, b))
        on_device = isinstance(scale, Tensor)
        per_adapter = scale.reshape(-1).expand(1 if a is None else len(a)).contiguous() if on_device else None
        magnitude = magnitude if magnitude is None or magnitude.dim() == 2 else magnitude[None]
        bias, magnitude = (None if t is None else t.contiguous() for t in (bias, magnitude))
        tensors += [weight if dense else None, a, b, per_adapter, bias, magnitude]
        factors.append(1.0 if on_device else float(scale))
        quantized.append(None if dense else weight)
    return _Call(factors, quantized, float(dropout_p), activation), tensors


def stack(
    x: Tensor,
    layers: list[tuple],
    dropout_p: float,
    seed: int | Tensor | None,
    adapter: Tensor | None,
    activation: str | None,
) -> tuple[Tensor, ...]:
    """y [*, N] of each layer (weight, lora_a, lora_b, scale, bias, magnitude) for x [*, K]; lora_a and lora_b None for none."""
    call, tensors = _call(layers, dropout_p, activation)
    given = _rows(x), *_of_rows(x, dropout_p, seed, adapter), *tensors
    if torch.is_grad_enabled():
        ys = _LoraStack.apply(call, *given)
    else:
        ys = _fwd_op(*call.operands(*given[:3], tensors), False)[: len(layers)]
    return tuple(ys) if x.dim() == 2 else tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in ys)


def gated(
    gate: Tensor,
    up: Tensor,
    layer: tuple,
    activation: str,
    dropout_p: float,
    seed: int | Tensor | None,
    adapter: Tensor | None,
) -> Tensor:
    """y [*, N] of one layer for swiglu(gate, up), gate and up [*, K]; the latter are saved, their swiglu is not."""
    call, tensors = _call([layer], dropout_p, None)
    given = _rows(gate), _rows(up), *_of_rows(gate, dropout_p, seed, adapter), *tensors
    y = _GatedLora.apply(call, activation, *given)
    return y.view(*gate.shape[:-1], y.shape[-1])


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.flatten(0, -2) if x.dim() > 1 else x[None]


def _of_rows(
    x: Tensor, dropout_p: float, seed: int | Tensor | None, adapter: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The mask's seed and the adapters of x's rows."""
    seed = seed_tensor(seed, x.device) if dropout_p else None
    return seed, None if adapter is None else adapter.reshape(-1).contiguous()
