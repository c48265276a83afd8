"""bench refuses what it must, says why a figure is missing, and report's tables hold the records and nothing else."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from equivalence_tests.harness.interpreter import interpreting
from experiments import _environment, _figures, _timing, bench, lora_linear, report, swiglu
from experiments._environment import read_records, slug, unverified
from experiments._timing import Contestant, Timing
from experiments.rms_norm import ROWS, row

KEYS = {
    "op",
    "function",
    "shape",
    "dtype",
    "impl",
    "phase",
    "kernel_ms",
    "host_us",
    "gbps",
    "tflops",
    "peak_mib",
}
PEERS_ROWS = ["262144×128", "65536×1024", "16384×4096", "16384×8192", "4096×32768", "4096×65536"]


def test_rows_cover_the_published_comparison():
    shapes = [r.shape for r in ROWS]
    assert shapes[: len(PEERS_ROWS)] == PEERS_ROWS
    assert all({"fwd", "bwd"} <= set(r.phases) for r in ROWS)
    packed = (
        next(r for r in ROWS if "qkv" in r.shape).make(torch.bfloat16, torch.device("meta"), None).args[0]
    )
    assert packed.shape == (4, 4096, 32, 128)
    assert packed.stride() == (4096 * 3 * 4096, 3 * 4096, 128, 1)


@pytest.mark.parametrize("arguments", [["no_such_op"], ["--shape", "3×5"], ["--impl", "nobody"]])
def test_bad_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture):
    assert bench.main(arguments) == 2
    assert "must be" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_exits_with_2_and_says_so(capsys: pytest.CaptureFixture):
    assert bench.main([]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err


@pytest.fixture
def cpu_bench(monkeypatch: pytest.MonkeyPatch) -> bench.Bench:
    """A Bench whose stopwatch is a stand-in: every call takes 1 ms, a copy 2 ms."""

    def captured(thunks: list, _: Any) -> Contestant:
        for thunk in thunks:
            thunk()
        return Contestant(lambda: None, 1)

    monkeypatch.setattr(_timing, "captured", captured)
    monkeypatch.setattr(_timing, "host_us", lambda *_: 7.0)
    monkeypatch.setattr(_timing, "peak_mib", lambda *_: 3.0)
    monkeypatch.setattr(
        _timing,
        "race",
        lambda entrants, *_, **__: {e: Timing(2.0 if e == "copy" else 1.0, 0.0) for e in entrants},
    )
    monkeypatch.setattr(bench, "ROTATED_BYTES", 1)
    made = object.__new__(bench.Bench)
    made.device, made.stream, made.gemm_tflops = torch.device("cpu"), None, 800.0
    made.generator, made.copy = torch.Generator().manual_seed(0), Contestant(lambda: None, 1)
    return made


@pytest.mark.skipif(not interpreting(), reason="the stand-in stopwatch runs kernels on the CPU")
def test_records_hold_every_figure_or_a_reason(cpu_bench: bench.Bench, monkeypatch: pytest.MonkeyPatch):
    def missing() -> None:
        raise ImportError("no module named quack")

    monkeypatch.setitem(bench.experiment("rms_norm").PEERS, "quack", {"rms_norm": missing})
    small = row("8×64 + residual", residual=True, phases=("fwd", "bwd", "fwd+bwd"))
    impls = ["reference", "torch", "fast", "quack"]
    records = list(cpu_bench.measure(small, "bf16", impls, ["fwd", "bwd", "fwd+bwd"]))
    assert [(r["phase"], r["impl"]) for r in records] == [
        (p, i) for p in ("fwd", "bwd", "fwd+bwd") for i in impls
    ]
    for record in records:
        assert set(record) >= KEYS | {"percent_of_limit", "limit", "floor"}
        if record["impl"] == "quack":
            assert record["kernel_ms"] is None
            assert "no module named quack" in record["reason"]
        else:
            assert (record["kernel_ms"], record["host_us"], record["peak_mib"]) == (1.0, 7.0, 3.0)
            assert "reason" not in record
    moved = {r["phase"]: r["floor"]["bytes"] for r in records}
    assert moved["fwd"] == 4 * 8 * 64 * 2 + 64 * 2 + 8 * 4
    assert moved["fwd+bwd"] == moved["fwd"] + moved["bwd"]
    assert records[0]["gbps"] == pytest.approx(moved["fwd"] / 1e-3 / 1e9)
    copy_gbps = 2 * 2**31 / 2e-3 / 1e9
    assert records[0]["percent_of_limit"] == pytest.approx(100 * records[0]["gbps"] / copy_gbps)


@pytest.mark.skipif(not interpreting(), reason="the stand-in stopwatch runs kernels on the CPU")
def test_an_implementation_of_something_else_is_not_timed(
    cpu_bench: bench.Bench, monkeypatch: pytest.MonkeyPatch
):
    peers = bench.experiment("rms_norm").PEERS
    honest = peers["torch"]["rms_norm"]()
    wrong = {"rms_norm": lambda: lambda *args, **kwargs: 1.05 * honest(*args, **kwargs)}
    monkeypatch.setitem(peers, "torch", wrong)
    (record,) = cpu_bench.measure(row("8×64"), "bf16", ["torch"], ["fwd"])
    assert "differs from the reference" in record["reason"]
    assert record["kernel_ms"] is None


@pytest.mark.skipif(not interpreting(), reason="the stand-in stopwatch runs kernels on the CPU")
@pytest.mark.parametrize(
    "shape",
    [
        "9×70",
        "9×70 halves gelu",
        "9×70 alternating clamped",
        "9×16×40",
        "9×16×40 recompute",
        "9×16×40 frozen",
        "9×16×40 halves biases clamped",
    ],
)
def test_every_form_of_swiglu_is_the_same_in_every_implementation(cpu_bench: bench.Bench, shape: str):
    work = swiglu.row(shape, ("fwd", "bwd", "fwd+bwd"))
    records = list(cpu_bench.measure(work, "fp32", ["reference", "torch", "fast"], ["fwd", "bwd", "fwd+bwd"]))
    assert [r.get("reason") for r in records] == [None] * 9
    assert {r["function"] for r in records} == {"swiglu_mlp" if shape.count("×") == 2 else "swiglu"}


def test_swiglu_rows_are_laid_out_as_they_say():
    def made(shape: str) -> Any:
        return swiglu.row(shape).make(torch.bfloat16, torch.device("meta"), None)

    assert {r.function for r in swiglu.ROWS} == {"swiglu", "swiglu_mlp"}
    assert [t.stride() for t in made("4×8 halves").args] == [(16, 1), (16, 1)]
    assert [t.stride() for t in made("4×8 alternating").args] == [(16, 2), (16, 2)]
    call = made("4×8×16 halves biases")
    assert [t.shape for t in (*call.args, *call.cotangents)] == [(4, 8), (16, 8), (16, 8), (8, 16), (4, 8)]
    assert len(call.wanted) == 7
    assert len(made("4×8×16 frozen").wanted) == 1
    with pytest.raises(ValueError, match="is none of"):
        swiglu.row("4×8 sideways")


@pytest.mark.skipif(not interpreting(), reason="the stand-in stopwatch runs kernels on the CPU")
@pytest.mark.parametrize("shape", ["9×24×16+8+8 r4", "9×24×16+8 r4 narrow", "mlp 9×24×40 r4"])
def test_stacks_of_adapted_layers_are_the_same_in_every_implementation(cpu_bench: bench.Bench, shape: str):
    work = lora_linear.row(shape, ("fwd", "bwd", "fwd+bwd"))
    impls = ["reference", "torch", "recipe", "fast"]
    records = list(cpu_bench.measure(work, "bf16", impls, ["fwd", "bwd", "fwd+bwd"]))
    assert [r.get("reason") for r in records] == [None] * 12
    assert {r["function"] for r in records} == {"lora_swiglu_mlp" if "mlp" in shape else "lora_qkv"}


def test_stacks_of_adapted_layers_count_x_once():
    """M = 8, K = 16, bf16, adapters of rank 4 in fp32."""

    def cost(shape: str) -> Any:
        work = lora_linear.row(f"{shape} r4")
        return work.cost(work.make(torch.bfloat16, torch.device("meta"), None))

    x, single, pair, mlp = 8 * 16 * 2, cost("8×16×32"), cost("8×16×32+32"), cost("mlp 8×16×32")
    assert pair.forward.bytes == 2 * single.forward.bytes - x
    assert pair.backward.bytes == 2 * single.backward.bytes - 2 * x
    assert pair.forward.flops == 2 * single.forward.flops
    assert pair.saved == 2 * single.saved - x == x + 2 * 8 * 4 * 4
    hidden, s = 8 * 32 * 2, 8 * 4 * 4
    weights, adapters = 3 * 16 * 32 * 2, 3 * (16 + 32) * 4 * 4
    assert mlp.saved == x + 2 * hidden + 3 * s
    assert mlp.forward.bytes == 2 * x + weights + adapters + 2 * hidden
    assert mlp.backward.bytes == 3 * x + weights + 2 * adapters + 2 * hidden
    assert mlp.forward.flops == 3 * single.forward.flops + 6 * 8 * 32


def test_functions_composed_of_others_are_vouched_for_by_those(tmp_path: Path):
    work = [(lora_linear.row(shape), "bf16") for shape in ("8×8×8+8", "mlp 8×8×8", "8×8×8")]
    (line,) = bench.refused(work, tmp_path / "verify.jsonl", "NVIDIA H200")
    assert line.startswith("fast.lora_linear in bf16 is not verified")


def test_a_frozen_block_counts_no_products_for_its_weights():
    whole, frozen = (
        (r := swiglu.row(shape)).cost(r.make(torch.bfloat16, torch.device("meta"), None))
        for shape in ("4×8×16", "4×8×16 frozen")
    )
    assert whole.backward.flops - frozen.backward.flops == 3 * 2 * 4 * 8 * 16
    assert whole.backward.bytes - frozen.backward.bytes == 3 * 8 * 16 * 2
    assert whole.forward == frozen.forward


def test_what_an_implementation_writes_over_its_inputs_is_undone():
    """Liger's gradients lie where gate and up lay: what is compared or timed next must not start from them."""

    class Overwriting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
            ctx.save_for_backward(gate, up)
            return gate * up

        @staticmethod
        def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, Tensor]:
            gate, up = ctx.saved_tensors
            dgate, dup = dh * up, dh * gate
            return gate.data.copy_(dgate), up.data.copy_(dup)

    call = swiglu.row("4×8").make(torch.float32, torch.device("cpu"), torch.Generator().manual_seed(0))
    call.kwargs.clear()
    before = [t.detach().clone() for t in call.tensors]
    assert bench.disagreement(Overwriting.apply, torch.mul, call) == 0.0
    assert all(torch.equal(a, b) for a, b in zip(call.tensors, before, strict=True))


def test_a_training_step_does_not_keep_its_graph():
    call = swiglu.row("4×8").make(torch.float32, torch.device("cpu"), torch.Generator().manual_seed(0))
    y, dgate, _ = call.step(import_module("reference").swiglu)
    assert dgate.shape == (4, 8)
    with pytest.raises(RuntimeError, match="second time"):
        call.gradients((y,))


def test_the_compiled_block_starts_from_products_in_the_working_dtype(monkeypatch: pytest.MonkeyPatch):
    started = []
    monkeypatch.setattr(torch, "compile", lambda plain, **_: started.append(plain))
    for function in ("swiglu", "swiglu_mlp"):
        bench.functions("swiglu", function)("compile")
    assert started[0] is import_module("reference").swiglu
    assert started[1].__module__ == "experiments.swiglu"


def verification(**changes: Any) -> dict[str, Any]:
    from equivalence_tests.harness.report import digest

    record = {
        "operation": "rms_norm",
        "function": "rms_norm",
        "dtype": "bf16",
        "impl": "fast",
        "verdict": "pass",
    }
    return record | {"digest": digest("rms_norm"), "environment": {"device": "NVIDIA H200"}} | changes


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"verdict": "fail"}, "verdict"),
        ({"digest": "0" * 64}, "other sources"),
        ({"environment": {"device": "NVIDIA A100"}}, "no record"),
        ({"dtype": "fp32"}, "no record"),
        ({"impl": "liger"}, "no record"),
    ],
)
def test_only_a_verdict_on_these_sources_and_this_gpu_counts(
    changes: dict[str, Any], why: str | None, tmp_path: Path
):
    path = tmp_path / "verify.jsonl"
    path.write_text(json.dumps(verification(**changes)) + "\n")
    found = unverified("rms_norm", "rms_norm", "bf16", "NVIDIA H200", path)
    assert found is None if why is None else why in found


def test_a_missing_verification_record_refuses(tmp_path: Path):
    assert "no verification record" in unverified(
        "rms_norm", "rms_norm", "bf16", "NVIDIA H200", tmp_path / "none.jsonl"
    )


def test_records_that_are_none_name_their_line(tmp_path: Path):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"op": 1}\nnot json\n')
    with pytest.raises(ValueError, match=r"broken\.jsonl:2"):
        read_records(path)


def figure(shape: str, impl: str, phase: str, gbps: float | None, **more: Any) -> dict[str, Any]:
    record = {
        "op": "rms_norm",
        "function": "rms_norm",
        "shape": shape,
        "dtype": "bf16",
        "impl": impl,
        "phase": phase,
    }
    record |= {
        "kernel_ms": 0.1,
        "host_us": 30.0,
        "gbps": gbps,
        "tflops": 1.0,
        "peak_mib": 2.0,
        "percent_of_limit": 90.0,
    }
    record |= {
        "limit": {"kind": "copy", "copy_gbps": 4000.0, "gemm_tflops": 700.0},
        "floor": {"bytes": 100, "flops": 150},
    }
    return (
        record
        | {"environment": {"device": "NVIDIA H200", "packages": {"torch": "2.11.0"}, "date": "2026-12-01"}}
        | more
    )


@pytest.fixture
def results(tmp_path: Path) -> Path:
    records = [
        figure("8×64", impl, phase, gbps)
        for impl, gbps in (("torch", 1234.0), ("fast", 3456.0))
        for phase in ("fwd", "bwd")
    ]
    records.append(figure("8×64", "quack", "fwd", None, kernel_ms=None, reason="ImportError: no quack"))
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "rms_norm.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return tmp_path


def test_tables_come_from_the_records(results: Path):
    empty = "before\n<!-- table: rms_norm h200 -->\n<!-- /table -->\nafter <!-- table: rms_norm host h200 -->\n<!-- /table -->\n"
    text = report.filled(empty, results)
    assert "| 8×64 | bf16 | fwd | 1234 | – | 3456 | 90.0 |" in text
    assert "quack, 8×64 fwd: ImportError: no quack" in text
    assert "4000 GB/s" in text
    assert "NVIDIA H200" in text
    assert report.filled(text, results) == text
    assert text.startswith("before\n")
    (results / "h200" / "rms_norm.jsonl").write_text(json.dumps(figure("8×64", "fast", "fwd", 1.0)) + "\n")
    assert report.filled(text, results) != text


def test_products_are_reported_in_ms_and_apart(tmp_path: Path):
    limit = {"kind": "gemm", "copy_gbps": 4000.0, "gemm_tflops": 700.0}
    block = {"op": "swiglu", "function": "swiglu_mlp", "limit": limit, "kernel_ms": 4.125}
    records = [
        figure("8×64", "fast", "fwd", 3456.0, op="swiglu", function="swiglu"),
        figure("8×4×16", "fast", "fwd", 210.0, **block),
    ]
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "swiglu.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    text = report.filled("<!-- table: swiglu h200 -->\n<!-- /table -->", tmp_path)
    assert "| 8×64 | bf16 | fwd | 3456 | 90.0 |" in text
    assert "| 8×4×16 | bf16 | fwd | 4.125 | 90.0 |" in text
    assert text.index("4000 GB/s") < text.index("700 TFLOP/s")


def test_the_verdicts_make_a_table(tmp_path: Path):
    record = verification(
        cases=24, worst_over_bound=0.5, worst_over_reference=1.0, mutants_killed=3, mutants_total=3
    )
    record["environment"] |= {"packages": {"torch": "2.11.0"}, "date": "2026-12-01T00:00:00+00:00"}
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "verify.jsonl").write_text(json.dumps(record) + "\n")
    text = report.filled("<!-- table: rms_norm verified h200 -->\n<!-- /table -->", tmp_path)
    assert "| rms_norm | bf16 | 24 | 0.500 | 1.000 | 3/3 | pass |" in text
    assert "2026-12-01" in text
    assert "NVIDIA H200" in text


def test_no_results_yet_is_said(tmp_path: Path):
    assert "No results for a100 yet" in report.filled(
        "<!-- table: rms_norm a100 -->\n<!-- /table -->", tmp_path
    )


def test_an_unknown_kind_of_table_is_an_error(results: Path):
    with pytest.raises(ValueError, match="must be one of"):
        report.filled("<!-- table: rms_norm colour h200 -->\n<!-- /table -->", results)


def test_two_records_of_one_figure_are_an_error(results: Path):
    (results / "h200" / "again.jsonl").write_text(json.dumps(figure("8×64", "fast", "fwd", 1.0)) + "\n")
    with pytest.raises(ValueError, match="two records"):
        report.load("h200", results)


def test_figures_are_the_same_bytes_and_stale_when_the_data_changes(results: Path, tmp_path: Path):
    pytest.importorskip("matplotlib")
    records = report.load("h200", results)
    first, second = tmp_path / "first", tmp_path / "second"
    drawn = _figures.update(records, "h200", first, write=True)
    assert len(drawn) == 2
    _figures.update(records, "h200", second, write=True)
    assert all((second / path.name).read_bytes() == path.read_bytes() for path in drawn)
    assert _figures.update(records, "h200", first, write=False) == []
    assert len(_figures.update([r | {"gbps": 1.0} for r in records], "h200", first, write=False)) == 2


def test_the_tables_and_figures_in_the_repository_are_current(capsys: pytest.CaptureFixture):
    assert report.main(["--check"]) == 0, capsys.readouterr().out


def test_directories_are_named_by_gpu():
    assert slug("NVIDIA H200") == "h200"
    assert _environment.RESULTS.name == "results"
