"""Cross-entropy of a head without its logits, in Triton and cuBLAS. The definition is reference/chunked_cross_entropy.py.

Math        r = x·Wᵀ + bias;  z = cap(scale·r);  lse = log Σ exp z;  l = (1 − ε)·w_y·(lse − z_y) + …
Backward    dz = a·p − b·[v = y] − c·w,  p = exp(z − lse);  dr = scale·cap'·dz;  dx = dr·W;  dW = drᵀ·x;  dbias = Σ_m dr
            a, b and c [M] hold the loss's options and cotangents, those of lse and log_prob, too
Saved       keep="nothing": lse; logits are computed again. keep="gradients": dx and dW of Σ l in fp32, made in the forward pass
Fusion      eager                                               here
            x·W ─ r ─ float ─ log_softmax ─ nll ─ mean          slice of W ─ r in a buffer ─ _cross_entropy_stats ─ lse, z_y …
            bytes: logits in 16 bits, and three times in 32     keep="gradients": tokens in turn, all classes; dlogits beside r
Floor       keep="gradients" 6·M·V·D FLOPs, "nothing" 8. At M = 8192, D = 4096, V = 128256: 26 and 34 TFLOP beside 1 GB of W.
Tiles       stats: a program takes a row of a buffer; dlogits: BLOCK_V columns of a row. Rows that are left out return at once.
Buffers     chunk_bytes of r in fp32 and dr in x's dtype: CHUNK_BYTES by default. Of tokens in turn, dW is added to in fp32 once
            for each chunk, which costs 245/C of the product with C tokens: a larger buffer is faster.
Rounding    r, losses and sums in fp32; dr to x's dtype (fp16: scaled by a power of two); each gradient once. The mean's divisor
            and the cotangent multiply before that.
Determinism no atomics; chunks in order. A row's loss does not depend on the chunks' size.
Limits      fp32, fp16, bf16; x and weight of one dtype. Products of rows that are left out are computed (of zeros), not skipped.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fast._chunked_cross_entropy_chunks import (
    Head,
    by_classes,
    gradients_by_classes,
    gradients_by_tokens,
    token_factors,
    without_ignored,
)
from fast._chunked_cross_entropy_kernels import DLOGITS, STATS, Stats, dlogits
from fast._triton.autocast import cast_as_linear, without_autocast
from fast._triton.launch import check_supported
from fast._triton.registration import define
from reference._chunked_cross_entropy_check import check_chunked_cross_entropy, check_cross_entropy
from reference.chunked_cross_entropy import (
    Bias,
    ChunkBytes,
    ClassWeight,
    CrossEntropyStats,
    IgnoreIndex,
    Keep,
    Logits,
    LogitScale,
    Lora,
    Normalizer,
    Reduction,
    Smoothing,
    Softcap,
    Target,
    TokenWeight,
    X,
    ZLoss,
    chunked_cross_entropy_backward,
    cross_entropy_backward,
    shifted,
)
from reference.chunked_cross_entropy import (
    Head as HeadWeight,
)
from reference.chunked_cross_entropy import (
    Stats as ReturnStats,
)

__all__ = ["DLOGITS", "STATS", "CrossEntropyStats", "chunked_cross_entropy", "cross_entropy"]

CHUNK_BYTES = {"gradients": 2**28, "nothing": 3 * 2**25}

_HEAD = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor? a, Tensor? b, Tensor? class_weight, Tensor label, float lora_scale, "
    "float logit_scale, float? softcap, int chunk_bytes"
)


@without_autocast
def _chunked_ce_stats(
    x, weight, bias, a, b, class_weight, label, lora_scale, logit_scale, softcap, chunk_bytes, smooth, details
) -> list[Tensor]:
    head = Head(weight, bias, a, b, lora_scale, class_weight, logit_scale, softcap)
    return by_classes(without_ignored(x, label), head, label, smooth, details, chunk_bytes)


@without_autocast
def _chunked_ce_backward(
    x, weight, bias, a, b, class_weight, label, lora_scale, logit_scale, softcap, chunk_bytes, lse, of_p, of_label, of_all, needed
) -> list[Tensor]:  # fmt: skip
    head = Head(weight, bias, a, b, lora_scale, class_weight, logit_scale, softcap)
    rows, factors = without_ignored(x, label), (of_p, of_label, of_all)
    found = gradients_by_classes(rows, head, label, lse, factors, needed, chunk_bytes)
    return [x.new_empty(0) if t is None else t for t in found]


@without_autocast
def _chunked_ce_gradients(
    x, weight, bias, a, b, class_weight, label, lora_scale, logit_scale, softcap, chunk_bytes, of_label, of_all, token,
    all_classes, z_loss, smooth, needed,
) -> list[Tensor]:  # fmt: skip
    head, weights = (
        Head(weight, bias, a, b, lora_scale, class_weight, logit_scale, softcap),
        (of_label, of_all, token),
    )
    stats, found = gradients_by_tokens(
        x, head, label, weights, all_classes, z_loss, smooth, needed, chunk_bytes
    )
    return [*stats[:3], *(x.new_empty(0) if t is None else t for t in found)]


def _stats_shapes(x, weight, bias, a, b, class_weight, label, *rest) -> list[Tensor]:
    rows, smooth, details = x.new_empty(len(x), dtype=torch.float32), *rest[-2:]
    entropy = torch.empty_like(rows) if details else rows.new_empty(0)
    prediction = torch.empty_like(label) if details else label.new_empty(0)
    return [
        rows,
        torch.empty_like(rows),
        torch.empty_like(rows) if smooth else rows.new_empty(0),
        entropy,
        prediction,
    ]


def _gradient_shapes(x, weight, bias, a, b, needed, dtype: torch.dtype | None) -> list[Tensor]:
    return [
        x.new_empty(t.shape, dtype=dtype or t.dtype) if need else x.new_empty(0)
        for t, need in zip((x, weight, bias, a, b), needed, strict=True)
    ]


_stats_op = define(
    f"chunked_ce_stats({_HEAD}, bool smooth, bool details) -> Tensor[]", _chunked_ce_stats, _stats_shapes
)
_backward_op = define(
    f"chunked_ce_backward({_HEAD}, Tensor lse, Tensor of_p, Tensor of_label, Tensor of_all, bool[] needed) -> Tensor[]",
    _chunked_ce_backward,
    lambda x, weight, bias, a, b, *rest: _gradient_shapes(x, weight, bias, a, b, rest[-1], None),
)
_gradients_op = define(
    f"chunked_ce_gradients({_HEAD}, Tensor of_label, Tensor of_all, Tensor token, Tensor all_classes, float z_loss, bool smooth, "
    "bool[] needed) -> Tensor[]",
    _chunked_ce_gradients,
    lambda x, weight, bias, a, b, class_weight, label, *rest: [
        *_stats_shapes(x, weight, bias, a, b, class_weight, label, rest[-2], False)[:3],
        *_gradient_shapes(x, weight, bias, a, b, rest[-1], torch.float32),
    ],
)


def _cross_entropy_stats(logits, class_weight, label, logit_scale, softcap, smooth, details) -> list[Tensor]:
    stats = Stats(label, smooth, details)
    stats.add(logits, None, class_weight, logit_scale, softcap, logits.device)
    return stats.results()


def _cross_entropy_dlogits(
    logits, class_weight, label, logit_scale, softcap, lse, of_p, of_label, of_all
) -> Tensor:
    factors = of_p, of_label, of_all
    return dlogits(
        logits, None, class_weight, label, lse, factors, None, 0, logit_scale, softcap, logits.dtype, logits.device
    )  # fmt: skip


_LOGITS = "Tensor logits, Tensor? class_weight, Tensor label, float logit_scale, float? softcap"
_logits_stats_op = define(
    f"cross_entropy_stats({_LOGITS}, bool smooth, bool details) -> Tensor[]",
    _cross_entropy_stats,
    lambda logits, class_weight, label, *rest: _stats_shapes(
        logits, None, None, None, None, None, label, *rest
    ),
)
_logits_backward_op = define(
    f"cross_entropy_dlogits({_LOGITS}, Tensor lse, Tensor of_p, Tensor of_label, Tensor of_all) -> Tensor",
    _cross_entropy_dlogits,
    lambda logits, *rest: torch.empty_like(logits, memory_format=torch.contiguous_format),
)


class _Terms:
    """What the loss is made of besides logits: weights [M] of label, every class and token, in fp32; all_classes: Σ w."""

    def __init__(
        self,
        label: Tensor,
        V: int,
        label_smoothing: float,
        z_loss: float,
        class_weight: Tensor | None,
        token_weight: Tensor | None,
    ):
        self.label, self.z_loss, self.smooth = label, z_loss, label_smoothing > 0
        valid = label >= 0
        token = (
            torch.ones_like(label, dtype=torch.float32)
            if token_weight is None
            else token_weight.reshape(-1).float()
        )
        self.token = torch.where(valid, token, 0.0)
        self.of_class = self.token
        self.all_classes = label.new_full((), V, dtype=torch.float32)
        if class_weight is not None:
            self.of_class = self.token * class_weight.float()[label.clamp_min(0)]
            self.all_classes = class_weight.sum(dtype=torch.float32)
        self.of_label, self.of_all = self.of_class * (1 - label_smoothing), self.token * (label_smoothing / V)

    def losses(self, lse: Tensor, z_y: Tensor, smooth: Tensor) -> Tensor:
        """l [M]; NaN for labels outside [0, V)."""
        found = self.of_label * (lse - z_y)
        if self.smooth:
            found = found + self.of_all * (self.all_classes * lse - smooth)
        if self.z_loss:
            found = found + self.z_loss * self.token * lse.square()
        return torch.where(self.label >= 0, found, torch.where(self.label == -2, torch.nan, 0.0))

    def factors(
        self, lse: Tensor, dl: Tensor | None, dlse: Tensor | None, dlog_prob: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Of p, of the label and of every class in dz."""
        of_p, of_label, of_all = token_factors(
            self.of_label, self.of_all, self.token, self.all_classes, self.z_loss, lse
        )
        zero = torch.zeros_like(lse)
        dl, dlse, dlog_prob = (zero if c is None else c.float() for c in (dl, dlse, dlog_prob))
        return dl * of_p + dlse - dlog_prob, dl * of_label - dlog_prob, dl * of_all


class _Call:
    """One call's operands that are no tensors with a gradient, and the terms of its loss."""

    def __init__(self, terms: _Terms, options: dict[str, Any], class_weight: Tensor | None):
        self.terms, self.class_weight = terms, class_weight
        self.label_smoothing, self.z_loss = options["label_smoothing"], options["z_loss"]
        self.logit_scale, self.softcap = float(options["logit_scale"]), options["softcap"]
        self.token_weight, self.lora_scale = options["token_weight"], float(options.get("lora_scale", 1.0))
        self.chunk_bytes = options.get("chunk_bytes", 0)

    def head(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor | None, b: Tensor | None
    ) -> tuple:
        cap = None if self.softcap is None else float(self.softcap)
        return (
            x, weight, bias, a, b, self.class_weight, self.terms.label, self.lora_scale, self.logit_scale, cap, self.chunk_bytes,
        )  # fmt: skip

    def reference(self) -> dict[str, Any]:
        """Options of the reference's backward, token by token."""
        names = ("label_smoothing", "z_loss", "softcap", "logit_scale", "class_weight")
        token = None if self.token_weight is None else self.token_weight.reshape(-1)
        return {name: getattr(self, name) for name in names} | {
            "token_weight": token, "reduction": "none", "ignore_index": -1,
        }  # fmt: skip


class _Tokens(Function):
    """l, lse and log_prob of each token, differentiable, then entropy and prediction; logits are computed again in backward."""

    @staticmethod
    def forward(ctx: Any, call: _Call, details: bool, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        terms = call.terms
        lse, z_y, smooth, entropy, prediction = _stats_op(*call.head(*tensors), terms.smooth, details)
        ctx.call = call
        ctx.save_for_backward(*tensors, lse)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(entropy, prediction)
        return terms.losses(lse, z_y, smooth), lse.clone(), z_y - lse, entropy, prediction

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, lse = ctx.saved_tensors
        needed = list(ctx.needs_input_grad[2:])
        if torch.is_grad_enabled():
            return None, None, *_differentiable(ctx.call, cotangents[:3], tensors, needed)
        factors = ctx.call.terms.factors(lse, *cotangents[:3])
        found = _backward_op(*ctx.call.head(*tensors), lse, *factors, needed)
        return None, None, *(t if need else None for t, need in zip(found, needed, strict=True))


class _Sum(Function):
    """Σ l; its gradients are made at once, and kept."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor | None) -> Tensor:
        terms, needed = call.terms, list(ctx.needs_input_grad[1:])
        lse, z_y, smooth, *found = _gradients_op(
            *call.head(*tensors), terms.of_label, terms.of_all, terms.token, terms.all_classes, terms.z_loss, terms.smooth, needed
        )  # fmt: skip
        ctx.call = call
        ctx.save_for_backward(*tensors, *found)
        return terms.losses(lse, z_y, smooth).sum()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        tensors, kept = saved[:5], saved[5:]
        needed = list(ctx.needs_input_grad[1:])
        if torch.is_grad_enabled():
            of_tokens = dloss.expand(ctx.call.terms.label.shape)
            return None, *_differentiable(ctx.call, (of_tokens, None, None), tensors, needed)
        return None, *(
            torch.mul(g, dloss.float(), out=torch.empty_like(g, dtype=t.dtype)) if need else None
            for g, t, need in zip(kept, tensors, needed, strict=True)
        )


class _Logits(Function):
    """As _Tokens, of logits [M, V]."""

    @staticmethod
    def forward(ctx: Any, call: _Call, details: bool, logits: Tensor) -> tuple[Tensor, ...]:
        terms = call.terms
        form = call.class_weight, terms.label, call.logit_scale, call.softcap
        lse, z_y, smooth, entropy, prediction = _logits_stats_op(logits, *form, terms.smooth, details)
        ctx.call, ctx.form = call, form
        ctx.save_for_backward(logits, lse)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(entropy, prediction)
        return terms.losses(lse, z_y, smooth), lse.clone(), z_y - lse, entropy, prediction

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, lse = ctx.saved_tensors
        call = ctx.call
        if torch.is_grad_enabled():
            found = cross_entropy_backward(cotangents[:3], logits, call.terms.label, **call.reference())
            return None, None, found["logits"]
        factors = call.terms.factors(lse, *cotangents[:3])
        return None, None, _logits_backward_op(logits, *ctx.form, lse, *factors)


def _differentiable(
    call: _Call, cotangents: tuple[Tensor | None, ...], tensors: tuple[Tensor | None, ...], needed: list[bool]
) -> list[Tensor | None]:
    """The reference's backward, which can be differentiated again."""
    x, weight, bias, a, b = tensors
    lora = None if a is None else (a, b, call.lora_scale)
    found = chunked_cross_entropy_backward(
        cotangents, x, weight, call.terms.label, bias=bias, lora=lora, **call.reference()
    )
    names = ("x", "weight", "bias", "lora_a", "lora_b")
    return [found[name] if need else None for name, need in zip(names, needed, strict=True)]


def chunked_cross_entropy(
    x: X,
    weight: HeadWeight,
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
    return_stats: ReturnStats = False,
) -> Tensor:
    """Loss of x [*, D] under the head weight [V, D], for integer labels target [*]; [] or, with reduction="none", [*], in fp32.

    Arguments and errors are those of reference.chunked_cross_entropy; TypeError also for float64. Under autocast x and weight are
    cast as torch.nn.functional.linear casts them.
    """
    x, weight = cast_as_linear(x, weight)
    check_chunked_cross_entropy(
        x, weight, target, bias, reduction, ignore_index, label_smoothing, z_loss, softcap, logit_scale,
        class_weight, token_weight, normalizer, shift, lora, keep, chunk_bytes, return_stats,
    )  # fmt: skip
    a, b, lora_scale = (None, None, 1.0) if lora is None else lora
    check_supported(
        "chunked_cross_entropy",
        x=x,
        weight=weight,
        bias=bias,
        class_weight=class_weight,
        token_weight=token_weight,
    )
    check_supported("chunked_cross_entropy", lora_a=a, lora_b=b)
    target, token_weight = shifted(target, token_weight, ignore_index) if shift else (target, token_weight)
    way = keep
    if keep == "auto":
        trained = (
            any(t is not None and t.requires_grad for t in (x, weight, bias, a, b))
            and torch.is_grad_enabled()
        )
        way = "gradients" if trained and reduction != "none" and not return_stats else "nothing"
    terms = _Terms(
        _labels(target, ignore_index, len(weight)),
        len(weight),
        label_smoothing,
        z_loss,
        class_weight,
        token_weight,
    )
    options = {
        "label_smoothing": label_smoothing, "z_loss": z_loss, "logit_scale": logit_scale, "softcap": softcap,
        "token_weight": token_weight, "lora_scale": lora_scale, "chunk_bytes": chunk_bytes or CHUNK_BYTES[way],
    }  # fmt: skip
    class_weight, bias = (None if t is None else t.contiguous() for t in (class_weight, bias))
    call, tensors = _Call(terms, options, class_weight), (x.reshape(-1, x.shape[-1]), weight, bias, a, b)
    if way == "gradients":
        return _mean(_Sum.apply(call, *tensors), terms, reduction, normalizer)
    return _finish(
        _Tokens.apply(call, return_stats, *tensors), terms, target, reduction, normalizer, return_stats
    )


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
    return_stats: ReturnStats = False,
) -> Tensor:
    """Loss of logits [*, V] for integer labels target [*]: options, results and errors are those of reference.cross_entropy,
    with a TypeError for float64 too. logits are not written to."""
    check_cross_entropy(
        logits, target, reduction, ignore_index, label_smoothing, z_loss, softcap, logit_scale, class_weight, token_weight,
        normalizer, shift, return_stats,
    )  # fmt: skip
    check_supported("cross_entropy", logits=logits, class_weight=class_weight, token_weight=token_weight)
    target, token_weight = shifted(target, token_weight, ignore_index) if shift else (target, token_weight)
    V = logits.shape[-1]
    terms = _Terms(_labels(target, ignore_index, V), V, label_smoothing, z_loss, class_weight, token_weight)
    options = {
        "label_smoothing": label_smoothing, "z_loss": z_loss, "logit_scale": logit_scale, "softcap": softcap,
        "token_weight": token_weight,
    }  # fmt: skip
    class_weight = None if class_weight is None else class_weight.contiguous()
    found = _Logits.apply(_Call(terms, options, class_weight), return_stats, logits.reshape(-1, V))
    return _finish(found, terms, target, reduction, normalizer, return_stats)


def _labels(target: Tensor, ignore_index: int, V: int) -> Tensor:
    """[M] int64: the class; −1 where it is ignored, −2 where it is none of the V."""
    label = target.reshape(-1).long()
    valid = (label >= 0) & (label < V)
    return torch.where(label == ignore_index, -1, torch.where(valid, label, -2)).contiguous()


def _mean(total: Tensor, terms: _Terms, reduction: str, normalizer: float | Tensor | None) -> Tensor:
    if normalizer is not None:
        return total / (normalizer.reshape(()) if isinstance(normalizer, Tensor) else normalizer)
    if reduction == "sum":
        return total
    divisor = terms.of_class.sum()
    return total / torch.where(divisor == 0, 1.0, divisor)


def _finish(
    found: tuple[Tensor, ...],
    terms: _Terms,
    target: Tensor,
    reduction: str,
    normalizer: float | Tensor | None,
    return_stats: bool,
) -> Any:
    l, lse, log_prob, entropy, prediction = found  # noqa: E741  the loss's usual name
    loss = l.view(target.shape) if reduction == "none" else _mean(l.sum(), terms, reduction, normalizer)
    if not return_stats:
        return loss
    valid, none = terms.label >= 0, torch.where(terms.label == -2, torch.nan, 0.0)
    lse = torch.where(valid, lse, lse.detach())
    stats = (
        lse,
        torch.where(valid, log_prob, none),
        entropy,
        prediction,
        valid & (prediction == terms.label),
    )
    return loss, CrossEntropyStats(*(t.view(target.shape) for t in stats))
