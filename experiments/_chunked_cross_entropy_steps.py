"""The steps between eager PyTorch and fast.chunked_cross_entropy: the gradients of the mean, without options."""

import torch
from torch import Tensor
from torch.nn import functional

from fast._triton.matmul import add_matmul
from reference.chunked_cross_entropy import cross_entropy_backward

TOKENS = 64


def eager_logits(logits: Tensor, target: Tensor) -> tuple[Tensor]:
    one = torch.ones((), device=logits.device)
    return (cross_entropy_backward((one,), logits, target)["logits"],)


def softmax_once(logits: Tensor, target: Tensor) -> tuple[Tensor]:
    p = torch.softmax(logits, -1, dtype=torch.float32)
    p.scatter_add_(1, target[:, None], p.new_full((len(p), 1), -1.0))
    return (p.mul_(1 / max(1, len(p))).to(logits.dtype),)


def eager_head(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    (dr,) = eager_logits(add_matmul(None, x, weight.T), target)
    dr = dr.to(x.dtype)
    return add_matmul(None, dr, weight).to(x.dtype), add_matmul(None, dr.T, x).to(weight.dtype)


def tokens_in_turn(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    dx, dweight = [], None
    for rows, labels in zip(x.split(TOKENS), target.split(TOKENS), strict=True):
        logits = add_matmul(None, rows, weight.T)
        p = functional.softmax(logits, -1)
        p.scatter_add_(1, labels[:, None], p.new_full((len(p), 1), -1.0))
        dr = p.to(x.dtype)
        dx.append((add_matmul(None, dr, weight) / len(x)).to(x.dtype))
        dweight = add_matmul(dweight, dr.T, rows)
    return torch.cat(dx), (dweight / len(x)).to(weight.dtype)
