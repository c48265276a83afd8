"""SwiGLU and its relatives, elementwise and as the whole MLP block. Shazeer 2020, https://arxiv.org/abs/2002.05202

Dimension key: M tokens (the product of all leading dims), D model width, F ffn width.

    g = min(gate, limit);  u = clamp(up, −limit, limit)                 both untouched without a limit
    a = g · s(alpha · g)
    h = round(a · (u + up_offset))                                      swiglu

    activation    s(z)
    silu          σ(z) = 1 / (1 + e^−z)                                 alpha = 1.702: the sigmoid form of GELU
    gelu_tanh     σ(2y), y = √(2/π) · (z + 0.044715 z³)                 = (1 + tanh y) / 2;  Hendrycks & Gimpel 2016,
    gelu          Φ(z) = (1 + erf(z / √2)) / 2                          https://arxiv.org/abs/1606.08415
    relu2         max(z, 0)                                             So et al. 2021, https://arxiv.org/abs/2109.08668

    gate = round(x · w_gateᵀ + b_gate);  up = round(x · w_upᵀ + b_up)   swiglu_mlp
    y = round(swiglu(gate, up) · w_downᵀ + b_down)

gpt-oss: alpha 1.702, limit 7, up_offset 1. DeepSeek-V4: a limit alone.

Where values are rounded (everything else is computed in fp32, or float64 where an input is float64):
    swiglu: h, to promote(gate.dtype, up.dtype); dgate and dup, each to its argument's dtype;
    swiglu_mlp: gate, up, h and y, and backward dh = dy · w_down, dgate and dup, to x's dtype, which all tensors have; then each
    gradient once.
A clamp passes the gradient where it changes nothing, its bounds included. s' of relu2 is 0 at 0.
"""

from math import isfinite, pi, sqrt
from typing import Annotated, Literal, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from reference._cost import Cost, Work, nbytes
from reference._signature import Choices, Dims, check, promote
from reference._swiglu_majorant import swiglu_majorant, swiglu_mlp_majorant

__all__ = ["swiglu", "swiglu_majorant", "swiglu_mlp", "swiglu_mlp_majorant"]

Gate = Annotated[Tensor, Dims("* F")]
Up = Annotated[Tensor, Dims("* F", dtype="own", beside=("gate", "F"))]
Rows = Annotated[Tensor, Dims("* D")]
GateWeight = Annotated[Tensor, Dims("F D", fan_in="D")]
UpWeight = Annotated[Tensor, Dims("F D", fan_in="D", beside=("w_gate", "F"))]
OutWeight = Annotated[Tensor, Dims("D F", fan_in="F")]
InBias = Annotated[Tensor | None, Dims("F")]
OutBias = Annotated[Tensor | None, Dims("D")]
Activation = Literal["silu", "gelu_tanh", "gelu", "relu2"]
Alpha = Annotated[float, Choices((1.0, 1.702))]
Limit = Annotated[float | None, Choices((None, 7.0, 0.5))]
Offset = Annotated[float, Choices((0.0, 1.0))]


def swiglu(
    gate: Gate,
    up: Up,
    *,
    activation: Activation = "silu",
    alpha: Alpha = 1.0,
    limit: Limit = None,
    up_offset: Offset = 0.0,
) -> Tensor:
    """Gate up by an activation of gate: h [*, F] of gate, up [*, F].

    gate and up may be any views, such as the halves or the interleaved columns of one packed [*, 2F] tensor.
    alpha: finite factor of the activation's argument. limit: > 0, bounds gate from above and up from both sides; None bounds
    nothing. up_offset: finite, added to up after the bound.
    Raises TypeError for a dtype that is not floating point and an option that is no number; ValueError for a shape, device or
    option that is not allowed.
    """
    check_swiglu("swiglu", {"gate": (gate, "* F"), "up": (up, "* F")}, activation, alpha, limit, up_offset)
    wide = promote(gate, up)
    g, u = _clamped(gate.to(wide), up.to(wide), limit)
    s, _ = _factor(alpha * g, activation)
    return (g * s * (u + up_offset)).to(torch.promote_types(gate.dtype, up.dtype))


def swiglu_backward(
    cotangents: tuple[Tensor, ...],
    gate: Tensor,
    up: Tensor,
    *,
    activation: str = "silu",
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
) -> dict[str, Tensor]:
    """The gradients by name, from the cotangent (dh,); differentiable itself.

    da/dg = s(z) + z · s'(z) with z = alpha · g;  dgate = [gate ≤ limit] · dh · (u + up_offset) · da/dg;
    dup = [|up| ≤ limit] · dh · a.
    """
    wide = promote(gate, up)
    dh, (g, u) = cotangents[0].to(wide), _clamped(gate.to(wide), up.to(wide), limit)
    s, zds = _factor(alpha * g, activation)
    dgate, dup = dh * (u + up_offset) * (s + zds), dh * g * s
    if limit is not None:
        dgate, dup = torch.where(gate <= limit, dgate, 0.0), torch.where(up.abs() <= limit, dup, 0.0)
    return {"gate": dgate.to(gate.dtype), "up": dup.to(up.dtype)}


def swiglu_mlp(
    x: Rows,
    w_gate: GateWeight,
    w_up: UpWeight,
    w_down: OutWeight,
    *,
    b_gate: InBias = None,
    b_up: InBias = None,
    b_down: OutBias = None,
    activation: Activation = "silu",
    alpha: Alpha = 1.0,
    limit: Limit = None,
    up_offset: Offset = 0.0,
    recompute: bool = False,
) -> Tensor:
    """The gated MLP block: y [*, D] of x [*, D], with weights as torch.nn.Linear holds them, [out, in].

    w_gate, w_up [F, D] (any views, such as the halves or interleaved rows of one packed [2F, D]), w_down [D, F], b_gate and b_up
    [F], b_down [D]: all of x's dtype. recompute: keep x alone for the backward pass and compute gate and up again there; the same
    bits. The other options are those of `swiglu`.
    Raises TypeError for dtypes that differ or are not floating point and an option that is no number; ValueError for a shape,
    device or option that is not allowed.
    """
    check_swiglu_mlp(
        x, w_gate, w_up, w_down, b_gate, b_up, b_down, activation, alpha, limit, up_offset, recompute
    )

    def block(x: Tensor, *parameters: Tensor | None) -> Tensor:
        w_gate, w_up, w_down, b_gate, b_up, b_down = parameters
        wide = x.to(promote(x))
        gate, up = _linear(wide, w_gate, b_gate, x.dtype), _linear(wide, w_up, b_up, x.dtype)
        h = swiglu(gate, up, activation=activation, alpha=alpha, limit=limit, up_offset=up_offset)
        return _linear(h.to(wide.dtype), w_down, b_down, x.dtype)

    tensors = (x, w_gate, w_up, w_down, b_gate, b_up, b_down)
    return (
        checkpoint(block, *tensors, use_reentrant=False, preserve_rng_state=False)
        if recompute
        else block(*tensors)
    )


def swiglu_mlp_backward(
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
) -> dict[str, Tensor]:
    """The gradients by name, from the cotangent (dy,); differentiable itself.

    dh = dy · w_down;  (dgate, dup) = swiglu_backward(dh);  dx = dgate · w_gate + dup · w_up;
    dw_down = dyᵀ · h;  dw_gate = dgateᵀ · x;  dw_up = dupᵀ · x;  each db is the column sum of its cotangent.
    """
    wide, options = (
        promote(x),
        {"activation": activation, "alpha": alpha, "limit": limit, "up_offset": up_offset},
    )
    rows, dy = (t.to(wide).reshape(-1, x.shape[-1]) for t in (x, cotangents[0]))
    gate, up = _linear(rows, w_gate, b_gate, x.dtype), _linear(rows, w_up, b_up, x.dtype)
    h, dh = swiglu(gate, up, **options).to(wide), (dy @ w_down.to(wide)).to(x.dtype)
    grads = swiglu_backward((dh,), gate, up, **options)
    dgate, dup = grads["gate"].to(wide), grads["up"].to(wide)
    found = {
        "x": (dgate @ w_gate.to(wide) + dup @ w_up.to(wide)).view(x.shape),
        "w_gate": dgate.T @ rows,
        "w_up": dup.T @ rows,
        "w_down": dy.T @ h,
    }
    biases = {"b_gate": (b_gate, dgate), "b_up": (b_up, dup), "b_down": (b_down, dy)}
    found |= {name: cotangent.sum(0) for name, (bias, cotangent) in biases.items() if bias is not None}
    return {name: grad.to(x.dtype) for name, grad in found.items()}


def swiglu_cost(
    gate: Tensor,
    up: Tensor,
    *,
    activation: str = "silu",
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
) -> Cost:
    """Only shapes and dtypes are read. Backward reads gate, up and dh, writes dgate and dup."""
    h = torch.empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype), device="meta")
    forward, backward = nbytes(gate, up, h), 2 * nbytes(gate, up) + nbytes(h)
    return Cost(Work(6 * gate.numel(), forward), Work(12 * gate.numel(), backward), nbytes(gate, up))


def swiglu_mlp_cost(
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
) -> Cost:
    """Only shapes and dtypes are read. Six matrix products of 2·M·D·F FLOPs with their operands and results; seven and eight
    when gate and up are computed again. Saved: gate and up, or nothing, beside x and the weights, which the caller keeps."""
    D = x.shape[-1]
    M, F = x.numel() // D, w_gate.shape[0]
    product, parameters = 2 * M * D * F, nbytes(w_gate, w_up, w_down, b_gate, b_up, b_down)
    hidden = M * F * x.element_size()
    kept = 0 if recompute else 2 * hidden
    forward = Work(3 * product + 6 * M * F, 2 * nbytes(x) + parameters + kept)
    again = 2 * product if recompute else 0
    backward = Work(6 * product + again + 12 * M * F, 3 * nbytes(x) + 2 * parameters + kept)
    return Cost(forward, backward, kept + nbytes(x) + parameters)


COST = {"swiglu": swiglu_cost, "swiglu_mlp": swiglu_mlp_cost}


def check_swiglu(
    function: str,
    dims: dict[str, tuple[Tensor | None, str]],
    activation: str,
    alpha: float,
    limit: float | None,
    up_offset: float,
) -> None:
    """Raise the error that names the argument; shared by both functions and both trees."""
    check(function, dims)
    if activation not in get_args(Activation):
        raise ValueError(f"{function}: activation must be one of {get_args(Activation)}, got {activation!r}")
    for name, number in (("alpha", alpha), ("limit", limit), ("up_offset", up_offset)):
        if name == "limit" and number is None:
            continue
        if not hasattr(number, "__float__") or isinstance(number, Tensor):
            raise TypeError(f"{function}: {name} must be a number, got {number!r}")
        if not isfinite(number):
            raise ValueError(f"{function}: {name} must be finite, got {number!r}")
    if limit is not None and not limit > 0:
        raise ValueError(f"{function}: limit must be > 0 or None, got {limit!r}")


def check_swiglu_mlp(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    activation: str,
    alpha: float,
    limit: float | None,
    up_offset: float,
    recompute: bool,
) -> None:
    """The same for swiglu_mlp."""
    dims = {
        "x": (x, "* D"),
        "w_gate": (w_gate, "F D"),
        "w_up": (w_up, "F D"),
        "w_down": (w_down, "D F"),
        "b_gate": (b_gate, "F"),
        "b_up": (b_up, "F"),
        "b_down": (b_down, "D"),
    }
    check_swiglu("swiglu_mlp", dims, activation, alpha, limit, up_offset)
    for name, (tensor, _) in dims.items():
        if tensor is not None and tensor.dtype != x.dtype:
            raise TypeError(f"swiglu_mlp: {name} must have x's dtype {x.dtype}, got {tensor.dtype}")
    if x.shape[-1] == 0 or w_gate.shape[0] == 0:
        raise ValueError(
            f"swiglu_mlp: D and F must be at least 1, got x {list(x.shape)} and w_gate {list(w_gate.shape)}"
        )
    if not isinstance(recompute, bool):
        raise TypeError(f"swiglu_mlp: recompute must be a bool, got {recompute!r}")


def _clamped(gate: Tensor, up: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    return (gate, up) if limit is None else (gate.clamp(max=limit), up.clamp(-limit, limit))


def _factor(z: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """s(z) and z · s'(z)."""
    if activation == "silu":
        return torch.sigmoid(z), z * (torch.sigmoid(z) * torch.sigmoid(-z))
    if activation == "gelu_tanh":
        t = z.clamp(-40, 40)  # beyond, s is 0 or 1 and s' is 0 in any precision; z³ would overflow
        w, dw = 2 * sqrt(2 / pi) * (t + 0.044715 * t**3), 2 * sqrt(2 / pi) * (1 + 3 * 0.044715 * t**2)
        return torch.sigmoid(w), z * (torch.sigmoid(w) * torch.sigmoid(-w) * dw)
    if activation == "gelu":
        return (1 + torch.erf(z / sqrt(2))) / 2, z * (torch.exp(-z.square() / 2) / sqrt(2 * pi))
    return torch.relu(z), torch.relu(z)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """round(x · weightᵀ + bias); x in the dtype to compute in."""
    y = x @ weight.to(x.dtype).T
    return (y if bias is None else y + bias.to(x.dtype)).to(dtype)
