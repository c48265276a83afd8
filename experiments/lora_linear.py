"""Linear layers with adapters measured: the rows that bench times, the peers beside them, and the fusion ladders."""

import random
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from experiments import _lora_linear_stacks as stacks
from experiments._ladder import Ladder, Step, main
from experiments._lora_linear_stacks import RANK, SCALE, dropout_options, numbers, source
from experiments._work import Call, Row

WORDS = ("narrow", "trained", "base", "dropout", "silu", "bias", "dora")


def row(shape: str, phases: tuple[str, ...] = ("fwd", "bwd")) -> Row:
    """`shape` is "M×K×N" (x [M, K], y [M, N]) with words behind it: rN, the rank (16); gN, so many adapters in a batch; narrow
    (adapters of x's dtype, not of fp32); trained (dW is wanted); dropout (0.1), silu, bias, dora; base.

    base: a fresh adapter, B = 0, and dx alone is wanted. The plain product computes the same, so it can be timed beside.
    Several layers, "M×K×N1+N2+…" and "mlp M×K×F": experiments/_lora_linear_stacks.py.
    """
    if shape.startswith("mlp ") or "+" in shape:
        return stacks.row(shape, phases)
    sizes, words = [int(size) for size in shape.split()[0].split("×")], shape.split()[1:]
    found = numbers(words, "rg", WORDS)

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator | None) -> Call:
        return _call(sizes, found.get("r", RANK), found.get("g"), words, dtype, device, generator)

    backward = _backward_of_x if "base" in words else _backward_with_weight if "trained" in words else None
    return Row("lora_linear", "lora_linear", shape, make, phases, backward)


def _call(
    sizes: list[int],
    R: int,
    G: int | None,
    words: list[str],
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator | None,
) -> Call:
    (M, K, N), fresh = sizes, source(device, generator)
    own, lead = dtype if "narrow" in words else torch.float32, () if G is None else (G,)
    x, weight, dy = fresh(M, K, dtype=dtype), fresh(N, K, dtype=dtype).mul_(K**-0.5), fresh(M, N, dtype=dtype)
    a, b = fresh(*lead, R, K, dtype=own).mul_(K**-0.5), fresh(*lead, N, R, dtype=own).mul_(R**-0.5)
    wanted, options = [x, a, b], {"scale": SCALE}
    if "base" in words:
        b.zero_()
        wanted = [x]
    if "trained" in words:
        wanted.append(weight)
    if G is not None:
        options["scale"] = torch.full((G,), SCALE, device=device)
        if generator is None:
            options["adapter"] = torch.zeros(M, dtype=torch.int32, device=device)
        else:
            options["adapter"] = torch.randint(
                -1, G, (M,), dtype=torch.int32, device=device, generator=generator
            )
    if "dropout" in words:
        options |= dropout_options(device)
    if "silu" in words:
        options["activation"] = "silu"
    if "bias" in words:
        options["bias"] = fresh(N, dtype=dtype)
        wanted.append(options["bias"])
    if "dora" in words:
        options["magnitude"] = fresh(*lead, N, dtype=own).abs_()
        wanted.append(options["magnitude"])
    for tensor in wanted:
        tensor.requires_grad_()
    return Call((x, weight, a, b), options, (dy,))


def _backward_of_x(call: Call) -> Any:
    """dS and dx: neither dA nor dB, and x is not read."""
    x, weight, a, b = call.args
    full = import_module("reference.lora_linear").COST["lora_linear"](*call.args, **call.kwargs).backward
    small = a.numel() * a.element_size() + b.numel() * b.element_size()
    skipped = 2 * len(x) * a.numel() // x.shape[1] * (x.shape[1] + len(weight))
    return type(full)(full.flops - skipped, full.bytes - x.numel() * x.element_size() - small)


def _backward_with_weight(call: Call) -> Any:
    x, weight = call.args[:2]
    full = import_module("reference.lora_linear").COST["lora_linear"](*call.args, **call.kwargs).backward
    return type(full)(
        full.flops + 2 * len(x) * weight.numel(), full.bytes + weight.numel() * weight.element_size()
    )


ALL = ("fwd", "bwd", "fwd+bwd")
ROWS = [
    row("8192×4096×4096 r16", ALL),
    row("8192×4096×14336 r16", ALL),
    row("8192×4096×4096 r16 narrow", ALL),
    row("8192×4096×14336 r16 narrow", ALL),
    *(
        row(f"{M}×4096×4096 r{R}", ALL)
        for M in (256, 1024, 8192)
        for R in (8, 16, 64)
        if (M, R) != (8192, 16)
    ),
    row("8192×4096×4096 r16 dropout"),
    row("8192×4096×4096 r16 g8"),
    row("8192×4096×4096 r16 silu"),
    row("8192×4096×4096 r16 dora"),
    *(row(f"{M}×4096×4096 r16 base", ALL) for M in (256, 1024, 8192)),
    row("8192×4096×14336 r16 base", ALL),
    row("8192×4096×4096+1024+1024 r16", ALL),
    row("mlp 8192×4096×14336 r16", ALL),
]


def compiled(architecture: int) -> Iterator[Row]:
    """Rows that reach every configuration of the tables, with each operand there and absent."""
    matmul, skinny, hopper = (
        _limits(import_module(f"fast._lora_linear_{name}"), table, architecture)
        for name, table in (("matmul", "MATMUL"), ("skinny", "SKINNY"), ("hopper", "HOPPER"))
    )
    for K in sorted({min(K, 256) for K in matmul}):
        yield row(f"48×{K}×64")
        yield row(f"48×{K}×64 narrow silu bias")
    for R in sorted({min(R, 64) for R in skinny} | {8}):
        yield row(f"80×264×136 r{R}")
        yield row(f"80×264×136 r{R} narrow dropout")
        yield row(f"80×264×136 r{R} dora silu bias")
        yield row(f"80×264×136 r{R} g3 dora dropout silu bias")
    yield row("80×264×136 g3 bias")
    yield row("80×264×136 trained base")
    yield row("33×70×35 r5 g2 trained dora silu bias")
    for M, N in sorted(hopper):
        for words in ("", " narrow", " silu bias", " dora silu bias", " dropout"):
            yield row(f"{M}×256×{N}{words}")
        yield row(f"{M}×{N}×64")  # whose dx is [M, N]
        yield row(f"{M}×{N}×64 dropout")
    yield from stacks.compiled(hopper)


def _limits(module: Any, name: str, architecture: int) -> set:
    """Keys that reach each row of a table; of HOPPER, whose key is M · N, as (M, N)."""
    table = vars(module)[name]
    served = table.rows[max(a for a in table.rows if a <= max(architecture, min(table.rows)))]
    if name != "HOPPER":
        return {limit for limit, choice in served if choice is not None}
    reached, last = set(), 0
    for limit, choice in served:
        if choice is not None:
            M = max(16, round(last**0.5))
            reached.add((M, -(-(last + 1) // M // 8) * 8))
        last = limit
    return reached


def random_shape(generator: random.Random) -> str:
    """Any rank, any layer whose products a CPU can do, in any form."""
    M, K, N = (int(2 ** generator.uniform(0, top)) for top in (11, 8, 8))
    words = [word for word in WORDS if word != "base" and generator.random() < 0.25]
    words += [f"g{generator.randint(1, 4)}"] if generator.random() < 0.25 else []
    return " ".join([f"{M}×{K}×{N}", f"r{int(2 ** generator.uniform(0, 6))}", *words])


def _torch() -> Callable:
    def lora_linear(
        x, weight, lora_a, lora_b, *, scale=1.0, bias=None, dropout_p=0.0, seed=None, magnitude=None,
        adapter=None, activation=None,
    ):  # fmt: skip
        _refuse("torch", dropout=dropout_p > 0, DoRA=magnitude is not None)
        result = functional.linear(x, weight, bias)
        wide = x.to(lora_a.dtype)
        if adapter is None:
            added = functional.linear(functional.linear(wide, lora_a), lora_b) * scale
        else:
            G, R, _ = lora_a.shape
            own = adapter[:, None] == torch.arange(G, device=x.device)
            down = (
                functional.linear(wide, lora_a.flatten(0, 1)).view(-1, G, R)
                * (own * scale).to(wide.dtype)[:, :, None]
            )
            added = functional.linear(down.flatten(1), lora_b.transpose(0, 1).flatten(1))
        result = (result + added).to(x.dtype)
        return functional.silu(result) if activation else result

    return lora_linear


class _Recipe(Function):
    """As fused LoRA layers are commonly written: in x's dtype, addmm over the product's result, S and dS computed twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, weight, lora_a, lora_b)
        ctx.scale = scale
        y = x @ weight.T
        return y.addmm_(x @ lora_a.to(x.dtype).T, lora_b.to(x.dtype).T, alpha=scale)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, lora_a, lora_b = ctx.saved_tensors
        a, b, da, db = lora_a.to(x.dtype), lora_b.to(x.dtype), None, None
        if ctx.needs_input_grad[2]:
            da = (dy @ b).T.mul(ctx.scale) @ x
        if ctx.needs_input_grad[3]:
            db = dy.T @ (x @ a.T).mul(ctx.scale)
        dx = dy @ weight
        dx.addmm_(dy @ b, a, alpha=ctx.scale)
        return (
            dx,
            None,
            da if da is None else da.to(lora_a.dtype),
            db if db is None else db.to(lora_b.dtype),
            None,
        )


def _recipe() -> Callable:
    def lora_linear(
        x, weight, lora_a, lora_b, *, scale=1.0, bias=None, dropout_p=0.0, seed=None, magnitude=None,
        adapter=None, activation=None,
    ):  # fmt: skip
        given = {"DoRA": magnitude is not None, "adapters in a batch": adapter is not None}
        _refuse("recipe", dropout=dropout_p > 0, bias=bias is not None, **given)
        y = _Recipe.apply(x, weight, lora_a, lora_b, scale)
        return functional.silu(y) if activation else y

    return lora_linear


def _gemm() -> Callable:
    def lora_linear(
        x, weight, lora_a, lora_b, *, scale=1.0, bias=None, dropout_p=0.0, seed=None, magnitude=None,
        adapter=None, activation=None,
    ):  # fmt: skip
        if lora_b.requires_grad:
            raise NotImplementedError("the plain product has no adapter; it is timed in the rows `base`")
        return functional.linear(x, weight, bias)

    return lora_linear


def _peft() -> Callable:
    from peft import LoraConfig, inject_adapter_in_model

    @lru_cache
    def layer(K: int, N: int, R: int, scale: float, bias: bool, dora: bool) -> torch.nn.Module:
        config = LoraConfig(r=R, lora_alpha=scale * R, target_modules=["0"], use_dora=dora)
        with torch.device("meta"):
            model = torch.nn.Sequential(torch.nn.Linear(K, N, bias=bias))
        return inject_adapter_in_model(config, model, low_cpu_mem_usage=True)[0]

    def lora_linear(
        x, weight, lora_a, lora_b, *, scale=1.0, bias=None, dropout_p=0.0, seed=None, magnitude=None,
        adapter=None, activation=None,
    ):  # fmt: skip
        # Its dropout draws other elements; its batches of several adapters are for inference, and loop over lists on the host.
        _refuse("peft", dropout=dropout_p > 0, **{"adapters in a batch": adapter is not None})
        linear = layer(
            weight.shape[1], len(weight), len(lora_a), scale, bias is not None, magnitude is not None
        )
        named = {
            "base_layer.weight": weight,
            "lora_A.default.weight": lora_a,
            "lora_B.default.weight": lora_b,
        }
        if bias is not None:
            named["base_layer.bias"] = bias
        if magnitude is not None:
            named["lora_magnitude_vector.default.weight"] = magnitude
        y = torch.func.functional_call(linear, named, (x,))
        return functional.silu(y) if activation else y

    return lora_linear


def _refuse(peer: str, **given: bool) -> None:
    if lacking := [option for option, used in given.items() if used]:
        raise NotImplementedError(f"{peer} has no {lacking[0]} that can be compared")


PEERS = {
    "gemm": {"lora_linear": _gemm},
    "torch": stacks.peers(_torch),
    # torch's own chain is compiled: the reference multiplies in fp32.
    "compile": stacks.peers(_torch),
    "peft": stacks.peers(_peft),
    "recipe": stacks.peers(_recipe),
}

NOTES = {
    "reference": "multiplies in fp32",
    "gemm": "F.linear without an adapter, in the rows `base`: what the other figures are to be divided by",
    "torch": "what PEFT computes, written out: x cast to the adapters' dtype, their result added to F.linear's and cast; "
    "several layers one by one, F.silu(gate) * up between them",
    "compile": "torch.compile of torch's chain",
    "peft": "peft.tuners.lora.Linear through torch.func.functional_call, whose host time counts",
    "recipe": "everything in x's dtype, addmm over the result of the product, in both directions; S and dS computed twice",
    "fast": "adapters in fp32 unless the row says narrow",
}


def ladders() -> tuple[Ladder, Ladder]:
    """Both directions, each from separate eager operations to what `fast` does. Base frozen, rank 16; adapters have x's
    dtype, because a step's outputs share one.
    """
    from experiments import _lora_linear_steps as steps

    definition = import_module("reference.lora_linear")

    def forward(
        sizes: list[int], dtype: torch.dtype, device: torch.device, generator: torch.Generator
    ) -> dict[str, Tensor]:
        call = _call(sizes, RANK, None, ["narrow"], dtype, device, generator)
        named = dict(zip(("x", "weight", "lora_a", "lora_b"), (t.detach() for t in call.args), strict=True))
        return {**named, "scale": torch.tensor(SCALE, device=device)}

    def backward(*given: Any) -> dict[str, Tensor]:
        inputs = forward(*given)
        dy = torch.randn(
            len(inputs["x"]), len(inputs["weight"]), dtype=given[1], device=given[2], generator=given[3]
        )
        s = steps.times(inputs["x"], inputs["lora_a"].T)
        saved = {"wide_x": inputs["x"].to(torch.float32), "s": s, "t": s * inputs["scale"]}
        return {"dy": dy, **inputs, **saved}

    def cost(inputs: dict[str, Tensor]) -> Any:
        given = {name: inputs[name] for name in ("x", "weight", "lora_a", "lora_b", "scale")}
        return definition.COST["lora_linear"](**given)

    up = (
        Step(
            "eager",
            "PEFT's operations, one launch each: x cast to fp32, through A and B, · scale, + the product, cast.",
            steps.eager,
        ),
        Step(
            "no copy of x",
            "16-bit products with fp32 sums, S as hi + lo, so no cast of x is needed; scale is applied to S.",
            steps.no_copy_of_x,
        ),
        Step(
            "product, then addmm",
            "S · Bᵀ is added where the product lies: no matrix [M, N] of its own.",
            steps.added_in_place,
        ),
        Step(
            "one longer product",
            "S beside x against B beside W, through cuBLAS: K + 64 columns, y written once. Here both are copied for it, which "
            "would be saved if what makes them left room for 64 columns more.",
            steps.augmented,
        ),
        Step(
            "fast.lora_linear",
            "S by one pass over x, its parts summed in order; the product's accumulators start from S · Bᵀ, so x and W stay "
            "where they are.",
            steps.fast,
        ),
    )
    down = (
        Step(
            "eager",
            "What autograd runs behind PEFT's operations: dy cast to fp32 and back, · scale, two products of it, two of x.",
            steps.eager_backward,
        ),
        Step(
            "no copy of dy",
            "16-bit products with fp32 sums, dS as hi + lo; its part of dx is added in place. No fp32 x was kept.",
            steps.no_copy_of_dy,
        ),
        Step(
            "dS and dB in one pass",
            "Both are products of dy with 16 columns: one kernel reads its tiles once for both.",
            steps.one_pass_over_dy,
        ),
        Step(
            "fast.lora_linear",
            "dx's accumulators start from dS · A: dx is written once, in its dtype.",
            steps.fast_backward,
        ),
    )
    sizes = {"metered_at": "256×512×512", "timed_at": "8192×4096×4096"}
    gradients = ("dx", "dlora_a", "dlora_b")
    return (
        Ladder("lora_linear", "fwd", ("y",), forward, lambda inputs: cost(inputs).forward, up, **sizes),
        Ladder(
            "lora_linear", "bwd", gradients, backward, lambda inputs: cost(inputs).backward, down, **sizes
        ),
    )


if __name__ == "__main__":
    sys.exit(main("lora_linear"))
