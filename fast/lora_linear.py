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
Tiles       skinny: a program takes BLOCK_C columns of x (or du) and ROWS rows of it, and leaves parts that are summed in order;
            on Hopper, in bf16, _lora_linear_pass. matmul: a program takes BLOCK_M × BLOCK_N elements of y (or dx), the sum of up
            to three products; on Hopper _lora_linear_hopper. Those two read digits that _lora_linear_spread has written.
Adapters    Several adapters in one batch lie side by side, as one of rank G·R; S is 0 where a row has another.
Dropout     The mask is a function of seed, row and column (fast/_triton/dropout.py): a bit an element, made anew in backward.
Rounding    fp32 inside; what has more digits enters a 16-bit product as several numbers (fast/_lora_linear_digits.py): all of
            fp32's in S, dS, dA and dB, two in y and dx. Rounded are y and the gradients, and with an activation or a magnitude
            u and du. fp32 products are IEEE.
Determinism no atomics; sums over programs are added in order. B = 0 gives the bits of the base layer in the same launch.
Limits      fp32, fp16, bf16; ranks of all adapters together cost as one rank: 8 adapters of rank 16 as one of 128.
"""

from typing import Any

import torch
from torch import Tensor

from fast._lora_linear_autograd import gated, stack
from fast._lora_linear_digits import SPREAD
from fast._lora_linear_epilogue import EPILOGUE
from fast._lora_linear_hopper import HOPPER
from fast._lora_linear_matmul import MATMUL, MATMUL_FP32, MATMUL_SCALED
from fast._lora_linear_pass import PASS
from fast._lora_linear_skinny import SKINNY, SKINNY_FP32, SKINNY_RAGGED, SUM
from fast._triton.launch import check_supported
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
    no_adapter,
    seed_tensor,
)
from reference.swiglu import check_swiglu

__all__ = [
    "EPILOGUE",
    "HOPPER",
    "MATMUL",
    "MATMUL_FP32",
    "MATMUL_SCALED",
    "PASS",
    "SKINNY",
    "SKINNY_FP32",
    "SKINNY_RAGGED",
    "SPREAD",
    "SUM",
    "Adapter",
    "lora_linear",
    "lora_qkv",
    "lora_swiglu_mlp",
]


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
    return stack(x, [layer], dropout_p, seed, adapter, activation)[0]


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
    options = dropout_p, seed, adapter
    layers = [
        _layer("lora_qkv", x, *given, *options) for given in zip(weights, adapters, biases, strict=True)
    ]
    return stack(_autocast(x, None)[0], layers, *options, None) if layers else ()


def _layer(
    name: str,
    x: Tensor,
    weight: Any,
    given: Adapter | None,
    bias: Tensor | None,
    dropout_p: float,
    seed: int | Tensor | None,
    adapter: Tensor | None,
) -> tuple:
    """A layer of x as `stack` takes it, checked."""
    x, weight = _autocast(x, weight)
    a, b, scale = given if given is not None else no_adapter(x, weight, adapter)
    check_lora_linear(x, weight, a, b, scale, bias, dropout_p, seed, None, adapter, None)
    dense = {"weight": weight} if isinstance(weight, Tensor) else {}
    check_supported(name, x=x, **dense, lora_a=a, lora_b=b, bias=bias)
    return weight, *((None, None) if given is None else (a, b)), scale, bias, None


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

    Saved: x, gate, up and the S of the three layers; swiglu(gate, up) is made again in backward. Raised as by lora_linear and
    swiglu.
    """
    biases = check_lora_qkv("lora_swiglu_mlp", weights, adapters, biases, count=3)
    seed = seed_tensor(seed, x.device) if dropout_p else None
    options = {"dropout_p": dropout_p, "adapter": adapter}
    gate, up = lora_qkv(x, weights[:2], adapters[:2], biases=biases[:2], seed=seed, **options)
    if torch.is_grad_enabled():
        options["seed"] = seed + 1 if dropout_p else None
        check_swiglu(
            "lora_swiglu_mlp", {"gate": (gate, "* F"), "up": (up, "* F")}, activation, 1.0, None, 0.0
        )
        layer = _layer("lora_swiglu_mlp", gate, weights[2], adapters[2], biases[2], **options)
        return gated(gate, up, layer, activation, **options)
    h = swiglu(gate, up, activation=activation)
    seed = seed + 1 if dropout_p else None
    return lora_qkv(h, weights[2:], adapters[2:], biases=biases[2:], seed=seed, **options)[0]
