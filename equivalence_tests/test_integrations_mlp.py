"""Which modules are recognised as gated MLPs, as which, which are refused with what reason, and what LoRA does to either."""

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from transformers.activations import ACT2FN
from transformers.models.arcee.modeling_arcee import ArceeMLP
from transformers.models.bert.modeling_bert import BertIntermediate
from transformers.models.cohere.modeling_cohere import CohereMLP
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.granitemoeshared.modeling_granitemoeshared import GraniteMoeSharedMLP
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralSparseMoeBlock
from transformers.models.phi.modeling_phi import PhiMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from equivalence_tests.harness.real import DEVICE, one_thread
from equivalence_tests.test_integrations import make as make_model
from equivalence_tests.test_integrations import step
from fast.integrations import patch, unpatch
from fast.integrations._forward import Forward
from fast.integrations._swiglu_mlp import detect
from fast.nn import SwiGLUMLP

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 64,
}
LLAMA = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def config(family: str, **options: Any) -> Any:
    return getattr(transformers, f"{family}Config")(**SIZES, **options)


def llama(**options: Any) -> LlamaMLP:
    return LlamaMLP(config("Llama", **options))


class Limited(LlamaMLP):
    """As DeepSeek-V4's."""

    limit = 0.5

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x).clamp(max=self.limit), self.up_proj(x).clamp(-self.limit, self.limit)
        return self.down_proj(self.act_fn(gate) * up)


class Function(LlamaMLP):
    """Its activation is a function; its argument has another name."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del self.act_fn
        self.act_fn = nn.functional.gelu

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: llama(mlp_bias=True), (LLAMA, "silu", 1.0, None)),
        *(
            (lambda act=act: llama(hidden_act=act), (LLAMA, *formula, None))
            for act, formula in {
                "gelu": ("gelu", 1.0),
                "gelu_python": ("gelu", 1.0),
                "gelu_new": ("gelu_tanh", 1.0),
                "gelu_pytorch_tanh": ("gelu_tanh", 1.0),
                "relu2": ("relu2", 1.0),
                "quick_gelu": ("silu", 1.702),
            }.items()
        ),
        (lambda: CohereMLP(config("Cohere")), (LLAMA, "silu", 1.0, None)),
        (lambda: Limited(config("Llama")), (LLAMA, "silu", 1.0, "limit")),
        (lambda: Function(config("Llama")), (LLAMA, "gelu", 1.0, None)),
        (lambda: Phi3MLP(config("Phi3", pad_token_id=0)), (("gate_up_proj", "down_proj"), "silu", 1.0, None)),
        (lambda: Lfm2MLP(config("Lfm2")), (("w1", "w3", "w2"), "silu", 1.0, None)),
        (
            lambda: GraniteMoeSharedMLP(config("GraniteMoeShared", shared_intermediate_size=40)),
            (("input_linear", "output_linear"), "silu", 1.0, None),
        ),
        (lambda: FalconH1MLP(config("FalconH1")), (LLAMA, "silu", 1.0, None)),  # its multipliers are 1 here
    ],
)
def test_recognised_and_computed_alike(
    make: Callable[[], nn.Module], kind: tuple, dtype: torch.dtype
) -> None:
    module = make().to(DEVICE, dtype)
    for name, parameter in module.named_parameters():
        nn.init.normal_(parameter, std=1.0 if "bias" in name else parameter.shape[-1] ** -0.5)
    weights, random, before = copy.deepcopy(module.state_dict()), torch.get_rng_state(), dict(vars(module))
    found = detect(module)
    assert isinstance(found, Forward), found
    assert (found.projections, found.activation, found.alpha, found.limit_name) == kind
    assert vars(module) == before
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)

    x = torch.randn(2, 5, module(torch.zeros(1, 32, device=DEVICE, dtype=dtype)).shape[-1]).to(DEVICE, dtype)
    want = module(x)
    patch(module)
    got = module(x)
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    # gate, up, act(gate), h and y are rounded once each, and python's GELU some times more: 16 roundings, and fp32 sums of 48.
    assert (got - want).norm() <= 16 * torch.finfo(dtype).eps * want.norm()


class Changed(LlamaMLP):
    """A LlamaMLP that does something else as well."""

    def __init__(self, change: str) -> None:
        super().__init__(config("Llama"))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        if self.change == "raises":
            raise RuntimeError("no values today")
        if self.change == "casts":
            return super().forward(x.float()).to(x.dtype)
        if self.change == "real width":
            return self.down_proj(self.act_fn(self.gate_proj(x))[..., : self.intermediate_size].view(-1, 48))
        if self.change == "swapped":
            return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))
        if self.change == "normed":
            h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
            return self.down_proj(nn.functional.layer_norm(h, h.shape[-1:]))
        y = super().forward(x)
        return {
            "scaled": y * 1.001,
            "dropout": nn.functional.dropout(y, 0.05, training=self.training),
            "clamped": y.clamp(-500, 500),
            "residual": x + y,
            "last column": torch.cat([y[..., :-1], torch.zeros_like(y[..., -1:])], -1),
            "float32": y.float(),
            "pair": (y, y),
        }[self.change]


class Extra(LlamaMLP):
    """One more submodule; the forward does not need it."""

    def __init__(self, extra: nn.Module) -> None:
        super().__init__(config("Llama"))
        self.extra = extra


class Dropout(Extra):
    def forward(self, x: Tensor) -> Tensor:
        return self.extra(super().forward(x))


class TwoTensors(LlamaMLP):
    def forward(self, x: Tensor, layer_idx: int | None = None) -> Tensor:
        return super().forward(x)


class WrappedLinear(nn.Linear):
    """A subclass, as quantised linears are."""


class LoRALinear(nn.Module):
    """What PEFT puts in a projection's place, in small."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base, self.rank = base, rank
        self.down = nn.Linear(base.in_features, rank, bias=False).to(base.weight)
        self.up = nn.Linear(rank, base.out_features, bias=False).to(base.weight)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def changed(change: Callable[[LlamaMLP], Any]) -> LlamaMLP:
    module = llama(mlp_bias=True)
    change(module)
    return module


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        *(
            (Changed(change), "no gated MLP formula gives its values")
            for change in (
                "scaled",
                "clamped",
                "residual",
                "last column",
                "float32",
                "pair",
                "swapped",
                "normed",
            )
        ),
        (Changed("dropout"), "in training mode"),
        (Changed("dropout").eval(), "in training mode"),
        (Changed("raises"), "RuntimeError: no values today"),
        (Changed("real width"), "does not run"),
        (Changed("casts"), "a projection of torch.bfloat16 was given torch.float32"),
        (Dropout(nn.Dropout(0.1)), "in training mode"),
        (Extra(nn.LayerNorm(32)), "besides those of its projections: extra.bias, extra.weight"),
        (llama(hidden_act="relu"), "no gated MLP formula .*its activation: ReLU"),
        (llama(hidden_act="gelu_10"), "no gated MLP formula .*ClippedGELU"),
        (llama(hidden_act="xielu"), "besides those of its projections: act_fn"),
        (TwoTensors(config("Llama")), "not one tensor"),
        (FalconH1MLP(config("FalconH1", mlp_multipliers=[0.5, 2.0])), "no gated MLP formula"),
        (
            Gemma3nTextMLP(
                transformers.Gemma3nTextConfig(
                    hidden_size=32,
                    intermediate_size=[48],
                    num_hidden_layers=1,
                    activation_sparsity_pattern=[0.9],
                )
            ),
            "no gated MLP formula",
        ),
        (llama().double(), "float64"),
        (llama().to("meta"), "meta device"),
        (changed(lambda m: m.up_proj.to(torch.bfloat16)), "not of one dtype .*bfloat16, torch.float32"),
        (changed(lambda m: setattr(m, "up_proj", nn.Linear(32, 40))), r"shapes .* up_proj \[40, 32\]"),
        (
            changed(lambda m: setattr(m, "up_proj", WrappedLinear(32, 48))),
            "up_proj is a .*WrappedLinear, not a plain",
        ),
        (changed(lambda m: setattr(m, "down_proj", LoRALinear(m.down_proj))), "down_proj is a .*LoRALinear"),
        (changed(lambda m: weight_norm(m.gate_proj)), "gate_proj is a .*ParametrizedLinear"),
        (changed(lambda m: m.gate_proj.register_forward_hook(print)), "gate_proj has hooks"),
        (changed(lambda m: m.up_proj.register_forward_pre_hook(print)), "up_proj has hooks"),
        (changed(lambda m: m.down_proj.register_full_backward_hook(print)), "down_proj has hooks"),
        (changed(lambda m: m.act_fn.register_forward_hook(print)), "act_fn has hooks"),
        (changed(lambda m: setattr(m.up_proj, "forward", abs)), "up_proj has hooks, or a forward bound"),
        (MixtralExperts(config("Mixtral", num_local_experts=2)), "gate_up_proj is a .*Parameter"),
        (Qwen3MoeExperts(config("Qwen3Moe", num_experts=2)), "gate_up_proj is a .*Parameter"),
        (GptOssExperts(config("GptOss", num_local_experts=2)), "gate_up_proj is a .*Parameter"),
        (SwiGLUMLP(32, 48), "by itself"),
    ],
)
def test_refused_with_a_reason(module: nn.Module, reason: str) -> None:
    found = detect(module)
    assert isinstance(found, str), found
    assert re.search(reason, found), found


@pytest.mark.parametrize(
    "module",
    [
        GPT2MLP(48, transformers.GPT2Config(n_embd=32, n_head=4)),
        PhiMLP(config("Phi")),
        BertIntermediate(config("Bert")),
        ArceeMLP(config("Arcee")),  # up and down without a gate
        MixtralSparseMoeBlock(config("Mixtral", num_local_experts=2)),
        Qwen2MoeSparseMoeBlock(config("Qwen2Moe", num_experts=2)),
        nn.Linear(32, 32),
        nn.Sequential(llama()),
        ACT2FN["silu"],
    ],
)
def test_other_modules_are_not_looked_at(module: nn.Module) -> None:
    assert detect(module) is None


def test_shared_expert_of_a_moe_block_is_patched_alone() -> None:
    block = Qwen2MoeSparseMoeBlock(config("Qwen2Moe", num_experts=4, shared_expert_intermediate_size=40))
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.2)
    block, x = block.to(DEVICE), torch.randn(1, 5, 32, device=DEVICE)
    want = block(x)
    report = patch(block)
    assert {entry.path: entry.replaced for entry in report.entries} == {
        "experts": False,
        "shared_expert": True,
    }
    assert (block(x) - want).norm() <= 2**-18 * want.norm()  # as for whole models


def test_patched_module_follows_its_weights_attributes_and_hooks() -> None:
    module, x = Limited(config("Llama")).to(DEVICE), torch.randn(2, 32, device=DEVICE)
    seen = []
    module.register_forward_hook(lambda *_: seen.append(1))
    patch(module)
    assert not seen  # the probe runs no hooks
    y = module(x)
    module.limit = 0.01
    assert seen == [1]
    assert module(x).norm() < y.norm()
    for how in ("functional_call", "load_state_dict", "new Linear", "bfloat16"):
        twin = Limited(config("Llama")).to(DEVICE)
        own = copy.deepcopy(module)
        if how == "functional_call":
            got = torch.func.functional_call(own, dict(twin.named_parameters()), (x,))
        elif how == "load_state_dict":
            own.load_state_dict(twin.state_dict())
            got = own(x)
        elif how == "new Linear":
            own.gate_proj, own.up_proj, own.down_proj = twin.gate_proj, twin.up_proj, twin.down_proj
            got = own(x)
        else:
            own.load_state_dict(twin.state_dict())
            own, twin, x = own.bfloat16(), twin.bfloat16(), x.bfloat16()
            got = own(x)
        twin.limit = 0.01
        want = twin(x)
        assert (got - want).norm() <= 16 * torch.finfo(x.dtype).eps * want.norm(), how


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: setattr(m, "up_proj", LoRALinear(m.up_proj)), "up_proj is a .*LoRALinear"),
        (lambda m: m.down_proj.register_forward_hook(print), "down_proj has hooks"),
        (lambda m: weight_norm(m.gate_proj), "gate_proj is a .*ParametrizedLinear"),
        (lambda m: setattr(m, "act_fn", nn.ReLU()), "act_fn was replaced"),
        (lambda m: m.act_fn.register_forward_hook(print), "act_fn has hooks"),
    ],
)
def test_a_change_that_the_patch_cannot_follow_is_an_error_at_the_call(change: Any, said: str) -> None:
    module, x = llama().to(DEVICE), torch.randn(2, 32, device=DEVICE)
    patch(module)
    change(module)
    for patched_module in (module, copy.deepcopy(module)):
        with pytest.raises(RuntimeError, match=f"LlamaMLP: {said}(.|\n)*unpatch"):
            patched_module(x)
    with pytest.raises(ValueError, match=f"since then {said}"):
        patch(module)
    unpatch(module)
    module(x)


def test_the_tensor_may_be_given_by_the_name_that_the_class_gives_it() -> None:
    module, x = llama().to(DEVICE), torch.randn(2, 32, device=DEVICE)
    patch(module)
    assert torch.equal(module(x=x), module(x))
    with pytest.raises(TypeError, match=r"LlamaMLP\.forward takes one tensor, x"):
        module(hidden_states=x)
    assert module(x[:0]).shape == (0, 32)


def with_lora(model: nn.Module, targets: list[str]) -> nn.Module:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    lora = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    return peft.get_peft_model(model, lora)


def test_lora_on_a_projection_is_refused_in_the_report_and_norms_are_patched() -> None:
    model = with_lora(make_model(), ["up_proj"])
    want = step(model)
    report = patch(model)
    assert report.counts == {"rms_norm": 5, "swiglu_mlp": 0}
    refused = {entry.path: entry.reason for entry in report.entries if not entry.replaced}
    assert len(refused) == 2
    assert all(
        re.match(r"up_proj is a peft\.tuners\.lora\.\S+Linear, not a plain", r) for r in refused.values()
    )
    assert "up_proj is a peft" in str(report)
    got = step(model)
    assert any("lora" in key for key in want)
    assert all((got[key] - want[key]).norm() <= 2**-18 * want[key].norm() for key in want)
    with pytest.raises(ValueError, match=r"nothing was replaced(.|\n)*up_proj is a peft"):
        patch(with_lora(make_model(), ["up_proj"]), ops="swiglu_mlp")


def test_lora_on_attention_alone_leaves_the_mlps_patchable() -> None:
    model = with_lora(make_model(), ["q_proj", "v_proj"])
    want = step(model)
    assert patch(model).counts == {"rms_norm": 5, "swiglu_mlp": 2}
    got = step(model)
    assert got.keys() == want.keys()
    assert all((got[key] - want[key]).norm() <= 2**-18 * want[key].norm() for key in want)


def test_lora_added_after_patching_is_an_error_at_the_call() -> None:
    model = make_model()
    patch(model)
    wrapped = with_lora(model, ["gate_proj"])
    with pytest.raises(RuntimeError, match=r"LlamaMLP: gate_proj is a peft\.(.|\n)*unpatch the model first"):
        step(wrapped)
    unpatch(wrapped)
    want = step(wrapped)
    assert patch(wrapped).counts == {"rms_norm": 5, "swiglu_mlp": 0}
    got = step(wrapped)
    assert all((got[key] - want[key]).norm() <= 2**-18 * want[key].norm() for key in want)
    merged = wrapped.merge_and_unload()
    assert patch(merged, ops="swiglu_mlp").counts == {"swiglu_mlp": 2}


@pytest.mark.parametrize("name", ["Llama", "Phi3", "Gemma2"])
def test_training_gives_the_same_losses(name: str) -> None:
    ids = (torch.arange(22, device=DEVICE) * 5 % 64).view(2, 11)
    losses: list[list[float]] = []
    for fast in (False, True):
        model = make_model(name)
        if fast:
            patch(model, ops="swiglu_mlp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append([])
        for _ in range(6):
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0][-1] < losses[0][0] - 0.1
    # Gradients agree to 2⁻¹⁸, so the weights after six steps do, as far as they moved; a loss moves no further than they.
    torch.testing.assert_close(losses[1], losses[0], rtol=2**-17, atol=0)


def test_patched_model_compiles_to_one_graph() -> None:
    model = make_model()
    patch(model)
    ids = (torch.arange(22, device=DEVICE) * 5 % 64).view(2, 11)
    want = model(input_ids=ids).logits
    compiled = torch.compile(model.model.layers[0].mlp, backend="eager", fullgraph=True)
    x = torch.randn(2, 32, device=DEVICE)
    assert torch.equal(compiled(x), model.model.layers[0].mlp(x))
    torch.nn.init.zeros_(model.model.layers[0].mlp.down_proj.weight)
    assert not compiled(x).any()
    assert not torch.equal(model(input_ids=ids).logits, want)
