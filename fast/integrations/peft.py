"""Run the LoRA layers of a PEFT model on fast.lora_linear, one model instance at a time, reversibly.

    model = peft.get_peft_model(base, config)
    report = patch(model)          # print(report) shows what was replaced, and what was not and why
    unpatch(model)                 # every module's __dict__ is as it was
    with patched(model): ...
    with mixed_batch(model, ["en", "__base__", "de"]): loss(model(ids)).backward()

Replaced is the forward of LoRA layers on torch.nn.Linear, and on bitsandbytes' Linear4bit in NF4; the rest stays PEFT's: adding,
deleting, switching, scaling, merging and disabling adapters, modules_to_save, saving and loading. A patched layer looks at its
adapters at each call and runs PEFT's own forward where they are

- disabled, merged, or none of the layer is active;
- on a 4-bit base whose compute_dtype is narrower than x, outside autocast: PEFT gives the adapters x as it is;
- such as fast.lora_linear does not compute: lora_bias, ranks above 256, variants other than DoRA, DoRA with dropout in training;
- several active at once, and with DoRA or dropout (in training) among them; otherwise they run as one of their ranks together.

`patch` again to see in the report what applies now, and to replace layers that a later adapter brought in. Dropout masks are
fast.lora_linear's, not torch's: torch.manual_seed decides them, but they are others than PEFT would draw.
transformers.unpatch takes these replacements out too, with its own.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from peft.tuners.lora.layer import Linear, LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from fast.integrations._forward import install, rebound, standing, wrapper_of_replacement
from fast.integrations._peft_lora import (
    BASE,
    LoRALinearForward,
    adapter_refused,
    base_refused,
    operands,
)
from fast.integrations.transformers import Entry, Report, _restore

__all__ = ["Entry", "Report", "mixed_batch", "patch", "patched", "unpatch"]

LOOKED_FOR = {"lora_linear": "LoRA layers of PEFT"}


def patch(model: nn.Module) -> Report:
    """Replace, in this model instance, the forward of the LoRA layers that fast.lora_linear can compute.

    Patching again is allowed: modules that are patched stay so and are reported as such.
    Raises TypeError for what is no torch.nn.Module; ValueError where there is no LoRA layer, or none that could be replaced.
    """
    return _patch(model)[0]


def unpatch(model: nn.Module) -> None:
    """Take the replacements of this module out of this model instance, and no others.

    Raises ValueError where there is none; RuntimeError, with nothing changed, where one is hidden inside a wrapper that
    someone else put around it and that only they can take off.
    """
    if not _restore(_lora_layers(model)):
        raise ValueError(f"unpatch: no LoRA layer of this {type(model).__name__} is patched")


@contextmanager
def patched(model: nn.Module) -> Iterator[Report]:
    """`patch` inside the with block; afterwards what was patched before is still patched, and nothing else."""
    report, mine = _patch(model)
    before = {module for module in _lora_layers(model) if standing(module)} - set(mine)
    try:
        yield report
    finally:
        # Also modules that left the model inside the block, and copies of patched ones that came into it.
        _restore(module for module in dict.fromkeys([*mine, *_lora_layers(model)]) if module not in before)


@contextmanager
def mixed_batch(model: nn.Module, adapter_names: Sequence[str]) -> Iterator[None]:
    """Inside the with block row i of every batch runs adapter_names[i], "__base__" for none; in training too.

    It does what PEFT's model(…, adapter_names=…) does, which refuses a model in training mode. With activation checkpointing
    run backward inside the block as well: it calls the layers anew, and outside they have lost the names (an error from torch,
    but wrong gradients with use_reentrant=True).
    Raises ValueError for a name that no layer has.
    """
    wrappers = (LoraLayer, AuxiliaryTrainingWrapper)
    modules = [module for module in model.modules() if isinstance(module, wrappers)]
    layers = _lora_layers(model)
    known = {BASE}.union(*(m.lora_A for m in layers), *(m.lora_embedding_A for m in layers))
    if unknown := sorted(set(adapter_names) - known):
        raise ValueError(f"mixed_batch: adapter_names must be among {sorted(known)}, got {unknown}")
    with ExitStack() as stack:
        for module in modules:
            hook = _Named(adapter_names)
            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


class _Named:
    """A forward pre-hook that adds adapter_names to a call."""

    def __init__(self, adapter_names: Sequence[str]) -> None:
        self.adapter_names = list(adapter_names)

    def __call__(self, module: nn.Module, args: tuple, options: dict) -> tuple[tuple, dict]:
        return args, options | {"adapter_names": self.adapter_names}


def _lora_layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def _patch(model: nn.Module) -> tuple[Report, list[nn.Module]]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch: model must be a torch.nn.Module, got {type(model).__name__}")
    entries, chosen = [], []
    for path, module in model.named_modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        why, present = _refused(module), standing(module)
        reason = why or "; ".join([*(["was patched before"] if present else []), *_remarks(module)])
        entries.append(
            Entry(path, type(module).__name__, "lora_linear", present is not None or why is None, reason)
        )
        if present is None and why is None:
            chosen.append(module)
    report = Report(type(model).__name__, LOOKED_FOR, tuple(entries))
    if not any(isinstance(model.get_submodule(entry.path), LoraLayer) for entry in entries):
        raise ValueError(f"patch: {report.model} holds no LoRA layers of PEFT\n{report}")
    if not report.counts["lora_linear"]:
        raise ValueError(f"patch: nothing was replaced in {report.model}\n{report}")
    for module in chosen:
        install(LoRALinearForward(module))
    return report, chosen


def _refused(module: nn.Module) -> str | None:
    """Why this tuner layer keeps the forward that it has."""
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    if type(module) is not Linear and kind != "peft.tuners.lora.bnb.Linear4bit":
        return f"is a {kind}; replaced are LoRA layers on torch.nn.Linear and on Linear4bit of bitsandbytes"
    if why := base_refused(module):
        return why
    refused = [adapter_refused(module, name) for name in module.lora_A]
    if refused and all(refused):
        return "; ".join(map(str, refused))
    if standing(module) is None and (wrapper_of_replacement(module) or rebound(module)):
        return f"its forward is already re-bound on this instance, to {rebound(module)}"
    return None


def _remarks(module: nn.Module) -> list[str]:
    """What calls of a replaced layer run PEFT's own forward, as far as its state tells now."""
    refused = [why for name in module.lora_A if (why := adapter_refused(module, name))]
    dora = [
        f"adapter {name!r}: DoRA with dropout, fused in evaluation alone"
        for name in module.lora_magnitude_vector
        if isinstance(module.lora_dropout[name], nn.Dropout)
    ]
    now = operands(module, None, None)
    active = [f"PEFT's own forward now: {now}"] if isinstance(now, str) and now not in refused else []
    return [*(f"PEFT's own forward for {why}" for why in refused), *dora, *active]
