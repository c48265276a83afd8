"""Plain matrix products through torch (cuBLAS on a GPU): fp32 accumulation, one rounding, results where they are wanted."""

import torch
from torch import Tensor


def matmul(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a [M, K] · b [K, N], rounded once to a's dtype, into `out` if given.

    fp32 products follow torch.backends.cuda.matmul: IEEE unless the caller allowed TF32. On a CPU, where torch may accumulate
    16-bit products in 16 bits, they are computed in fp32.
    """
    if a.device.type == "cpu":
        product = (a.float() @ b.float()).to(a.dtype)
        return product if out is None else out.copy_(product)
    return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)


def add_matmul(acc: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """acc + a · b as fp32 [M, N], in acc's memory; a · b where there is no acc yet."""
    if a.device.type == "cpu" or a.dtype == torch.float32:
        a, b = a.float(), b.float()
        return a @ b if acc is None else acc.addmm_(a, b)
    if acc is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.addmm(acc, a, b, out_dtype=torch.float32, out=acc)
