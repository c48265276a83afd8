"""The command line: exit statuses, the files it writes, replay, and what it says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from equivalence_tests.__main__ import main
from equivalence_tests.harness.report import digest
from reference.rms_norm import rms_norm

FEW = ["rms_norm", "--dtype", "fp32", "--profile", "ci"]
ROOT = Path(__file__).parent.parent


def off_by_a_percent(
    x, weight=None, *, bias=None, residual=None, eps=1e-6, weight_offset=0.0, casting="llama"
):
    """1 % wrong where there is a bias."""
    y = rms_norm(
        x, weight, bias=bias, eps=eps, weight_offset=weight_offset, casting=casting, residual=residual
    )
    if bias is None:
        return y
    return y * 1.01 if residual is None else (y[0] * 1.01, y[1])


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """failures/ is made in the working directory."""
    monkeypatch.chdir(tmp_path)


def test_a_right_implementation_passes_and_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture):
    args = [
        *FEW,
        "--impl",
        "reference",
        "--json",
        str(tmp_path / "r.json"),
        "--html",
        str(tmp_path / "r.html"),
    ]
    assert main(args) == 0
    (record,) = json.loads((tmp_path / "r.json").read_text())
    assert record["operation"] == record["function"] == "rms_norm"
    assert (record["dtype"], record["impl"], record["profile"]) == ("fp32", "reference", "ci")
    assert (record["verdict"], record["gradients"], record["determinism"]) == ("pass", "pass", "pass")
    assert record["cases"] >= 20
    assert 0 < record["worst_over_bound"] <= 1
    assert 0 < record["worst_over_reference"] < 2
    assert record["mutants_total"] == 0
    assert record["digest"] == digest("rms_norm")
    assert {"device", "driver", "cuda", "python", "packages", "date"} <= record["environment"].keys()
    assert record["environment"]["packages"]["torch"] == torch.__version__
    page = (tmp_path / "r.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "pass" in page
    assert "src=" not in page
    assert "href=" not in page
    out = capsys.readouterr().out
    assert out.index("verdict") > out.index("rms_norm fp32: pass"), "the table comes last"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.html", "r.json"], (
        "no failures, no temporary files"
    )


def test_json_lines_are_written_where_the_name_asks_for_them(tmp_path: Path):
    args = ["rms_norm", "--dtype", "fp32", "bf16", "--profile", "ci", "--impl", "reference"]
    assert main([*args, "--json", str(tmp_path / "r.jsonl")]) == 0
    lines = (tmp_path / "r.jsonl").read_text().splitlines()
    assert [json.loads(line)["dtype"] for line in lines] == ["fp32", "bf16"]


def test_a_mismatch_is_shrunk_told_saved_and_replayed(tmp_path: Path, capsys: pytest.CaptureFixture):
    wrong = f"{__name__}:off_by_a_percent"
    assert main([*FEW, "--impl", wrong, "--json", "r.json"]) == 1
    out = capsys.readouterr().out
    (record,) = json.loads((tmp_path / "r.json").read_text())
    assert record["verdict"] == "fail"
    failure = record["failures"][0]
    assert failure["kind"] in ("values", "gradients")
    assert "x: fp32 [" in failure["case"]
    assert "bias: " in failure["case"]
    assert "residual: not given" in failure["case"]
    assert "truth" in failure["text"]
    assert "got" in failure["text"]
    assert failure["text"] in out
    assert failure["case"] in out
    assert f"--replay {failure['file']}" in out
    file = tmp_path / failure["file"]
    assert file.parent == tmp_path / "failures"

    assert main(["--replay", str(file)]) == 1
    assert "still fails" in capsys.readouterr().out
    assert main(["--replay", str(file), "--impl", "reference"]) == 0
    assert "passes" in capsys.readouterr().out

    before = {p.name: p.read_text() for p in file.parent.iterdir()}
    assert main([*FEW, "--impl", wrong, "--seed", "1"]) == 1
    for name, text in before.items():
        assert (file.parent / name).read_text() == text, "another failure does not overwrite it"


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["no_such_op"], "OP must be some of "),
        (["--dtype", "fp8"], "--dtype must be some of fp32, bf16, fp16, got fp8"),
        (["--profile", "slow"], "--profile must be one of quick, ci, gpu, deep"),
        (
            ["--impl", "nobody"],
            "--impl must be one of fast, reference, torch, liger, transformers or package.module:function",
        ),
        (["rms_norm", "--impl", "no.such.module:f"], "cannot be imported"),
        (["--impl", ""], "--impl must be one of fast"),
        (["rms_norm", "--impl", ":f"], "cannot be imported"),
        (["rms_norm", "--impl", "math:no_such_function"], "math has no no_such_function"),
        (["rms_norm", "--impl", "math:pi"], "not callable"),
        (["--impl", "math:pi"], "is one function; name the operation, one of "),
        (["swiglu", "--impl", "transformers"], "--impl transformers has no swiglu"),
        (["--json", "no/such/directory/r.json"], "cannot be written"),
        (["--html", "."], "is a directory"),
        (["--replay", "no_such_file.json"], "No such file"),
    ],
)
def test_bad_usage_is_status_2_and_says_what_is_allowed(
    args: list[str], complaint: str, capsys: pytest.CaptureFixture
):
    assert main(args) == 2
    captured = capsys.readouterr()
    assert complaint in captured.err
    assert captured.out == "", "found before any work is done"


def test_a_module_that_raises_while_it_is_imported_is_bad_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    (tmp_path / "broken_kernel.py").write_text("def f(:\n")
    (tmp_path / "leaving_kernel.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["rms_norm", "--impl", "leaving_kernel:f"]) == 2
    assert main(["rms_norm", "--impl", "broken_kernel:f"]) == 2
    assert "broken_kernel cannot be imported: SyntaxError" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_bad_usage(capsys: pytest.CaptureFixture):
    assert main(["--device", "cuda"]) == 2
    assert "sees no GPU" in capsys.readouterr().err


def test_a_file_that_is_no_failure_is_not_replayed(tmp_path: Path, capsys: pytest.CaptureFixture):
    for text in ("no json", "[]", '{"what": "case"}'):
        (tmp_path / "f.json").write_text(text)
        assert main(["--replay", "f.json"]) == 2
    record = {"function": "rms_norm", "dtype": "fp32", "impl": "reference", "device": "cpu", "words": ""}
    record |= {"what": "case", "case": {}}
    (tmp_path / "f.json").write_text(json.dumps(record))
    assert main(["--replay", "f.json"]) == 2
    assert "not a test case" in capsys.readouterr().err
    for damage in ({"impl": 7}, {"words": None}, {"profile": []}, {"what": "guess"}):
        (tmp_path / "f.json").write_text(json.dumps(record | damage))
        assert main(["--replay", "f.json"]) == 2, damage


def test_an_unknown_option_is_status_2():
    with pytest.raises(SystemExit) as status:
        main(["--no-such-option"])
    assert status.value.code == 2


def test_the_list_says_what_there_is(capsys: pytest.CaptureFixture):
    assert main(["--list"]) == 0
    out = capsys.readouterr().out
    for word in (
        "rms_norm",
        "fast",
        "liger",
        "package.module:function",
        "fp32",
        "bf16",
        "fp16",
        "quick",
        "ci",
        "gpu",
        "deep",
    ):
        assert word in out


def test_the_command_sets_the_interpreter_up_by_itself(tmp_path: Path):
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": path}
    command = [sys.executable, "-m", "equivalence_tests", *FEW, "--impl", "reference", "--device", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "interpreter" in done.stdout
    assert done.stderr == ""


def test_the_digest_follows_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from equivalence_tests.harness import report

    sources = {
        "reference/rms_norm.py": "from reference import _cost\n",
        "reference/_cost.py": "import torch\n",
        "fast/rms_norm.py": "from fast._triton.launch import launch\nfrom fast import nn_parts\n",
        "fast/_triton/launch.py": "def f():\n    from fast._triton.device import arch\n",
        "fast/_triton/device.py": "",
        "fast/__init__.py": "from fast import rms_norm, swiglu\n",
        "fast/swiglu.py": "",
    }
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(report, "_ROOT", tmp_path)
    before = digest("rms_norm")
    for name, text in sources.items():
        (tmp_path / name).write_text(text + "# changed\n")
        concerned = name not in ("fast/swiglu.py", "fast/__init__.py")
        assert (digest("rms_norm") != before) == concerned, name
        before = digest("rms_norm")


def test_an_operation_named_like_one_of_its_functions_is_that_function(tmp_path: Path, monkeypatch, capsys):
    """`swiglu --impl module:function` judges swiglu, not swiglu_mlp beside it."""
    (tmp_path / "mine_gated.py").write_text("from reference import swiglu as gated\n")
    monkeypatch.syspath_prepend(tmp_path)
    main(["swiglu", "--impl", "mine_gated:gated", "--dtype", "fp32", "--profile", "ci"])
    out = capsys.readouterr().out
    assert "swiglu fp32: " in out
    assert "swiglu_mlp" not in out
