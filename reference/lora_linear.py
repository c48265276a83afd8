"""A linear layer with low-rank adapters. Hu et al. 2021, https://arxiv.org/abs/2106.09685

Dimension key: M tokens (the product of all leading dims), N out features, K in features, R rank, G adapters.

    x̃ = x ∘ kept / (1 − p)                      dropout on the adapter's path alone; kept: reference/_philox.py
    S = x̃ · Aᵀ                                  [M, R]
    u = x · Wᵀ + scale · S · Bᵀ                 [M, N]
    c = magnitude / ‖W + scale · B · A‖_row     1 without magnitude; the norm is a constant of the gradient
    y = round(activation(c · u + bias))

magnitude: DoRA, Liu et al. 2024, https://arxiv.org/abs/2402.09353; where the norm is 0, c is NaN. With `adapter` each row m has
A, B, scale and c of its own, those of adapter[m]; what is none of 0 … G − 1 (−1 by convention) means no adapter: u = x · Wᵀ and
c = 1.

lora_qkv is several such layers on one x; lora_swiglu_mlp puts swiglu between (gate, up) and down.

Where values are rounded (everything else is computed in fp32, or float64 where an input is float64): y, to x's dtype; in
backward with an activation or magnitude, u where it is saved and du where it is multiplied, to x's dtype, with a magnitude alone
not for dS and dB; each gradient once, to its argument's dtype. S and dS have fp32's digits. Where x has 16 bits, they, A and B
enter y and dx as a sum of two 16-bit numbers each.
The dtype rule: y has x's dtype; weight, A and B may have any.
"""

from math import isfinite
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor

from reference._lora_linear_cost import lora_linear_cost, lora_qkv_cost, lora_swiglu_mlp_cost
from reference._lora_linear_majorant import lora_linear_majorant
from reference._philox import dropout_mask
from reference._signature import Choices, Dims, check, promote
from reference.swiglu import swiglu

__all__ = ["Adapter", "lora_linear", "lora_linear_majorant", "lora_qkv", "lora_swiglu_mlp"]

X = Annotated[Tensor, Dims("* K")]
Weight = Annotated[Tensor, Dims("N K", fan_in="K")]  # or an NF4Weight or a FakeQuantWeight
DownProjection = Annotated[Tensor, Dims("R K", dtype="own", fan_in="K")]  # or [G, R, K] with `adapter`
UpProjection = Annotated[Tensor, Dims("N R", dtype="own", fan_in="R")]  # or [G, N, R]
Scale = Annotated[float, Choices((1.0, 2.0, 0.25))]  # or a tensor of one element, of G with `adapter`
Bias = Annotated[Tensor | None, Dims("N", dtype="own")]
Probability = Annotated[float, Choices((0.0, 0.3))]
Seed = Annotated[int | Tensor | None, Choices((5, 2**40 + 1))]
Magnitude = Annotated[Tensor | None, Dims("N", dtype="own")]  # or [G, N]
RowAdapter = Annotated[Tensor | None, Choices((None,))]
Activation = Literal[None, "silu"]
LARGEST = {"R": 256}


class Adapter(NamedTuple):
    """a [R, K], b [N, R] and their scale."""

    a: Tensor
    b: Tensor
    scale: float | Tensor = 1.0


def lora_linear(
    x: X,
    weight: Weight,
    lora_a: DownProjection,
    lora_b: UpProjection,
    *,
    scale: Scale = 1.0,
    bias: Bias = None,
    dropout_p: Probability = 0.0,
    seed: Seed = None,
    magnitude: Magnitude = None,
    adapter: RowAdapter = None,
    activation: Activation = None,
) -> Tensor:
    """y [*, N] of x [*, K], weight [N, K] (a tensor, an NF4Weight or a FakeQuantWeight), lora_a [R, K] and lora_b [N, R].

    scale: a number or a tensor of one element (alpha/R, or alpha/√R for rsLoRA), without a gradient. bias [N]. dropout_p in
    [0, 1): of x on the adapter's path. seed: int64, a number or a tensor of one element, of the mask; drawn from torch's
    generator when None. magnitude [N]. activation: "silu" of all that. adapter: integers [*], the adapter of each row, −1 for
    none; then lora_a [G, R, K], lora_b [G, N, R], magnitude [G, N] and scale a number or [G].
    Raises TypeError for what is no floating-point tensor and an option of a wrong type; ValueError for a shape, device or value
    that is not allowed.
    """
    check_lora_linear(x, weight, lora_a, lora_b, scale, bias, dropout_p, seed, magnitude, adapter, activation)
    parts = _parts(x, weight, lora_a, lora_b, scale, dropout_p, seed, adapter)
    u, c = parts.u(), _row_scale(parts, magnitude)
    z = u if c is None else c * u
    z = z if bias is None else z + bias.to(z.dtype)
    z = z if activation is None else z * torch.sigmoid(z)
    return z.to(x.dtype).reshape(*x.shape[:-1], z.shape[-1])


class _Parts(NamedTuple):
    """The operands of u in the dtype to compute in: x, x̃ [M, K], w [N, K], a [G, R, K], b [G, N, R], s [G], rows [M, G] of 0 and
    1; factor [M, K] of x̃, None without dropout."""

    x: Tensor
    dropped: Tensor
    w: Tensor
    a: Tensor
    b: Tensor
    s: Tensor
    rows: Tensor
    factor: Tensor | None

    def down(self) -> Tensor:
        """S [M, G, R], zero in the adapters that are not a row's."""
        return torch.einsum("mk,grk->mgr", self.dropped, self.a) * self.rows[:, :, None]

    def norms(self) -> Tensor:
        """‖W + scale · B · A‖_row [G, N], a constant; NaN where it is 0, as a direction is undefined there."""
        norms = (self.w + self.s[:, None, None] * (self.b @ self.a)).detach().norm(dim=-1)
        return norms.where(norms > 0, torch.nan)

    def u(self) -> Tensor:
        return self.x @ self.w.T + torch.einsum("mgr,gnr->mn", self.down() * self.s[:, None], self.b)


def _parts(
    x: Tensor,
    weight: Any,
    lora_a: Tensor,
    lora_b: Tensor,
    scale: float | Tensor,
    dropout_p: float,
    seed: int | Tensor | None,
    adapter: Tensor | None,
) -> _Parts:
    wide = promote(x, weight if isinstance(weight, Tensor) else None, lora_a, lora_b)
    rows, K = x.flatten(0, -2).to(wide) if x.dim() > 1 else x[None].to(wide), x.shape[-1]
    a, b = (t.to(wide) if t.dim() == 3 else t.to(wide)[None] for t in (lora_a, lora_b))
    s = torch.as_tensor(scale, dtype=wide, device=x.device).detach().reshape(-1).expand(len(a))
    member = torch.ones(len(rows), 1, dtype=wide, device=x.device)
    if adapter is not None:
        member = (adapter.reshape(-1, 1) == torch.arange(len(a), device=x.device)).to(wide)
    factor = None
    if dropout_p:
        seed = seed_tensor(seed, x.device)
        factor = dropout_mask(seed, len(rows), K, dropout_p, x.device).to(wide) / (1 - dropout_p)
    return _Parts(
        rows, rows if factor is None else rows * factor, dense(weight, wide), a, b, s, member, factor
    )


def _row_scale(parts: _Parts, magnitude: Tensor | None) -> Tensor | None:
    """c [M, N]; None without magnitude."""
    if magnitude is None:
        return None
    c = magnitude.to(parts.w.dtype).reshape(len(parts.a), -1) / parts.norms()
    return parts.rows @ c + (1 - parts.rows.sum(1, keepdim=True))


def lora_linear_backward(
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
) -> dict[str, Tensor]:
    """The gradients by name, from the cotangent (dy,); differentiable itself. weight's only where it is a tensor.

    dz = dy · activation'(z);  du = dz · c;  dS = scale · du · B;  dx = du · W + (dS · A) ∘ kept / (1 − p);
    dA = dSᵀ · x̃;  dB = scale · duᵀ · S;  dW = duᵀ · x;  dbias = Σ_m dz;  dmagnitude = Σ_m dz · u / norm.
    """
    parts = _parts(x, weight, lora_a, lora_b, scale, dropout_p, seed, adapter)
    wide, c = parts.x.dtype, _row_scale(parts, magnitude)
    dz = cotangents[0].to(wide).reshape(len(parts.x), len(parts.w))
    found: dict[str, Tensor] = {}
    u = parts.u() if c is not None or activation else None
    if u is not None:
        u = u.to(x.dtype).to(wide)
    if activation:
        z = (u if c is None else c * u) + (0 if bias is None else bias.to(wide))
        dz = dz * (torch.sigmoid(z) * (1 + z * torch.sigmoid(-z)))
    low = dz if c is None else dz * c  # du for the adapters
    du = low if u is None else low.to(x.dtype).to(wide)
    low = du if activation else low
    S, dS = (
        parts.down(),
        torch.einsum("mn,gnr->mgr", low, parts.b) * parts.rows[:, :, None] * parts.s[:, None],
    )
    through = torch.einsum("mgr,grk->mk", dS, parts.a)
    dx = du @ parts.w + (through if parts.factor is None else through * parts.factor)
    dA = torch.einsum("mgr,mk->grk", dS, parts.dropped)
    dB = torch.einsum("mn,mgr->gnr", low, S * parts.s[:, None])
    found = {
        "x": dx.view(x.shape).to(x.dtype),
        "lora_a": dA.reshape(lora_a.shape).to(lora_a.dtype),
        "lora_b": dB.reshape(lora_b.shape).to(lora_b.dtype),
    }
    if isinstance(weight, Tensor):
        found["weight"] = (du.T @ parts.x).to(weight.dtype)
    if bias is not None:
        found["bias"] = dz.sum(0).to(bias.dtype)
    if magnitude is not None:
        dmagnitude = parts.rows.T @ (dz * u) / parts.norms()
        found["magnitude"] = dmagnitude.reshape(magnitude.shape).to(magnitude.dtype)
    return found


def lora_qkv(
    x: Tensor,
    weights: tuple[Any, ...],
    adapters: tuple[Adapter | None, ...],
    *,
    biases: tuple[Tensor | None, ...] | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    adapter: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """(q, k, v) of one x: lora_linear with each of the weights and its Adapter; None is no adapter.

    Any number of layers; all drop the same elements of x. adapter: as lora_linear's, for all of them.
    Raises as lora_linear, and ValueError where weights, adapters and biases are not equally many.
    """
    biases = check_lora_qkv("lora_qkv", weights, adapters, biases)
    seed = seed_tensor(seed, x.device) if dropout_p else None
    return tuple(
        lora_linear(
            x, weight, *no_adapter(x, weight, adapter)[:2] if given is None else given[:2],
            scale=1.0 if given is None else given[2], bias=bias, dropout_p=dropout_p, seed=seed, adapter=adapter,
        )
        for weight, given, bias in zip(weights, adapters, biases, strict=True)
    )  # fmt: skip


def lora_swiglu_mlp(
    x: Tensor,
    weights: tuple[Any, Any, Any],
    adapters: tuple[Adapter | None, Adapter | None, Adapter | None],
    *,
    biases: tuple[Tensor | None, Tensor | None, Tensor | None] | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    adapter: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """The gated MLP of adapted layers: y = down(swiglu(gate(x), up(x))); weights, adapters and biases as (gate, up, down).

    gate, up and h are rounded to x's dtype, as in swiglu_mlp. down drops other elements than gate and up do: its seed is
    seed + 1. activation: as swiglu's.
    """
    biases = check_lora_qkv("lora_swiglu_mlp", weights, adapters, biases, count=3)
    seed = seed_tensor(seed, x.device) if dropout_p else None
    shared = {"dropout_p": dropout_p, "adapter": adapter}
    gate, up = lora_qkv(x, weights[:2], adapters[:2], biases=biases[:2], seed=seed, **shared)
    h = swiglu(gate, up, activation=activation)
    seed = None if seed is None else seed + 1
    return lora_qkv(h, weights[2:], adapters[2:], biases=biases[2:], seed=seed, **shared)[0]


def no_adapter(x: Tensor, weight: Any, adapter: Tensor | None) -> Adapter:
    """An adapter of rank 1 that adds zero."""
    N, K = weight.shape
    lead = () if adapter is None else (1,)
    return Adapter(x.new_zeros(*lead, 1, K), x.new_zeros(*lead, N, 1))


def dense(weight: Any, dtype: torch.dtype) -> Tensor:
    """The weight's values as a tensor [N, K]."""
    return weight.to(dtype) if isinstance(weight, Tensor) else weight.dequantize(dtype)


def seed_tensor(seed: int | Tensor | None, device: torch.device) -> Tensor:
    """The seed as one int64 on the device, drawn from torch's generator if None; without synchronising with the device."""
    if seed is None:
        return torch.randint(2**62, (), device=device)
    return (
        seed.reshape(())
        if isinstance(seed, Tensor)
        else torch.full((), seed, dtype=torch.int64, device=device)
    )


COST = {
    "lora_linear": lora_linear_cost,
    "lora_qkv": lora_qkv_cost,
    "lora_swiglu_mlp": lora_swiglu_mlp_cost,
}


def check_lora_linear(
    x: Tensor,
    weight: Any,
    lora_a: Tensor,
    lora_b: Tensor,
    scale: float | Tensor,
    bias: Tensor | None,
    dropout_p: float,
    seed: int | Tensor | None,
    magnitude: Tensor | None,
    adapter: Tensor | None,
    activation: str | None,
) -> None:
    """Raise the error that names the argument; shared by both trees."""
    name, many = "lora_linear", "G " if adapter is not None else ""
    if not isinstance(weight, Tensor) and not callable(getattr(weight, "dequantize", None)):
        raise TypeError(
            f"{name}: weight must be a torch.Tensor, an NF4Weight or a FakeQuantWeight, got {type(weight).__name__}"
        )
    if adapter is not None and (
        not isinstance(adapter, Tensor) or adapter.dtype not in (torch.int32, torch.int64)
    ):
        kind = adapter.dtype if isinstance(adapter, Tensor) else type(adapter).__name__
        raise TypeError(f"{name}: adapter must be a tensor of int32 or int64, got {kind}")
    sizes = check(
        name,
        {
            "x": (x, "* K"),
            "weight": (weight if isinstance(weight, Tensor) else None, "N K"),
            "lora_a": (lora_a, f"{many}R K"),
            "lora_b": (lora_b, f"{many}N R"),
            "bias": (bias, "N"),
            "magnitude": (magnitude, f"{many}N"),
        },
    )
    if tuple(weight.shape) != (sizes["N"], sizes["K"]):
        raise ValueError(
            f"{name}: weight must have shape [{sizes['N']}, {sizes['K']}], got {list(weight.shape)}"
        )
    if min(sizes["K"], sizes["N"], sizes["R"]) < 1 or sizes["R"] > LARGEST["R"]:
        raise ValueError(
            f"{name}: K and N must be at least 1 and the rank R in 1 … {LARGEST['R']}, "
            f"got K={sizes['K']}, N={sizes['N']}, R={sizes['R']}"
        )
    _check_scale(scale, sizes.get("G"), x)
    _check_number("dropout_p", dropout_p)
    if not 0 <= dropout_p < 1:
        raise ValueError(f"{name}: dropout_p must be in [0, 1), got {dropout_p!r}")
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != x.device:
            raise ValueError(
                f"{name}: seed must be one int64 on {x.device}, got {seed.dtype} {list(seed.shape)} on {seed.device}"
            )
    elif seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise TypeError(f"{name}: seed must be an int, a tensor or None, got {seed!r}")
    if adapter is not None and (adapter.shape != x.shape[:-1] or adapter.device != x.device):
        raise ValueError(
            f"{name}: adapter must have shape {list(x.shape[:-1])} on {x.device}, "
            f"got {list(adapter.shape)} on {adapter.device}"
        )
    if activation not in (None, "silu"):
        raise ValueError(f"{name}: activation must be None or 'silu', got {activation!r}")


def _check_scale(scale: float | Tensor, adapters: int | None, x: Tensor) -> None:
    if not isinstance(scale, Tensor):
        return _check_number("scale", scale)
    allowed = (1,) if adapters is None else (1, adapters)
    if (
        not scale.is_floating_point()
        or scale.dim() > 1
        or scale.numel() not in allowed
        or scale.device != x.device
    ):
        raise ValueError(
            f"lora_linear: scale must be a number or a floating-point tensor of {' or '.join(map(str, allowed))} elements on "
            f"{x.device}, got {scale.dtype} {list(scale.shape)} on {scale.device}"
        )
    if scale.requires_grad:
        raise ValueError(
            "lora_linear: scale has no gradient, but got one that requires it; pass scale.detach()"
        )
    return None


def _check_number(option: str, value: float) -> None:
    if not hasattr(value, "__float__") or isinstance(value, Tensor):
        raise TypeError(f"lora_linear: {option} must be a number, got {value!r}")
    if not isfinite(value):
        raise ValueError(f"lora_linear: {option} must be finite, got {value!r}")


def check_lora_qkv(
    function: str, weights: tuple, adapters: tuple, biases: tuple | None, count: int | None = None
) -> tuple[Tensor | None, ...]:
    """The biases, one for each weight."""
    biases = tuple(biases) if biases is not None else (None,) * len(weights)
    if not len(weights) == len(adapters) == len(biases) or (count and len(weights) != count):
        wanted = f"{count} each" if count else "equally many"
        raise ValueError(
            f"{function}: weights, adapters and biases must be {wanted}, got {len(weights)}, {len(adapters)} and {len(biases)}"
        )
    for given in adapters:
        if given is not None and (not isinstance(given, tuple) or len(given) != 3):
            raise TypeError(
                f"{function}: adapters must be Adapter(a, b, scale) or None, got {type(given).__name__}"
            )
    return biases
