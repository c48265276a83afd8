"""Starting point of the exercises in paper_notes/lora_linear.md: right as it stands, and easily made wrong."""

from typing import Any

import torch
from torch import Tensor

from reference.lora_linear import lora_linear as definition
from reference.lora_linear import lora_linear_backward, seed_tensor


class Adapted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        lora_a: Tensor,
        lora_b: Tensor,
        bias: Tensor | None,
        magnitude: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        ctx.save_for_backward(x, weight, lora_a, lora_b, bias, magnitude)
        ctx.options = options
        return definition(x, weight, lora_a, lora_b, bias=bias, magnitude=magnitude, **options)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        *operands, bias, magnitude = ctx.saved_tensors
        options = ctx.options | {"bias": bias, "magnitude": magnitude}
        grads = lora_linear_backward((dy,), *operands, **options)
        names = ("x", "weight", "lora_a", "lora_b", "bias", "magnitude")
        return *(grads.get(name) for name in names), None


def lora_linear(
    x: Tensor,
    weight: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    *,
    bias: Tensor | None = None,
    magnitude: Tensor | None = None,
    seed: int | Tensor | None = None,
    **options: Any,
) -> Tensor:
    """`reference.lora_linear` with a backward pass of its own."""
    if options.get("dropout_p"):
        seed = seed_tensor(seed, x.device)
    return Adapted.apply(x, weight, lora_a, lora_b, bias, magnitude, {**options, "seed": seed})
