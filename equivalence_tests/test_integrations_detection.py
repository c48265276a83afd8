"""Which modules are recognised as RMSNorm, as which kind, and which are refused with what reason."""

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm, Qwen3NextRMSNormGated
from transformers.models.t5.modeling_t5 import T5LayerNorm

from equivalence_tests.harness.real import DEVICE, one_thread
from fast.integrations._forward import Forward
from fast.integrations._rms_norm import detect
from fast.integrations.transformers import patch
from fast.nn import RMSNorm as FastRMSNorm

N = 80
LLAMA, OLMO, GEMMA = ("llama", 0.0), ("gemma", 0.0), ("gemma", 1.0)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


class Changed(LlamaRMSNorm):
    """A LlamaRMSNorm that does something else as well."""

    def __init__(self, change: str) -> None:
        super().__init__(N)
        self.change = change

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self.change == "raises":
            raise RuntimeError("no values today")
        y = super().forward(hidden_states)
        return {
            "scaled": y * 1.01,
            "dropout": nn.functional.dropout(y, 0.1, training=True),
            "clamped": y.clamp(-2, 2),
            "last column": torch.cat([y[..., :-1], torch.zeros_like(y[..., -1:])], -1),
            "float32": y.float(),
            "pair": (y, y),
        }[self.change]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: LlamaRMSNorm(N, eps=1e-5), LLAMA),
        (lambda: DeepseekV3RMSNorm(N), LLAMA),
        (lambda: Olmo2RMSNorm(N), OLMO),
        (lambda: GptOssRMSNorm(N, eps=1e-5), OLMO),
        (lambda: Gemma3nRMSNorm(N), OLMO),
        (lambda: Gemma3nRMSNorm(N, with_scale=False), LLAMA),  # without a weight there is one formula only
        (lambda: nn.RMSNorm(N, eps=1e-6), OLMO),
        (lambda: nn.RMSNorm(N), OLMO),
        (lambda: nn.RMSNorm(N, elementwise_affine=False), LLAMA),
        (lambda: GemmaRMSNorm(N), GEMMA),
        (lambda: Qwen3NextRMSNorm(N), GEMMA),
    ],
)
def test_recognised_and_computed_alike(make: Any, kind: tuple[str, float], dtype: torch.dtype) -> None:
    module = make().to(DEVICE, dtype)
    weights, random = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    before = dict(vars(module))
    found = detect(module)
    assert isinstance(found, Forward), found
    assert (found.casting, found.weight_offset) == kind
    assert vars(module) == before
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)

    for parameter in module.parameters():
        nn.init.normal_(parameter)
    x = (
        torch.randn(3, 40, N, device=DEVICE, dtype=dtype)
        * torch.tensor([1.0, 100.0, 1e-3], device=DEVICE, dtype=dtype)[:, None, None]
    )
    want = module(x)
    patch(module)
    got = module(x)
    assert got.dtype == want.dtype
    # The same fp32 value up to 2⁻²¹ or so, rounded: fp16 has its rounding boundaries 2⁻¹⁰ apart, bf16 wider.
    moved = (got.double() - want.double()).abs() > 2**-20 * want.double().abs()
    assert moved.double().mean() <= 2**-8
    torch.testing.assert_close(
        got, want, rtol=2 * torch.finfo(dtype).eps if dtype != torch.float32 else 2**-20, atol=0
    )


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.LayerNorm(N), "no RMSNorm formula"),
        (nn.LayerNorm(N, bias=False), "no RMSNorm formula"),
        (nn.LayerNorm(N, elementwise_affine=False), "no RMSNorm formula"),
        (nn.BatchNorm1d(N), "buffers"),
        (nn.GroupNorm(4, N), "does not run"),
        (nn.RMSNorm((4, N)), "not of one shape"),
        (MambaRMSNormGated(N, N), "gate=None"),
        (Qwen3NextRMSNormGated(N), "gate"),
        (T5LayerNorm(N), "x bfloat16 and weight float32"),  # does not round x̂ there
        (LlamaRMSNorm(N).double(), "float64"),
        (LlamaRMSNorm(N).to("meta"), "meta device"),
        (FastRMSNorm(N), "residual"),
        *(
            (Changed(change), "no RMSNorm formula")
            for change in ("scaled", "dropout", "clamped", "last column", "float32", "pair")
        ),
        (Changed("raises"), "RuntimeError: no values today"),
    ],
)
def test_refused_with_a_reason(module: nn.Module, reason: str) -> None:
    found = detect(module)
    assert isinstance(found, str)
    assert re.search(reason, found), found


class OtherEps(LlamaRMSNorm):
    """Adds 1 % more than its eps attribute says."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.float()
        rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1.01 * self.variance_epsilon)
        return self.weight * (wide * rstd).to(hidden_states.dtype)


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-8])
def test_eps_is_verified_not_believed(eps: float) -> None:
    assert isinstance(detect(LlamaRMSNorm(N, eps=eps)), Forward)
    assert "no RMSNorm formula" in detect(OtherEps(N, eps=eps))


@pytest.mark.parametrize(
    "module", [nn.Linear(N, N), nn.Embedding(4, N), nn.SiLU(), nn.Sequential(nn.LayerNorm(N))]
)
def test_other_modules_are_not_looked_at(module: nn.Module) -> None:
    assert detect(module) is None


def test_patched_module_follows_its_attributes_and_hooks() -> None:
    module = LlamaRMSNorm(N).to(DEVICE)
    seen = []
    module.register_forward_hook(lambda *_: seen.append(1))
    patch(module)
    assert not seen  # the probe runs no hooks
    x = torch.randn(2, N, device=DEVICE)
    y = module(x)
    module.variance_epsilon = 3.0
    assert seen == [1]
    assert not torch.allclose(module(x), y)
    swapped = torch.func.functional_call(module, {"weight": torch.zeros(N, device=DEVICE)}, (x,))
    assert not swapped.any()


def test_a_forward_bound_by_others_is_left_alone() -> None:
    model = nn.Sequential(LlamaRMSNorm(N), LlamaRMSNorm(N)).to(DEVICE)

    def theirs(hidden_states: Tensor) -> Tensor:
        return hidden_states

    model[0].forward = theirs
    report = patch(model)
    assert [entry.replaced for entry in report.entries] == [False, True]
    assert "theirs" in report.entries[0].reason
    assert model[0].forward is theirs
