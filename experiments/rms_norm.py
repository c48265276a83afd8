"""RMSNorm measured: the rows that bench times, the peers beside it, and the fusion ladder from eager to fast.rms_norm."""

import random
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from experiments._ladder import Ladder, Step, main
from experiments._work import Call, Row


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
    weight = weight and "no weight" not in shape

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


def random_shape(generator: random.Random) -> str:
    """Any row width that is promised, few enough elements for a CPU to allocate."""
    N = int(2 ** generator.uniform(0, 17))
    return f"{generator.randint(1, max(1, 2**20 // N))}×{N}"


def _torch() -> Callable:
    def rms_norm(x, weight=None, *, bias=None, residual=None, eps=1e-6, weight_offset=0.0, casting="llama"):
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

    def rms_norm(x, weight=None, *, bias=None, residual=None, eps=1e-6, weight_offset=0.0, casting="llama"):
        if bias is not None:
            raise NotImplementedError("liger has no bias")
        if residual is None:
            return LigerRMSNormFunction.apply(x, weight, eps, weight_offset, casting, True, None)
        return LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps, weight_offset, casting, False)

    return rms_norm


def _quack() -> Callable:
    from quack.rmsnorm import rmsnorm

    def rms_norm(x, weight=None, *, bias=None, residual=None, eps=1e-6, weight_offset=0.0, casting="llama"):
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


PEERS = {"torch": {"rms_norm": _torch}, "liger": {"rms_norm": _liger}, "quack": {"rms_norm": _quack}}

NOTES = {
    "torch": "torch.nn.functional.rms_norm; a residual is added before it, gemma's cast and offset are ops around it",
    "liger": "with its modules' defaults: without a residual dx is written into the incoming gradient (in_place=True)",
    "quack": "rounds once, as casting='gemma' does, whatever the row asks; strided heads are copied by its wrapper",
}


def _eager_once(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    rstd = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * rstd).to(x.dtype) * weight


def _eager_backward_once(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    wide, r = dy.float(), rstd[:, None]
    xhat, g = x * r, wide * weight
    c = torch.linalg.vecdot(g, xhat).div_(x.shape[-1])[:, None]
    dx = g.addcmul_(xhat, c, value=-1).mul_(r).to(x.dtype)
    return dx, (wide * xhat).sum(0).to(weight.dtype)


def ladders() -> tuple[Ladder, Ladder]:
    """Forward and backward, each from separate eager operations to fast.rms_norm."""
    import fast
    from experiments import _rms_norm_kernels as kernels

    eps, launcher = 1e-6, import_module("fast.rms_norm").rms_norm_bwd
    definition = import_module("reference.rms_norm")

    def forward(
        sizes: list[int], dtype: torch.dtype, device: torch.device, generator: torch.Generator
    ) -> dict[str, Tensor]:
        x, w = (torch.randn(size, device=device, generator=generator) for size in (sizes, sizes[-1:]))
        return {"x": x.to(dtype), "weight": w.to(dtype)}

    def backward(*given: Any) -> dict[str, Tensor]:
        inputs = forward(*given)
        x, dy = (
            inputs["x"].float(),
            torch.randn(inputs["x"].shape, device=inputs["x"].device, generator=given[-1]),
        )
        return {"dy": dy.to(inputs["x"].dtype), **inputs, "rstd": torch.rsqrt(x.square().mean(-1) + eps)}

    def fast_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        dx, _, dw, _ = launcher(dy, None, x, weight, rstd, 0.0, x.dtype, None, weight.dtype, None)
        return dx, dw

    def eager_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        gradients = definition.rms_norm_backward((dy,), x, weight, eps=eps)
        return gradients["x"], gradients["weight"]

    def cost(inputs: dict[str, Tensor]) -> Any:
        return definition.COST["rms_norm"](inputs["x"], inputs["weight"])

    up = (
        Step(
            "eager",
            "One launch per operation, each with its result in memory, the first of them in fp32.",
            lambda x, weight: (definition.rms_norm(x, weight, eps=eps),),
        ),
        Step(
            "eager, cast once",
            "The fp32 copy of x is made once; the sum of squares is one reduction without its squares in memory.",
            lambda x, weight: (_eager_once(x, weight, eps),),
        ),
        Step(
            "two kernels",
            "All between the reads of x and the write of y stays in registers; x is read for r, and again for y.",
            lambda x, weight: (kernels.two_kernels(x, weight, eps),),
        ),
        Step(
            "one kernel",
            "A program holds its row in registers while it sums, so x is read once: the floor.",
            lambda x, weight: (kernels.one_kernel(x, weight, eps),),
        ),
        Step(
            "fast.rms_norm",
            "As many rows in a program as fill it, and a column loop for rows that no program can hold.",
            lambda x, weight: (fast.rms_norm(x, weight, eps=eps),),
            rises="The bytes are at their floor already; this buys time on narrow and on very wide rows.",
        ),
    )
    down = (
        Step(
            "eager",
            "The formulas one operation at a time; r and x̂ are computed again.",
            eager_backward,
        ),
        Step(
            "eager, r saved",
            "r comes from the forward pass (4 bytes a row), and products that are used once are not kept.",
            _eager_backward_once,
        ),
        Step(
            "dx, then dw",
            "A row's dx needs one number from the whole row and no intermediate in memory; dw reads dy and x again.",
            kernels.dx_then_dw,
        ),
        Step(
            "dx with partial dw",
            "dw's addends are summed while dy and x are in registers; every few rows leave an fp32 partial in memory.",
            kernels.partial_dw,
        ),
        Step(
            "fast.rms_norm",
            "Persistent programs keep their partial until their last row, so there are few partials, whatever M is.",
            fast_backward,
        ),
    )
    return (
        Ladder("rms_norm", "fwd", ("y",), forward, lambda inputs: cost(inputs).forward, up),
        Ladder("rms_norm", "bwd", ("dx", "dweight"), backward, lambda inputs: cost(inputs).backward, down),
    )


if __name__ == "__main__":
    sys.exit(main("rms_norm"))
