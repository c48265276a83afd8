"""lora_qkv and lora_swiglu_mlp for experiments/lora_linear.py: their rows, and peers made of those of one layer."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from experiments._work import Call, Row
from reference import Adapter

SCALE, DROPOUT, RANK = 2.0, 0.1, 16
WORDS = ("narrow", "dropout")


def row(shape: str, phases: tuple[str, ...] = ("fwd", "bwd")) -> Row:
    """`shape` is "M×K×N1+N2+…", layers with outputs [M, N1], [M, N2] … of one x [M, K] (lora_qkv), or "mlp M×K×F", a gated MLP
    whose hidden layer has F features (lora_swiglu_mlp); behind it rN, the rank (16), narrow and dropout, as for one layer.
    """
    if not re.fullmatch(r"(mlp \d+×\d+×\d+|\d+×\d+×\d+(\+\d+)+)( \S+)*", shape):
        raise ValueError(f'shape must be "M×K×N1+N2 …" or "mlp M×K×F …", got {shape!r}')
    mlp = shape.startswith("mlp ")
    sizes, *words = shape.removeprefix("mlp ").split()
    M, K, *widths = map(int, re.split("[×+]", sizes))
    R = numbers(words, "r", WORDS).get("r", RANK)
    layers = [(N, K) for N in widths]
    if mlp:
        layers = [*layers, *layers, (K, *widths)]

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator | None) -> Call:
        fresh, own = source(device, generator), dtype if "narrow" in words else torch.float32
        x = fresh(M, K, dtype=dtype).requires_grad_()
        weights = tuple(fresh(*layer, dtype=dtype).mul_(layer[-1] ** -0.5) for layer in layers)
        adapters = tuple(
            Adapter(
                fresh(R, inner, dtype=own).mul_(inner**-0.5).requires_grad_(),
                fresh(outer, R, dtype=own).mul_(R**-0.5).requires_grad_(),
                SCALE,
            )
            for outer, inner in layers
        )
        options = dropout_options(device) if "dropout" in words else {}
        outputs = [K] if mlp else widths
        return Call((x, weights, adapters), options, tuple(fresh(M, N, dtype=dtype) for N in outputs))

    return Row("lora_linear", "lora_swiglu_mlp" if mlp else "lora_qkv", shape, make, phases)


def numbers(words: list[str], letters: str, known: tuple[str, ...]) -> dict[str, int]:
    """{"r": 16} where r16 is among the words behind a shape. Raises ValueError for one that is neither such nor known."""
    matches = {word: re.fullmatch(rf"([{letters}])(\d+)", word) for word in words if word not in known}
    if unknown := [word for word, match in matches.items() if match is None]:
        named = (*known, *(f"{letter}N" for letter in letters))
        raise ValueError(f"shape: {', '.join(unknown)} is none of {', '.join(named)}")
    return {match[1]: int(match[2]) for match in matches.values()}


def source(device: torch.device, generator: torch.Generator | None) -> Callable[..., Tensor]:
    """fresh(*size, dtype=…): random numbers; without a generator whatever was in memory."""

    def fresh(*size: int, dtype: torch.dtype) -> Tensor:
        if generator is None:
            return torch.empty(size, dtype=dtype, device=device)
        return torch.randn(size, dtype=dtype, device=device, generator=generator)

    return fresh


def dropout_options(device: torch.device) -> dict[str, Any]:
    return {"dropout_p": DROPOUT, "seed": torch.full((), 5, dtype=torch.int64, device=device)}


def compiled(hopper: Iterable[tuple[int, int]]) -> Iterator[Row]:
    """Small rows whose dx [M, K] sums over 2, 3 and 4 layers, the last in two launches: by the portable kernel, and at each
    (M, K) of `hopper`."""
    yield row("33×70×35+19+8 r5 dropout")
    yield row("33×70×35+19+8+8 r5 narrow")
    for M, K in sorted(hopper):
        for words in ("", " narrow", " dropout", " narrow dropout"):
            yield row(f"{M}×{K}×64+32+32{words}")
        yield row(f"{M}×{K}×64+32")
        yield row(f"{M}×{K}×64+32+32+32")


def peers(maker: Callable[[], Callable]) -> dict[str, Callable[[], Callable]]:
    """Makers of all three functions, layer by layer, from that of one layer; with the options that rows have."""
    return {
        "lora_linear": maker,
        "lora_qkv": lambda: _qkv(maker()),
        "lora_swiglu_mlp": lambda: _swiglu_mlp(maker()),
    }


def _qkv(lora_linear: Callable) -> Callable:
    def lora_qkv(x, weights, adapters, *, dropout_p=0.0, seed=None):
        options = {"dropout_p": dropout_p, "seed": seed}
        return tuple(
            lora_linear(x, weight, a, b, scale=scale, **options)
            for weight, (a, b, scale) in zip(weights, adapters, strict=True)
        )

    return lora_qkv


def _swiglu_mlp(lora_linear: Callable) -> Callable:
    lora_qkv = _qkv(lora_linear)

    def lora_swiglu_mlp(x, weights, adapters, *, dropout_p=0.0, seed=None):
        options = {"dropout_p": dropout_p, "seed": seed}
        gate, up = lora_qkv(x, weights[:2], adapters[:2], **options)
        return lora_qkv(functional.silu(gate) * up, weights[2:], adapters[2:], **options)[0]

    return lora_swiglu_mlp
