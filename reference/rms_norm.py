"""RMSNorm, optionally with a residual added first. Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467

Dimension key: M rows (the product of all leading dims), N columns.

    s  = round(x + residual)                    residual_out; s = x without residual
    r  = 1 / sqrt(mean(s², over N) + eps)       one per row
    x̂  = s · r
    y  = round(round(x̂) · (weight + offset) + bias)      casting="llama"
    y  = round(x̂ · (weight + offset) + bias)             casting="gemma"

Where values are rounded (everything else is computed in fp32, or float64 where an input is float64):
    residual_out to residual's dtype, and the norm sees the rounded sum, as an unfused model does;
    x̂ to x's dtype under "llama" (Llama, Mistral, Qwen, Phi-3, Mixtral, DeepSeek), not under "gemma" (Gemma, OLMo2, gpt-oss);
    y to promote(x.dtype, weight.dtype) under "llama", to x's dtype under "gemma" (bias does not change y's dtype).
The gradients have no rounding but that of each result to the dtype of its argument: rounding is passed straight through.
"""

from math import isfinite
from typing import Annotated, Literal, get_args

import torch
from torch import Tensor

from reference._cost import Cost, Work, nbytes
from reference._numerics import Term
from reference._signature import Choices, Dims, check, promote

Rows = Annotated[Tensor, Dims("* N")]
Columns = Annotated[Tensor | None, Dims("N", dtype="own")]
Residual = Annotated[Tensor | None, Dims("* N", dtype="own")]
Eps = Annotated[float, Choices((1e-6, 1e-5, 0.0))]
Offset = Annotated[float, Choices((0.0, 1.0), needs="weight")]
Casting = Literal["llama", "gemma"]


def rms_norm(
    x: Rows,
    weight: Columns = None,
    *,
    bias: Columns = None,
    residual: Residual = None,
    eps: Eps = 1e-6,
    weight_offset: Offset = 0.0,
    casting: Casting = "llama",
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise each row of x [*, N] by its root mean square; returns y, or (y, residual_out) when residual [*, N] is given.

    weight, bias: [N], any floating dtype. Without a weight y = x̂ (+ bias), and weight_offset must stay 0.
    residual: its own dtype, which residual_out has too. eps: ≥ 0, added to the mean square.
    Raises TypeError for a dtype that is not floating point and an option that is no number; ValueError for a shape, device or
    option that is not allowed.
    """
    check_rms_norm(x, weight, bias, residual, eps, weight_offset, casting)
    wide = promote(x, weight, bias, residual)
    s = x if residual is None else (x.to(wide) + residual.to(wide)).to(residual.dtype)
    xhat = s.to(wide) * _rstd(s.to(wide), eps)
    if casting == "llama":
        xhat = xhat.to(x.dtype).to(wide)
    y = xhat * _gain(weight, weight_offset, wide)
    y = (y if bias is None else y + bias.to(wide)).to(result_dtype(x, weight, casting))
    return y if residual is None else (y, s)


def rms_norm_backward(
    cotangents: tuple[Tensor, ...],
    x: Tensor,
    weight: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    casting: str = "llama",
) -> dict[str, Tensor]:
    """The gradients by name, from the cotangents (dy,) or (dy, dresidual_out); differentiable itself.

    g = dy ∘ (w + offset);  ds = r (g − x̂ · mean(g ∘ x̂)) + dresidual_out;  dw = Σ_m dy ∘ x̂;  db = Σ_m dy.
    x and residual enter only by their sum, so ds is the gradient of both.
    """
    wide = promote(x, weight, bias, residual)
    s = (x if residual is None else (x.to(wide) + residual.to(wide)).to(residual.dtype)).to(wide)
    dy, r = cotangents[0].to(wide), _rstd(s, eps)
    g, xhat = dy * _gain(weight, weight_offset, wide), s * r
    ds = r * (g - xhat * (g * xhat).mean(-1, keepdim=True))
    ds = ds if residual is None else ds + cotangents[1].to(wide)
    rows = tuple(range(x.dim() - 1))
    grads = {"x": ds.to(x.dtype)}
    if weight is not None:
        grads["weight"] = _sum(dy * xhat, rows).to(weight.dtype)
    if bias is not None:
        grads["bias"] = _sum(dy, rows).to(bias.dtype)
    if residual is not None:
        grads["residual"] = ds.to(residual.dtype)
    return grads


def rms_norm_majorant(
    cotangents: tuple[Tensor, ...],
    x: Tensor,
    weight: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    casting: str = "llama",
) -> dict[str, list[Term]]:
    """Error majorants of "y", "residual_out" and the gradients "dx", "dweight", …; inputs in float64, dtypes as in the call.

    r carries half the relative error of its sum of squares (Σ s² has no cancellation), and a division and a root of
    2 ulp each, i.e. 4 roundings;
    a rounded s moves r by u and x̂ by 2u. In ds the factor r enters three times (outside, and in both x̂), so it carries
    3/2 sums of squares and the sum of mean(g x̂): three sums at most.
    """
    dtypes = {"x": x.dtype, "residual": None if residual is None else residual.dtype}
    x, weight, bias, residual, dy = (
        None if t is None else t.double() for t in (x, weight, bias, residual, cotangents[0])
    )
    s = x if residual is None else x + residual
    stored = () if residual is None else (dtypes["residual"],)
    N, M, rows = s.shape[-1], max(1, s[..., 0].numel()), tuple(range(s.dim() - 1))
    r, gain = _rstd(s, eps), _gain_majorant(weight, weight_offset)
    xhat, g = (s * r).abs(), dy.abs() * gain
    llama = (dtypes["x"],) if casting == "llama" else ()
    moved = r * (1 + xhat) if stored else torch.zeros_like(xhat)  # of x̂ by a unit error of every s
    product = Term(xhat * gain, (N,), 12, 2 * stored + llama, unit=(moved + bool(llama)) * gain)
    terms = {"y": [product] if bias is None else [product, Term(bias.abs().expand_as(s), ops=1)]}
    c = (g * xhat).mean(-1, keepdim=True)
    slope = r * (g + xhat * c)
    unit = r * (slope + moved * c + xhat * (g * moved).mean(-1, keepdim=True))
    terms["dx"] = [Term(slope, (N,) * 3, 36, 5 * stored, unit)]
    if residual is not None:
        terms["residual_out"] = []
        terms["dx"].append(Term(cotangents[1].double().abs(), ops=1))
        terms["dresidual"] = terms["dx"]
    if weight is not None:
        terms["dweight"] = [
            Term(_sum(dy.abs() * xhat, rows), (M, N), 12, 2 * stored, _sum(dy.abs() * moved, rows))
        ]
    if bias is not None:
        terms["dbias"] = [Term(_sum(dy.abs(), rows), sums=(M,), ops=1)]
    return terms


def rms_norm_cost(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    casting: str = "llama",
) -> Cost:
    """Only shapes and dtypes are read. Backward reads dy, s, weight and r, writes ds and the parameters' gradients."""
    y = torch.empty(x.shape, dtype=result_dtype(x, weight, casting), device="meta")
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device="meta")
    s = x if residual is None else residual
    mixed = residual is not None and residual.dtype != x.dtype
    forward = nbytes(x, weight, bias, y, rstd) + (0 if residual is None else nbytes(residual, s))
    backward = (
        nbytes(y, s, rstd, weight, s, weight, bias)
        + (nbytes(s) if residual is not None else 0)
        + (nbytes(x) if mixed else 0)
    )
    return Cost(Work(6 * x.numel(), forward), Work(13 * x.numel(), backward), nbytes(s, weight, rstd))


COST = {"rms_norm": rms_norm_cost}


def check_rms_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    weight_offset: float,
    casting: str,
) -> None:
    """Raise the error that names the argument; shared by both trees."""
    sizes = check(
        "rms_norm",
        {"x": (x, "* N"), "weight": (weight, "N"), "bias": (bias, "N"), "residual": (residual, "* N")},
    )
    if sizes["N"] == 0:
        raise ValueError(f"rms_norm: the last dimension of x must be at least 1, got shape {list(x.shape)}")
    for name, number in (("eps", eps), ("weight_offset", weight_offset)):
        if not hasattr(number, "__float__"):
            raise TypeError(f"rms_norm: {name} must be a number, got {number!r}")
    if not eps >= 0:
        raise ValueError(f"rms_norm: eps must be a number ≥ 0, got {eps!r}")
    if not isfinite(weight_offset):
        raise ValueError(f"rms_norm: weight_offset must be finite, got {weight_offset!r}")
    if weight is None and weight_offset != 0:
        raise ValueError(
            f"rms_norm: weight_offset is added to weight, and weight is None; it must be 0, got {weight_offset!r}"
        )
    if casting not in get_args(Casting):
        raise ValueError(f"rms_norm: casting must be one of {get_args(Casting)}, got {casting!r}")


def result_dtype(x: Tensor, weight: Tensor | None, casting: str) -> torch.dtype:
    """dtype of y."""
    return (
        torch.promote_types(x.dtype, weight.dtype) if casting == "llama" and weight is not None else x.dtype
    )


def _rstd(s: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + eps)


def _gain(weight: Tensor | None, offset: float, wide: torch.dtype) -> Tensor | float:
    return 1.0 if weight is None else weight.to(wide) + offset


def _gain_majorant(weight: Tensor | None, offset: float) -> Tensor | float:
    return 1.0 if weight is None else weight.abs() + abs(offset)


def _sum(rows_of_terms: Tensor, rows: tuple[int, ...]) -> Tensor:
    return rows_of_terms.sum(rows) if rows else rows_of_terms
