"""Cross-entropy measured, of a head and of logits: the rows that bench times, the peers beside it, and the fusion ladders."""

import random
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from experiments._ladder import Ladder, Step, main
from experiments._work import Call, Row

WORDS = {"frozen", "nothing", "none", "capped", "smooth", "bias", *(f"{2**k}MiB" for k in range(11))}


def row(shape: str, phases: tuple[str, ...] = ("fwd+bwd",)) -> Row:
    """`shape` is "M×V" (cross_entropy of logits) or "M×D×V" (of a head), with words behind it: frozen (dx alone is wanted);
    nothing (keep); none (reduction); NMiB (chunk_bytes); capped (softcap 30), smooth (label smoothing 0.1), bias.
    """
    sizes, words = [int(size) for size in shape.split()[0].split("×")], shape.split()[1:]
    if unknown := set(words) - WORDS:
        raise ValueError(f"shape: {', '.join(sorted(unknown))} is none of {', '.join(sorted(WORDS))}")
    options: dict[str, Any] = {"softcap": 30.0} if "capped" in words else {}
    options |= {"label_smoothing": 0.1} if "smooth" in words else {}
    options |= {"reduction": "none"} if "none" in words else {}
    if len(sizes) == 2:
        return Row("chunked_cross_entropy", "cross_entropy", shape, _logits(sizes, options), phases)
    options |= {"keep": "nothing"} if "nothing" in words else {}
    size = next((word for word in words if word.endswith("MiB")), None)
    options |= {"chunk_bytes": int(size[:-3]) * 2**20} if size else {}
    return Row("chunked_cross_entropy", "chunked_cross_entropy", shape, _head(sizes, words, options), phases)


def _logits(sizes: list[int], options: dict[str, Any]) -> Callable:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator | None) -> Call:
        logits = _fresh(sizes, dtype, device, generator).mul_(2).requires_grad_()
        return Call(
            (logits, _labels(sizes, device, generator)),
            dict(options),
            (_cotangent(sizes[0], options, device),),
        )

    return make


def _head(sizes: list[int], words: list[str], options: dict[str, Any]) -> Callable:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator | None) -> Call:
        M, D, V = sizes
        x = _fresh([M, D], dtype, device, generator).requires_grad_()
        weight = (
            _fresh([V, D], dtype, device, generator).mul_(2 * D**-0.5).requires_grad_("frozen" not in words)
        )
        given = dict(options)
        if "bias" in words:
            given["bias"] = _fresh([V], dtype, device, generator).requires_grad_("frozen" not in words)
        return Call((x, weight, _labels([M, V], device, generator)), given, (_cotangent(M, options, device),))

    return make


def _fresh(
    size: list[int], dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
) -> Tensor:
    if generator is None:
        return torch.empty(size, dtype=dtype, device=device)
    return torch.randn(size, dtype=dtype, device=device, generator=generator)


def _labels(sizes: list[int], device: torch.device, generator: torch.Generator | None) -> Tensor:
    M, V = sizes
    if generator is None:
        return torch.zeros(M, dtype=torch.int64, device=device)
    return torch.randint(V, (M,), device=device, generator=generator)


def _cotangent(M: int, options: dict[str, Any], device: torch.device) -> Tensor:
    return torch.ones((M,) if options.get("reduction") == "none" else (), device=device)


ROWS = [
    row("8192×128256", ("fwd", "bwd", "fwd+bwd")),
    row("8192×32768"),
    row("4096×151936"),
    row("8192×4096×128256"),
    row("8192×4096×128256 1024MiB"),
    row("8192×4096×128256 nothing"),
    row("8192×4096×128256 frozen"),
    row("8192×2304×256000"),
    row("8192×2304×256000 nothing"),
    row("4096×4096×32768"),
    row("32768×4096×32768"),
    row("4096×4096×151936"),
]


def compiled(architecture: int) -> Iterator[Row]:
    """Rows that reach every configuration of the tables, with each operand there and absent."""
    for V in (1024, 5000):
        yield row(f"9×{V}")
        yield row(f"9×{V} capped smooth none")
        yield row(f"9×16×{V}")
        yield row(f"9×16×{V} capped smooth bias nothing")
    yield row("33×17×77 bias none")


def random_shape(generator: random.Random) -> str:
    """Few tokens, any vocabulary that a CPU can do, in any form."""
    M, D, V = (int(2 ** generator.uniform(0, top)) for top in (6, 6, 12))
    words = [word for word in ("capped", "smooth", "none") if generator.random() < 0.3]
    if generator.random() < 0.4:
        return " ".join([f"{M}×{V}", *words])
    words += [word for word in ("frozen", "nothing", "bias") if generator.random() < 0.3]
    return " ".join([f"{M}×{D}×{V}", *words])


def _refuse(peer: str, **given: Any) -> None:
    if lacking := [option for option, value in given.items() if value]:
        raise NotImplementedError(f"{peer} has no {lacking[0]}")


def _torch() -> Callable:
    def cross_entropy(logits, target, *, reduction="mean", label_smoothing=0.0, softcap=None):
        logits = logits.float()
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        return functional.cross_entropy(logits, target, reduction=reduction, label_smoothing=label_smoothing)

    return cross_entropy


def _torch_head() -> Callable:
    cross_entropy = _torch()

    def chunked_cross_entropy(x, weight, target, *, bias=None, keep="auto", chunk_bytes=None, **options):
        return cross_entropy(functional.linear(x, weight, bias), target, **options)

    return chunked_cross_entropy


def _liger() -> Callable:
    from liger_kernel.transformers.functional import liger_cross_entropy

    def cross_entropy(logits, target, *, reduction="mean", label_smoothing=0.0, softcap=None):
        return liger_cross_entropy(
            logits, target, reduction=reduction, label_smoothing=label_smoothing, softcap=softcap
        )

    return cross_entropy


def _liger_head() -> Callable:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    def chunked_cross_entropy(x, weight, target, *, bias=None, keep="auto", chunk_bytes=None, **options):
        return liger_fused_linear_cross_entropy(x, weight, target, bias=bias, **options)

    return chunked_cross_entropy


def _cce() -> Callable:
    from cut_cross_entropy import linear_cross_entropy

    def chunked_cross_entropy(
        x, weight, target, *, bias=None, keep="auto", chunk_bytes=None, reduction="mean", label_smoothing=0.0, softcap=None
    ):  # fmt: skip
        _refuse("cut-cross-entropy", smoothing=label_smoothing)
        return linear_cross_entropy(x, weight, target, bias=bias, softcap=softcap, reduction=reduction)

    return chunked_cross_entropy


def _torch_linear() -> Callable:
    if not hasattr(functional, "linear_cross_entropy"):
        raise ImportError("this torch has no torch.nn.functional.linear_cross_entropy")

    def chunked_cross_entropy(
        x, weight, target, *, bias=None, keep="auto", chunk_bytes=None, reduction="mean", label_smoothing=0.0, softcap=None
    ):  # fmt: skip
        _refuse("linear_cross_entropy", softcap=softcap)
        options = {"reduction": reduction, "label_smoothing": label_smoothing}
        return functional.linear_cross_entropy(x, weight, target, linear_bias=bias, **options)

    return chunked_cross_entropy


PEERS = {
    "torch": {"cross_entropy": _torch, "chunked_cross_entropy": _torch_head},
    # torch's own chain is compiled: the reference multiplies in fp32.
    "compile": {"cross_entropy": _torch, "chunked_cross_entropy": _torch_head},
    "liger": {"cross_entropy": _liger, "chunked_cross_entropy": _liger_head},
    "cce": {"chunked_cross_entropy": _cce},
    "torch linear": {"chunked_cross_entropy": _torch_linear},
}

NOTES = {
    "reference": "multiplies in fp32",
    "torch": "F.linear, .float(), F.cross_entropy: all logits, in 16 and in 32 bits",
    "compile": "torch.compile of torch's chain",
    "liger": "of logits it writes the gradient into them, so a backward that is asked again scales its own result",
    "cce": "cut-cross-entropy, whose default drops small gradients",
    "torch linear": "torch.nn.functional.linear_cross_entropy",
}


def ladders() -> tuple[Ladder, Ladder]:
    """The gradient of logits, and of a head, both of the mean; each from all logits in fp32 to what `fast` does."""
    import fast
    from experiments import _chunked_cross_entropy_steps as steps

    definition = import_module("reference.chunked_cross_entropy")

    def logits(
        sizes: list[int], dtype: torch.dtype, device: torch.device, generator: torch.Generator
    ) -> dict[str, Tensor]:
        return {
            "logits": _fresh(sizes, dtype, device, generator),
            "target": _labels(sizes, device, generator),
        }

    def head(
        sizes: list[int], dtype: torch.dtype, device: torch.device, generator: torch.Generator
    ) -> dict[str, Tensor]:
        M, D, V = sizes
        x, weight = (_fresh(size, dtype, device, generator) for size in ([M, D], [V, D]))
        return {"x": x, "weight": weight.mul_(D**-0.5), "target": _labels([M, V], device, generator)}

    def gradients(function: Callable, names: tuple[str, ...], **options: Any) -> Callable:
        def run(**inputs: Tensor) -> tuple[Tensor, ...]:
            given = {n: t.detach().requires_grad_(n in names) for n, t in inputs.items()}
            with torch.enable_grad():
                loss = function(**given, **options)
            return torch.autograd.grad(loss, [given[n] for n in names])

        return run

    def of_logits(inputs: dict[str, Tensor]) -> Any:
        cost = definition.COST["cross_entropy"](**inputs)
        return type(cost.forward)(
            cost.forward.flops + cost.backward.flops, cost.forward.bytes + cost.backward.bytes
        )

    def of_head(inputs: dict[str, Tensor]) -> Any:
        trained = {n: t.detach().requires_grad_(t.is_floating_point()) for n, t in inputs.items()}
        cost = definition.COST["chunked_cross_entropy"](**trained)
        return type(cost.forward)(
            cost.forward.flops + cost.backward.flops, cost.forward.bytes + cost.backward.bytes
        )

    up = (
        Step("eager", "The reference's formulas one operation at a time, in fp32.", steps.eager_logits),
        Step(
            "eager, softmax once",
            "One softmax in fp32, 1 taken off it at the labels, one cast.",
            steps.softmax_once,
        ),
        Step(
            "fast.cross_entropy",
            "lse by one pass over the logits, the gradient by another: nothing else of their size is in memory.",
            gradients(fast.cross_entropy, ("logits",)),
        ),
    )
    both = ("x", "weight")
    down = (
        Step(
            "eager", "All logits in fp32, the reference's formulas on them, two products.", steps.eager_head
        ),
        Step(
            "eager, tokens in turn",
            "A few tokens' logits at a time; dweight is added up in fp32.",
            steps.tokens_in_turn,
        ),
        Step(
            'fast, keep="gradients"',
            "The same, lse and the gradient of the logits by a kernel each.",
            gradients(fast.chunked_cross_entropy, both, keep="gradients", chunk_bytes=2**17),
        ),
        Step(
            'fast, keep="nothing"',
            "Classes in turn: dweight is written once, in its dtype, and nothing is kept in fp32 for the backward pass.",
            gradients(fast.chunked_cross_entropy, both, keep="nothing", chunk_bytes=2**17),
            rises="Logits are made twice: a third more FLOPs.",
        ),
    )
    return (
        Ladder("chunked_cross_entropy", "logits", ("dlogits",), logits, of_logits, up, metered_at="64×4096",
               timed_at="8192×128256", function="cross_entropy"),
        Ladder("chunked_cross_entropy", "head", ("dx", "dweight"), head, of_head, down, metered_at="256×64×2048",
               timed_at="4096×2048×32768"),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main("chunked_cross_entropy"))
