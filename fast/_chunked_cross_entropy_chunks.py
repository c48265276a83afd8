"""The head's products, chunk by chunk, so that no more logits exist at once than fit in a buffer; plain products are cuBLAS's.

by_classes    all tokens, some classes: each slice of weight is read, and of dweight written, once
by_tokens     some tokens, all classes: softmax and gradient of a token at once, dweight summed over chunks in fp32
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fast._chunked_cross_entropy_kernels import Stats, dlogits
from fast._triton.matmul import add_matmul


class Head(NamedTuple):
    """weight [V, D], bias [V], a [R, D] and b [V, R] of a LoRA, its scale; and what makes z of logits."""

    weight: Tensor
    bias: Tensor | None
    a: Tensor | None
    b: Tensor | None
    lora_scale: float
    class_weight: Tensor | None
    logit_scale: float
    softcap: float | None

    def part(self, start: int, end: int) -> "Head":
        """Some classes."""
        cut = {name: getattr(self, name) for name in ("weight", "bias", "b", "class_weight")}
        return self._replace(**{name: None if t is None else t[start:end] for name, t in cut.items()})

    def down(self, rows: Tensor) -> Tensor | None:
        """scale · rows · Aᵀ [M, R] in fp32."""
        return None if self.a is None else rows.float() @ self.a.float().T * self.lora_scale

    def logits(self, rows: Tensor, down: Tensor | None) -> Tensor:
        """[M, V] in fp32, without bias."""
        r = add_matmul(None, rows, self.weight.T)
        return r if down is None else r.addmm_(down, self.b.float().T)

    @property
    def form(self) -> dict[str, Any]:
        return {"scale": self.logit_scale, "cap": self.softcap}


class Gradients(NamedTuple):
    """In fp32 and unrounded, or as they are asked for; None where not needed."""

    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    a: Tensor | None
    b: Tensor | None


def without_ignored(x: Tensor, label: Tensor) -> Tensor:
    """x with zeros in rows that are left out, whatever they hold."""
    return x.masked_fill((label == -1)[:, None], 0.0)


def by_classes(
    rows: Tensor, head: Head, label: Tensor, smooth: bool, details: bool, chunk_bytes: int
) -> list[Tensor]:
    """Stats.results() of rows [M, D]."""
    stats, down = Stats(label, smooth, details), head.down(rows)
    for start, end in _parts(len(head.weight), chunk_bytes // max(1, 4 * len(rows))):
        part = head.part(start, end)
        stats.add(
            part.logits(rows, down), part.bias, part.class_weight, device=head.weight.device, **head.form
        )
    return stats.results()


def gradients_by_classes(
    rows: Tensor,
    head: Head,
    label: Tensor,
    lse: Tensor,
    factors: tuple[Tensor, Tensor, Tensor],
    needed: list[bool],
    chunk_bytes: int,
) -> Gradients:
    """Of rows, weight, bias, a and b, in their dtypes."""
    (M, D), device, dtype = rows.shape, head.weight.device, rows.dtype
    need_x, need_w, need_bias, need_a, need_b = needed
    unit, back = _unit(factors, head, dtype)
    dx = rows.new_zeros(M, D, dtype=torch.float32) if need_x else None
    dw = torch.empty_like(head.weight, memory_format=torch.contiguous_format) if need_w else None
    dbias = head.weight.new_empty(len(head.weight), dtype=torch.float32) if need_bias else None
    lora, down = _LoraGradients(head, rows, need_x, need_a, need_b), head.down(rows)
    for start, end in _parts(len(head.weight), chunk_bytes // max(1, (4 + dtype.itemsize) * M)):
        part = head.part(start, end)
        r = part.logits(rows, down)
        dr = dlogits(
            r, part.bias, part.class_weight, label, lse, factors, unit, start, dtype=dtype, device=device, **head.form
        )  # fmt: skip
        if need_x:
            dx = add_matmul(dx, dr, part.weight)
        if need_w:
            dw[start:end] = _scaled(add_matmul(None, dr.T, rows), back)
        if need_bias:
            dbias[start:end] = dr.sum(0, dtype=torch.float32)
        lora.add_classes(dr, part.b, start, end)
    da, db = lora.finish(rows, back)
    if need_x:
        dx = _scaled(lora.through(dx), back).to(dtype)
    bias = None if dbias is None else _scaled(dbias, back).to(head.bias.dtype)
    return Gradients(dx, dw, bias, da, db)


def gradients_by_tokens(
    x: Tensor,
    head: Head,
    label: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    all_classes: Tensor,
    z_loss: float,
    smooth: bool,
    needed: list[bool],
    chunk_bytes: int,
) -> tuple[list[Tensor], Gradients]:
    """Stats.results(), and in fp32 the gradients of Σ l. weights [M]: of label, every class and token; all_classes: Σ w."""
    (M, D), V, device, dtype = x.shape, len(head.weight), head.weight.device, x.dtype
    need_x, need_w, need_bias, need_a, need_b = needed
    wide = {"dtype": torch.float32}
    dx = x.new_empty(M, D, **wide) if need_x else None
    dw = x.new_zeros(V, D, **wide) if need_w else None
    dbias = x.new_zeros(V, **wide) if need_bias else None
    da = torch.zeros_like(head.a, **wide) if need_a else None
    db = torch.zeros_like(head.b, **wide) if need_b else None
    found = []
    for start, end in _parts(M, chunk_bytes // ((4 + dtype.itemsize) * V)):
        own = label[start:end]
        rows = without_ignored(x[start:end], own)
        down = head.down(rows)
        r = head.logits(rows, down)
        stats = Stats(own, smooth, False)
        stats.add(r, head.bias, head.class_weight, device=device, **head.form)
        results = stats.results()
        found.append(results)
        factors = token_factors(*(t[start:end] for t in weights), all_classes, z_loss, results[0])
        unit, back = _unit(factors, head, dtype)
        dr = dlogits(
            r, head.bias, head.class_weight, own, results[0], factors, unit, 0, dtype=dtype, device=device, **head.form
        )  # fmt: skip
        if need_w:
            dw = _accumulated(dw, dr.T, rows, back)
        if need_bias:
            dbias += _scaled(dr.sum(0, **wide), back)
        lora = _LoraGradients(head, rows, need_x, need_a, need_b)
        lora.add_classes(dr, head.b, 0, V)
        of_a, of_b = lora.finish(rows, back, rounded=False)
        if need_a:
            da += of_a
        if need_b:
            db += of_b
        if need_x:
            dx[start:end] = _scaled(lora.through(add_matmul(None, dr, head.weight)), back)
    columns = [torch.cat(parts) for parts in zip(*found, strict=True)]
    return columns, Gradients(dx, dw, dbias, da, db)


def token_factors(
    of_label: Tensor, of_all: Tensor, token: Tensor, all_classes: Tensor, z_loss: float, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What dz takes of p, of the label and of every class, for a cotangent of 1."""
    of_p = of_label + of_all * all_classes
    return of_p + 2 * z_loss * token * lse if z_loss else of_p, of_label, of_all


class _LoraGradients:
    """ds = dr · B, summed over classes, and what follows from it."""

    def __init__(self, head: Head, rows: Tensor, need_x: bool, need_a: bool, need_b: bool):
        self.head, self.need_a = head, need_a
        self.active = head.a is not None and (need_x or need_a or need_b)
        self.ds = rows.new_zeros(len(rows), len(head.a), dtype=torch.float32) if self.active else None
        self.db = torch.empty_like(head.b, dtype=torch.float32) if need_b else None
        self.down = head.down(rows) if need_b else None

    def add_classes(self, dr: Tensor, b: Tensor | None, start: int, end: int) -> None:
        if not self.active:
            return
        wide = dr.float()
        self.ds.addmm_(wide, b.float(), alpha=self.head.lora_scale)
        if self.db is not None:
            self.db[start:end] = wide.T @ self.down

    def through(self, dx: Tensor) -> Tensor:
        """dx + ds · A."""
        return dx.addmm_(self.ds, self.head.a.float()) if self.active else dx

    def finish(
        self, rows: Tensor, back: Tensor | None, rounded: bool = True
    ) -> tuple[Tensor | None, Tensor | None]:
        da = _scaled(self.ds.T @ rows.float(), back) if self.need_a else None
        db = None if self.db is None else _scaled(self.db, back)
        if not rounded:
            return da, db
        return None if da is None else da.to(self.head.a.dtype), None if db is None else db.to(
            self.head.b.dtype
        )


def _parts(total: int, size: int) -> list[tuple[int, int]]:
    """Of `size` at most, in multiples of 64 where it has as many; one, if an empty one, there always is."""
    size = max(1, size)
    size = size // 64 * 64 if size >= 64 else size
    return [(start, min(start + size, total)) for start in range(0, max(1, total), size)]


def _unit(
    factors: tuple[Tensor, Tensor, Tensor], head: Head, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Of fp16 a power of two, and its inverse, that brings a logit's largest gradient near 2¹³: else small ones underflow."""
    if dtype != torch.float16 or not factors[0].numel():
        return None, None
    of_class = 1.0 if head.class_weight is None else head.class_weight.float().abs().amax()
    largest = factors[0].abs() + factors[1].abs() + factors[2].abs() * of_class
    exponent = torch.frexp((largest.amax() * abs(head.logit_scale)).clamp(2.0**-100, 2.0**100))[1]
    one = exponent.new_ones((), dtype=torch.float32)
    return torch.ldexp(one, 14 - exponent), torch.ldexp(one, exponent - 14)


def _scaled(t: Tensor, factor: Tensor | None) -> Tensor:
    return t if factor is None else t.mul_(factor)


def _accumulated(acc: Tensor, a: Tensor, b: Tensor, factor: Tensor | None) -> Tensor:
    return add_matmul(acc, a, b) if factor is None else acc.add_(add_matmul(None, a, b) * factor)
