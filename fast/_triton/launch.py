"""What stands between a tensor and a kernel: what is supported, on which device it runs, how rows are addressed."""

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

SUPPORTED = (torch.float32, torch.float16, torch.bfloat16)


def interpreting() -> bool:
    """Whether Triton's interpreter runs the kernels (TRITON_INTERPRET=1 before triton was imported)."""
    return triton.knobs.runtime.interpret


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
            raise ValueError(f"fast.{function}: {name} is on {tensor.device}; supported are CUDA devices. See reference.{function}")
        if tensor.device.type == "cpu" and not interpreting():
            raise ValueError(
                f"fast.{function}: {name} is on the CPU; kernels run there only in Triton's interpreter "
                f"(TRITON_INTERPRET=1 before triton is imported). reference.{function} runs on the CPU"
            )


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **options: Any) -> None:
    """Run the kernel on the tensors' device, which need not be the current one."""
    if device.type == "cpu":
        # Uncorrected, the interpreter truncates bf16 and computes garbage with it.
        from equivalence_tests.harness import interpreter

        interpreter.correct()
        here = nullcontext()
    else:
        here = torch.cuda.device(device)
    with here:
        kernel[grid](*args, **options)


class Rows(NamedTuple):
    """A tensor [*, N] as rows with unit column stride: row m lies at (m // inner) * outer_stride + (m % inner) * inner_stride."""

    tensor: Tensor
    outer_stride: int
    inner_stride: int
    inner: int


def as_rows(x: Tensor) -> Rows:
    """View the leading dims of x as rows. Copies only where two strides and a unit column stride cannot address them."""
    groups: list[tuple[int, int]] = []  # (size, stride) of the merged leading dims, outermost first
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if groups and groups[-1][1] == stride * size:
            groups[-1] = (groups[-1][0] * size, stride)
        else:
            groups.append((size, stride))
    if len(groups) > 2 or (x.stride(-1) != 1 and x.shape[-1] > 1):
        return Rows(x.contiguous(), x.shape[-1], 0, 1)
    if len(groups) < 2:
        return Rows(x, groups[0][1] if groups else 0, 0, 1)
    (_, outer_stride), (inner, inner_stride) = groups
    return Rows(x, outer_stride, inner_stride, inner)
