"""Error majorants of reference/lora_linear.py: what the roundings that it admits to can do, to first order.

Where x has 16 bits, S and dS, A and B enter y and dx as two 16-bit numbers each: a = hi + lo is off by u² relatively, and by what
lo underflows. The passes that make S, dS, dA and dB take fp32's digits; in fp16 as two numbers of a column that is scaled so that
its largest number lies from 2¹³ to 2¹⁴: off by 2⁻²⁴ relatively, and by 2⁻³⁸ of that largest number.
"""

from typing import Any

import torch
from torch import Tensor

from reference._numerics import Term, contracted, times
from reference._philox import dropout_mask

_FP32 = 2.0**-24


def lora_linear_majorant(
    cotangents: tuple[Tensor, ...],
    x: Tensor,
    weight: Any,
    lora_a: Tensor,
    lora_b: Tensor,
    *,
    scale: float | Tensor = 1.0,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    magnitude: Tensor | None = None,
    adapter: Tensor | None = None,
    activation: str | None = None,
) -> dict[str, list[Term]]:
    """Error majorants of "y" and of the gradients "dx", "dweight", "dlora_a", "dlora_b", "dbias" and "dmagnitude"."""
    dtype, shape, device = x.dtype, x.shape, x.device
    K, N, R = x.shape[-1], lora_b.shape[-2], lora_b.shape[-1]
    M = x.numel() // K
    split = (
        0
        if dtype not in (torch.bfloat16, torch.float16)
        else round((torch.finfo(dtype).eps / 2) ** 2 / _FP32)
    )
    w = (weight if isinstance(weight, Tensor) else weight.dequantize(torch.float64)).double()
    x, dy = x.double().reshape(M, K), cotangents[0].double().reshape(M, N)
    a, b = (t.double() if t.dim() == 3 else t.double()[None] for t in (lora_a, lora_b))
    G = len(a)
    s = torch.as_tensor(scale, dtype=torch.float64, device=device).reshape(-1).expand(G)
    rows = torch.ones(M, 1, dtype=torch.float64, device=device)
    if adapter is not None:
        rows = (adapter.reshape(-1, 1) == torch.arange(G, device=device)).double()
    factor = torch.ones((), dtype=torch.float64, device=device)
    if dropout_p:
        seed = torch.as_tensor(seed, device=device)
        factor = dropout_mask(seed, M, K, dropout_p, device).double() / (1 - dropout_p)
    dropped, ranks = x * factor, rows[:, :, None] * s[:, None]

    def down(values: Tensor, weights: Tensor) -> Tensor:
        return torch.einsum("mk,grk->mgr", values, weights) * ranks

    def up(values: Tensor, weights: Tensor) -> Tensor:
        return torch.einsum("mgr,gnr->mn", values, weights)

    def entering(value: Tensor, unit: Tensor, sums: tuple[int, ...]) -> list[Term]:
        """A product of two factors that are split."""
        pair = Term(torch.zeros_like(value), rounded=(dtype,), unit=unit) if split else None
        return [Term(value, sums=sums, ops=6 + 2 * split), *([pair] if pair else [])]

    def coarse(*values: Tensor) -> list[Term]:
        """What scaled columns leave, from products with their largest numbers."""
        return [Term(value * 2.0**-14, ops=1) for value in values] if dtype == torch.float16 else []

    def largest(factor: Tensor, dim: int) -> Tensor:
        """The largest number of each column, in all of the column."""
        return factor.abs().amax(dim, keepdim=True).expand_as(factor) if factor.numel() else factor

    # u = x Wᵀ + s S Bᵀ
    u = x @ w.T + up(down(dropped, a), b)
    T, A, B = down(dropped.abs(), a.abs()).abs(), a.abs(), b.abs()
    T_largest = down(dropped.abs(), largest(a, 2)).abs()
    base, added = x.abs() @ w.abs().T, up(T, B)
    ones = torch.ones_like(T) * rows[:, :, None]
    unit = up(ones, B) + up(T, torch.ones_like(b))
    of_u = [Term(base + added, sums=(K + 3 * G * R,), ops=2), *entering(added, unit, (K, G * R))]
    of_u += coarse(up(T_largest, B))

    # z = c u + bias
    c, of_c, norm = None, [], None
    if magnitude is not None:
        norm = (w + s[:, None, None] * (b @ a)).norm(dim=-1)  # [G, N]
        norm = norm.where(norm > 0, torch.nan)
        size = (w.abs() + s.abs()[:, None, None] * (B @ A)).square().sum(-1)
        c = rows @ (magnitude.double().reshape(G, N) / norm) + (1 - rows.sum(1, keepdim=True))
        doubt = rows @ (size / norm.square())
        of_c = [Term(c.abs() * doubt, sums=(K, R), ops=10)]
    z = u if c is None else c * u
    of_z = of_u if c is None else [*times(of_u, c), *times(of_c, u), Term(z.abs(), ops=2)]
    if bias is not None:
        z = z + bias.double()
        of_z = [*of_z, Term(z.abs() + bias.double().abs(), ops=1)]
    gate = torch.sigmoid(z)
    slope = gate * (1 + z * torch.sigmoid(-z))
    of_y = of_z
    if activation:
        of_y = [
            *times(of_z, slope),
            Term(z.abs() * gate * (1 + z.abs()), ops=8, rounded=(torch.float32,), unit=z.abs()),
        ]

    # Backward, from u as it is saved.
    of_dz: list[Term] = []
    dz, du, of_du = dy, dy, []
    saved = [*of_u, Term(u.abs(), rounded=(dtype,), unit=torch.ones_like(u))]
    if activation:
        bend = gate * torch.sigmoid(-z) * (2 + z.abs())
        of_saved = saved if c is None else [*times(saved, c), *times(of_c, u)]
        of_saved = [*of_saved, Term(z.abs() + (0 if bias is None else bias.double().abs()), ops=3)]
        dz = dy * slope
        of_dz = [
            *times(of_saved, dy * bend),
            Term(dy.abs() * gate * (1 + 2 * z.abs()), ops=16, rounded=(torch.float32,), unit=dy.abs()),
        ]
    of_rounding: list[Term] = []  # of du, in dx and dW; in the adapters' passes with an activation alone
    if activation or c is not None:
        du = dz if c is None else dz * c
        of_du = of_dz if c is None else [*times(of_dz, c), *times(of_c, dz), Term(du.abs(), ops=2)]
        of_rounding = [Term(du.abs(), rounded=(dtype,), unit=torch.ones_like(du))]
    if activation:
        of_du, of_rounding = [*of_du, *of_rounding], []

    dS = torch.einsum("mn,gnr->mgr", du.abs(), B) * ranks.abs()
    through = torch.einsum("mgr,grk->mk", dS, A) * factor

    def to_dx(part: Tensor) -> Tensor:
        low_rank = torch.einsum("mgr,grk->mk", torch.einsum("mn,gnr->mgr", part, B) * ranks.abs(), A)
        return part @ w.abs() + low_rank * factor

    low = s[:, None, None] * (b @ a)  # [G, N, K]

    def to_dx_squares(part: Tensor) -> Tensor:
        """Σ_n part · (W + the row's low-rank part)²."""
        mixed = torch.einsum("mg,mn,gnk->mk", rows, part, 2 * w * low)
        return (
            part @ w.square()
            + factor * mixed
            + factor.square() * torch.einsum("mg,mn,gnk->mk", rows, part, low.square())
        )

    of_dx = [Term(du.abs() @ w.abs() + through, sums=(N + 3 * G * R,), ops=2)]
    unit = torch.einsum("mgr,grk->mk", ones, A) + torch.einsum("mgr,grk->mk", dS, torch.ones_like(a))
    of_dx += entering(through, unit * factor, (N, G * R))
    dS_largest = torch.einsum("mn,gnr->mgr", du.abs(), largest(b, 1)) * ranks.abs()
    of_dx += coarse(torch.einsum("mgr,grk->mk", dS_largest, A) * factor)
    of_dx += contracted(of_du, to_dx, to_dx_squares)
    of_dx += contracted(of_rounding, lambda part: part @ w.abs(), lambda part: part @ w.square())
    terms = {
        "y": [_viewed(t, (*shape[:-1], N)) for t in of_y],
        "dx": [_viewed(t, shape) for t in of_dx],
    }
    tokens = max(1, M)

    def to_dA(part: Tensor) -> Tensor:
        return torch.einsum("mgr,mk->grk", part, dropped.abs())

    of_dA = [Term(to_dA(dS), sums=(N, tokens), ops=6), *coarse(to_dA(dS_largest), to_dA(largest(dS, 0)))]
    sb = B * s.abs()[:, None, None]
    of_dA += contracted(
        of_du,
        lambda part: torch.einsum(
            "mgr,mk->grk", torch.einsum("mn,gnr->mgr", part, sb) * rows[:, :, None], dropped.abs()
        ),
        lambda part: torch.einsum(
            "mgr,mk->grk", torch.einsum("mn,gnr->mgr", part, sb.square()) * rows[:, :, None], dropped.square()
        ),
    )

    def to_dB(part: Tensor) -> Tensor:
        return torch.einsum("mn,mgr->gnr", du.abs(), part)

    of_dB = [Term(to_dB(T), sums=(K, tokens), ops=6)]
    of_dB += coarse(to_dB(T_largest), to_dB(largest(T, 0)))
    exact = down(dropped, a)
    of_dB += contracted(
        of_du,
        lambda part: torch.einsum("mn,mgr->gnr", part, exact.abs()),
        lambda part: torch.einsum("mn,mgr->gnr", part, exact.square()),
    )
    terms |= {
        "dlora_a": [_viewed(t, lora_a.shape) for t in of_dA],
        "dlora_b": [_viewed(t, lora_b.shape) for t in of_dB],
    }
    if isinstance(weight, Tensor):
        terms["dweight"] = [
            Term(du.abs().T @ x.abs(), sums=(tokens,)),
            *contracted(
                [*of_du, *of_rounding], lambda part: part.T @ x.abs(), lambda part: part.T @ x.square()
            ),
        ]
    if bias is not None:
        terms["dbias"] = [
            Term(dz.abs().sum(0), sums=(tokens,)),
            *contracted(of_dz, lambda p: p.sum(0), lambda p: p.sum(0)),
        ]
    if magnitude is not None:

        def per_adapter(part: Tensor) -> Tensor:
            return rows.T @ part / norm

        def squares(part: Tensor) -> Tensor:
            return rows.T @ part / norm.square()

        of_product = [*times(of_dz, u), *times(saved, dz)]
        doubt = (size / norm.square()) * per_adapter((dz * u).abs())
        found = [
            Term(per_adapter((dz * u).abs()), sums=(tokens,), ops=4),
            Term(doubt, sums=(K, R), ops=10),
        ]
        found += contracted(of_product, per_adapter, squares)
        terms["dmagnitude"] = [_viewed(t, magnitude.shape) for t in found]
    return terms


def _viewed(term: Term, shape: tuple[int, ...]) -> Term:
    def view(part: Tensor | None) -> Tensor | None:
        return None if part is None else part.reshape(shape)

    return Term(view(term.value), term.sums, term.ops, term.rounded, view(term.unit), view(term.rms))
