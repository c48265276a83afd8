"""experiments.preference: DPO and KTO without logits have the loss and the gradients of those with."""

import json
from pathlib import Path

import pytest
import torch

from equivalence_tests.harness import real
from equivalence_tests.harness.interpreter import interpreting
from experiments import preference

pytestmark = pytest.mark.skipif(
    real.DEVICE == "cpu" and not interpreting(), reason="kernels run on the CPU in the interpreter alone"
)


@pytest.fixture(autouse=True)
def _small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "load", real.small)


@pytest.mark.parametrize("loss", preference.LOSSES)
def test_fused_is_unfused(loss: str):
    with real.one_thread():
        policy, frozen, tokenizer, _ = preference.models(real.DEVICE)
        pairs = preference.pairs_of_text(tokenizer, 256, 2, 24, real.DEVICE)
        function = getattr(preference, loss)
        unfused, exact = preference.step(policy, frozen, pairs, function, "unfused")
        exact = {name: gradient.clone() for name, gradient in exact.items()}
        fused, got = preference.step(policy, frozen, pairs, function, "fused")
    assert unfused > 0
    assert torch.allclose(fused, unfused, rtol=1e-5)
    assert got.keys() == exact.keys()
    for name, gradient in got.items():
        assert (gradient - exact[name]).norm() <= 1e-4 * exact[name].norm(), name


def test_prompts_are_shared_and_not_counted():
    pairs = preference.pairs_of_text(real.ByteTokenizer(), 256, 2, 16, "cpu")
    assert torch.equal(pairs.chosen[:, :4], pairs.rejected[:, :4])
    assert not torch.equal(pairs.chosen, pairs.rejected)
    assert (pairs.labels[:, :4] == -100).all()
    assert torch.equal(pairs.labels[:, 4:], pairs.ids[:, 4:])


def test_the_command_reports_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture):
    path = tmp_path / "preference.jsonl"
    with real.one_thread():
        options = [
            "--loss",
            "dpo",
            "--device",
            real.DEVICE,
            "--pairs",
            "1",
            "--tokens",
            "16",
            "--json",
            str(path),
        ]
        assert preference.main(options) == 0
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["way"] for r in records] == ["unfused", "fused"]
    assert abs(records[0]["loss"] - records[1]["loss"]) < 1e-5
    assert "ms a step" in capsys.readouterr().out
    assert preference.main(["--pairs", "0"]) == 2
