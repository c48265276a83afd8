"""The shape of the project: five columns that mirror each other, two trees with one interface, and what a wheel carries."""

import ast
import importlib
import inspect
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import fast
import reference
from equivalence_tests.harness.operations import operations

ROOT = Path(__file__).parent.parent
SHIPPED = ("reference", "fast", "equivalence_tests")
COLUMNS = (*SHIPPED, "experiments")
FUNCTIONS = [name for name in reference.__all__ if inspect.isfunction(getattr(reference, name))]
CLASSES = [name for name in reference.__all__ if inspect.isclass(getattr(reference, name))]
OPERATIONS = sorted({getattr(reference, name).__module__.rsplit(".")[-1] for name in reference.__all__})
# What fast has beside the operations.
COMPANIONS = {"nn", "integrations", "distributed"}
MAX_FILE, MAX_KERNEL, MAX_HEADER = 500, 120, 60


def sources(*columns: str) -> list[Path]:
    return [path for column in columns for path in sorted((ROOT / column).rglob("*.py"))]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def run_python(script: str, **environment: str) -> str:
    """Standard output of a fresh interpreter that has no GPU and was told nothing about Triton's interpreter."""
    env = (
        {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        | {"CUDA_VISIBLE_DEVICES": ""}
        | environment
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def public_modules(package: Path) -> set[str]:
    files = {path.stem for path in package.glob("*.py")} | {
        path.parent.name for path in package.glob("*/__init__.py")
    }
    return {name for name in files if not name.startswith("_")}


@pytest.mark.parametrize("op", OPERATIONS)
def test_every_operation_has_its_five_files(op: str) -> None:
    """fast may be a package; the other four are one file each."""
    missing = [
        path
        for path in (
            f"reference/{op}.py",
            f"equivalence_tests/test_{op}.py",
            f"experiments/{op}.py",
            f"paper_notes/{op}.md",
        )
        if not (ROOT / path).is_file()
    ]
    if not (ROOT / f"fast/{op}.py").is_file() and not (ROOT / f"fast/{op}/__init__.py").is_file():
        missing.append(f"fast/{op}.py")
    assert not missing


def test_the_directory_is_the_registry() -> None:
    """No module of either tree is left out of `__all__`, and both trees export the same names."""
    assert sorted(public_modules(ROOT / "reference") - {"distributed"}) == OPERATIONS
    assert sorted(public_modules(ROOT / "fast") - COMPANIONS) == OPERATIONS
    assert sorted(fast.__all__) == sorted(reference.__all__)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_both_trees_have_one_signature(function: str) -> None:
    ours, theirs = getattr(fast, function), getattr(reference, function)
    assert inspect.isfunction(ours)
    assert inspect.isfunction(theirs)
    assert inspect.signature(ours) == inspect.signature(theirs)


@pytest.mark.parametrize("name", CLASSES)
def test_both_trees_have_one_class(name: str) -> None:
    """The constructor, public methods and properties of both are the same; what fast does not define it inherits."""
    ours, theirs = getattr(fast, name), getattr(reference, name)
    assert inspect.signature(ours) == inspect.signature(theirs)
    public = [n for n in {*dir(ours), *dir(theirs)} if not n.startswith("_")]
    kinds = [{type(inspect.getattr_static(c, n)) for c in (ours, theirs)} for n in public]
    assert all(len(kind) == 1 for kind in kinds)
    methods = [n for n in public if callable(getattr(theirs, n))]
    assert {n: inspect.signature(getattr(ours, n)) for n in methods} == {
        n: inspect.signature(getattr(theirs, n)) for n in methods
    }


def test_everything_public_is_a_function_or_a_class() -> None:
    assert sorted(FUNCTIONS + CLASSES) == sorted(reference.__all__)


@pytest.mark.parametrize("function", [o.function for o in operations()])
def test_the_reference_is_complete(function: str) -> None:
    """Each function brings its gradient, its error majorant and its cost, all of which take its arguments."""
    module = importlib.import_module(getattr(reference, function).__module__)
    arguments = list(inspect.signature(getattr(reference, function)).parameters)
    for suffix in ("backward", "majorant"):
        companion = getattr(module, f"{function}_{suffix}")
        assert list(inspect.signature(companion).parameters) == ["cotangents", *arguments]
    assert list(inspect.signature(module.COST[function]).parameters) == arguments


# Forks after the slow imports: each order then costs milliseconds.
ORDERS = """
import importlib, json, os, sys
import torch, triton
for order in json.loads(os.environ["ORDERS"]):
    child = os.fork()
    if child:
        if os.waitpid(child, 0)[1]:
            sys.exit(f"fails when imported in this order: {order}")
        continue
    for module in order:
        importlib.import_module(module)
    import fast, reference
    for tree in (fast, reference):
        for name in tree.__all__:
            assert type(getattr(tree, name)).__name__ in ("function", "type"), f"{tree.__name__}.{name} is {getattr(tree, name)}"
    os._exit(0)
"""


def test_an_operation_is_the_function_in_every_import_order() -> None:
    """`fast.rms_norm` is the function and not the module of that name, whatever was imported first."""
    modules = [
        name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in sources("fast", "reference")
    ]
    orders = [[module] for module in modules]
    for op in OPERATIONS:
        orders += itertools.permutations(("reference", f"reference.{op}", "fast", f"fast.{op}"))
    run_python(ORDERS, ORDERS=json.dumps(orders))


def test_the_reference_needs_no_triton() -> None:
    run_python("""
import sys, torch
before = set(sys.modules)
import reference
new = set(sys.modules) - before
assert not [name for name in new if name.split(".")[0] in ("triton", "fast", "equivalence_tests")], sorted(new)
""")


def test_fast_imports_without_a_gpu_and_says_what_it_needs() -> None:
    """Importing asks for no device; a call on the CPU outside the interpreter is one clear error that names the way out."""
    said = run_python("""
import torch, fast
assert not torch.cuda.is_initialized()
try:
    fast.rms_norm(torch.ones(2, 4))
except ValueError as error:
    print(error)
""")
    assert "TRITON_INTERPRET" in said
    assert "reference.rms_norm" in said


@pytest.mark.parametrize("path", sources(*COLUMNS), ids=name_of)
def test_files_and_kernels_stay_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE
    kernels = {
        node.name: node.end_lineno - node.lineno + 1 for node in ast.walk(ast.parse(text)) if is_kernel(node)
    }
    assert {name: lines for name, lines in kernels.items() if lines > MAX_KERNEL} == {}


def is_kernel(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any(
        re.match(r"(triton|gluon)\.jit", ast.unparse(d)) for d in node.decorator_list
    )


@pytest.mark.parametrize("op", OPERATIONS)
def test_the_header_of_a_fast_operation_teaches_and_ends(op: str) -> None:
    header = importlib.import_module(f"fast.{op}").__doc__.splitlines()
    assert len(header) <= MAX_HEADER
    for topic in (
        "Math",
        "Backward",
        "Saved",
        "Fusion",
        "Floor",
        "Tiles",
        "Rounding",
        "Determinism",
        "Limits",
    ):
        assert any(line.startswith(topic) for line in header), (
            f"the header of fast/{op} has no line that starts with {topic}"
        )


@pytest.mark.parametrize("path", sources(*SHIPPED), ids=name_of)
def test_public_names_are_documented_and_typed(path: Path) -> None:
    """Docstrings where users import from, types in the harness too. Tests speak by their names, kernels by memory maps."""
    module = ast.parse(path.read_text())
    assert ast.get_docstring(module), "no module docstring"
    private = any(part.startswith("_") and part != "__init__.py" for part in path.relative_to(ROOT).parts)
    if private or path.name.startswith("test_") or path.name == "conftest.py":
        return
    faults = []
    for name, node in public_definitions(module):
        if not ast.get_docstring(node) and "equivalence_tests" not in path.relative_to(ROOT).parts:
            faults.append(f"{name} has no docstring")
        if isinstance(node, ast.FunctionDef) and untyped(node):
            faults.append(f"{name} has no type for {', '.join(untyped(node))}")
    assert not faults


def public_definitions(module: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    for node in module.body:
        if (
            isinstance(node, ast.FunctionDef | ast.ClassDef)
            and not node.name.startswith("_")
            and not is_kernel(node)
        ):
            yield node.name, node


def untyped(function: ast.FunctionDef) -> list[str]:
    named = function.args
    arguments = [
        *named.posonlyargs,
        *named.args,
        *named.kwonlyargs,
        *filter(None, (named.vararg, named.kwarg)),
    ]
    return [a.arg for a in arguments if a.annotation is None] + ([] if function.returns else ["its result"])


def test_no_path_of_one_machine() -> None:
    """Sources, notes and results name no directory of the machine that they were written on."""
    pattern = re.compile(r"(?<![\w.~-])/(?:work|farm|root|home|Users)/\w")
    texts = {".py", ".md", ".toml", ".txt", ".json", ".jsonl", ".svg", ""}
    places = ("*", ".ci/*", "requirements/*", "paper_notes/**/*", *(f"{column}/**/*" for column in COLUMNS))
    files = {path for place in places for path in ROOT.glob(place) if path.is_file() and path.suffix in texts}
    assert Path(__file__) in files
    assert [name_of(path) for path in sorted(files) if pattern.search(path.read_text())] == []


def test_the_wheel_ships_three_typed_packages(tmp_path: Path) -> None:
    """Every module of the three trees with py.typed, nothing of experiments. Built from a copy: no stale build/ counts."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for column in COLUMNS:
        shutil.copytree(ROOT / column, copy / column, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    build = "import sys, setuptools.build_meta as b; b.build_wheel(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=copy, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("tandem_kernels-*.whl")
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {name_of(path) for path in sources(*SHIPPED)} | {f"{package}/py.typed" for package in SHIPPED}
    assert shipped == wanted


NOTES = sorted((ROOT / "paper_notes").glob("*.md"))
MAX_NOTE = 200


@pytest.mark.parametrize("path", NOTES, ids=name_of)
def test_notes_stay_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_NOTE


@pytest.mark.parametrize(
    "path", [*sorted(ROOT.glob("*.md")), ROOT / "experiments/README.md", *NOTES], ids=name_of
)
def test_links_between_files_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", path.read_text())
    assert [target for target in targets if not (path.parent / target).exists()] == []


def test_the_tour_of_the_readme_runs() -> None:
    """The README's first two blocks, in the interpreter as the text below them says, so that no GPU is needed."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[:2]
    there, here = 'device, dtype = "cuda", torch.bfloat16', 'device, dtype = "cpu", torch.float32'
    tour = "".join(blocks)
    assert there in tour
    assert "rms_norm" in run_python(tour.replace(there, here), TRITON_INTERPRET="1").lower()


README_EXAMPLE = re.compile(r"```python\n# my_norm\.py\n(.*?)```", re.S)


@pytest.mark.parametrize(
    ("right", "wrong", "status"), [("", "", 0), ("dy.float() * weight", "(dy * weight).float()", 1)]
)
def test_the_readme_example_gets_the_verdict_it_promises(
    tmp_path: Path, right: str, wrong: str, status: int
) -> None:
    (example,) = README_EXAMPLE.findall((ROOT / "README.md").read_text())
    assert right in example
    (tmp_path / "my_norm.py").write_text(example.replace(right, wrong) if right else example)
    options = ["rms_norm", "--impl", "my_norm:rms_norm", "--dtype", "bf16", "--profile", "ci"]
    command = [sys.executable, "-m", "equivalence_tests", *options]
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    if status:
        assert "dx element" in done.stdout
