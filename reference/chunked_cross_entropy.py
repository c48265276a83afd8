"""Cross-entropy of a language model's head, from hidden states or from logits.

Dimension key: M tokens (the product of all leading dims), D model width, V vocabulary, R rank of a LoRA on the head.

    r = x · weightᵀ + s · (x · Aᵀ) · Bᵀ + bias                     [M, V]     `cross_entropy` starts from r, the logits
    z = cap(logit_scale · r),  cap(t) = softcap · tanh(t / softcap)           without a softcap cap(t) = t
    lse = log Σ_v exp(z_v);  y the label, w_v the class weights
    l = token_weight · ((1 − ε) · w_y · (lse − z_y) + ε/V · Σ_v w_v · (lse − z_v) + z_loss · lse²)
    loss = Σ l / Σ w_y · token_weight   (mean; or Σ l / normalizer)   Σ l   (sum)   l   (none)

ε: label smoothing, Szegedy et al. 2016, https://arxiv.org/abs/1512.00567. z_loss: Chowdhery et al. 2022 (PaLM),
https://arxiv.org/abs/2204.02311. Reductions and class weights are those of torch.nn.functional.cross_entropy.

Labels: ignore_index (any integer) leaves a token out: l = 0, no gradient, whatever its x holds, inf and NaN too. A label outside
[0, V) that is not ignore_index is an error of the data: l = NaN, no gradient, and no part in the mean's divisor. Where nothing is
left, the mean is 0. shift: the label of position t is target[…, t + 1]; the last position has none.

Where values are rounded (everything else is computed in fp32, or float64 where an input is float64): the gradient of r, to x's
dtype before it is multiplied (of fp16 scaled by a power of two, so that it does not underflow); then each gradient once. Losses
and statistics are not rounded.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from reference._chunked_cross_entropy_check import check_chunked_cross_entropy, check_cross_entropy
from reference._chunked_cross_entropy_majorant import chunked_cross_entropy_majorant, cross_entropy_majorant
from reference._cost import Cost, Work, nbytes
from reference._signature import Choices, Dims, promote

__all__ = [
    "CrossEntropyStats",
    "chunked_cross_entropy",
    "chunked_cross_entropy_majorant",
    "cross_entropy",
    "cross_entropy_majorant",
]

X = Annotated[Tensor, Dims("* D")]
Head = Annotated[Tensor, Dims("V D", fan_in="D")]
Logits = Annotated[Tensor, Dims("* V")]
Target = Annotated[Tensor, Dims("*", dtype="labels V")]
Bias = Annotated[Tensor | None, Dims("V", dtype="own")]
Reduction = Literal["mean", "sum", "none"]
IgnoreIndex = Annotated[int, Choices((-100, 1))]
Smoothing = Annotated[float, Choices((0.0, 0.1))]
ZLoss = Annotated[float, Choices((0.0, 0.01))]
Softcap = Annotated[float | None, Choices((None, 5.0))]
LogitScale = Annotated[float, Choices((1.0, 0.25))]
ClassWeight = Annotated[Tensor | None, Choices((None,))]  # [V]
TokenWeight = Annotated[Tensor | None, Choices((None,))]  # [*]
Normalizer = Annotated[float | Tensor | None, Choices((None,))]
Lora = Annotated[tuple | None, Choices((None,))]  # A [R, D], B [V, R], scale
Keep = Annotated[Literal["auto", "gradients", "nothing"], Choices(("auto", "nothing"))]
ChunkBytes = Annotated[int | None, Choices((None, 4096))]
Stats = Annotated[bool, Choices((False,))]


@dataclass(frozen=True)
class CrossEntropyStats:
    """Of each token [*], in fp32 or better; 0, and prediction −1, where the label is ignored. lse and log_prob have gradients.

    lse: log Σ exp(z). log_prob: z_y − lse; NaN for a label outside [0, V). entropy: of the softmax. prediction: the class of the
    largest z, int64. correct: whether that is the label.
    """

    lse: Tensor
    log_prob: Tensor
    entropy: Tensor
    prediction: Tensor
    correct: Tensor


def chunked_cross_entropy(
    x: X,
    weight: Head,
    target: Target,
    *,
    bias: Bias = None,
    reduction: Reduction = "mean",
    ignore_index: IgnoreIndex = -100,
    label_smoothing: Smoothing = 0.0,
    z_loss: ZLoss = 0.0,
    softcap: Softcap = None,
    logit_scale: LogitScale = 1.0,
    class_weight: ClassWeight = None,
    token_weight: TokenWeight = None,
    normalizer: Normalizer = None,
    shift: bool = False,
    lora: Lora = None,
    keep: Keep = "auto",
    chunk_bytes: ChunkBytes = None,
    return_stats: Stats = False,
) -> Tensor:
    """Loss of x [*, D] under the head weight [V, D], for integer labels target [*]; [] or, with reduction="none", [*]; in fp32
    (float64 where x or weight is).

    bias [V]. ignore_index, label_smoothing in [0, 1], z_loss ≥ 0, softcap > 0, logit_scale: see the formulas. class_weight [V]
    and token_weight [*]: constants, any floating dtype. normalizer: a number or a tensor of one element in place of the mean's
    divisor (the number of labels in a whole batch of which this is a part). shift: labels are those of the next position.
    lora: (A [R, D], B [V, R], scale) on the head. keep: what the fast path keeps for the backward pass, "gradients" (made in the
    forward pass; scalar losses only) or "nothing" (logits are computed again), with the same result; "auto" takes the former
    where it may. chunk_bytes: of the fast path's largest buffer. return_stats: (loss, CrossEntropyStats).
    Raises TypeError for a dtype or type, ValueError for a shape, device or value that is not allowed.
    """
    check_chunked_cross_entropy(
        x, weight, target, bias, reduction, ignore_index, label_smoothing, z_loss, softcap, logit_scale,
        class_weight, token_weight, normalizer, shift, lora, keep, chunk_bytes, return_stats,
    )  # fmt: skip
    target, token_weight = shifted(target, token_weight, ignore_index) if shift else (target, token_weight)
    rows = torch.where((target != ignore_index)[..., None], x, 0.0).to(promote(x, weight, bias))
    return _loss(
        _head(rows, weight, bias, lora), target, reduction, label_smoothing, z_loss, return_stats,
        ignore_index=ignore_index, softcap=softcap, logit_scale=logit_scale, class_weight=class_weight,
        token_weight=token_weight, normalizer=normalizer,
    )  # fmt: skip


def cross_entropy(
    logits: Logits,
    target: Target,
    *,
    reduction: Reduction = "mean",
    ignore_index: IgnoreIndex = -100,
    label_smoothing: Smoothing = 0.0,
    z_loss: ZLoss = 0.0,
    softcap: Softcap = None,
    logit_scale: LogitScale = 1.0,
    class_weight: ClassWeight = None,
    token_weight: TokenWeight = None,
    normalizer: Normalizer = None,
    shift: bool = False,
    return_stats: Stats = False,
) -> Tensor:
    """Loss of logits [*, V] for integer labels target [*]: options and errors are those of `chunked_cross_entropy`."""
    check_cross_entropy(
        logits, target, reduction, ignore_index, label_smoothing, z_loss, softcap, logit_scale, class_weight, token_weight,
        normalizer, shift, return_stats,
    )  # fmt: skip
    target, token_weight = shifted(target, token_weight, ignore_index) if shift else (target, token_weight)
    r = torch.where((target != ignore_index)[..., None], logits, 0.0).to(promote(logits))
    return _loss(
        r, target, reduction, label_smoothing, z_loss, return_stats, ignore_index=ignore_index, softcap=softcap,
        logit_scale=logit_scale, class_weight=class_weight, token_weight=token_weight, normalizer=normalizer,
    )  # fmt: skip


def shifted(target: Tensor, token_weight: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor | None]:
    """Labels, and their weights, of the next position; none at the last."""
    if not target.dim():
        return torch.full_like(target, ignore_index), token_weight
    last = (0, min(1, target.shape[-1]))
    next_target = functional.pad(target[..., 1:], last, value=ignore_index)
    return next_target, None if token_weight is None else functional.pad(token_weight[..., 1:], last)


class _Tokens(NamedTuple):
    """What loss and gradient share. z [*, V], the rest [*] or, of classes, [V]; label is 0 where it is not valid."""

    z: Tensor
    lse: Tensor
    label: Tensor
    kept: Tensor
    valid: Tensor
    w: Tensor
    token: Tensor
    divisor: Tensor | float

    @property
    def z_y(self) -> Tensor:
        return self.z.gather(-1, self.label[..., None])[..., 0]


def _tokens(
    r: Tensor,
    target: Tensor,
    reduction: str,
    ignore_index: int,
    softcap: float | None,
    logit_scale: float,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    normalizer: float | Tensor | None,
) -> _Tokens:
    V, kept = r.shape[-1], target != ignore_index
    valid = kept & (target >= 0) & (target < V)
    label = torch.where(valid, target, 0).long()
    z = logit_scale * r
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    w = torch.ones(V, dtype=z.dtype, device=z.device) if class_weight is None else class_weight.to(z.dtype)
    token = (
        torch.ones(target.shape, dtype=z.dtype, device=z.device)
        if token_weight is None
        else token_weight.to(z.dtype)
    )
    divisor = 1.0
    if normalizer is not None:
        divisor = normalizer.to(z.dtype).reshape(()) if isinstance(normalizer, Tensor) else normalizer
    elif reduction == "mean":
        weights = torch.where(valid, w[label] * token, 0.0).sum()
        divisor = torch.where(weights == 0, 1.0, weights)
    return _Tokens(z, torch.logsumexp(z, -1), label, kept, valid, w, token, divisor)


def _loss(
    r: Tensor,
    target: Tensor,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    return_stats: bool,
    **of_tokens: Any,
) -> Any:
    t = _tokens(r, target, reduction, **of_tokens)
    of_token = (1 - label_smoothing) * t.w[t.label] * (t.lse - t.z_y) + z_loss * t.lse.square()
    if label_smoothing:
        of_token = of_token + label_smoothing / r.shape[-1] * (t.w * (t.lse[..., None] - t.z)).sum(-1)
    bad = torch.where(t.kept, torch.nan, 0.0).to(t.lse.dtype)
    of_token = torch.where(t.valid, t.token * of_token, bad)
    loss = of_token if reduction == "none" else of_token.sum() / t.divisor
    if not return_stats:
        return loss
    p = torch.exp(t.z - t.lse[..., None])
    entropy = (t.lse - torch.where(p > 0, p * t.z, 0.0).sum(-1)).detach()
    prediction = torch.where(t.kept, t.z.argmax(-1), -1)
    return loss, CrossEntropyStats(
        torch.where(t.valid, t.lse, torch.where(t.kept, t.lse.detach(), 0.0)),
        torch.where(t.valid, t.z_y - t.lse, bad),
        torch.where(t.kept, entropy, 0.0),
        prediction,
        t.valid & (prediction == target),
    )


def cross_entropy_backward(
    cotangents: tuple[Tensor | None, ...],
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
) -> dict[str, Tensor]:
    """The gradient by name, from the cotangents of the loss and, where given, of lse and log_prob; differentiable itself.

    With p = exp(z − lse) and g the loss's cotangent of a token, over the divisor:
    dz_v = (g · token_weight · ((1 − ε) · w_y + ε/V · Σ w + 2 · z_loss · lse) + dlse − dlog_prob) · p_v
           − [v = y] · (g · token_weight · (1 − ε) · w_y − dlog_prob) − g · token_weight · ε/V · w_v
    dr = logit_scale · (1 − (z/softcap)²) · dz
    """
    target, token_weight = shifted(target, token_weight, ignore_index) if shift else (target, token_weight)
    r = torch.where((target != ignore_index)[..., None], logits, 0.0).to(promote(logits))
    t = _tokens(
        r, target, reduction, ignore_index, softcap, logit_scale, class_weight, token_weight, normalizer
    )
    dloss, dlse, dlog_prob = (None if c is None else c.to(r.dtype) for c in (*cotangents, None, None)[:3])
    zero, V = torch.zeros_like(t.lse), r.shape[-1]
    g = zero if dloss is None else dloss / t.divisor * t.token
    dlse, dlog_prob = (zero if c is None else c for c in (dlse, dlog_prob))
    of_label = g * (1 - label_smoothing) * t.w[t.label]
    of_all = g * label_smoothing / V
    of_p = of_label + of_all * t.w.sum() + 2 * g * z_loss * t.lse + dlse - dlog_prob
    dz = of_p[..., None] * torch.exp(t.z - t.lse[..., None]) - of_all[..., None] * t.w
    dz = dz.scatter_add(-1, t.label[..., None], (dlog_prob - of_label)[..., None])
    dr = dz * logit_scale if softcap is None else dz * logit_scale * (1 - (t.z / softcap).square())
    return {"logits": torch.where(t.valid[..., None], dr, 0.0).to(logits.dtype)}


def chunked_cross_entropy_backward(
    cotangents: tuple[Tensor | None, ...],
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
) -> dict[str, Tensor]:
    """The gradients by name ("lora_a" and "lora_b" are the adapter's), from the cotangents of `cross_entropy_backward`.

    dx = dr · weight + s · (dr · B) · A;  dweight = drᵀ · x;  dbias = Σ_m dr;  dB = s · drᵀ · (x · Aᵀ);  dA = s · (dr · B)ᵀ · x
    """
    target, token_weight = shifted(target, token_weight, ignore_index) if shift else (target, token_weight)
    wide = promote(x, weight, bias)
    rows = torch.where((target != ignore_index)[..., None], x, 0.0).to(wide)
    r = _head(rows, weight, bias, lora)
    options = {
        "reduction": reduction,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
    }
    options |= {"softcap": softcap, "logit_scale": logit_scale, "class_weight": class_weight}
    options |= {"token_weight": token_weight, "normalizer": normalizer}
    dr = cross_entropy_backward(cotangents, r, target, **options)["logits"]
    dr, flat = dr.to(x.dtype).to(wide).reshape(-1, r.shape[-1]), rows.reshape(-1, x.shape[-1])
    found = {"x": dr @ weight.to(wide), "weight": dr.T @ flat}
    if bias is not None:
        found["bias"] = dr.sum(0)
    if lora is not None:
        a, b, scale = (t.to(wide) if isinstance(t, Tensor) else t for t in lora)
        ds = scale * (dr @ b)
        found |= {"x": found["x"] + ds @ a, "lora_a": ds.T @ flat, "lora_b": scale * dr.T @ (flat @ a.T)}
    found["x"] = found["x"].reshape(x.shape)
    given = {"x": x, "weight": weight, "bias": bias, "lora_a": lora and lora[0], "lora_b": lora and lora[1]}
    return {name: gradient.to(given[name].dtype) for name, gradient in found.items()}


def _head(rows: Tensor, weight: Tensor, bias: Tensor | None, lora: tuple | None) -> Tensor:
    """r [*, V] of rows [*, D] in the dtype to compute in."""
    wide = rows.dtype
    r = rows @ weight.to(wide).T
    if lora is not None:
        a, b, scale = lora
        r = r + scale * ((rows @ a.to(wide).T) @ b.to(wide).T)
    return r if bias is None else r + bias.to(wide)


def cross_entropy_cost(
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
) -> Cost:
    """Saved: the logits, which the caller keeps, and lse."""
    tokens = target.numel()
    forward = Work(6 * logits.numel(), nbytes(logits, target) + 4 * tokens)
    backward = Work(6 * logits.numel(), 2 * nbytes(logits) + nbytes(target) + 4 * tokens)
    return Cost(forward, backward, nbytes(logits) + 4 * tokens)


def chunked_cross_entropy_cost(
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
) -> Cost:
    """As with keep="gradients": three products in all. The bytes are those of inputs and gradients: logits need not reach memory.
    The weight counts as trained where it requires a gradient."""
    M, (V, D) = target.numel(), weight.shape
    product, trained = 2 * M * V * D, weight.requires_grad
    gradients = nbytes(x) + (nbytes(weight) if trained else 0)
    forward = Work(product, nbytes(x, weight, target))
    backward = Work((2 if trained else 1) * product, nbytes(x, weight, target) + gradients)
    return Cost(forward, backward, gradients)


COST = {"chunked_cross_entropy": chunked_cross_entropy_cost, "cross_entropy": cross_entropy_cost}
