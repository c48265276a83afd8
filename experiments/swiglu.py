"""SwiGLU measured, elementwise and as the MLP block: the rows that bench times, the peers beside it, and the fusion ladders."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from experiments._ladder import Ladder, Step, main
from experiments._work import Call, Row

CLAMPED = {"alpha": 1.702, "limit": 7.0, "up_offset": 1.0}  # gpt-oss
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu2")


def row(shape: str, phases: tuple[str, ...] = ("fwd", "bwd")) -> Row:
    """`shape` is "M×F" (swiglu) or "M×D×F" (swiglu_mlp), with words behind it: an activation; clamped (as gpt-oss); halves
    or alternating (gate and up of one packed tensor, or both weights of one); recompute, biases, frozen (dx alone is wanted).
    """
    sizes, words = [int(size) for size in shape.split()[0].split("×")], shape.split()[1:]
    known = {*ACTIVATIONS, "clamped", "halves", "alternating", "recompute", "biases", "frozen"}
    if unknown := set(words) - known:
        raise ValueError(f"shape: {', '.join(sorted(unknown))} is none of {', '.join(sorted(known))}")
    options: dict[str, Any] = dict(CLAMPED) if "clamped" in words else {}
    options["activation"] = next((word for word in words if word in ACTIVATIONS), "silu")
    if len(sizes) == 2:
        return Row("swiglu", "swiglu", shape, _elementwise(sizes, words, options), phases)
    if "recompute" in words:
        options["recompute"] = True
    backward = _backward_of_x if "frozen" in words else None
    return Row("swiglu", "swiglu_mlp", shape, _block(sizes, words, options), phases, backward)


def _elementwise(sizes: list[int], words: list[str], options: dict[str, Any]) -> Callable:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator | None) -> Call:
        fresh = _source(dtype, device, generator)
        gate, up = (t.requires_grad_() for t in _pair(fresh, sizes, words, dim=1))
        return Call((gate, up), dict(options), (fresh(*sizes),))

    return make


def _block(sizes: list[int], words: list[str], options: dict[str, Any]) -> Callable:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator | None) -> Call:
        (M, D, F), fresh = sizes, _source(dtype, device, generator)
        x, w_down = fresh(M, D), fresh(D, F).mul_(F**-0.5)
        weights = [*(t.mul_(D**-0.5) for t in _pair(fresh, [F, D], words, dim=0)), w_down]
        biases = {"b_gate": fresh(F), "b_up": fresh(F), "b_down": fresh(D)} if "biases" in words else {}
        for tensor in (x, *weights, *biases.values()):
            tensor.requires_grad_(tensor is x or "frozen" not in words)
        return Call((x, *weights), biases | options, (fresh(M, D),))

    return make


def _source(
    dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
) -> Callable[..., Tensor]:
    def fresh(*size: int) -> Tensor:
        if generator is None:
            return torch.empty(size, dtype=dtype, device=device)
        return torch.randn(size, dtype=dtype, device=device, generator=generator)

    return fresh


def _pair(fresh: Callable[..., Tensor], sizes: list[int], words: list[str], dim: int) -> tuple[Tensor, ...]:
    """Two matrices of these sizes, each on its own or both in one that is packed along `dim`."""
    packed = [2 * size if d == dim else size for d, size in enumerate(sizes)]
    if "halves" in words:
        return fresh(*packed).chunk(2, dim)
    if "alternating" in words:
        return fresh(*packed).unflatten(dim, (-1, 2)).unbind(dim + 1)
    return fresh(*sizes), fresh(*sizes)


def _backward_of_x(call: Call) -> Any:
    """dh, and dx in two products; gate and up again where they are not saved. No dw."""
    full = import_module("reference.swiglu").COST["swiglu_mlp"](*call.args, **call.kwargs).backward
    x, w_gate, w_up, w_down = call.args
    parameters = sum(t.numel() * t.element_size() for t in (w_gate, w_up, w_down))
    return type(full)(full.flops - 6 * x.numel() * w_gate.shape[0], full.bytes - parameters)


ALL = ("fwd", "bwd", "fwd+bwd")
ROWS = [
    row("16384×14336", ALL),
    row("16384×14336 halves"),
    row("16384×2880 alternating clamped"),
    row("8192×11008 gelu_tanh"),
    row("8192×4096×14336", ALL),
    row("8192×4096×14336 recompute", ALL),
    row("16384×2048×5632", ALL),
    row("8192×4096×14336 frozen", ALL),
]


def compiled(architecture: int) -> Iterator[Row]:
    """Rows that reach every configuration of the tables: row lengths at and around each limit, all forms and activations."""
    from fast._triton import tuning

    found = {}
    for table in tuning.tables(import_module("fast.swiglu")):
        served = table.rows[max(a for a in table.rows if a <= max(architecture, min(table.rows)))]
        found[table.name] = {limit for limit, choice in served if choice is not None}
    widths = found.pop("swiglu_fwd") | found.pop("swiglu_bwd")
    for F in sorted({max(16, F) for F in widths} | {2 * max(widths)}):
        yield row(f"48×{F}")
        yield row(f"48×{F - 1} halves")
        yield row(f"48×{F} alternating clamped")
    for activation in ACTIVATIONS:
        yield row(f"47×{max(widths) - 1} {activation}")
    # Products run on the CPU here, so they are small. The fused ones are chosen by the smaller of M and 2·D.
    for M in sorted({64}.union(*found.values())):
        D = max(64, M // 2)
        for activation in ACTIVATIONS:
            yield row(f"{M}×{D}×256 {activation}")
        yield row(f"{M}×{D}×256 halves biases clamped recompute")
    yield row("65×30×70 alternating gelu_tanh")


def random_shape(generator: random.Random) -> str:
    """Any length of a row that is promised, few enough elements for a CPU to allocate, in any form."""
    F = int(2 ** generator.uniform(0, 15))
    form = generator.choice(("", " halves", " alternating", " clamped", *(f" {a}" for a in ACTIVATIONS)))
    return f"{generator.randint(1, max(1, 2**17 // F))}×{F}{form}"


def _torch() -> Callable:
    def swiglu(gate, up, *, activation="silu", alpha=1.0, limit=None, up_offset=0.0):
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        if activation == "silu" and alpha != 1.0:
            a = gate * torch.sigmoid(alpha * gate)
        elif alpha != 1.0:
            raise NotImplementedError(f"torch has no {activation} with alpha")
        else:
            a = _EAGER[activation](gate)
        return a * (up + up_offset if up_offset else up)

    return swiglu


_EAGER = {
    "silu": functional.silu,
    "gelu_tanh": lambda gate: functional.gelu(gate, approximate="tanh"),
    "gelu": functional.gelu,
    "relu2": lambda gate: functional.relu(gate).square(),
}


def _torch_mlp() -> Callable:
    swiglu = _torch()

    def swiglu_mlp(
        x, w_gate, w_up, w_down, *, b_gate=None, b_up=None, b_down=None, recompute=False, **options
    ):
        def block(x):
            gate, up = functional.linear(x, w_gate, b_gate), functional.linear(x, w_up, b_up)
            return functional.linear(swiglu(gate, up, **options), w_down, b_down)

        return _checkpointed(block, x) if recompute else block(x)

    return swiglu_mlp


def _checkpointed(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    # Nothing is random inside, and asking for a random state would break the capture of a CUDA graph.
    return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)


def _liger() -> Callable:
    from liger_kernel.ops import LigerGELUMulFunction, LigerSiLUMulFunction

    functions = {"silu": LigerSiLUMulFunction, "gelu_tanh": LigerGELUMulFunction}

    def swiglu(gate, up, *, activation="silu", alpha=1.0, limit=None, up_offset=0.0):
        _refuse("liger", activation, alpha=alpha != 1.0, limit=limit is not None, up_offset=up_offset != 0.0)
        return functions[activation].apply(gate, up)

    return swiglu


def _liger_mlp() -> Callable:
    from liger_kernel.transformers.geglu import LigerGEGLUMLP
    from liger_kernel.transformers.swiglu import LigerSwiGLUMLP

    @lru_cache
    def module(D: int, F: int, activation: str) -> torch.nn.Module:
        config = SimpleNamespace(hidden_size=D, intermediate_size=F, hidden_act=activation)
        with torch.device("meta"):
            return (LigerSwiGLUMLP if activation == "silu" else LigerGEGLUMLP)(config)

    def swiglu_mlp(
        x, w_gate, w_up, w_down, *, b_gate=None, b_up=None, b_down=None, activation="silu", alpha=1.0,
        limit=None, up_offset=0.0, recompute=False,
    ):  # fmt: skip
        biased = any(b is not None for b in (b_gate, b_up, b_down))
        given = {
            "alpha": alpha != 1.0,
            "limit": limit is not None,
            "up_offset": up_offset != 0.0,
            "bias": biased,
        }
        _refuse("liger", activation, **given)
        mlp = module(x.shape[-1], w_gate.shape[0], activation)
        named = {"gate_proj.weight": w_gate, "up_proj.weight": w_up, "down_proj.weight": w_down}

        def block(x):
            return torch.func.functional_call(mlp, named, (x,))

        return _checkpointed(block, x) if recompute else block(x)

    return swiglu_mlp


def _refuse(peer: str, activation: str, **given: bool) -> None:
    if activation not in ("silu", "gelu_tanh"):
        raise NotImplementedError(f"{peer} has no {activation}")
    if lacking := [option for option, used in given.items() if used]:
        raise NotImplementedError(f"{peer} has no {lacking[0]}")


PEERS = {
    "torch": {"swiglu": _torch, "swiglu_mlp": _torch_mlp},
    # Of the block torch's own chain is compiled: the reference multiplies in fp32.
    "compile": {"swiglu_mlp": _torch_mlp},
    "liger": {"swiglu": _liger, "swiglu_mlp": _liger_mlp},
}

NOTES = {
    "reference": "multiplies in fp32 in the block",
    "torch": "F.silu(gate) * up, F.linear around it; recompute is torch.utils.checkpoint",
    "compile": "torch.compile of the reference; of the block, of torch's chain",
    "liger": "backward writes over what was saved, gate and up themselves: a backward that is asked again, as bwd here, "
    "starts from its own results, needs no memory and counts only for its time; halves are copied by its wrapper; "
    "the block is LigerSwiGLUMLP through torch.func.functional_call, whose host time counts; recompute is "
    "torch.utils.checkpoint around it",
}


def _eager_once(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate.float()).mul_(up).to(gate.dtype)


def _eager_backward_once(dh: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    wide = gate.float()
    dup = functional.silu(wide).mul_(dh).to(up.dtype)
    return torch.ops.aten.silu_backward(dh.float() * up, wide).to(gate.dtype), dup


def ladders() -> tuple[Ladder, ...]:
    """Both directions of both functions, each from separate eager operations to what `fast` does."""
    return *_elementwise_ladders(), *_block_ladders()


def _elementwise_ladders() -> tuple[Ladder, Ladder]:
    import fast
    from experiments import _swiglu_kernels as kernels

    definition, launcher = import_module("reference.swiglu"), import_module("fast.swiglu").swiglu_bwd

    def forward(
        sizes: list[int], dtype: torch.dtype, device: torch.device, generator: torch.Generator
    ) -> dict[str, Tensor]:
        fresh = _source(dtype, device, generator)
        return {"gate": fresh(*sizes), "up": fresh(*sizes)}

    def backward(*given: Any) -> dict[str, Tensor]:
        inputs = forward(*given)
        return {"dh": torch.randn_like(inputs["gate"], generator=given[-1]), **inputs}

    def cost(inputs: dict[str, Tensor]) -> Any:
        return definition.COST["swiglu"](inputs["gate"], inputs["up"])

    up = (
        Step(
            "eager",
            "The reference: one launch per operation, each with its result in memory in fp32.",
            lambda gate, up: (definition.swiglu(gate, up),),
        ),
        Step(
            "eager, silu · up",
            "Only gate is cast, silu is one operation, and the product is written over its result.",
            lambda gate, up: (_eager_once(gate, up),),
        ),
        Step(
            "one kernel",
            "Everything between the reads of gate and up and the write of h stays in registers: the floor.",
            lambda gate, up: (kernels.one_kernel(gate, up),),
        ),
        Step(
            "fast.swiglu",
            "Halves and alternating columns of a packed tensor are read where they lie; any activation, any bound.",
            lambda gate, up: (fast.swiglu(gate, up),),
            rises="The bytes are at their floor already; this saves the copies before the kernel, which this ladder "
            "does not have.",
        ),
    )
    down = (
        Step(
            "eager",
            "The reference's formulas one operation at a time, in fp32.",
            lambda dh, gate, up: tuple(definition.swiglu_backward((dh,), gate, up).values()),
        ),
        Step(
            "eager, silu and its derivative",
            "One operation each in the place of several.",
            _eager_backward_once,
        ),
        Step(
            "dgate, then dup",
            "No intermediate reaches memory: s is computed again from gate. dh and gate are read by both kernels.",
            kernels.dgate_then_dup,
        ),
        Step(
            "one kernel",
            "Both gradients while dh, gate and up are in registers: the floor.",
            kernels.both_gradients,
        ),
        Step(
            "fast.swiglu",
            "The same for any layout, activation and bound; what is not asked for is not written.",
            lambda dh, gate, up: launcher(dh, gate, up, "silu", 1.0, None, 0.0, True, True),
            rises="The bytes are at their floor already.",
        ),
    )
    sizes = {"metered_at": "256×1024", "timed_at": "16384×14336", "function": "swiglu"}
    return (
        Ladder("swiglu", "fwd", ("h",), forward, lambda inputs: cost(inputs).forward, up, **sizes),
        Ladder(
            "swiglu", "bwd", ("dgate", "dup"), backward, lambda inputs: cost(inputs).backward, down, **sizes
        ),
    )


@contextmanager
def _slices_as_on_a_gpu(F: int) -> Iterator[None]:
    """As many slices as a GPU's 14336 columns have; in the interpreter small inputs would have more, and move more bytes."""
    from fast import _swiglu_mlp as mlp
    from fast._triton.device import interpreting

    columns = max(1, 2048 * F // 14336)
    with mock.patch.object(mlp, "COLUMNS", columns) if interpreting() else nullcontext():
        yield


def _block_ladders() -> tuple[Ladder, Ladder]:
    from experiments import _swiglu_kernels as kernels
    from fast._triton.matmul import matmul

    definition, fast = import_module("reference.swiglu"), import_module("fast.swiglu")
    # The launchers themselves, without options: inside an operator the meter sees launches, but no products.
    options = (None, None, None, "silu", 1.0, None, 0.0)

    def forward(
        sizes: list[int], dtype: torch.dtype, device: torch.device, generator: torch.Generator
    ) -> dict[str, Tensor]:
        (M, D, F), fresh = sizes, _source(dtype, device, generator)
        weights = {
            "w_gate": fresh(F, D) * D**-0.5,
            "w_up": fresh(F, D) * D**-0.5,
            "w_down": fresh(D, F) * F**-0.5,
        }
        return {"x": fresh(M, D), **weights}

    def backward(*given: Any) -> dict[str, Tensor]:
        inputs = forward(*given)
        gate, up = (matmul(inputs["x"], inputs[f"w_{name}"].T) for name in ("gate", "up"))
        with _slices_as_on_a_gpu(len(inputs["w_gate"])):  # as fast lays them out
            _, kept_gate, kept_up = fast.swiglu_mlp_fwd(*inputs.values(), *options, True)
        saved = {"gate": gate, "up": up, "kept_gate": kept_gate, "kept_up": kept_up}
        return {"dy": torch.randn_like(inputs["x"], generator=given[-1]), **inputs, **saved}

    def eager(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> tuple[Tensor]:
        gate, up = kernels.products.matmul(x, w_gate.T), kernels.products.matmul(x, w_up.T)
        return (kernels.products.matmul(definition.swiglu(gate, up), w_down.T),)

    def eager_backward(
        dy: Tensor,
        x: Tensor,
        w_gate: Tensor,
        w_up: Tensor,
        w_down: Tensor,
        gate: Tensor,
        up: Tensor,
        **_: Tensor,
    ) -> tuple[Tensor, ...]:
        matmul, h = kernels.products.matmul, definition.swiglu(gate, up)
        dh = matmul(dy, w_down)
        dgate, dup = definition.swiglu_backward((dh,), gate, up).values()
        dx = matmul(dgate, w_gate) + matmul(dup, w_up)
        return dx, matmul(dgate.T, x), matmul(dup.T, x), matmul(dy.T, h)

    def fast_forward(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> tuple[Tensor]:
        with _slices_as_on_a_gpu(len(w_gate)):
            return (fast.swiglu_mlp_fwd(x, w_gate, w_up, w_down, *options, False)[0],)

    def fast_backward(
        dy: Tensor,
        x: Tensor,
        w_gate: Tensor,
        w_up: Tensor,
        w_down: Tensor,
        kept_gate: Tensor,
        kept_up: Tensor,
        **_: Tensor,
    ) -> tuple[Tensor, ...]:
        saved, needed = [kept_gate, kept_up], [True] * 4 + [False] * 3
        with _slices_as_on_a_gpu(len(w_gate)):
            return tuple(fast.swiglu_mlp_bwd(dy, saved, x, w_gate, w_up, w_down, *options, needed)[:4])

    def cost(inputs: dict[str, Tensor], recompute: bool) -> Any:
        given = (inputs[name] for name in ("x", "w_gate", "w_up", "w_down"))
        return definition.COST["swiglu_mlp"](*given, recompute=recompute)

    up = (
        Step(
            "eager",
            "torch.nn.functional.linear three times; between them one launch per operation, in fp32.",
            eager,
        ),
        Step(
            "cuBLAS, one kernel between",
            "gate, up and h once each in memory, in the working dtype.",
            lambda **inputs: (kernels.block(**inputs),),
        ),
        Step(
            "gate, up and h in one kernel",
            "Both products share x's tiles and end in the activation: gate and up reach no memory.",
            lambda **inputs: (kernels.block_in_two(**inputs),),
        ),
        Step(
            "fast.swiglu_mlp",
            "On Hopper the same by a kernel whose warps load, multiply and activate at the same time.",
            fast_forward,
            rises="Elsewhere, and where bytes are metered, cuBLAS multiplies, in slices of the ffn width: gate and up of "
            "one slice are in memory.",
        ),
    )
    down = (
        Step(
            "eager",
            "What autograd runs: five products and the formulas between them, one launch per operation, in fp32.",
            eager_backward,
        ),
        Step(
            "cuBLAS, one kernel between",
            "dgate, dup and h in one pass over dh, gate and up; the addends of dx are summed in fp32.",
            kernels.block_backward,
        ),
        Step(
            "fast.swiglu_mlp",
            "dh, and h in its place, for a slice of the ffn width at a time; on Hopper both products of dx in one kernel, "
            "with one accumulator.",
            fast_backward,
            rises="dy and x are read once for every slice; where bytes are metered, cuBLAS sums dx over slices in memory.",
        ),
    )
    sizes = {"metered_at": "256×128×448", "timed_at": "8192×4096×14336", "function": "swiglu_mlp"}
    gradients = ("dx", "dw_gate", "dw_up", "dw_down")
    return (
        Ladder("swiglu", "mlp fwd", ("y",), forward, lambda inputs: cost(inputs, True).forward, up, **sizes),
        Ladder(
            "swiglu",
            "mlp bwd",
            gradients,
            backward,
            lambda inputs: cost(inputs, False).backward,
            down,
            **sizes,
        ),
    )


if __name__ == "__main__":
    sys.exit(main("swiglu"))
