"""SwiGLU in Triton, elementwise and as the whole MLP block. The definition is reference/swiglu.py.

Math        a = g·s(alpha·g), g = min(gate, limit);  u = clamp(up, ±limit) + up_offset;  h = a·u
            MLP: gate = x·w_gateᵀ;  up = x·w_upᵀ;  y = h·w_downᵀ (each + its bias)
Backward    dgate = dh·u·(s + z·s'), z = alpha·g;  dup = dh·a;  a and s are computed again from gate and up
            MLP: dh = dy·w_down;  dw_down = dyᵀ·h;  dw_gate = dgateᵀ·x;  dw_up = dupᵀ·x;  dx = dgate·w_gate + dup·w_up
Saved       gate and up. MLP: x, which the caller holds, the weights, and gate and up, or with recompute=True neither
Fusion      eager, bf16                           here
            gate ─ silu ─ a ─┐                    gate, up ─── _swiglu_fwd ─── h                      1 launch, 3 passes
            up ──────────────┴ mul ─ h            dh, gate, up ─ _swiglu_bwd ─ dgate, dup (, h)       1 launch, 5 passes (6)
            5 passes; 8 backward; keeps a, too    MLP: h is not kept; backward makes it again in the same pass
Floor       forward 3, backward 5 passes over M·F elements. At 16384 × 14336 in bf16 1.41 and 2.35 GB: 0.33 and 0.55 ms at the
            rate of a copy, 4281 GB/s (experiments/results/h200). MLP: 6·M·D·F FLOPs forward and 12 backward.
Tiles       A program takes BLOCK_M × BLOCK_F elements. Tensors of odd width without gaps are one long row; halves and alternating
            columns of a packed tensor are read where they lie, alternating ones by one contiguous load that is split.
            MLP: backward, and forward where cuBLAS multiplies, in slices of the ffn width (fast/_swiglu_mlp.py). On Hopper, where
            the tables GATE_UP and DX say so, gate, up and h come from one kernel with both products (fast/_swiglu_gemm.py),
            and dx from one in which both products share an accumulator (fast/_triton/hopper_products.py).
Rounding    fp32 inside, without fused multiply-adds; the points where values are rounded are the reference's.
            Products in 16 bits are summed in fp32 to the end, biases added before the rounding.
Determinism no atomics and no split sums in the kernels; cuBLAS gives the same bits for the same shapes. recompute=True runs the
            same products on the same slices, so it gives the bits that would have been saved.
In place    Backward writes dgate and dup over saved gate and up where nobody can see those again (fast/_triton/ownership.py).
Limits      fp32, fp16, bf16; tensors whose leading dims need more than two strides are copied first. swiglu_mlp: one dtype.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fast import _swiglu_kernels as kernels
from fast import _swiglu_mlp as mlp
from fast._swiglu_gemm import GATE_UP
from fast._swiglu_kernels import BWD, FWD
from fast._swiglu_mlp import DX
from fast._triton.launch import check_supported
from fast._triton.registration import define
from reference.swiglu import (
    Activation,
    Alpha,
    Gate,
    GateWeight,
    InBias,
    Limit,
    Offset,
    OutBias,
    OutWeight,
    Rows,
    Up,
    UpWeight,
    check_swiglu,
    check_swiglu_mlp,
    swiglu_backward,
    swiglu_mlp_backward,
)

__all__ = ["BWD", "DX", "FWD", "GATE_UP", "swiglu", "swiglu_mlp"]


def swiglu_fwd(
    gate: Tensor, up: Tensor, activation: str, alpha: float, limit: float | None, up_offset: float
) -> Tensor:
    """h [*, F], contiguous."""
    h = _h(gate, up, activation, alpha, limit, up_offset)
    kernels.swiglu_fwd(gate, up, h, activation, alpha, limit, up_offset)
    return h


def swiglu_bwd(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: str,
    alpha: float,
    limit: float | None,
    up_offset: float,
    need_gate: bool,
    need_up: bool,
) -> tuple[Tensor, Tensor]:
    """dgate and dup [*, F], contiguous; empty where not needed."""
    found = dgate, dup = _gradients(dh, gate, up, activation, alpha, limit, up_offset, need_gate, need_up)
    outputs = dgate if need_gate else None, dup if need_up else None
    kernels.swiglu_bwd(dh, gate, up, *outputs, False, activation, alpha, limit, up_offset)
    return found


def _h(gate, up, activation, alpha, limit, up_offset):
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


def _gradients(dh, gate, up, activation, alpha, limit, up_offset, need_gate, need_up):
    return gate.new_empty(gate.shape if need_gate else 0), up.new_empty(up.shape if need_up else 0)


_OPTIONS = "str activation, float alpha, float? limit, float up_offset"
_fwd_op = define(f"swiglu_fwd(Tensor gate, Tensor up, {_OPTIONS}) -> Tensor", swiglu_fwd, _h)
_bwd_op = define(
    f"swiglu_bwd(Tensor dh, Tensor gate, Tensor up, {_OPTIONS}, bool need_gate, bool need_up) -> (Tensor, Tensor)",
    swiglu_bwd,
    _gradients,
)


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, *options: Any) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.options = options
        return _fwd_op(gate, up, *options)

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        (gate, up), needed = ctx.saved_tensors, ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():
            found = swiglu_backward((dh,), gate, up, **_named(ctx.options)).values()
        else:
            found = _bwd_op(dh, gate, up, *ctx.options, *needed)
        return (
            *(grad if need else None for grad, need in zip(found, needed, strict=True)),
            None,
            None,
            None,
            None,
        )


def swiglu(
    gate: Gate,
    up: Up,
    *,
    activation: Activation = "silu",
    alpha: Alpha = 1.0,
    limit: Limit = None,
    up_offset: Offset = 0.0,
) -> Tensor:
    """h [*, F] of gate, up [*, F]: `reference.swiglu` in Triton; same arguments, result, rounding points and errors.

    Any strides: halves and alternating columns of a packed tensor are read where they are. fp32, fp16 or bf16 each. The result
    and the gradients are contiguous. Differentiable twice; nothing is written to; the same bits from run to run.
    Raises TypeError for other dtypes, ValueError for tensors that are not on one CUDA device, shapes and options.
    """
    check_swiglu("swiglu", {"gate": (gate, "* F"), "up": (up, "* F")}, activation, alpha, limit, up_offset)
    check_supported("swiglu", gate=gate, up=up)
    if gate is up:
        up = gate.view_as(gate)  # torch.compile refuses one tensor as two inputs of a Function
    options = _options(activation, alpha, limit, up_offset)
    if torch.is_grad_enabled():
        return _SwiGLU.apply(gate, up, *options)
    return _fwd_op(gate, up, *options)


def swiglu_mlp_fwd(
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
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y like x; gate and up for the backward pass, empty without `save`."""
    parameters, options = (w_gate, w_up, w_down, b_gate, b_up, b_down), (activation, alpha, limit, up_offset)
    y, gate, up = mlp.swiglu_mlp_fwd(_rows(x), parameters, options, save)
    return y.view(x.shape), gate, up


def swiglu_mlp_bwd(
    dy: Tensor,
    saved: list[Tensor],
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
    needed: list[bool],
) -> list[Tensor]:
    """Gradients of x, the weights and the biases, empty where not needed; saved: gate and up, or nothing."""
    parameters, options = (w_gate, w_up, w_down, b_gate, b_up, b_down), (activation, alpha, limit, up_offset)
    dx, *others = mlp.swiglu_mlp_bwd(_rows(dy), saved, _rows(x), parameters, options, needed)
    return [dx.view(x.shape) if needed[0] else dx, *others]


def _mlp_outputs(x, w_gate, w_up, w_down, b_gate, b_up, b_down, activation, alpha, limit, up_offset, save):
    hidden = (x.numel() // x.shape[-1], w_gate.shape[0]) if save else (0,)
    return x.new_empty(x.shape), x.new_empty(hidden), x.new_empty(hidden)


def _mlp_gradients(
    dy, saved, x, w_gate, w_up, w_down, b_gate, b_up, b_down, activation, alpha, limit, up_offset, needed
):
    given = (x, w_gate, w_up, w_down, b_gate, b_up, b_down)
    return [x.new_empty(t.shape if need else 0) for t, need in zip(given, needed, strict=True)]


_PARAMETERS = "Tensor w_gate, Tensor w_up, Tensor w_down, Tensor? b_gate, Tensor? b_up, Tensor? b_down"
_mlp_fwd_op = define(
    f"swiglu_mlp_fwd(Tensor x, {_PARAMETERS}, {_OPTIONS}, bool save) -> (Tensor, Tensor, Tensor)",
    swiglu_mlp_fwd,
    _mlp_outputs,
)
_mlp_bwd_op = define(
    f"swiglu_mlp_bwd(Tensor dy, Tensor[] saved, Tensor x, {_PARAMETERS}, {_OPTIONS}, bool[] needed) -> Tensor[]",
    swiglu_mlp_bwd,
    _mlp_gradients,
)


class _SwiGLUMLP(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        *given, recompute = rest
        y, gate, up = _mlp_fwd_op(x, *given, not recompute)
        ctx.save_for_backward(x, *given[:6], *(() if recompute else (gate, up)))
        ctx.options, ctx.strides = tuple(given[6:]), _strides(x, *given[:2])
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *given = ctx.saved_tensors
        parameters, saved, needed = given[:6], given[6:], ctx.needs_input_grad[:7]
        del given
        if _strides(x, *parameters[:2]) != ctx.strides:
            # Hooks on saved tensors have packed them closer, and by their strides the launcher knows how gate and up lie.
            saved = []
        if torch.is_grad_enabled():
            grads = _differentiable_backward(dy, x, parameters, ctx.options)
        elif torch.compiler.is_compiling() or type(dy) is not Tensor:
            grads = _mlp_bwd_op(dy, saved, x, *parameters, *ctx.options, needed)
        else:
            # The launcher itself: unless the graph is kept, `saved` then has the only references to gate and up, whose
            # memory dgate and dup take.
            ctx.maybe_clear_saved_tensors()
            grads = swiglu_mlp_bwd(dy, saved, x, *parameters, *ctx.options, needed)
        return *(grad if need else None for grad, need in zip(grads, needed, strict=True)), *[None] * 5


def _differentiable_backward(
    dy: Tensor, x: Tensor, parameters: list[Tensor | None], options: tuple
) -> list[Tensor | None]:
    names = ("w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down")
    given = dict(zip(names, parameters, strict=True))
    grads = swiglu_mlp_backward((dy,), x, **given, **_named(options))
    return [grads.get(name) for name in ("x", *names)]


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
    """y [*, D] of x [*, D]: `reference.swiglu_mlp` with fused kernels; same arguments, result, rounding points and errors.

    Saved for the backward pass: x, the weights, and gate and up [M, F]; with recompute=True x and the weights alone. Frozen
    weights cost no product. Under autocast all tensors are cast to its dtype first, as torch.nn.functional.linear does.
    fp32 products are IEEE unless torch.backends.cuda.matmul allows TF32. Differentiable twice; nothing is written to; the same
    bits from run to run, with recompute and without.
    Raises TypeError for other dtypes, ValueError for tensors that are not on one CUDA device, shapes and options.
    """
    tensors = {
        "x": x,
        "w_gate": w_gate,
        "w_up": w_up,
        "w_down": w_down,
        "b_gate": b_gate,
        "b_up": b_up,
        "b_down": b_down,
    }
    autocast = (
        isinstance(x, Tensor)
        and x.device.type in ("cpu", "cuda")
        and torch.is_autocast_enabled(x.device.type)
    )
    if autocast:
        dtype = torch.get_autocast_dtype(x.device.type)
        tensors = {
            name: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t
            for name, t in tensors.items()
        }
    check_swiglu_mlp(*tensors.values(), activation, alpha, limit, up_offset, recompute)
    check_supported("swiglu_mlp", **tensors)
    call = (*tensors.values(), *_options(activation, alpha, limit, up_offset))
    if torch.is_grad_enabled():
        return _SwiGLUMLP.apply(*call, recompute)
    return _mlp_fwd_op(*call, False)[0]


def _options(
    activation: str, alpha: float, limit: float | None, up_offset: float
) -> tuple[str, float, float | None, float]:
    return activation, float(alpha), None if limit is None else float(limit), float(up_offset)


def _named(options: tuple[str, float, float | None, float]) -> dict[str, Any]:
    return dict(zip(("activation", "alpha", "limit", "up_offset"), options, strict=True))


def _strides(*tensors: Tensor) -> list[tuple[int, ...]]:
    return [tuple(t.stride()) for t in tensors]


def _rows(x: Tensor) -> Tensor:
    """[M, D]. Copied where rows are so far apart that cuBLAS, which may count elements in 32 bits, could not reach them."""
    x = x.reshape(-1, x.shape[-1])
    return x.contiguous() if max(x.stride()) >= 2**24 else x
