"""The loss of a causal language model from its hidden states: no logits in training.

A model's forward makes hidden states, calls its head, does something to the logits (a scale, a softcap) and hands them to its
loss function. Its replacement runs that same forward without labels while the head stands aside: the head's input is kept, its
output has no columns. The loss is then fast.chunked_cross_entropy of what was kept. What is done to logits is found by letting
the head give a ramp; and a model is replaced only if its own loss of a few tokens is then the same.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

import reference
from fast import chunked_cross_entropy
from fast._triton.launch import SUPPORTED
from fast.integrations._forward import Forward

LOOKS_FOR = "causal language models with a linear head and Transformers' usual loss (found by running them on a few tokens)"
TOKENS = 8
RAMP = (0.0, 1e-3, -1e-2, 0.5, -1.0, 3.0, 20.0, -90.0, 1e6)


class CausalLossForward(Forward):
    """`forward` of the whole model: in training, with labels, a loss without logits, which are None; else the model's own."""

    operation = "chunked_cross_entropy"

    def __init__(self, module: nn.Module, logit_scale: float, softcap: float | None) -> None:
        self.module, self.had_entry = module, False
        self.logit_scale, self.softcap = logit_scale, softcap

    def __call__(self, *args: Any, **named: Any) -> Any:
        own = MethodType(type(self.module).forward, self.module)
        given = inspect.signature(own).bind(*args, **named).arguments
        given |= given.pop("kwargs", {})
        keep = given.get("logits_to_keep", 0)
        asked = given.get("return_dict") is False or not isinstance(keep, int) or keep > 0
        routed = given.get("output_router_logits") or getattr(
            self.module.config, "output_router_logits", False
        )
        in_training = self.module.training and torch.is_grad_enabled()
        if given.get("labels") is None or not in_training or asked or routed:
            return own(*args, **named)
        if why := self.changed():
            raise RuntimeError(
                f"the loss of this {type(self.module).__name__} was patched to come from hidden states, but {why}; "
                "unpatch the model"
            )
        return self.fused(own, given, chunked_cross_entropy)

    def fused(self, own: Callable, given: dict[str, Any], loss_of: Callable) -> Any:
        """The model's output with the loss, and without logits."""
        labels, items = given.pop("labels"), given.pop("num_items_in_batch", None)
        shifted, ignore_index = given.pop("shift_labels", None), given.pop("ignore_index", -100)
        head = self.module.get_output_embeddings()
        with standing_aside(head, lambda x: x.new_empty(*x.shape[:-1], 0)) as kept:
            output = own(**given)
        (x,) = kept
        target = (labels if shifted is None else shifted.view(labels.shape)).to(x.device)
        output.logits = None
        output.loss = loss_of(
            x,
            head.weight,
            target,
            bias=head.bias,
            shift=shifted is None,
            ignore_index=ignore_index,
            normalizer=items.to(x.device) if isinstance(items, Tensor) else items,
            logit_scale=self.logit_scale,
            softcap=self.softcap,
        )
        return output

    def changed(self) -> str | None:
        """What makes of the head something else than its weight and bias: an adapter, a hook, shards."""
        return _refusal(self.module)


@contextmanager
def standing_aside(head: nn.Module, answer: Callable[[Tensor], Tensor]) -> Iterator[list[Tensor]]:
    """Inside, head gives `answer` of its input, which is kept in the list."""
    entries, kept = vars(head), []
    before = entries.get("forward")

    def forward(x: Tensor) -> Tensor:
        kept.append(x)
        return answer(x)

    entries["forward"] = forward
    try:
        yield kept
    finally:
        if before is None:
            del entries["forward"]
        else:
            entries["forward"] = before


def detect(module: nn.Module) -> Forward | str | None:
    """The replacement; or why a model with a head gets none; or None for a module that is no causal language model."""
    if not type(module).__name__.endswith("ForCausalLM") or not hasattr(module, "get_output_embeddings"):
        return None
    return _refusal(module) or _probed(module)


def _refusal(module: nn.Module) -> str | None:
    """What can be said without running it."""
    head = module.get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"its head is a {type(head).__name__}, not a torch.nn.Linear"
    if type(head.weight) not in (nn.Parameter, Tensor):
        return f"its head's weight is a {type(head.weight).__name__} (sharded or quantised), not a plain parameter"
    if "forward" in vars(head) or "_old_forward" in vars(head):
        return "the forward of its head is re-bound on this instance"
    if head._forward_hooks or head._forward_pre_hooks:
        return "its head has hooks"
    if any(p.is_meta for p in module.parameters()):
        return "its parameters are on the meta device (not loaded, or offloaded); patch once they are on their device"
    if head.weight.dtype not in SUPPORTED:
        return f"its head is {head.weight.dtype}; fast.chunked_cross_entropy takes {', '.join(map(str, SUPPORTED))}"
    return None


def _probed(module: nn.Module) -> Forward | str:
    training = {m for m in module.modules() if m.training}
    device = module.get_input_embeddings().weight.device
    try:
        module.eval()
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            return _fitted(module, device)
    except Exception as error:  # whatever a foreign forward raises is a reason, not our error
        return f"does not run on a few tokens: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    finally:
        for m in module.modules():
            m.training = m in training


def _fitted(module: nn.Module, device: torch.device) -> Forward | str:
    head, own = module.get_output_embeddings(), MethodType(type(module).forward, module)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(len(head.weight), (2, TOKENS), generator=generator).to(device)
    ramp = torch.tensor(RAMP, device=head.weight.device)
    with standing_aside(head, lambda x: ramp.expand(*x.shape[:-1], -1)):
        given = own(input_ids=ids).logits[0, 0].float()
    scale, cap = float(given[1] / ramp[1]), float(given[-1])
    softcap = None if abs(cap) > 1e5 * abs(scale) else cap
    wanted = scale * ramp if softcap is None else softcap * torch.tanh(scale * ramp / softcap)
    if not torch.allclose(given, wanted, rtol=2e-2, atol=1e-4):
        return "what its forward does to logits is no scale and no softcap"
    replacement = CausalLossForward(module, _near(scale), None if softcap is None else _near(softcap))
    if getattr(module.config, "output_router_logits", False):
        return "adds its routers' loss (output_router_logits), which is made of no logits"
    labels = torch.where(torch.rand(ids.shape, generator=generator).to(device) < 0.2, -100, ids)
    theirs = own(input_ids=ids, labels=labels).loss
    ours = replacement.fused(own, {"input_ids": ids, "labels": labels}, reference.chunked_cross_entropy).loss
    if theirs is None or not torch.allclose(ours.float(), theirs.float(), rtol=2e-2):
        return f"its own loss of a few tokens is {theirs}, not the {ours} of its head's cross-entropy"
    return replacement


def _near(value: float) -> float:
    """Without the last digits, in which the probe was rounded."""
    return float(f"{value:.6g}")
