"""What swiglu and swiglu_mlp must do beyond the drawn cases: algebra, views, memory, PyTorch around them."""

import importlib
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import fast
import reference
from equivalence_tests.harness.cases import Spec, example
from equivalence_tests.harness.interpreter import interpreting
from equivalence_tests.harness.mutants import Mutant
from equivalence_tests.harness.real import DEVICE, Site
from fast import _swiglu_mlp
from fast._triton import rows

definition = importlib.import_module("reference.swiglu")
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: no CUDA graphs on a CPU")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu2")
CLAMPED = {"alpha": 1.702, "limit": 0.5, "up_offset": 1.0}

KERNELS, VALUE = "fast._swiglu_kernels", "fast._swiglu_activation:activation_value"
FWD, BWD = f"{KERNELS}:_swiglu_fwd", f"{KERNELS}:_swiglu_bwd"
SLOPES, CLAMP, FACTOR = (f"fast._swiglu_activation:{n}" for n in ("activation_gradients", "_clamped", "_factor"))
MLP_FWD, MLP_BWD = "fast._swiglu_mlp:swiglu_mlp_fwd", "fast._swiglu_mlp:swiglu_mlp_bwd"
MUTANTS = [
    Mutant("last_column_dropped", FWD, "(offs_f < F)", "(offs_f < F - 1)"),
    Mutant("last_row_dropped", FWD, "mask = (offs_m < M)", "mask = (offs_m < M - 1)", of="swiglu"),
    Mutant("last_row_of_gradient_dropped", BWD, "mask = (offs_m < M)", "mask = (offs_m < M - 1)", of="swiglu"),
    Mutant("pairs_of_first_tile_only", f"{KERNELS}:_load_pair", "2 * first_f + ", "first_f + ", of="swiglu"),
    Mutant("column_stride_forgotten", FWD, "offs_f * stride_gf", "offs_f", of="swiglu"),
    Mutant("rows_without_gaps_assumed", f"{KERNELS}:_views", "for t in (gate, up, *others)):", "for t in (gate, *others)):", of="swiglu"),
    Mutant("offset_forgotten", VALUE, "(up + up_offset)", "up"),
    Mutant("alpha_forgotten", VALUE, "_factor(alpha * gate", "_factor(gate"),
    Mutant("gate_bounded_from_below", CLAMP, "tl.where(gate > limit, limit, gate)", "tl.where(gate > limit, limit, tl.where(gate < -limit, -limit, gate))"),
    Mutant("up_not_bounded_from_below", CLAMP, "tl.where(up < -limit, -limit, up)", "up"),
    Mutant("slope_of_s_forgotten", SLOPES, "(s + zds)", "s"),
    Mutant("gradient_through_bound_of_gate", SLOPES, "tl.where(raw_gate <= limit, dgate, 0.0)", "dgate"),
    Mutant("no_gradient_at_the_bound", SLOPES, "raw_gate <= limit", "raw_gate < limit", of="swiglu"),
    Mutant("up_bounded_from_above_only", SLOPES, "tl.abs(raw_up) <= limit", "raw_up <= limit"),
    Mutant("dup_of_gate", SLOPES, "dh * a\n", "dh * gate\n"),
    Mutant("dgate_ignores_offset", SLOPES, "dh * u * (", "dh * up * ("),
    Mutant("h_ignores_offset", SLOPES, "dup, a * u", "dup, a * up", of="swiglu_mlp"),
    Mutant("gelu_of_unscaled_z", FACTOR, "0.7071067811865476 * z", "z"),
    Mutant("cubic_term_forgotten", FACTOR, " + 0.044715 * t * t * t", "", dtypes=("fp32", "fp16")),
    Mutant("density_too_narrow", FACTOR, "-0.5 * z * z", "-1.0 * z * z"),
    Mutant("relu2_slope_of_relu", FACTOR, "zds = s", "zds = 0.0 * s"),
    Mutant("dx_of_gate_weight_only", MLP_BWD, "(dup, w_up,", "(dup, w_gate,", of="swiglu_mlp"),
    Mutant("dx_of_last_group", MLP_BWD, "add_matmul(total, cotangent, weight[whole])", "add_matmul(None, cotangent, weight[whole])", of="swiglu_mlp"),
    Mutant("dw_down_of_dh", MLP_BWD, "*outputs, needed[3],", "*outputs, False,", of="swiglu_mlp"),
    Mutant("gate_and_up_swapped", MLP_BWD, "gate, up = (saved", "up, gate = (saved", of="swiglu_mlp"),
    Mutant("bias_of_first_slice", "fast._swiglu_mlp:_gate_up", "b[part]", "b[: part.stop - part.start]", of="swiglu_mlp"),
    Mutant("db_down_not_summed", MLP_BWD, "db_down.copy_(dy.sum(0, dtype=torch.float32))", "db_down.copy_(dy[0])", of="swiglu_mlp"),
    Mutant("packed_halves_merged", "fast._triton.rows:as_rows", "== stride * size", ">= stride * size", of="swiglu"),
]  # fmt: skip
BIASES = {name: Spec() for name in ("b_gate", "b_up", "b_down")}
EXAMPLES = [
    case
    for dtype in ("fp32", "fp16", "bf16")
    for activation in ACTIVATIONS
    for case in (
        example("swiglu", dtype, {"*": (2, 3), "F": 1100}, {"up": Spec("alternating")}, {"activation": activation, **CLAMPED}),
        example("swiglu", dtype, {"*": (7,), "F": 500}, {"up": Spec("halves")}, {"activation": activation}),
        example("swiglu_mlp", dtype, {"*": (65,), "D": 40, "F": 1100} if activation == "silu" else {"*": (33,), "D": 48, "F": 70},
                BIASES, {"activation": activation, "alpha": 1.702, "up_offset": 1.0}),
    )
] + [
    example("swiglu", dtype, {"*": (64,), "F": 64}, {n: Spec(content="signs") for n in ("gate", "up")}, {"limit": 0.5})
    for dtype in ("fp32", "fp16", "bf16")
]  # fmt: skip
GPU_EXAMPLES = [
    case
    for dtype in ("fp32", "fp16", "bf16")
    for case in (
        example("swiglu", dtype, {"*": (2048,), "F": 14336}),
        example("swiglu", dtype, {"*": (8192,), "F": 2880}, {"up": Spec("alternating")}, {"alpha": 1.702, "limit": 7.0, "up_offset": 1.0}),
        example("swiglu_mlp", dtype, {"*": (2048,), "D": 1024, "F": 14336}),
        example("swiglu_mlp", dtype, {"*": (8192,), "D": 512, "F": 4416}, {"w_up": Spec("halves")}, {"recompute": True}),
        example("swiglu_mlp", dtype, {"*": (2, 77), "D": 42, "F": 431}, BIASES, {"activation": "gelu_tanh"}),
    )
]  # fmt: skip


def real_sites(model: nn.Module) -> Iterator[Site]:
    """The MLPs of the first, a middle and the last layer, whole and between their projections."""
    layers = len(model.model.layers)
    for path in (f"model.layers.{i}.mlp" for i in (0, layers // 2, layers - 1)):
        mlp = model.get_submodule(path)
        yield Site(path, mlp, _block, function="swiglu_mlp")
        yield Site(path, mlp, _between, cotangent=lambda mlp, dy: dy @ mlp.down_proj.weight)


def _block(mlp: nn.Module, inputs: dict) -> tuple[tuple, dict]:
    return (inputs["x"], mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight), {}


def _between(mlp: nn.Module, inputs: dict) -> tuple[tuple, dict]:
    return (mlp.gate_proj(inputs["x"]), mlp.up_proj(inputs["x"])), {}
