"""What stands between a tensor and a kernel: what is supported, and on which device it runs."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fast._triton.device import interpreting

SUPPORTED = (torch.float32, torch.float16, torch.bfloat16)


def check_supported(function: str, **tensors: Tensor | None) -> None:
    """Raise for a dtype or device that the kernels cannot take, and name the reference function that can."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype not in SUPPORTED:
            raise TypeError(
                f"fast.{function}: {name} has dtype {tensor.dtype}; supported are float32, float16 and bfloat16. "
                f"reference.{function} takes any floating dtype"
            )
        if tensor.device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"fast.{function}: {name} is on {tensor.device}; supported are CUDA devices. See reference.{function}"
            )
        if tensor.device.type == "cpu" and not interpreting():
            raise ValueError(
                f"fast.{function}: {name} is on the CPU; kernels run there only in Triton's interpreter "
                f"(TRITON_INTERPRET=1 before triton is imported). reference.{function} runs on the CPU"
            )


def cdiv(a: int, b: int) -> int:
    """⌈a / b⌉; triton.cdiv is made for kernels and takes microseconds on the host."""
    return -(-a // b)


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **options: Any) -> None:
    """Run the kernel on the tensors' device, which need not be the current one.

    Without fused multiply-adds: which ones the compiler forms depends on what else a kernel computes, so the gradient of x would
    have other bits where that of the weight is not asked for (seen on an H200 at N = 785).
    """
    if device.type == "cpu":
        # Uncorrected, the interpreter truncates bf16 and computes garbage with it.
        from equivalence_tests.harness import interpreter

        interpreter.correct()
        here = nullcontext()
    else:
        here = torch.cuda.device(device)
    with here:
        kernel[grid](*args, enable_fp_fusion=False, **options)
