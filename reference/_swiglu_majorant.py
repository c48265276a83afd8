"""Error majorants of reference/swiglu.py: what the roundings that it admits to can do, to first order.

An activation g·s(z), z = alpha·g, passes on the relative error of z (`arg_ops` roundings, those inside exp included) with the
conditioning |z s'|, and its derivative s + z s' with |2z s' + z² s''|. Beside that, h carries 16 fp32 roundings (exp and a
division of 2 ulp each, i.e. 4, and the sums and products around them) and dgate 24. e^−|z| may underflow: `unit`.
"""

from dataclasses import dataclass, replace
from math import pi, sqrt

import torch
from torch import Tensor

from reference._numerics import Term, contracted, times

_FP32 = 2.0**-24


@dataclass(frozen=True)
class _Shape:
    """slope: s + z·s'. Magnitudes at z: s, z·s' and their conditioning by a relative error of z; bend: |d(s + z s')/dz|."""

    slope: Tensor

    s: Tensor
    zds: Tensor
    s_by_z: Tensor
    slope_by_z: Tensor
    bend: Tensor
    arg_ops: int


def _shape(activation: str, z: Tensor) -> _Shape:
    if activation == "silu":
        s, ds, size = torch.sigmoid(z), torch.sigmoid(z) * torch.sigmoid(-z), z.abs()
        zds = size * ds
        return _Shape(s + z * ds, s, zds, zds, (2 + size) * zds, (2 + size) * ds, arg_ops=4)
    if activation == "gelu_tanh":
        t, c = z.clamp(-40, 40), 2 * sqrt(2 / pi)
        w, dw, ddw = c * (t + 0.044715 * t**3), c * (1 + 0.134145 * t**2), c * 0.26829 * t.abs()
        s, ds, size, wide = torch.sigmoid(w), torch.sigmoid(w) * torch.sigmoid(-w), z.abs(), w.abs()
        zds, bend = size * dw * ds, ds * (2 * dw + size * (dw.square() + ddw))
        return _Shape(s + z * dw * ds, s, zds, wide * ds, wide * ds * (1 + size * dw), bend, arg_ops=12)
    if activation == "gelu":
        density, size = torch.exp(-z.square() / 2) / sqrt(2 * pi), z.abs()
        s, bend, zds = (1 + torch.erf(size / sqrt(2))) / 2, (2 + z.square()) * density, size * density
        slope = (1 + torch.erf(z / sqrt(2))) / 2 + z * density
        return _Shape(slope, s, zds, zds, size * bend, bend, arg_ops=7)
    s = torch.relu(z)
    return _Shape(2 * s, s, s, s, 2 * s, torch.full_like(s, 2.0), arg_ops=2)


@dataclass(frozen=True)
class _Elementwise:
    """Values and magnitudes of one elementwise call: a and its derivatives by gate, up's factor, and the two clamps' masks."""

    a: Tensor
    slope: Tensor
    bend: Tensor
    u: Tensor
    shape: _Shape
    g: Tensor
    open_gate: Tensor
    open_up: Tensor

    def h(self) -> list[Term]:
        g = self.g.abs()
        return [
            Term(g * self.shape.s * self.u, ops=16, rounded=(torch.float32,), unit=g * self.u),
            Term(g * self.shape.s_by_z * self.u, ops=self.shape.arg_ops),
        ]

    def dgate(self, dh: Tensor) -> list[Term]:
        outer, shape = dh.abs() * self.u * self.open_gate, self.shape
        unit = outer * (1 + self.g.abs())
        return [
            Term(outer * (shape.s + shape.zds), ops=24, rounded=(torch.float32,), unit=unit),
            Term(outer * shape.slope_by_z, ops=shape.arg_ops),
        ]

    def dup(self, dh: Tensor) -> list[Term]:
        outer, g = dh.abs() * self.open_up, self.g.abs()
        return [
            Term(outer * g * self.shape.s, ops=16, rounded=(torch.float32,), unit=outer * g),
            Term(outer * g * self.shape.s_by_z, ops=self.shape.arg_ops),
        ]


def _elementwise(
    gate: Tensor, up: Tensor, activation: str, alpha: float, limit: float | None, up_offset: float,
    gate_error: Tensor | float = 0.0, up_error: Tensor | float = 0.0,
) -> _Elementwise:  # fmt: skip
    """gate_error, up_error: how far the values may be from those whose masks count."""
    everywhere = torch.ones_like(gate)
    open_gate = everywhere if limit is None else (gate <= limit + gate_error).double()
    open_up = everywhere if limit is None else (up.abs() <= limit + up_error).double()
    g, u = (gate, up) if limit is None else (gate.clamp(max=limit), up.clamp(-limit, limit))
    shape = _shape(activation, alpha * g)
    slope = shape.slope.abs() * open_gate
    bend = abs(alpha) * shape.bend * open_gate
    return _Elementwise(
        g.abs() * shape.s, slope, bend, u.abs() + abs(up_offset), shape, g, open_gate, open_up
    )


def swiglu_majorant(
    cotangents: tuple[Tensor, ...],
    gate: Tensor,
    up: Tensor,
    *,
    activation: str = "silu",
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
) -> dict[str, list[Term]]:
    """Error majorants of "h", "dgate" and "dup"; inputs in float64, dtypes as in the call."""
    dh = cotangents[0].double()
    part = _elementwise(gate.double(), up.double(), activation, alpha, limit, up_offset)
    return {"h": part.h(), "dgate": part.dgate(dh), "dup": part.dup(dh)}


def swiglu_mlp_majorant(
    cotangents: tuple[Tensor, ...],
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    *,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    activation: str = "silu",
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    recompute: bool = False,
) -> dict[str, list[Term]]:
    """Error majorants of "y" and the gradients "dx", "dw_gate", …

    gate, up, h, dh, dgate and dup are rounded to x's dtype on the way; each of these errors, and that of the sums that they
    come from, is followed through the derivatives of what is computed from it. Where gate or up is so near its bound that an
    error moves it across, the whole gradient is in doubt.
    """
    dtype, shape, (M, D, F) = x.dtype, x.shape, (x.numel() // x.shape[-1], x.shape[-1], w_gate.shape[0])
    given = (x.reshape(M, D), cotangents[0].reshape(M, D), w_gate, w_up, w_down, b_gate, b_up, b_down)
    x, dy, w_gate, w_up, w_down, b_gate, b_up, b_down = (None if t is None else t.double() for t in given)

    def rounded(value: Tensor) -> Term:
        return Term(value.abs(), rounded=(dtype,), unit=torch.ones_like(value))

    def linear(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, list[Term]]:
        value, size = x @ weight.T, x.abs() @ weight.abs().T
        if bias is not None:
            value, size = value + bias, size + bias.abs()
        return value, [rounded(value), Term(size, sums=(D,), ops=1)]

    def error(value: Tensor, terms: list[Term]) -> Tensor:
        """A little more than the terms allow."""
        return 2 * (torch.finfo(dtype).eps * value.abs() + 8 * (D**0.5 + 1) * _FP32 * terms[1].value)

    def times_weight(terms: list[Term], weight: Tensor) -> list[Term]:
        return contracted(terms, lambda part: part @ weight.abs(), lambda part: part @ weight.square())

    def over_tokens(terms: list[Term], rows: Tensor) -> list[Term]:
        return contracted(terms, lambda part: part.T @ rows.abs(), lambda part: part.T @ rows.square())

    def rows_over_tokens(rows: Tensor, terms: list[Term]) -> list[Term]:
        return contracted(terms, lambda part: rows.abs().T @ part, lambda part: rows.square().T @ part)

    def column_sum(terms: list[Term]) -> list[Term]:
        return contracted(terms, lambda part: part.sum(0), lambda part: part.sum(0))

    gate, of_gate = linear(w_gate, b_gate)
    up, of_up = linear(w_up, b_up)
    doubts = error(gate, of_gate), error(up, of_up)
    part = _elementwise(gate, up, activation, alpha, limit, up_offset, *doubts)
    h = part.a * part.u
    of_h = [rounded(h), *part.h(), *times(of_gate, part.slope * part.u), *times(of_up, part.a * part.open_up)]

    dh = dy @ w_down
    of_dh = [rounded(dh), Term(dy.abs() @ w_down.abs(), sums=(D,), ops=1)]
    dgate, dup = dh * part.slope * part.u, dh * part.a * part.open_up
    of_dgate = [rounded(dgate), *part.dgate(dh), *times(of_dh, part.slope * part.u)]
    of_dgate += times(of_gate, dh * part.bend * part.u) + times(of_up, dh * part.slope * part.open_up)
    of_dup = [rounded(dup), *part.dup(dh), *times(of_dh, part.a * part.open_up)]
    of_dup += times(of_gate, dh * part.slope * part.open_up)
    if limit is not None:
        # One operation's κ/(1 − κ), times 2²⁴, is 1 and a little.
        of_dgate.append(Term(dgate.abs() * ((gate - limit).abs() <= doubts[0]) / _FP32, ops=1))
        of_dup.append(Term(dup.abs() * ((up.abs() - limit).abs() <= doubts[1]) / _FP32, ops=1))

    y_size = h.abs() @ w_down.abs().T + (0.0 if b_down is None else b_down.abs())
    dx_size = dgate.abs() @ w_gate.abs() + dup.abs() @ w_up.abs()
    terms = {
        "y": [Term(y_size, sums=(F,), ops=1), *times_weight(of_h, w_down.T)],
        "dx": [
            Term(dx_size, sums=(2 * F,), ops=1),
            *times_weight(of_dgate, w_gate),
            *times_weight(of_dup, w_up),
        ],
        "dw_gate": [Term(dgate.abs().T @ x.abs(), sums=(max(1, M),)), *over_tokens(of_dgate, x)],
        "dw_up": [Term(dup.abs().T @ x.abs(), sums=(max(1, M),)), *over_tokens(of_dup, x)],
        "dw_down": [Term(dy.abs().T @ h.abs(), sums=(max(1, M),)), *rows_over_tokens(dy, of_h)],
    }
    for name, bias, value, errors in (
        ("db_gate", b_gate, dgate, of_dgate),
        ("db_up", b_up, dup, of_dup),
        ("db_down", b_down, dy, []),
    ):
        if bias is not None:
            terms[name] = [Term(value.abs().sum(0), sums=(max(1, M),)), *column_sum(errors)]
    return {
        name: [_reshaped(t, shape) for t in found] if name in ("y", "dx") else found
        for name, found in terms.items()
    }


def _reshaped(term: Term, shape: torch.Size) -> Term:
    def view(part: Tensor | None) -> Tensor | None:
        return None if part is None else part.reshape(shape)

    return replace(term, value=view(term.value), unit=view(term.unit), rms=view(term.rms))
