"""What it costs on the host to register an operation with PyTorch, in three ways. Runs on any CPU: nothing is launched.

    python -m experiments.registration [--json FILE]

The operation doubles its input (one ATen call, so the rest is the registration's own cost); the figures are medians of batches.
    bare         autograd.Function over the plain function: cheapest, but no operator for torch.compile and fake tensors
    inside       autograd.Function outside, a torch.library operator inside: what fast/_triton/registration.py does
    custom_op    torch.library.custom_op with register_autograd
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BATCHES, BATCH = 31, 200


def ways() -> dict[str, Callable[[Tensor], Tensor]]:
    """The same differentiable function, registered in each way."""
    library = torch.library.Library("tandem_experiment", "DEF")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: x + x, "CPU")
    torch.library.register_fake("tandem_experiment::double", torch.empty_like, lib=library)
    operator = torch.ops.tandem_experiment.double.default

    def function(double: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                ctx.save_for_backward(x)
                return double(x)

            @staticmethod
            def backward(ctx: Any, dy: Tensor) -> Tensor:
                return double(dy)

        return Double.apply

    @torch.library.custom_op("tandem_experiment::double_custom", mutates_args=())
    def custom(x: Tensor) -> Tensor:
        return x + x

    custom.register_fake(torch.empty_like)
    custom.register_autograd(
        lambda ctx, dy: custom(dy), setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
    )
    ways.library = library  # the operators live as long as their library
    return {"bare": function(lambda x: x + x), "inside": function(operator), "custom_op": custom}


def microseconds(call: Callable[[], Any]) -> float:
    """Median over batches of the time of one call."""
    times = []
    for _ in range(BATCHES):
        start = time.perf_counter()
        for _ in range(BATCH):
            call()
        times.append((time.perf_counter() - start) / BATCH * 1e6)
    return statistics.median(times)


def measure() -> list[dict[str, Any]]:
    """One record per way: µs without gradients, forward with them, forward and backward."""
    from equivalence_tests.harness.report import environment

    torch.set_num_threads(1)
    x, dy, records = torch.randn(64, requires_grad=True), torch.randn(64), []
    for way, double in ways().items():
        with torch.no_grad():
            plain = microseconds(lambda double=double: double(x))
        forward = microseconds(lambda double=double: double(x))
        both = microseconds(lambda double=double: torch.autograd.grad(double(x), x, dy))
        records.append(
            {
                "registration": way,
                "no_grad_us": plain,
                "fwd_us": forward,
                "fwd_bwd_us": both,
                "environment": environment("cpu"),
            }
        )
    return records


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.registration", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write JSON lines, one record per way")
    given = parser.parse_args(argv)
    records = measure()
    for r in records:
        figures = f"no grad {r['no_grad_us']:6.1f}  forward {r['fwd_us']:6.1f}  with backward {r['fwd_bwd_us']:6.1f}"
        print(f"{r['registration']:10} {figures} µs")
    if given.json:
        given.json.write_text("".join(json.dumps(r) + "\n" for r in records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
