"""What reference/chunked_cross_entropy.py and its fast twin accept."""

from math import isfinite
from typing import Any

import torch
from torch import Tensor

from reference._signature import check

INTEGERS = (torch.int32, torch.int64)


def check_chunked_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    normalizer: float | Tensor | None,
    shift: bool,
    lora: tuple | None,
    keep: str,
    chunk_bytes: int | None,
    return_stats: bool,
) -> None:
    """Raise TypeError or ValueError, naming the argument, what came and what is allowed."""
    name = "chunked_cross_entropy"
    tensors = {
        "x": (x, "* D"),
        "weight": (weight, "V D"),
        "bias": (bias, "V"),
        "class_weight": (class_weight, "V"),
    }
    if lora is not None:
        if not isinstance(lora, tuple) or len(lora) != 3:
            raise TypeError(f"{name}: lora must be a tuple (A [R, D], B [V, R], scale), got {lora!r}")
        tensors |= {"lora[0]": (lora[0], "R D"), "lora[1]": (lora[1], "V R")}
        _number(name, "lora[2]", lora[2])
    check(name, tensors | {"token_weight": (token_weight, "*")})
    if weight.dtype != x.dtype:
        raise TypeError(f"{name}: weight must have x's dtype, {x.dtype}, got {weight.dtype}")
    _labels(name, x, target)
    _options(
        name,
        reduction,
        ignore_index,
        label_smoothing,
        z_loss,
        softcap,
        logit_scale,
        normalizer,
        shift,
        return_stats,
    )
    _constants(name, class_weight=class_weight, token_weight=token_weight, normalizer=normalizer)
    if keep not in ("auto", "gradients", "nothing"):
        raise ValueError(f'{name}: keep must be "auto", "gradients" or "nothing", got {keep!r}')
    if keep == "gradients" and (reduction == "none" or return_stats):
        raise ValueError(
            f'{name}: keep="gradients" is for scalar losses; with reduction="none" or return_stats take "nothing" or "auto"'
        )
    if chunk_bytes is not None and (isinstance(chunk_bytes, bool) or not isinstance(chunk_bytes, int)):
        raise TypeError(f"{name}: chunk_bytes must be an int or None, got {chunk_bytes!r}")
    if chunk_bytes is not None and chunk_bytes < 1:
        raise ValueError(f"{name}: chunk_bytes must be at least 1, got {chunk_bytes}")


def check_cross_entropy(
    logits: Tensor,
    target: Tensor,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    normalizer: float | Tensor | None,
    shift: bool,
    return_stats: bool,
) -> None:
    """Raise TypeError or ValueError, naming the argument, what came and what is allowed."""
    name = "cross_entropy"
    check(
        name,
        {"logits": (logits, "* V"), "class_weight": (class_weight, "V"), "token_weight": (token_weight, "*")},
    )
    _labels(name, logits, target)
    _options(
        name,
        reduction,
        ignore_index,
        label_smoothing,
        z_loss,
        softcap,
        logit_scale,
        normalizer,
        shift,
        return_stats,
    )
    _constants(name, class_weight=class_weight, token_weight=token_weight, normalizer=normalizer)


def _labels(name: str, x: Tensor, target: Any) -> None:
    if not isinstance(target, Tensor):
        raise TypeError(f"{name}: target must be a torch.Tensor, got {type(target).__name__}")
    if target.dtype not in INTEGERS:
        raise TypeError(f"{name}: target must be int32 or int64 labels, got {target.dtype}")
    if target.shape != x.shape[:-1]:
        raise ValueError(f"{name}: target must have shape {list(x.shape[:-1])}, got {list(target.shape)}")
    if target.device != x.device:
        raise ValueError(
            f"{name}: target is on {target.device}, but the rows are on {x.device}; all must be on one device"
        )
    if x.shape[-1] < 1:
        raise ValueError(f"{name}: the last dimension must be at least 1, got shape {list(x.shape)}")


def _options(
    name: str,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float,
    normalizer: float | Tensor | None,
    shift: bool,
    return_stats: bool,
) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'{name}: reduction must be "mean", "sum" or "none", got {reduction!r}')
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"{name}: ignore_index must be an int, got {ignore_index!r}")
    numbers = {"label_smoothing": label_smoothing, "z_loss": z_loss, "logit_scale": logit_scale}
    for option, value in (numbers | ({} if softcap is None else {"softcap": softcap})).items():
        _number(name, option, value)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{name}: label_smoothing must be in [0, 1], got {label_smoothing!r}")
    if z_loss < 0:
        raise ValueError(f"{name}: z_loss must be at least 0, got {z_loss!r}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"{name}: softcap must be positive or None, got {softcap!r}")
    if normalizer is not None:
        if reduction != "mean":
            raise ValueError(
                f'{name}: normalizer replaces the divisor of reduction="mean", got reduction={reduction!r}'
            )
        if isinstance(normalizer, Tensor):
            if normalizer.numel() != 1:
                raise ValueError(
                    f"{name}: normalizer must have one element, got shape {list(normalizer.shape)}"
                )
        else:
            _number(name, "normalizer", normalizer)
    for option, value in {"shift": shift, "return_stats": return_stats}.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: {option} must be a bool, got {value!r}")


def _number(name: str, option: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: {option} must be a number, got {value!r}")
    if not isfinite(value):
        raise ValueError(f"{name}: {option} must be finite, got {value!r}")


def _constants(name: str, **given: Any) -> None:
    for option, value in given.items():
        if isinstance(value, Tensor) and value.requires_grad:
            raise ValueError(
                f"{name}: {option} counts as a constant and must not require a gradient; detach() it"
            )
