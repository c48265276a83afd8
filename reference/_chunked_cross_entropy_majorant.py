"""Error majorants of reference/chunked_cross_entropy.py: what the roundings that it admits to can do, to first order.

z passes on r's errors with the softcap's slope, lse averages those of z by the softmax, and p = exp(z − lse) multiplies both,
with the rounding of the exponent, by p. The sum of exponentials is rescaled when a larger z comes: of its range, too, exponents
are rounded. tanh is good to some units of 1, not of itself.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from reference._numerics import Term, contracted, times


class _Judged(NamedTuple):
    """loss: its terms. dr [M, V]: its magnitude, and terms before it is rounded. unit: what rounding to fp16 may add.
    at_label [M, V]: 1 at the labels, else 0."""

    loss: list[Term]
    dr: Tensor
    of_dr: list[Term]
    unit: Tensor
    at_label: Tensor


def cross_entropy_majorant(
    cotangents: tuple[Tensor, ...],
    logits: Tensor,
    target: Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    shift: bool = False,
    return_stats: bool = False,
) -> dict[str, list[Term]]:
    """Error majorants of "loss" and of the gradient "dlogits"."""
    V = logits.shape[-1]
    options = _Options(
        reduction, ignore_index, label_smoothing, z_loss, softcap, logit_scale, class_weight, token_weight, normalizer, shift
    )  # fmt: skip
    found = _judged(cotangents[0], logits.double().reshape(-1, V), [], target, options)
    return {"loss": found.loss, "dlogits": [_shaped(t, logits.shape) for t in found.of_dr]}


def chunked_cross_entropy_majorant(
    cotangents: tuple[Tensor, ...],
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    shift: bool = False,
    lora: tuple | None = None,
    keep: str = "auto",
    chunk_bytes: int | None = None,
    return_stats: bool = False,
) -> dict[str, list[Term]]:
    """Error majorants of "loss", "dx", "dweight" and "dbias". A LoRA's are not bounded: its tests compare norms."""
    if lora is not None:
        raise NotImplementedError("the majorant has no lora")
    (V, D), rows = weight.shape, x.double().reshape(-1, weight.shape[1])
    w = weight.double()
    r, size = rows @ w.T, rows.abs() @ w.abs().T
    if bias is not None:
        r, size = r + bias.double(), size + bias.double().abs()
    options = _Options(
        reduction, ignore_index, label_smoothing, z_loss, softcap, logit_scale, class_weight, token_weight, normalizer, shift
    )  # fmt: skip
    found = _judged(cotangents[0], r, [Term(size, sums=(D,), ops=2)], target, options)
    M, dr = len(rows), found.dr
    if x.dtype == torch.float32:
        of_dr = [*found.of_dr, Term(dr, ops=1)]
    else:
        # Roundings of many elements average out. That at the label does not: it is one, and the largest of its row by far.
        worst = round(torch.finfo(x.dtype).eps / 2 * 2**24)
        others = Term(dr * (1 - found.at_label), rounded=(x.dtype,), unit=found.unit)
        of_dr = [*found.of_dr, others, Term(dr * found.at_label, ops=worst)]
    dx = contracted(of_dr, lambda part: part @ w.abs(), lambda part: part @ w.square())
    dw = contracted(of_dr, lambda part: part.T @ rows.abs(), lambda part: part.T @ rows.square())
    terms = {
        "loss": found.loss,
        "dx": [_shaped(t, x.shape) for t in [*dx, Term(dr @ w.abs(), sums=(V,), ops=4)]],
        "dweight": [*dw, Term(dr.T @ rows.abs(), sums=(M,), ops=4)],
    }
    if bias is not None:
        db = contracted(of_dr, lambda part: part.sum(0), lambda part: part.sum(0))
        terms["dbias"] = [*db, Term(dr.sum(0), sums=(M,), ops=4)]
    return terms


class _Options(NamedTuple):
    reduction: str
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    logit_scale: float
    class_weight: Tensor | None
    token_weight: Tensor | None
    normalizer: float | Tensor | None
    shift: bool


def _judged(dloss: Tensor, r: Tensor, of_r: list[Term], target: Tensor, options: _Options) -> _Judged:
    """Of logits r [M, V] with errors of_r."""
    (
        reduction, ignore_index, label_smoothing, z_loss, softcap, logit_scale, class_weight, token_weight, normalizer, shift,
    ) = options  # fmt: skip
    from reference.chunked_cross_entropy import shifted

    shape = target.shape
    target, token_weight = shifted(target, token_weight, ignore_index) if shift else (target, token_weight)
    target, (M, V) = target.reshape(-1), r.shape
    valid = (target != ignore_index) & (target >= 0) & (target < V)
    label = torch.where(valid, target, 0).long()[:, None]
    # A row that is left out holds anything.
    r, of_r = _rows(r, valid), [_kept(t, valid) for t in of_r]
    w = r.new_ones(V) if class_weight is None else class_weight.double()
    token = r.new_ones(M) if token_weight is None else token_weight.double().reshape(-1)
    token = torch.where(valid, token, 0.0)
    divisor = r.new_ones(())
    if normalizer is not None:
        divisor = torch.as_tensor(normalizer, dtype=torch.float64, device=r.device).reshape(())
    elif reduction == "mean":
        divisor = (w[label[:, 0]] * token).sum()
        divisor = torch.where(divisor == 0, 1.0, divisor)

    # z, lse, p
    z, of_z = (
        logit_scale * r,
        [*times(of_r, r.new_full((), logit_scale)), Term((logit_scale * r).abs(), ops=1)],
    )
    slope, tanh = r.new_ones(()), r.new_zeros(())
    if softcap is not None:
        tanh = torch.tanh(z / softcap)
        slope, z = 1 - tanh.square(), softcap * tanh
        of_z = [*times(of_z, slope), Term(softcap + z.abs(), ops=10)]
    lse = torch.logsumexp(z, 1, keepdim=True)
    p, largest = torch.exp(z - lse), z.amax(1, keepdim=True)
    extent = largest - z.where(z.isfinite(), largest).amin(1, keepdim=True)
    of_lse = [_summed(t, p) for t in of_z]
    of_lse += [
        Term(torch.ones_like(lse), sums=(V, V), ops=10),
        Term(extent + lse.abs() + largest.abs(), ops=4),
    ]

    # l and the loss
    smooth, w_y, z_y = label_smoothing / V, w[label], z.gather(1, label)
    of_label = token[:, None].abs() * (1 - label_smoothing) * w_y.abs()
    of_all = token[:, None].abs() * smooth
    by_lse = of_label + of_all * w.abs().sum() + 2 * token[:, None].abs() * z_loss * lse.abs()
    size = of_label * (lse.abs() + z_y.abs()) + token[:, None].abs() * z_loss * lse.square()
    of_l = [*times(of_lse, by_lse), *(_picked(t, label, of_label) for t in of_z), Term(size, ops=10)]
    if label_smoothing:
        of_l += [_summed(t, of_all * w.abs()) for t in of_z]
        of_l += [Term((of_all * w.abs() * (lse.abs() + z.abs())).sum(1, keepdim=True), sums=(V,), ops=8)]
        size = size + (of_all * w.abs() * (lse.abs() + z.abs())).sum(1, keepdim=True)
    if reduction == "none":
        loss = [_shaped(t, shape) for t in of_l]
        dloss = dloss.double().reshape(-1, 1)
    else:
        loss = [_whole(t, divisor) for t in of_l] + [Term(size.sum() / divisor.abs(), sums=(M, M), ops=8)]
        dloss = dloss.double().reshape(1, 1).expand(M, 1)

    # dr
    g = (dloss / divisor).abs()
    a, b, c = g * by_lse, g * of_label, g * of_all * w.abs()
    signed = token[:, None] * ((1 - label_smoothing) * w_y + smooth * w.sum() + 2 * z_loss * lse)
    dz = (dloss / divisor) * (signed * p - token[:, None] * smooth * w)
    dz = dz.scatter_add(1, label, -(dloss / divisor) * token[:, None] * (1 - label_smoothing) * w_y).abs()
    parts = (a * p + c).scatter_add(1, label, b)
    of_dz = [
        *times(of_z, a * p),
        *(
            replace(t, value=t.value * (a + 2 * g * token[:, None].abs() * z_loss) * p, unit=None, rms=None)
            for t in of_lse
        ),
        Term(a * p * (z.abs() + lse.abs()), ops=3),
        Term(parts, sums=(M,), ops=16),
        Term(torch.zeros_like(p), rounded=(torch.float32,), unit=a.expand_as(p)),
    ]
    if label_smoothing:
        of_dz += [Term(a * p, sums=(V,))]
    chain = (logit_scale * slope).abs() if isinstance(slope, Tensor) else abs(logit_scale)
    of_dr = [*times(of_dz, chain * torch.ones_like(p)), Term(dz * chain, ops=3)]
    if softcap is not None:
        of_dr += times(of_z, dz * abs(logit_scale) * 2 * tanh.abs() / softcap)
        of_dr += [Term(dz * abs(logit_scale) * (1 + tanh.square()), ops=4)]
    dr = torch.where(valid[:, None], dz * chain, 0.0)
    of_dr = [_kept(t, valid) for t in of_dr]
    most = (a + b + c.amax(1, keepdim=True)).amax() * abs(logit_scale) if M else r.new_zeros(())
    unit = torch.ones_like(dr) * (most * 2.0**-12)
    return _Judged(loss, dr, of_dr, unit, torch.zeros_like(dr).scatter(1, label, 1.0))


def _rows(t: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid[:, None], t, 0.0)


def _kept(term: Term, valid: Tensor) -> Term:
    """Nothing of rows that are left out."""
    parts = {name: None if part is None else _rows(part, valid) for name, part in _parts(term)}
    return replace(term, **parts)


def _summed(term: Term, weights: Tensor) -> Term:
    """Σ_v weights · the term's, [M, 1]; roundings of different v are taken to be one."""
    parts = {
        name: None if part is None else torch.where(weights > 0, weights * part, 0.0).sum(1, keepdim=True)
        for name, part in _parts(term)
    }
    return replace(term, **parts)


def _picked(term: Term, label: Tensor, factor: Tensor) -> Term:
    parts = {name: None if part is None else part.gather(1, label) * factor for name, part in _parts(term)}
    return replace(term, **parts)


def _whole(term: Term, divisor: Tensor) -> Term:
    parts = {name: None if part is None else part.sum() / divisor.abs() for name, part in _parts(term)}
    return replace(term, **parts)


def _shaped(term: Term, shape: torch.Size) -> Term:
    parts = {name: None if part is None else part.reshape(shape) for name, part in _parts(term)}
    return replace(term, **parts)


def _parts(term: Term) -> list[tuple[str, Tensor | None]]:
    return [(name, getattr(term, name)) for name in ("value", "unit", "rms")]
