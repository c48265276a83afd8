"""The command line: judge implementations of the operations against their float64 reference.

Exit status 0 if everything that was selected passed, 1 for a mismatch, 2 for bad usage.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from equivalence_tests.harness.usage import UsageError


def main(argv: list[str] | None = None) -> int:
    """Parse, run, report; returns the exit status."""
    parser = _parser()
    given = parser.parse_args(argv)
    try:
        device = _device(given.device)
        # Only now, because whether kernels are interpreted is decided when triton is first imported.
        from equivalence_tests.harness import command

        _writable("--json", given.json)
        _writable("--html", given.html)
        return command.execute(given, device)
    except UsageError as error:
        print(f"equivalence_tests: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m equivalence_tests", description=__doc__.splitlines()[0])
    parser.add_argument("op", nargs="*", metavar="OP", help="operations or functions (all of them)")
    parser.add_argument("--impl", help="fast (default), a peer's name, or package.module:function")
    parser.add_argument("--profile", default="quick", help="how much is tried (quick)")
    parser.add_argument("--dtype", nargs="+", metavar="DTYPE", help="working dtypes (all of them)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="cuda where there is a GPU, else cpu: Triton's interpreter"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write one record per operation, function and dtype"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the same as a page")
    parser.add_argument(
        "--mutants",
        action="store_true",
        help="plant the operations' known bugs, and demand that each is refused",
    )
    parser.add_argument(
        "--replay", type=Path, metavar="FILE", help="run a saved failure again, and nothing else"
    )
    parser.add_argument("--list", action="store_true", help="say what there is, and stop")
    parser.add_argument("--seed", type=int, default=0, help="draw other cases (0: the same every time)")
    return parser


def _device(asked: str | None) -> str:
    """cpu or cuda, and TRITON_INTERPRET to match."""
    import torch

    interpret = os.environ.get("TRITON_INTERPRET") == "1"
    device = asked or ("cuda" if torch.cuda.is_available() and not interpret else "cpu")
    if device == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(
                "--device cuda: torch sees no GPU; --device cpu runs the kernels in Triton's interpreter"
            )
        if interpret:
            raise UsageError("--device cuda: TRITON_INTERPRET=1 is set; unset it, or say --device cpu")
        # cuBLAS is deterministic only with a workspace of fixed size; without it torch warns while memory is poisoned.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    elif not interpret:
        if "triton" in sys.modules:
            raise UsageError(
                "triton was imported before TRITON_INTERPRET=1 could be set; set it in the environment"
            )
        os.environ["TRITON_INTERPRET"] = "1"
    if device == "cpu":
        # Interpreted tensors are small; a second thread that waits for a busy core makes torch several times slower.
        torch.set_num_threads(1)
    return device


def _writable(option: str, path: Path | None) -> None:
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"{option} {path}: that is a directory")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            return
    except OSError as error:
        raise UsageError(f"{option} {path}: cannot be written: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
