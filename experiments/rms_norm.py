"""RMSNorm measured: the rows that bench times, the peers beside it, and the fusion ladder from eager to fast.rms_norm."""

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from experiments._work import Call, Row, Unsupported


def row(
    shape: str,
    *,
    residual: bool = False,
    weight: bool = True,
    phases: tuple[str, ...] = ("fwd", "bwd"),
    **options: Any,
) -> Row:
    """`shape` is "M×N", or "B×T×H×DH in a packed qkv" for heads that lie strided in one tensor, with a note behind it."""
    sizes = [int(size) for size in shape.split()[0].split("×")]

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator | None) -> Call:
        def fresh(*size: int) -> Tensor:
            if generator is None:
                return torch.empty(size, dtype=dtype, device=device)
            return torch.randn(size, dtype=dtype, device=device, generator=generator)

        if "qkv" in shape:
            B, T, H, DH = sizes
            x = fresh(B, T, 3, H, DH)[:, :, 0].requires_grad_()
        else:
            x = fresh(*sizes).requires_grad_()
        kwargs = dict(options)
        cotangents = (fresh(*sizes),)
        if residual:
            kwargs["residual"] = fresh(*sizes).requires_grad_()
            cotangents = (*cotangents, fresh(*sizes))
        gain = (
            (fresh(sizes[-1]) * 0.1 + 1.0 - options.get("weight_offset", 0.0)).requires_grad_()
            if weight
            else None
        )
        return Call((x, gain), kwargs, cotangents)

    return Row("rms_norm", "rms_norm", shape, make, phases)


ROWS = [
    *(
        row(shape)
        for shape in ("262144×128", "65536×1024", "16384×4096", "16384×8192", "4096×32768", "4096×65536")
    ),
    row("16384×4096 + residual", residual=True, phases=("fwd", "bwd", "fwd+bwd")),
    row("4×4096×32×128 in qkv"),
    row("16384×4096 gemma", casting="gemma", weight_offset=1.0),
]


def compiled(architecture: int) -> Iterator[Row]:
    """Rows whose widths reach every configuration of the tables, the narrowest and the widest that each serves."""
    from fast._triton import tuning

    limits = set()
    for table in tuning.tables(import_module("fast.rms_norm")):
        served = table.rows[max(a for a in table.rows if a <= max(architecture, min(table.rows)))]
        limits |= {limit for limit, _ in served if limit > 1}
    for N in sorted(limits | {2 * max(limits)}):
        yield row(f"512×{N}")
        yield row(f"512×{N - 1}", residual=True, casting="gemma", weight_offset=1.0)


def _torch() -> Callable:
    def rms_norm(
        x: Tensor,
        weight: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        eps: float = 1e-6,
        weight_offset: float = 0.0,
        casting: str = "llama",
    ) -> Any:
        s = x if residual is None else x + residual
        if casting == "gemma":
            gain = None if weight is None else weight.float() + weight_offset
            y = torch.nn.functional.rms_norm(s.float(), s.shape[-1:], gain, eps).to(x.dtype)
        else:
            y = torch.nn.functional.rms_norm(s, s.shape[-1:], weight, eps)
        y = y if bias is None else y + bias
        return y if residual is None else (y, s)

    return rms_norm


def _liger() -> Callable:
    from liger_kernel.ops import LigerFusedAddRMSNormFunction, LigerRMSNormFunction

    def rms_norm(
        x: Tensor,
        weight: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        eps: float = 1e-6,
        weight_offset: float = 0.0,
        casting: str = "llama",
    ) -> Any:
        if bias is not None:
            raise Unsupported("liger has no bias")
        if residual is None:
            return LigerRMSNormFunction.apply(x, weight, eps, weight_offset, casting, True, None)
        return LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps, weight_offset, casting, False)

    return rms_norm


def _quack() -> Callable:
    from quack.rmsnorm import rmsnorm

    def rms_norm(
        x: Tensor,
        weight: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        eps: float = 1e-6,
        weight_offset: float = 0.0,
        casting: str = "llama",
    ) -> Any:
        dtype = None if residual is None else residual.dtype
        return rmsnorm(
            x,
            weight,
            bias,
            residual,
            residual_dtype=dtype,
            eps=eps,
            prenorm=residual is not None,
            weight_offset=weight_offset,
        )

    return rms_norm


PEERS = {"torch": _torch, "liger": _liger, "quack": _quack}

NOTES = {
    "torch": "torch.nn.functional.rms_norm; a residual is added before it, gemma's cast and offset are ops around it",
    "liger": "with its modules' defaults: without a residual dx is written into the incoming gradient (in_place=True)",
    "quack": "rounds once, as casting='gemma' does, whatever the row asks; strided heads are copied by its wrapper",
}
