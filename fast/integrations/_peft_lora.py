"""The forward that stands in for that of a PEFT LoRA layer.

PEFT changes a layer between calls: adapters are added, deleted, switched, merged, disabled. So nothing but the module is
remembered, and each call looks at it as it is then. It runs fast.lora_linear where that computes what PEFT's own forward would,
and PEFT's own forward where not; both kinds of call may follow each other.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.layer import Linear
from peft.tuners.lora.variants import DoraLinearVariant
from torch import Tensor, nn
from torch.nn.functional import pad

import fast
from fast._triton.launch import SUPPORTED
from fast.integrations._forward import Forward
from fast.nn import has_hooks, not_plain

MAX_RANK = 256  # of fast.lora_linear
BASE = "__base__"  # PEFT's name, in adapter_names, for a row without an adapter


class Operands(NamedTuple):
    """Arguments of fast.lora_linear that the adapters give."""

    lora_a: Tensor
    lora_b: Tensor
    scale: float
    dropout_p: float
    magnitude: Tensor | None = None
    adapter: Tensor | None = None


class LoRALinearForward(Forward):
    """`forward` by fast.lora_linear from the module's current adapters and base weight, or PEFT's own at this call."""

    operation = "lora_linear"

    def __init__(self, module: nn.Module) -> None:
        # Not the parent's, which is for forwards of one tensor: PEFT's takes options as well.
        self.module, self.argument, self.had_entry = module, "x", False
        self.quantized: tuple | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the module has codes of its own.
        return vars(self) | {"quantized": None}

    def __call__(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        """As PEFT's: adapter_names has a name for each x[i], in a batch that mixes adapters."""
        module, base = self.module, self.module.base_layer
        found = _unknown(args, options) or _input_refused(x, base) or base_refused(module)
        found = found or operands(module, x, options.get("adapter_names"))
        if isinstance(found, str):
            return type(module).forward(module, x, *args, **options)
        if type(module) is Linear:
            return fast.lora_linear(x, base.weight, bias=base.bias, **found._asdict())
        # bitsandbytes returns x's dtype, under autocast too.
        given = x if base.compute_dtype is None else x.to(base.compute_dtype)
        return fast.lora_linear(given, self.nf4(), bias=base.bias, **found._asdict()).to(x.dtype)

    def nf4(self) -> "fast.NF4Weight":
        """The base weight, sharing the codes of bitsandbytes; made anew when those were replaced."""
        weight = self.module.base_layer.weight
        if torch.compiler.is_compiling():  # addresses cannot be traced
            return fast.NF4Weight.from_bitsandbytes(weight)
        state = weight.quant_state
        # `.to` moves the tensors inside a state and keeps the state.
        key = (weight.data_ptr(), state.absmax.data_ptr(), weight.device)
        if (
            self.quantized is None
            or self.quantized[0] is not weight
            or self.quantized[1] is not state
            or self.quantized[2] != key
        ):
            self.quantized = weight, state, key, fast.NF4Weight.from_bitsandbytes(weight)
        return self.quantized[3]


def operands(module: nn.Module, x: Tensor | None, adapter_names: Sequence[str] | None) -> Operands | str:
    """What the adapters give to a call, or why PEFT's own forward has to run it. x: needed with adapter_names alone."""
    if module.disable_adapters:
        return "its adapters are disabled"
    if module.merged:
        return f"merged: {', '.join(module.merged_adapters)}"
    if adapter_names is not None:
        return _mixed(module, x, adapter_names)
    names = [name for name in module.active_adapters if _part(module, "lora_A", name) is not None]
    if not names:
        return "it has no active adapter"
    for name in names:
        if why := adapter_refused(module, name):
            return why
    if len(names) > 1:
        return _stacked(module, names)
    (name,) = names
    magnitude, p = _magnitude(module, name), dropout_p(module, name)
    if p >= 1:
        return f"dropout {p}"
    if magnitude is not None and p:
        return "DoRA with dropout in training"  # W·x + (c − 1)·W·x̃ + c·s·B·A·x̃ there, another formula
    a, b = _part(module, "lora_A", name).weight, _part(module, "lora_B", name).weight
    return Operands(a, b, module.scaling[name], p, magnitude)


def _stacked(module: nn.Module, names: list[str]) -> Operands | str:
    """Several adapters on every row, as one of their ranks together."""
    if any(_magnitude(module, name) is not None for name in names):
        return "several active adapters, and DoRA among them"
    if any(dropout_p(module, name) for name in names):
        return "several active adapters with dropout in training: each has a mask of its own"
    rank = sum(module.lora_A[name].weight.shape[0] for name in names)
    if rank > MAX_RANK:
        return f"the ranks of the active adapters come to {rank}; fast.lora_linear takes up to {MAX_RANK}"
    (*b,), scale = _scaled(module, names)
    return Operands(torch.cat([module.lora_A[name].weight for name in names]), torch.cat(b, 1), scale, 0.0)


def _mixed(module: nn.Module, x: Tensor, adapter_names: Sequence[str]) -> Operands | str:
    """An adapter for each x[i], by name; what the module has no adapter of runs the base layer alone."""
    if x.dim() < 2 or len(adapter_names) != len(x):
        return "adapter_names are not one for each row"
    names = [name for name in dict.fromkeys(adapter_names) if name != BASE and name in module.lora_A]
    if not names:
        return "it has none of the named adapters"
    for name in names:
        if _magnitude(module, name) is not None:
            return "adapter_names with DoRA"
        if why := adapter_refused(module, name):
            return why
    chances = {dropout_p(module, name) for name in names}
    if len(chances) > 1 or max(chances) >= 1:
        return f"adapters of one batch with dropout {', '.join(map(str, sorted(chances)))}"
    a, (b, scale) = [module.lora_A[name].weight for name in names], _scaled(module, names)
    rank = max(map(len, a))
    wide = torch.stack([pad(t, (0, 0, 0, rank - len(t))) for t in _one_dtype(a)])
    tall = torch.stack([pad(t, (0, rank - t.shape[1])) for t in _one_dtype(b)])
    index = {name: i for i, name in enumerate(names)}
    ids = torch.tensor([index.get(name, -1) for name in adapter_names]).to(x.device, non_blocking=True)
    ids = ids.view(-1, *(1 for _ in x.shape[1:-1])).expand(x.shape[:-1])
    return Operands(wide, tall, scale, chances.pop(), None, ids)


def _scaled(module: nn.Module, names: list[str]) -> tuple[list[Tensor], float]:
    """B of each adapter, and the scale that they share; where scales differ they are in B, in fp32."""
    b, scales = [module.lora_B[name].weight for name in names], [module.scaling[name] for name in names]
    if len(set(scales)) == 1:
        return b, scales[0]
    return [t.to(torch.float32) * scale for t, scale in zip(b, scales, strict=True)], 1.0


def _one_dtype(tensors: list[Tensor]) -> list[Tensor]:
    dtypes = {t.dtype for t in tensors}
    return tensors if len(dtypes) == 1 else [t.to(torch.float32) for t in tensors]


def _part(module: nn.Module, kind: str, name: str) -> nn.Module | None:
    """The adapter's entry of lora_A, lora_B, …; attributes of modules cost a microsecond each, and a call asks for a dozen."""
    return module._modules[kind]._modules.get(name)


def _magnitude(module: nn.Module, name: str) -> Tensor | None:
    dora = _part(module, "lora_magnitude_vector", name)
    return None if dora is None else dora.weight


def dropout_p(module: nn.Module, name: str) -> float:
    """The probability that acts now."""
    dropout = _part(module, "lora_dropout", name)
    return dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0


def base_refused(module: nn.Module) -> str | None:
    """Why fast.lora_linear cannot take the base layer as it is now."""
    base = module._modules["base_layer"]
    if module.fan_in_fan_out:
        return "fan_in_fan_out: the base weight is transposed"
    if type(module) is not Linear:
        return _nf4_refused(base)
    if why := not_plain(base):
        return f"its base layer {why}"
    for name, t in (("weight", base.weight), ("bias", base.bias)):
        if why := _tensor_refused(t):
            return f"its base {name} {why}"
    return None


def _nf4_refused(base: nn.Module) -> str | None:
    kind = type(base)
    if not kind.__module__.startswith("bitsandbytes.") or kind.__name__ not in ("Linear4bit", "LinearNF4"):
        return f"its base layer is a {kind.__module__}.{kind.__qualname__}, not a bitsandbytes Linear4bit"
    if has_hooks(base):
        return "its base layer has hooks, or a forward bound on this instance"
    state = getattr(base.weight, "quant_state", None)
    if state is None:
        return "its base weight is not quantised yet"
    if state.quant_type != "nf4":
        return f"its base weight is {state.quant_type}; fast.NF4Weight is nf4 alone"
    if getattr(state, "packing_format_for_cpu", False):
        return "its base weight is packed for the CPU inference of bitsandbytes"
    return None


def adapter_refused(module: nn.Module, name: str) -> str | None:
    """Why fast.lora_linear cannot take this adapter as it is now."""
    variant = module.lora_variant.get(name)
    a, b = _part(module, "lora_A", name), _part(module, "lora_B", name)
    if variant is not None and type(variant) is not DoraLinearVariant:
        return f"adapter {name!r}: {type(variant).__name__}"
    if module.ephemeral_gpu_offload:
        return f"adapter {name!r}: ephemeral_gpu_offload"
    for part, projection in (("lora_A", a), ("lora_B", b)):
        if why := not_plain(projection):
            return f"adapter {name!r}: {part} {why}"
        if projection.bias is not None:
            return f"adapter {name!r}: {part} has a bias (lora_bias)"
        if why := _tensor_refused(projection.weight):
            return f"adapter {name!r}: {part} {why}"
    if len(a.weight) > MAX_RANK:
        return f"adapter {name!r}: rank {len(a.weight)}; fast.lora_linear takes up to {MAX_RANK}"
    if isinstance(module.scaling[name], Tensor):
        return f"adapter {name!r}: scaling is a tensor"
    dropout = _part(module, "lora_dropout", name)
    if type(dropout) not in (nn.Dropout, nn.Identity) or has_hooks(dropout):
        return f"adapter {name!r}: lora_dropout is a {type(dropout).__name__}, or has hooks"
    if variant is None:
        return None
    dora = _part(module, "lora_magnitude_vector", name)
    if type(dora) is not DoraLinearLayer or has_hooks(dora):
        return f"adapter {name!r}: lora_magnitude_vector is a {type(dora).__name__}, or has hooks"
    why = _tensor_refused(dora.weight)
    return f"adapter {name!r}: magnitude {why}" if why else None


def _tensor_refused(t: Tensor | None) -> str | None:
    if t is None:
        return None
    if type(t) not in (Tensor, nn.Parameter):
        return f"is a {type(t).__name__}, not a plain tensor"
    if t.is_meta:
        return "is on the meta device (not loaded, or offloaded); patch once it is on its device"
    return None if t.dtype in SUPPORTED else f"is {t.dtype}; fast.lora_linear takes {_listed(SUPPORTED)}"


def _input_refused(x: Any, base: nn.Module) -> str | None:
    if not isinstance(x, Tensor):
        return "x is no tensor"
    compute = getattr(base, "compute_dtype", None)
    # PEFT rounds such an x for the base weight alone, not for the adapters; autocast does for both.
    if compute is None or torch.promote_types(x.dtype, compute) == compute:
        return _tensor_refused(x)
    narrowed = torch.is_autocast_enabled(x.device.type)
    return _tensor_refused(x) if narrowed else f"x is {x.dtype} and the base layer computes in {compute}"


def _unknown(args: tuple, options: dict[str, Any]) -> str | None:
    more = options.keys() - {"adapter_names", "alora_offsets"}  # offsets are for a variant that is not fused
    return "it is called with more than x and adapter_names" if args or more else None


def _listed(values: Any) -> str:
    return ", ".join(sorted(map(str, values)))
