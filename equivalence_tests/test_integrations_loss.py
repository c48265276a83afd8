"""Patched causal language models: the loss without logits is the model's own, with its gradients."""

import pytest
import torch
from torch import nn

from equivalence_tests.harness.interpreter import interpreting
from equivalence_tests.harness.real import DEVICE
from equivalence_tests.test_integrations import make
from fast.integrations import patch, unpatch

pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and not interpreting(), reason="kernels run on the CPU in the interpreter alone"
)
OP = "chunked_cross_entropy"


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(2, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, :3] = -100
    return ids.to(DEVICE), labels.to(DEVICE)


def step(model: nn.Module, **given) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids, labels = batch()
    model.zero_grad(set_to_none=True)
    output = model(input_ids=ids, **({"labels": labels} | given))
    output.loss.backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Gemma2", "Granite"])
@pytest.mark.parametrize(
    "given", [{}, {"num_items_in_batch": torch.tensor(29)}, {"num_items_in_batch": 7}], ids=str
)
def test_the_loss_without_logits_is_the_models_own(name: str, given: dict):
    model = make(name).train()
    wanted, exact = step(model, **given)
    report = patch(model, ops=OP)
    assert report.counts == {OP: 1}
    got, grads = step(model, **given)
    assert got.logits is None
    assert torch.allclose(got.loss, wanted.loss, rtol=1e-5)
    assert grads.keys() == exact.keys()
    for key, gradient in grads.items():
        assert (gradient - exact[key]).norm() <= 1e-4 * exact[key].norm() + 1e-7, key
    unpatch(model)
    again, _ = step(model, **given)
    assert again.logits is not None


def test_logits_come_when_asked_and_in_evaluation():
    model = make("Llama").train()
    ids, labels = batch()
    patch(model, ops=OP)
    assert model(input_ids=ids).logits.shape == (2, 9, 64)
    assert model(input_ids=ids, labels=labels, logits_to_keep=0).logits is None
    shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    theirs, ours = (
        model(input_ids=ids, labels=labels),
        model(input_ids=ids, labels=labels, shift_labels=shifted),
    )
    assert torch.allclose(theirs.loss, ours.loss)
    with torch.no_grad():
        assert model(input_ids=ids, labels=labels).logits is not None
    model.eval()
    assert model(input_ids=ids, labels=labels).logits is not None


def test_heads_that_cannot_be_taken_are_named():
    model = make("Llama")
    model.lm_head.register_forward_hook(lambda module, args, output: output)
    with pytest.raises(ValueError, match="its head has hooks"):
        patch(model, ops=OP)
    model = make("Mixtral")
    model.config.output_router_logits = True
    with pytest.raises(ValueError, match="adds its routers' loss"):
        patch(model, ops=OP)


def test_C15_an_adapter_put_on_the_head_later_is_an_error_not_a_loss_without_it():
    peft = pytest.importorskip("peft")
    model = make("Llama").train()
    patch(model, ops=OP)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["lm_head", "q_proj"]))
    ids, labels = batch()
    with pytest.raises(
        RuntimeError, match=r"its head is a Linear, not a torch\.nn\.Linear; unpatch the model"
    ):
        adapted(input_ids=ids, labels=labels)
    model = make("Llama").train()
    peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["lm_head"]))
    with pytest.raises(ValueError, match=r"its head is a Linear, not a torch\.nn\.Linear"):
        patch(model, ops=OP)
    model = make("Llama").train()
    patch(model, ops=OP)
    model.lm_head.register_forward_hook(lambda module, args, output: output)
    with pytest.raises(RuntimeError, match="its head has hooks"):
        model(input_ids=ids, labels=labels)
