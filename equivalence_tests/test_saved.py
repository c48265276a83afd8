"""experiments.saved counts what autograd keeps: x and S where `fast` computes, and casts of x where its peers do."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from equivalence_tests.harness.interpreter import interpreting
from experiments import report, saved
from experiments._work import Call
from experiments.lora_linear import row

SHAPES = ["64×256×256 r16", "64×256×256+64+64 r16", "mlp 64×256×320 r16"]
CPU = torch.device("cpu")


def test_a_storage_counts_once_and_arguments_do_not():
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x.exp()  # keeps its result
        return (y * y[:1] * w).sum() + (x * w.view(1, 8)).sum()

    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    product = 4 * 8 * 4  # y · y[:1], for w's gradient
    assert saved.kept(function, Call((x, w), {}, ())) == (x.nbytes, x.nbytes + product)
    assert saved.kept(lambda x, w: w.exp().sum(), Call((x, w), {}, ())) == (0, w.nbytes)
    assert saved.kept(lambda x, w: x + w, Call((x, w), {}, ())) == (0, 0)


@pytest.mark.skipif(not interpreting(), reason="runs kernels on the CPU")
@pytest.mark.parametrize("shape", SHAPES)
def test_fast_keeps_what_its_cost_says(shape: str):
    work = row(shape)
    cost = work.cost(work.make(torch.bfloat16, torch.device("meta"), None))
    record = saved.measured(work, "bf16", "fast", CPU)
    assert record["saved_x_bytes"] == record["x_bytes"] == 64 * 256 * 2
    assert record["saved_x_bytes"] + record["saved_other_bytes"] == cost.saved


@pytest.mark.parametrize("impl", ["torch", "peft"])
def test_casts_of_x_count_for_each_layer(impl: str):
    """x in fp32 is twice x's bytes, S of rank 16 an eighth of them; the MLP keeps gate, silu(gate) and up, and h in fp32."""
    if impl == "peft":
        pytest.importorskip("peft")
    found = [saved.measured(row(shape), "bf16", impl, CPU) for shape in SHAPES]
    assert [r["saved_x_bytes"] for r in found] == [0, 0, 0]
    assert [r["times_x"] for r in found] == [2.125, 3 * 2.125, 2 * 2.125 + (3 + 2) * 320 / 256 + 0.125]
    narrow = saved.measured(row("64×256×256 r16 narrow"), "bf16", impl, CPU)
    assert (narrow["saved_x_bytes"], narrow["times_x"]) == (narrow["x_bytes"], 1 / 16)


def test_rows_by_default_are_the_first_of_each_function():
    chosen = saved.selected("lora_linear", None)
    assert {r.function: r.shape for r in chosen} == {
        "lora_linear": "8192×4096×4096 r16",
        "lora_qkv": "8192×4096×4096+1024+1024 r16",
        "lora_swiglu_mlp": "mlp 8192×4096×14336 r16",
    }
    assert [r.function for r in saved.selected("swiglu", None)] == ["swiglu_mlp"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["lora_linear", "--device", "cpu"],
        ["lora_linear", "--device", "cpu", "--shape", "8×8×8", "--impl", "nobody"],
        ["lora_linear", "--device", "cpu", "--shape", "mlp 8×8×8+8"],
        ["lora_linear", "--device", "cpu", "--shape", "8×8×8+8 g3"],
        ["swiglu", "--device", "cpu", "--shape", "4×8"],
    ],
)
def test_bad_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture):
    assert saved.main(arguments) == 2
    said = capsys.readouterr().err
    assert "must" in said or "is none of" in said


@pytest.mark.skipif(not interpreting(), reason="runs kernels on the CPU")
def test_the_command_writes_records_that_make_a_table(tmp_path: Path):
    path = tmp_path / "h200" / "saved.jsonl"
    path.parent.mkdir()
    options = ["--device", "cpu", "--shape", *SHAPES[:2], "--impl", "torch", "gemm", "fast"]
    assert saved.main(["lora_linear", *options, "--json", str(path)]) == 0
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["impl"] for r in records] == ["torch", "gemm", "fast", "torch", "fast"]
    assert "no adapter" in records[1]["reason"]
    assert all("packages" in r["environment"] for r in records)
    text = report.filled("<!-- table: lora_linear saved h200 -->\n<!-- /table -->", tmp_path)
    assert "| shape | dtype | torch | fast |" in text
    assert "| 64×256×256 r16 | bf16 | 0.1 (2.12) | x + 0.0 (0.12) |" in text
