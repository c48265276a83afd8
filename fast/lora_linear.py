"""Linear layers with low-rank adapters in Triton. The definition is reference/lora_linear.py.

Math        u = x·Wᵀ + s·S·Bᵀ,  S = x̃·Aᵀ;  y = activation(c·u + bias)
Backward    dS = s·du·B;  dx = du·W + (dS·A)∘kept/(1 − p);  dA = dSᵀ·x̃;  dB = s·duᵀ·S;  dW = duᵀ·x only if W is trained
Saved       x, which the caller holds, and s·S [M, R] in fp32; u where an activation or a magnitude needs it
Fusion      eager, bf16                                    here
            x ─┬─ W ───────────── base ─┐                  x ─ _lora_linear_skinny ─ S
               └─ drop ─ A ─ B ─ · s ───┴ + ─ y            x, S ─ _lora_linear_matmul ─ y   (S·Bᵀ starts the accumulator)
            passes beyond the product's own: M·K + 6 M·N forward, 5 M·K + 4 M·N backward; here M·K and M·K + M·N
Floor       the plain product, and 2·M·R·(K + N) FLOPs more: 0.8 % at K = N = 4096, R = 16. At M = 8192 in bf16 the pass over x is
            67 MB beside 0.27 TFLOP.
Tiles       skinny: a program takes BLOCK_C columns of x (or du) and ROWS rows of it, and leaves parts that are summed in order.
            matmul: a program takes BLOCK_M × BLOCK_N elements of y (or dx); on Hopper _lora_linear_hopper.
Adapters    Several adapters in one batch lie side by side, as one of rank G·R; S is 0 where a row has another.
Dropout     The mask is a function of seed, row and column (fast/_triton/dropout.py): made anew in the three places that need it.
Rounding    fp32 inside; S, dS, A and B enter 16-bit products as hi + lo. Rounded are y and the gradients, and with an activation
            or a magnitude u and du. fp32 products are IEEE.
Determinism no atomics; sums over programs are added in order. B = 0 gives the bits of the base layer in the same launch.
Limits      fp32, fp16, bf16; ranks of all adapters together cost as one rank: 8 adapters of rank 16 as one of 128.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fast._lora_linear_epilogue import EPILOGUE
from fast._lora_linear_hopper import HOPPER, WIDEN
from fast._lora_linear_matmul import MATMUL, MATMUL_FP32, MATMUL_SCALED
from fast._lora_linear_skinny import SKINNY, SKINNY_FP32, SKINNY_RAGGED, SUM
from fast._lora_linear_stack import Dropout, Layer, Saved, stack_bwd, stack_fwd
from fast._triton.launch import check_supported
from fast._triton.registration import define
from fast.swiglu import swiglu
from reference.lora_linear import (
    Activation,
    Adapter,
    Bias,
    DownProjection,
    Magnitude,
    Probability,
    RowAdapter,
    Scale,
    Seed,
    UpProjection,
    Weight,
    X,
    check_lora_linear,
    check_lora_qkv,
    lora_linear_backward,
    no_adapter,
    seed_tensor,
)
from reference.quantized_weights import FakeQuantWeight

__all__ = [
    "EPILOGUE",
    "HOPPER",
    "MATMUL",
    "MATMUL_FP32",
    "MATMUL_SCALED",
    "SKINNY",
    "SKINNY_FP32",
    "SKINNY_RAGGED",
    "SUM",
    "WIDEN",
    "Adapter",
    "lora_linear",
    "lora_qkv",
    "lora_swiglu_mlp",
]

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


def _stack(
    x: Tensor,
    layers: list[tuple],
    dropout_p: float,
    seed: int | Tensor | None,
    adapter: Tensor | None,
    activation: str | None,
) -> tuple[Tensor, ...]:
    """y [*, N] of each layer (weight, lora_a, lora_b, scale, bias, magnitude), lora_a and lora_b None for none."""
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
    rows = x if x.dim() == 2 else x.flatten(0, -2) if x.dim() > 1 else x[None]
    seed = seed_tensor(seed, x.device) if dropout_p else None
    call = _Call(factors, quantized, float(dropout_p), activation)
    given = rows, seed, None if adapter is None else adapter.reshape(-1).contiguous(), *tensors
    if torch.is_grad_enabled():
        ys = _LoraStack.apply(call, *given)
    else:
        ys = _fwd_op(*call.operands(*given[:3], tensors), False)[: len(factors)]
    return tuple(ys) if x.dim() == 2 else tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in ys)


def _autocast(x: Tensor, weight: Any) -> tuple[Tensor, Any]:
    """x and a dense weight as torch.nn.functional.linear would take them; adapters keep their digits."""
    if (
        not isinstance(x, Tensor)
        or x.device.type not in ("cpu", "cuda")
        or not torch.is_autocast_enabled(x.device.type)
    ):
        return x, weight
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple(t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for t in (x, weight))


def lora_linear(
    x: X,
    weight: Weight,
    lora_a: DownProjection,
    lora_b: UpProjection,
    *,
    scale: Scale = 1.0,
    bias: Bias = None,
    dropout_p: Probability = 0.0,
    seed: Seed = None,
    magnitude: Magnitude = None,
    adapter: RowAdapter = None,
    activation: Activation = None,
) -> Tensor:
    """y [*, N] of x [*, K]: `reference.lora_linear` with fused kernels; same arguments, result, rounding points and errors.

    Saved for the backward pass: x, the operands and scale · S [M, R] in fp32; with an activation or a magnitude u as well. A
    frozen weight costs no product. Under autocast x and a dense weight are cast to its dtype, adapters are not. A quantised
    weight is made dense for the length of a product, in either direction. Differentiable twice; nothing is written to; the
    same bits from run to run.
    Raises TypeError for other dtypes, ValueError for tensors that are not on one CUDA device, shapes and options.
    """
    x, weight = _autocast(x, weight)
    check_lora_linear(x, weight, lora_a, lora_b, scale, bias, dropout_p, seed, magnitude, adapter, activation)
    dense = {"weight": weight} if isinstance(weight, Tensor) else {}
    check_supported("lora_linear", x=x, **dense, lora_a=lora_a, lora_b=lora_b, bias=bias, magnitude=magnitude)
    layer = (weight, lora_a, lora_b, scale, bias, magnitude)
    return _stack(x, [layer], dropout_p, seed, adapter, activation)[0]


def lora_qkv(
    x: Tensor,
    weights: tuple[Any, ...],
    adapters: tuple[Adapter | None, ...],
    *,
    biases: tuple[Tensor | None, ...] | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    adapter: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """(q, k, v) of one x: `reference.lora_qkv` with fused kernels; one pass over x for all S, one for all dA, one dx.

    Saved and raised as by lora_linear; x is saved once.
    """
    biases = check_lora_qkv("lora_qkv", weights, adapters, biases)
    layers = []
    for weight, given, bias in zip(weights, adapters, biases, strict=True):
        rows, weight = _autocast(x, weight)
        a, b, scale = given if given is not None else no_adapter(rows, weight, adapter)
        check_lora_linear(rows, weight, a, b, scale, bias, dropout_p, seed, None, adapter, None)
        dense = {"weight": weight} if isinstance(weight, Tensor) else {}
        check_supported("lora_qkv", x=rows, **dense, lora_a=a, lora_b=b, bias=bias)
        layers.append((weight, *((None, None) if given is None else (a, b)), scale, bias, None))
    return _stack(_autocast(x, None)[0], layers, dropout_p, seed, adapter, None) if layers else ()


def lora_swiglu_mlp(
    x: Tensor,
    weights: tuple[Any, Any, Any],
    adapters: tuple[Adapter | None, Adapter | None, Adapter | None],
    *,
    biases: tuple[Tensor | None, Tensor | None, Tensor | None] | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    adapter: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """The gated MLP of adapted layers: `reference.lora_swiglu_mlp` with fused kernels; gate and up share the passes over x.

    Saved: x, gate, up, h and the S of the three layers. Raised as by lora_linear and swiglu.
    """
    biases = check_lora_qkv("lora_swiglu_mlp", weights, adapters, biases, count=3)
    seed = seed_tensor(seed, x.device) if dropout_p else None
    shared = {"dropout_p": dropout_p, "adapter": adapter}
    gate, up = lora_qkv(x, weights[:2], adapters[:2], biases=biases[:2], seed=seed, **shared)
    h = swiglu(gate, up, activation=activation)
    after = seed + 1 if dropout_p else None
    return lora_qkv(h, weights[2:], adapters[2:], biases=biases[2:], seed=after, **shared)[0]
