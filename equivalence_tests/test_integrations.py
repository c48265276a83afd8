"""Patching Transformers models: the same function afterwards, everything else untouched, and every step reversible."""

import copy
import pickle
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn

import fast
from equivalence_tests.harness.real import DEVICE, one_thread
from fast.integrations import Report, patch, patched, unpatch
from fast.integrations._forward import Forward
from fast.integrations.transformers import DETECTORS

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "attn_implementation": "eager",  # bitwise reproducible on a GPU too
    "max_position_embeddings": 32,
}


class Kind(NamedTuple):
    """norms: RMSNorms per layer; one more follows the last layer. activation: of its MLPs, one per layer; None: not one of ours.
    options: beside SIZES."""

    norms: int
    casting: str
    weight_offset: float
    activation: str | None = "silu"
    options: Mapping[str, Any] = MappingProxyType({})


MODELS: dict[str, Kind] = {
    "Llama": Kind(2, "llama", 0.0),
    "Mistral": Kind(2, "llama", 0.0),
    "Qwen2": Kind(2, "llama", 0.0),
    "Qwen3": Kind(4, "llama", 0.0, options={"head_dim": 16}),  # q_norm and k_norm on [B, T, H, D]
    "Phi3": Kind(2, "llama", 0.0),  # gate and up packed
    "Glm": Kind(2, "llama", 0.0, options={"head_dim": 16}),  # the same
    "Glm4": Kind(4, "llama", 0.0, options={"head_dim": 16}),  # the same
    "SmolLM3": Kind(2, "llama", 0.0, options={"mlp_bias": True}),
    "Granite": Kind(2, "llama", 0.0),
    "Mixtral": Kind(2, "llama", 0.0, None, {"num_local_experts": 2}),
    "Gemma": Kind(2, "gemma", 1.0, "gelu_tanh", {"head_dim": 16}),
    "Gemma2": Kind(4, "gemma", 1.0, "gelu_tanh", {"head_dim": 16}),
    "Gemma3": Kind(6, "gemma", 1.0, "gelu_tanh", {"head_dim": 16}),
    "Olmo2": Kind(4, "gemma", 0.0),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def make(name: str = "Llama", seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A small model; its norms' weights are random too, around a gain of 1."""
    config = getattr(transformers, {"Gemma3": "Gemma3TextConfig"}.get(name, f"{name}Config"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{name}ForCausalLM")(config(**SIZES, **MODELS[name].options))
        for path, parameter in model.named_parameters():
            if "norm" in path:
                nn.init.normal_(parameter, mean=1.0 - MODELS[name].weight_offset, std=0.3)
    return model.to(DEVICE, dtype)


def step(model: nn.Module) -> dict[str, Tensor]:
    """Logits, and the gradients of the loss, by name; in float64 so that differences are exact."""
    ids = (torch.arange(22, device=DEVICE) * 5 % 64).view(2, 11)
    model.zero_grad()
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: value.detach().double() for name, value in ({"logits": output.logits} | gradients).items()}


def attributes(model: nn.Module) -> dict[str, tuple]:
    """What hangs on every module and on its class, by identity."""
    return {
        path: (type(m), {k: id(v) for k, v in vars(m).items()}, {k: id(v) for k, v in vars(type(m)).items()})
        for path, m in model.named_modules()
    }


@pytest.mark.parametrize("name", MODELS)
def test_float32_model_is_the_same_function(name: str) -> None:
    kind, model = MODELS[name], make(name)
    want = step(model)
    report = patch(model)
    assert report.counts == {"rms_norm": 2 * kind.norms + 1, "swiglu_mlp": 2 if kind.activation else 0}
    forwards = [vars(model.get_submodule(e.path))["forward"] for e in report.entries if e.replaced]
    norms = {(f.casting, f.weight_offset) for f in forwards if f.operation == "rms_norm"}
    mlps = {(f.activation, f.alpha, f.limit_name) for f in forwards if f.operation == "swiglu_mlp"}
    assert norms == {(kind.casting, kind.weight_offset)}
    assert mlps == ({(kind.activation, 1.0, None)} if kind.activation else set())
    got = step(model)
    assert got.keys() == want.keys()
    for key in want:
        # The fp32 result of a norm or an MLP moves by a few 2⁻²⁴ (other order of the sum, one rounding less); up to 15 of them
        # in a row, forward and backward, with softmaxes between them that pass it on, make 2⁶ at most.
        difference, size = (got[key] - want[key]).norm(), want[key].norm()
        assert difference <= 2**-18 * size, f"{key}: {difference / size:.1e}"


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_model_is_as_accurate(name: str) -> None:
    model = make(name, dtype=torch.bfloat16)
    truth = step(copy.deepcopy(model).float())
    unpatched = step(model)
    patch(model)
    got = step(model)

    def error(values: dict[str, Tensor], keys: list[str]) -> float:
        return (
            torch.stack([(values[k] - truth[k]).norm() / truth[k].norm().clamp_min(1e-30) for k in keys])
            .norm()
            .item()
        )

    # Ours rounds less in the backward pass; 1.5 is the contract's normwise factor, on all gradients pooled.
    for keys in (["logits"], [key for key in truth if key != "logits"]):
        assert error(got, keys) <= 1.5 * error(unpatched, keys)


def test_unpatch_leaves_no_trace_and_other_models_never_change() -> None:
    model, other = make(), make(seed=1)
    before, others_before, weights = attributes(model), attributes(other), model.state_dict()
    want, others_want = step(model), step(other)
    patch(model)
    assert attributes(model) != before
    assert attributes(other) == others_before
    assert list(model.state_dict()) == list(weights)
    assert all(value.data_ptr() == weights[key].data_ptr() for key, value in model.state_dict().items())
    unpatch(model)
    assert attributes(model) == before
    assert all(torch.equal(value, others_want[key]) for key, value in step(other).items())
    assert all(torch.equal(value, want[key]) for key, value in step(model).items())


@pytest.mark.parametrize("ops", [None, "rms_norm", "swiglu_mlp", ["swiglu_mlp", "rms_norm"]])
def test_patched_model_calls_the_fast_functions_asked_for_and_an_unpatched_one_none(
    monkeypatch: pytest.MonkeyPatch, ops: Any
) -> None:
    calls: Counter[str] = Counter()

    def counted(name: str, real: Any) -> Any:
        return lambda *args, **kwargs: (calls.update([name]), real(*args, **kwargs))[1]

    for name in DETECTORS:
        monkeypatch.setattr(fast, name, counted(name, getattr(fast, name)))
    model = make()
    report = patch(model, ops=ops)
    step(model)
    usual = [name for name, detector in DETECTORS.items() if detector.unasked]
    chosen = usual if ops is None else [ops] if isinstance(ops, str) else ops
    assert calls == report.counts == {name: {"rms_norm": 5, "swiglu_mlp": 2}[name] for name in chosen}
    unpatch(model)
    step(model)
    assert calls == report.counts


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save_pretrained"])
def test_copies_are_patched_and_use_their_own_weights(how: str, tmp_path: Any) -> None:
    model = make()
    patch(model)
    if how == "save_pretrained":
        model.save_pretrained(tmp_path)
        twin = type(model).from_pretrained(tmp_path, attn_implementation="eager").to(DEVICE)
        assert "forward" not in vars(twin.model.norm)
        patch(twin)
    else:
        twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    norm, mlp = twin.model.norm, twin.model.layers[1].mlp
    assert all(vars(module)["forward"].module is module for module in (norm, mlp))
    want = step(model)
    assert all(torch.equal(value, want[key]) for key, value in step(twin).items())
    with torch.no_grad():
        mlp.down_proj.weight.zero_()
    assert not mlp(torch.ones(1, 32, device=DEVICE)).any()
    with torch.no_grad():
        norm.weight.zero_()
    assert not step(twin)["logits"].any()
    assert all(torch.equal(value, want[key]) for key, value in step(model).items())
    unpatch(twin)
    assert not any("forward" in vars(module) for module in (norm, mlp))
    assert "forward" in vars(model.model.norm)


def test_patching_twice_keeps_the_first_patch() -> None:
    model = make()
    first = patch(model)
    before = attributes(model)
    second = patch(model)
    assert attributes(model) == before
    assert second.counts == first.counts
    assert {entry.reason for entry in second.entries} == {"was patched before"}


def test_context_manager_undoes_its_own_patches_only() -> None:
    model = make()
    clean = attributes(model)
    with patched(model) as report:
        assert isinstance(report, Report)
        assert "forward" in vars(model.model.norm)
    assert attributes(model) == clean
    with pytest.raises(KeyError, match="inside"), patched(model):
        raise KeyError("inside")
    assert attributes(model) == clean
    patch(model.model.layers[0])
    half = attributes(model)
    with patched(model):
        assert "forward" in vars(model.model.norm)
    assert attributes(model) == half


def test_context_manager_undoes_its_patch_of_a_module_that_left_the_model() -> None:
    model = make()
    norm, mlp, layer = model.model.norm, model.model.layers[0].mlp, model.model.layers[1]
    with patched(model):
        model.model.norm = copy.deepcopy(norm)
        model.model.layers[0].mlp = nn.Identity()
        del model.model.layers[1]
        assert "forward" in vars(model.model.norm)
    for module in (norm, mlp, *layer.modules(), *model.modules()):
        assert "forward" not in vars(module)


def test_report_names_every_module_and_prints_as_a_table() -> None:
    report = patch(make("Qwen3"))
    assert "model.layers.1.self_attn.q_norm" in {entry.path for entry in report.entries}
    table = str(report)
    assert [line.split()[:5] for line in table.splitlines() if "q_norm" in line] == [
        ["model.layers.*.self_attn.q_norm", "Qwen3RMSNorm", "rms_norm", "2", "replaced"]
    ]
    assert "Qwen3ForCausalLM: 9 modules run fast.rms_norm" in table
    assert "Qwen3ForCausalLM: 2 modules run fast.swiglu_mlp" in table


def test_a_model_without_the_operation_is_an_error_that_says_what_was_looked_for() -> None:
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=32)
    model = transformers.GPT2LMHeadModel(config).to(DEVICE)
    before = attributes(model)
    with pytest.raises(
        ValueError,
        match=r"nothing was replaced in GPT2LMHeadModel(.|\n)*LayerNorm(.|\n)*compute RMSNorm(.|\n)*gated MLP",
    ):
        patch(model)
    assert attributes(model) == before


@pytest.mark.parametrize("ops", ["rmsnorm", ["rms_norm", "swigl"], []])
def test_a_misspelt_operation_is_an_error_that_names_the_allowed(ops: Any) -> None:
    with pytest.raises(ValueError, match=r"among \['rms_norm'"):
        patch(make(), ops=ops)


def test_default_device_and_dtype_are_not_seen_by_the_probes() -> None:
    model = make()
    try:
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.bfloat16)
        report = patch(model)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert report.counts == {"rms_norm": 5, "swiglu_mlp": 2}


def test_activation_checkpointing_of_a_patched_model_gives_the_same_bits() -> None:
    model = make().train()
    patch(model)
    want = step(model)
    model.gradient_checkpointing_enable()
    assert all(torch.equal(value, want[key]) for key, value in step(model).items())


def test_bad_calls_are_errors() -> None:
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, got str"):
        patch("meta-llama/Llama-3.2-1B")
    with pytest.raises(ValueError, match="no module of this LlamaForCausalLM is patched"):
        unpatch(make())


@pytest.mark.parametrize("path", ["model.norm", "model.layers.0.mlp"])
def test_accelerate_hooks_before_and_after(path: str) -> None:
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")

    class Counting(hooks.ModelHook):
        calls = 0

        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple:
            self.calls += 1
            return args, kwargs

    for first in ("hook", "patch"):
        model, hook = make(), Counting()
        module = model.get_submodule(path)
        clean = attributes(model)
        for action in (first, "patch" if first == "hook" else "hook"):
            if action == "hook":
                hooks.add_hook_to_module(module, hook)
                hooked = set(vars(module))
            else:
                patch(model)
        want = step(model)
        assert hook.calls == 1, first
        unpatch(model)
        assert set(vars(module)) == hooked
        assert not [v for m in model.modules() for v in vars(m).values() if isinstance(v, Forward)]
        difference = (step(model)["logits"] - want["logits"]).norm()
        assert difference <= 2**-18 * want["logits"].norm()  # as for whole models above
        assert hook.calls == 2, first
        hooks.remove_hook_from_module(module)
        # accelerate itself leaves the class's forward bound on the instance.
        vars(module).pop("forward", None)
        assert attributes(model) == clean


@pytest.mark.parametrize("path", ["model.norm", "model.layers.0.mlp"])
def test_a_foreign_wrapper_around_the_patch_is_an_error_at_unpatch(path: str) -> None:
    model = make()
    module = model.get_submodule(path)
    patch(model)
    forward = module.forward

    @wraps(forward, updated=())
    def wrapper(*args: Any) -> Any:
        return forward(*args)

    module.forward = wrapper
    before = attributes(model)
    with pytest.raises(RuntimeError, match=f"wraps the patched forward of a {type(module).__name__}"):
        unpatch(model)
    assert attributes(model) == before
    module.forward = forward
    unpatch(model)


def test_the_tensor_may_be_given_by_the_name_that_the_class_gives_it():
    norm, x = nn.RMSNorm(8, device=DEVICE), torch.randn(2, 8, device=DEVICE)
    patch(norm)
    torch.testing.assert_close(norm(x=x), norm(x), rtol=0, atol=0)
    for args, named in (((), {"hidden_states": x}), ((x,), {"x": x}), ((), {}), ((x, x), {})):
        with pytest.raises(TypeError, match=r"RMSNorm\.forward takes one tensor, x"):
            norm(*args, **named)
