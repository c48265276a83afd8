"""What ships compiles for the chips that are promised: no spills, shared memory within the chip's, wgmma where it must be.

At most four configurations of each kernel per chip; all of them where TANDEM_PROFILE=deep. Nothing needs a GPU.
"""

import contextlib
import json
import os
import random
import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from equivalence_tests.harness.interpreter import interpreting
from experiments._work import experiment, operations

DEEP = os.environ.get("TANDEM_PROFILE") == "deep"
CHIPS = ["sm_80", "sm_86", "sm_90"]  # sm_89 has sm_86's shared memory and is compiled in the deep profile
ROOT = Path(__file__).resolve().parent.parent


def compile_check(op: str, tmp_path: Path, *arguments: str) -> tuple[int, list[dict[str, Any]], str]:
    """Exit status, records and output of `python -m experiments.compile_check`, in a process without the interpreter."""
    path = tmp_path / "compiled.jsonl"
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "experiments.compile_check",
        op,
        "--json",
        str(path),
        *arguments,
    ]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3000)
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return done.returncode, records, done.stdout + done.stderr


@pytest.mark.parametrize("chip", [*CHIPS, *(["sm_89"] if DEEP else [])])
@pytest.mark.parametrize("op", operations())
def test_configurations_compile_without_spills(op: str, chip: str, tmp_path: Path):
    arguments = ["--chip", chip, *([] if DEEP else ["--per-kernel", "4", "--dtype", "bf16"])]
    status, records, output = compile_check(op, tmp_path, *arguments)
    assert status in (0, 1), output
    assert records, output
    counts = Counter(record["kernel"] for record in records)
    assert DEEP or max(counts.values()) <= 4
    assert all(record["registers"] > 0 for record in records)
    assert not [fault for record in records for fault in record["faults"]]


@pytest.mark.skipif(not DEEP, reason="compiles every configuration: TANDEM_PROFILE=deep")
@pytest.mark.parametrize("op", operations())
def test_every_configuration_of_every_table_was_compiled(op: str, tmp_path: Path):
    from fast._triton import tuning

    _, records, output = compile_check(op, tmp_path, "--chip", "sm_90", "--dtype", "bf16")
    compiled = [record["configuration"].split() for record in records]
    for table in tuning.tables(import_module(f"fast.{op}")):
        for config in table.configs(max(a for a in table.rows if a <= 90)):
            assert any(set(str(config).split()) <= set(found) for found in compiled), (
                f"{table.name}: {config}\n{output}"
            )


@pytest.mark.parametrize(
    ("op", "kernels"),
    [
        ("swiglu", {"_swiglu_gate_up", "_products"}),
        ("lora_linear", {"_lora_linear_hopper", "_lora_linear_pass"}),
    ],
)
def test_the_products_for_hopper_use_wgmma(op: str, kernels: set[str], tmp_path: Path):
    """Gluon has no tt.dot that compile_check could ask, so it is asked here."""
    arguments = ["--chip", "sm_90", "--dtype", "bf16", "--kernel", *kernels, "--per-kernel", "1"]
    status, records, output = compile_check(op, tmp_path, *arguments)
    assert status == 0, output
    assert {record["kernel"] for record in records} == kernels
    assert all(record["wgmma"] for record in records)


def test_calls_without_a_weight_compile(tmp_path: Path):
    """An absent tensor is another kernel: Triton 3.6 refused one that the interpreter ran."""
    shapes = ("512×1 no weight", "512×128 no weight", "512×32768 no weight", "512×65536 no weight")
    status, records, output = compile_check(
        "rms_norm", tmp_path, "--chip", "sm_90", "--dtype", "bf16", "--shape", *shapes
    )
    assert status == 0, output
    assert {r["kernel"] for r in records} >= {"_rms_norm_fwd", "_rms_norm_bwd", "_rms_norm_fwd_ring"}


def test_spills_are_seen(tmp_path: Path):
    """A row of 8192 fp32 numbers in one warp cannot fit, so the check must say so."""
    arguments = [
        "--chip",
        "sm_90",
        "--dtype",
        "fp32",
        "--shape",
        "16×8192",
        "--kernel",
        "_rms_norm_fwd",
        "--set",
        "num_warps=1",
    ]
    status, records, output = compile_check("rms_norm", tmp_path, *arguments)
    assert status == 1
    assert records[0]["spills"] > 0
    assert "B spilled" in output


def test_bad_usage_exits_with_2(tmp_path: Path):
    assert compile_check("no_such_op", tmp_path)[0] == 2


@pytest.mark.parametrize("op", operations())
def test_random_shapes_resolve_to_configurations_that_fit(op: str, tmp_path: Path):
    arguments = [
        "--chip",
        "sm_90",
        "--random",
        "200",
        *([] if DEEP else ["--per-kernel", "4", "--dtype", "bf16"]),
    ]
    status, records, output = compile_check(op, tmp_path, *arguments)
    assert status == 0, output
    assert records


@pytest.mark.skipif(not interpreting(), reason="CPU tensors reach the launchers only in the interpreter")
@pytest.mark.parametrize("op", operations())
def test_random_shapes_resolve_without_tuning(op: str):
    """200 random shapes launch plain kernels (no autotuner), each in a configuration of the op's tables."""
    from fast._triton import tuning

    fast, module, generator = import_module(f"fast.{op}"), experiment(op), random.Random(0)
    configs = [config for table in tuning.tables(fast) for config in table.configs()]
    # How deep a pipeline is follows from the shared memory that is there; the tile and the warps are the table's.
    allowed = [
        {word for word in str(config).split() if word.startswith(("BLOCK_", "num_warps"))}
        for config in configs
    ]
    seen: list[tuple[Any, dict[str, Any], str]] = []

    def note(kernel: Any, grid: tuple[int, ...], device: torch.device, *_: Any, **options: Any) -> None:
        seen.append((kernel, options, shape))

    own = [
        m
        for name, m in sys.modules.items()
        if name.startswith(("fast.", "fast._")) and hasattr(m, "launch") and op in name
    ]
    with contextlib.ExitStack() as stack:
        for launching in own:
            stack.enter_context(mock.patch.object(launching, "launch", note))
        for _ in range(200):
            shape = module.random_shape(generator)
            row = module.row(shape)
            call = row.make(generator.choice([torch.bfloat16, torch.float32]), torch.device("cpu"), None)
            call.gradients(call.outputs(getattr(import_module("fast"), row.function)))
    assert len({shape for _, _, shape in seen}) > 150
    for kernel, options, shape in seen:
        assert type(kernel).__name__ in ("JITFunction", "InterpretedFunction"), (
            f"{kernel} at {shape} is tuned at run time"
        )
        assert any(config <= {f"{k}={v}" for k, v in options.items()} for config in allowed), (
            f"{shape}: {options} is in no table"
        )
