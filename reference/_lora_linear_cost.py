"""What the functions of reference/lora_linear.py must do at least. Only shapes and dtypes are read. Weights count as frozen,
adapters as trained."""

from typing import Any

import torch
from torch import Tensor

from reference._cost import Cost, Work, nbytes


def lora_linear_cost(
    x: Tensor,
    weight: Any,
    lora_a: Tensor,
    lora_b: Tensor,
    *,
    scale: float | Tensor = 1.0,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    magnitude: Tensor | None = None,
    adapter: Tensor | None = None,
    activation: str | None = None,
) -> Cost:
    """Saved: x, which the caller keeps, S in fp32, and u where backward needs it."""
    K, N = x.shape[-1], weight.shape[0]
    M, rank = x.numel() // max(1, K), lora_a.numel() // max(1, K)
    small, y = nbytes(lora_a, lora_b, bias, magnitude), M * N * x.element_size()
    given, kept = nbytes(x) + small + weight.nbytes, 4 * M * rank
    kept += y if activation or magnitude is not None else 0
    adapter_flops = 2 * M * rank * (K + N)
    forward = Work(2 * M * N * K + adapter_flops, given + y)
    backward = Work(2 * M * N * K + 2 * adapter_flops, given + y + nbytes(x) + small)
    return Cost(forward, backward, nbytes(x) + kept)


def lora_qkv_cost(
    x: Tensor,
    weights: tuple[Any, ...],
    adapters: tuple[tuple | None, ...],
    *,
    biases: tuple[Tensor | None, ...] | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    adapter: Tensor | None = None,
) -> Cost:
    """The sum over layers, but x is read once in either direction, dx written once and x saved once."""
    layers = []
    for weight, given, bias in zip(weights, adapters, biases or (None,) * len(weights), strict=True):
        none = x.new_empty(0, x.shape[-1]), x.new_empty(weight.shape[0], 0)
        layers.append(lora_linear_cost(x, weight, *(none if given is None else given[:2]), bias=bias))
    again = (len(layers) - 1) * nbytes(x)
    return _total(layers, again, 2 * again, again)


def lora_swiglu_mlp_cost(
    x: Tensor,
    weights: tuple[Any, Any, Any],
    adapters: tuple[tuple | None, tuple | None, tuple | None],
    *,
    biases: tuple[Tensor | None, Tensor | None, Tensor | None] | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    adapter: Tensor | None = None,
    activation: str = "silu",
) -> Cost:
    """gate and up are written forward and read backward; h and the gradients of all three need not reach memory. Saved: x, gate,
    up and the S of the three layers."""
    biases = biases or (None,) * 3
    h = torch.empty(*x.shape[:-1], weights[0].shape[0], dtype=x.dtype, device="meta")
    first = lora_qkv_cost(x, weights[:2], adapters[:2], biases=biases[:2])
    last = lora_qkv_cost(h, weights[2:], adapters[2:], biases=biases[2:])
    # first reads dgate and dup, which count for gate and up; last reads h, reads it again and writes dh, and saves h.
    between = Cost(Work(6 * h.numel(), 0), Work(12 * h.numel(), 0), 2 * nbytes(h))
    return _total([first, last, between], nbytes(h), 2 * nbytes(h), nbytes(h))


def _total(costs: list[Cost], forward: int, backward: int, saved: int) -> Cost:
    """The sum of costs, less the bytes that it counts too often: of each direction, and of what is saved."""
    return Cost(
        Work(sum(c.forward.flops for c in costs), sum(c.forward.bytes for c in costs) - forward),
        Work(sum(c.backward.flops for c in costs), sum(c.backward.bytes for c in costs) - backward),
        sum(c.saved for c in costs) - saved,
    )
