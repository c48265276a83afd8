"""What swiglu and swiglu_mlp must do beyond the drawn cases: algebra, views, memory, PyTorch around them."""

import contextlib
import importlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import fast
import reference
from equivalence_tests.harness.cases import Spec, example
from equivalence_tests.harness.mutants import Mutant
from equivalence_tests.harness.real import DEVICE, Site
from fast import _swiglu_mlp

definition = importlib.import_module("reference.swiglu")
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: no CUDA graphs on a CPU")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu2")
GPT_OSS = {"alpha": 1.702, "limit": 7.0, "up_offset": 1.0}
CLAMPED = {**GPT_OSS, "limit": 0.5}

KERNELS, ACTIVATION = "fast._swiglu_kernels", "fast._swiglu_activation"
FWD, BWD = f"{KERNELS}:_swiglu_fwd", f"{KERNELS}:_swiglu_bwd"
VALUE, SLOPES, CLAMP, FACTOR = (
    f"{ACTIVATION}:{n}" for n in ("activation_value", "activation_gradients", "_clamped", "_factor")
)
MLP_BWD, DX, GATE_UP, SAVED = (
    f"fast._swiglu_mlp:{n}" for n in ("swiglu_mlp_bwd", "_add_dx", "_gate_up", "_columns")
)
ONE = {"of": "swiglu"}
MLP = {"of": "swiglu_mlp"}
MUTANTS = [
    Mutant("last_column_dropped", FWD, "(offs_f < F)", "(offs_f < F - 1)"),
    Mutant("last_row_dropped", FWD, "mask = (offs_m < M)", "mask = (offs_m < M - 1)", **ONE),
    Mutant("last_row_of_gradient_dropped", BWD, "mask = (offs_m < M)", "mask = (offs_m < M - 1)", **ONE),
    Mutant("pairs_of_first_tile_only", f"{KERNELS}:_load_pair", "2 * first_f + ", "first_f + ", **ONE),
    Mutant("column_stride_forgotten", FWD, "offs_f * stride_gf", "offs_f", **ONE),
    Mutant("gaps_not_seen", f"{KERNELS}:_views", "all(t.is_contiguous() for", "all(t.numel() for", **ONE),
    Mutant("offset_forgotten", VALUE, "(up + up_offset)", "up"),
    Mutant("alpha_forgotten", VALUE, "_factor(alpha * gate", "_factor(gate"),
    Mutant("gate_bounded_from_below", CLAMP, "limit, gate)\n", "limit, tl.where(gate < -limit, -limit, gate))\n"),
    Mutant("up_not_bounded_from_below", CLAMP, "tl.where(up < -limit, -limit, up)", "up"),
    Mutant("slope_of_s_forgotten", SLOPES, "(s + zds)", "s"),
    Mutant("gradient_through_bound_of_gate", SLOPES, "tl.where(raw_gate <= limit, dgate, 0.0)", "dgate"),
    Mutant("no_gradient_at_the_bound", SLOPES, "raw_gate <= limit", "raw_gate < limit", **ONE),
    Mutant("up_bounded_from_above_only", SLOPES, "tl.abs(raw_up) <= limit", "raw_up <= limit"),
    Mutant("dup_of_gate", SLOPES, "dh * a\n", "dh * gate\n"),
    Mutant("dgate_ignores_offset", SLOPES, "dh * u * (", "dh * up * ("),
    Mutant("h_ignores_offset", SLOPES, "dup, a * u", "dup, a * up", **MLP),
    Mutant("gelu_of_unscaled_z", FACTOR, "0.7071067811865476 * z", "z"),
    Mutant("cubic_term_forgotten", FACTOR, " + 0.044715 * t * t * t", "", dtypes=("fp32", "fp16")),
    Mutant("density_too_narrow", FACTOR, "-0.5 * z * z", "-1.0 * z * z"),
    Mutant("relu2_slope_of_relu", FACTOR, "zds = s", "zds = 0.0 * s"),
    Mutant("dx_of_gate_weight_only", DX, "dup, w_up)", "dup, w_gate)", **MLP),
    Mutant("dx_of_last_slice", MLP_BWD, "_add_dx(dx,", "_add_dx(None,", **MLP),
    Mutant("dw_down_of_dh", MLP_BWD, "dup, needed[3],", "dup, False,", **MLP),
    Mutant("saved_gate_and_up_swapped", MLP_BWD, "for t in saved)\n", "for t in saved[::-1])\n", **MLP),
    Mutant("saved_of_first_slice", SAVED, "M * part.start : M * part.stop", "0 : M * (part.stop - part.start)", **MLP),
    Mutant("bias_of_first_slice", GATE_UP, "b[part]", "b[: part.stop - part.start]", **MLP),
    Mutant("db_down_of_first_token", MLP_BWD, "dy.sum(0, dtype=torch.float32)", "dy[0]", **MLP),
    Mutant("sum_over_slices_in_16_bits", "fast._triton.matmul:add_matmul", "acc.addmm_(a, b)", "acc.addmm_(a, b).half().float()",
           dtypes=("fp32",), **MLP),
]  # fmt: skip
BIASES = {name: Spec() for name in ("b_gate", "b_up", "b_down")}
EXAMPLES = [
    case
    for dtype in ("fp32", "fp16", "bf16")
    for activation in ACTIVATIONS
    for case in (
        example("swiglu", dtype, {"*": (2, 3), "F": 1100}, {"up": Spec("alternating")}, {"activation": activation, **GPT_OSS}),
        example("swiglu", dtype, {"*": (7,), "F": 500}, {"up": Spec("halves")}, {"activation": activation}),
        example("swiglu_mlp", dtype, {"*": (65,), "D": 40, "F": 1100} if activation == "silu" else {"*": (33,), "D": 48, "F": 70},
                BIASES, {"activation": activation, "alpha": 1.702, "up_offset": 1.0}),
    )
] + [
    example("swiglu", dtype, {"*": (64,), "F": 64}, {n: Spec(content="signs") for n in ("gate", "up")}, {"limit": 0.5})
    for dtype in ("fp32", "fp16", "bf16")
]  # fmt: skip
AGAIN = {"recompute": True}
GPU_EXAMPLES = [
    case
    for dtype in ("fp32", "fp16", "bf16")
    for case in (
        example("swiglu", dtype, {"*": (2048,), "F": 14336}),
        example("swiglu", dtype, {"*": (8192,), "F": 2880}, {"up": Spec("alternating")}, GPT_OSS),
        example("swiglu_mlp", dtype, {"*": (2048,), "D": 1024, "F": 14336}),
        example("swiglu_mlp", dtype, {"*": (8192,), "D": 1024, "F": 4416}, {**BIASES, "w_up": Spec("halves")}, AGAIN),
        example("swiglu_mlp", dtype, {"*": (2, 77), "D": 42, "F": 431}, BIASES, {"activation": "gelu_tanh"}),
        example("swiglu_mlp", dtype, {"*": (4100,), "D": 42, "F": 4400}),
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


def draw(*shape: int, dtype: torch.dtype = F32, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(DEVICE, dtype).requires_grad_()


def block(
    M: int = 9, D: int = 48, F: int = 100, dtype: torch.dtype = F32, bias: bool = False
) -> tuple[list[Tensor], dict]:
    """The tensors of an MLP call: positional ones, and biases by name."""
    weights = [draw(F, D, seed=1), draw(F, D, seed=2), draw(D, F, seed=3)]
    tensors = [draw(M, D), *(w.detach() / w.shape[1] ** 0.5 for w in weights)]
    named = {n: draw(size, seed=4) for n, size in (("b_gate", F), ("b_up", F), ("b_down", D))} if bias else {}
    tensors = [t.detach().to(dtype).requires_grad_() for t in tensors]
    return tensors, {n: b.detach().to(dtype).requires_grad_() for n, b in named.items()}


def gradients(y: Tensor, inputs: list[Tensor], **options) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, inputs, draw(*y.shape, dtype=y.dtype, seed=9).detach(), **options)


def close(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...], tolerance: float = 2**-18) -> None:
    """fp32 results within 64 u in norm: two results of some 20 roundings each, and of sums of up to 100 addends."""
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).double().norm() <= tolerance * b.double().norm()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("options", [{}, CLAMPED])
def test_reference_gradients_are_derived_right(activation, options):
    options = {"activation": activation, **options}
    gate, up = (draw(3, 7, seed=i).double().detach().requires_grad_() for i in (0, 1))
    dh = torch.randn_like(gate)
    found = torch.autograd.grad(reference.swiglu(gate, up, **options), (gate, up), dh)
    derived = definition.swiglu_backward((dh,), gate, up, **options)
    torch.testing.assert_close(tuple(derived.values()), found, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda g, u: reference.swiglu(g, u, **options), (gate, up))
    assert torch.autograd.gradgradcheck(
        lambda g, u: definition.swiglu_backward((dh,), g, u, **options)["gate"], (gate, up)
    )
    tensors, biases = block(3, 4, 5, torch.float64, bias=True)
    y = reference.swiglu_mlp(*tensors, **biases, **options)
    dy = torch.randn_like(y)
    derived = definition.swiglu_mlp_backward((dy,), *tensors, **biases, **options)
    found = torch.autograd.grad(y, [*tensors, *biases.values()], dy)
    assert list(derived) == ["x", "w_gate", "w_up", "w_down", *biases]
    torch.testing.assert_close(tuple(derived.values()), found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_infinite_and_large_numbers_give_what_the_reference_gives(activation):
    edge = torch.tensor(
        [float("inf"), -float("inf"), float("nan"), 3e38, -3e38, 1e20, -1e20, 100.0, -100.0, 0.0, -0.0]
    )
    gate, up = (t.to(DEVICE).requires_grad_() for t in (edge.clone(), torch.full_like(edge, 0.5)))
    for options in ({}, {"limit": 7.0}):
        got, wanted = (m.swiglu(gate, up, activation=activation, **options) for m in (fast, reference))
        derived = definition.swiglu_backward(
            (torch.ones_like(gate),), gate, up, activation=activation, **options
        )
        torch.testing.assert_close(got, wanted, equal_nan=True, rtol=1e-6, atol=1e-30)
        found = torch.autograd.grad(got, (gate, up), torch.ones_like(gate))
        for a, b in zip(found, derived.values(), strict=True):
            torch.testing.assert_close(a, b, equal_nan=True, rtol=1e-6, atol=1e-30)


def test_algebra():
    gate, up = draw(5, 40), draw(5, 40, seed=1)
    ones = torch.ones_like(gate)
    assert torch.equal(fast.swiglu(gate, 4 * up), 4 * fast.swiglu(gate, up)), "linear in up"
    difference = fast.swiglu(gate, ones) - fast.swiglu(-gate, ones)
    assert (difference - gate).abs().max() <= 8 * 2**-24 * gate.abs().max(), "silu(a) − silu(−a) = a"
    assert torch.equal(fast.swiglu(gate, up, limit=100.0), fast.swiglu(gate, up)), (
        "a limit that nothing reaches"
    )
    assert torch.equal(fast.swiglu(gate, up, up_offset=1.0), fast.swiglu(gate, up.detach() + 1.0))


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("columns", ["halves", "alternating"])
@pytest.mark.parametrize("shape", [(3, 5, 64), (7, 31), (2, 3, 1100)])
def test_a_packed_tensor_is_read_where_it_lies(shape, columns, dtype, monkeypatch):
    """The bits of separate tensors, gradients in the packed tensor too, and no copy."""
    F = shape[-1]
    packed = draw(*shape[:-1], 2 * F, dtype=dtype)
    gate, up = packed.split(F, -1) if columns == "halves" else (packed[..., ::2], packed[..., 1::2])
    alone = [t.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for t in (gate, up)]
    wanted = fast.swiglu(*alone, **GPT_OSS)
    monkeypatch.setattr(Tensor, "contiguous", None)
    got = fast.swiglu(gate, up, **GPT_OSS)
    assert torch.equal(got, wanted)
    (grad,), (dgate, dup) = gradients(got, [packed]), gradients(wanted, alone)
    assert torch.equal(
        grad,
        torch.cat([dgate, dup], -1) if columns == "halves" else torch.stack([dgate, dup], -1).flatten(-2),
    )


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("shape", [(9, 48, 100), (257, 64, 256)])
def test_recompute_and_packed_weights_change_no_bits(dtype, shape):
    tensors, biases = block(*shape, dtype=dtype, bias=True)
    inputs = [*tensors, *biases.values()]
    x, w_gate, w_up, w_down = tensors
    packed = torch.stack([w_gate.detach(), w_up.detach()], 1).flatten(0, 1)
    variants = [tensors, [x, packed[::2].requires_grad_(), packed[1::2].requires_grad_(), w_down]]
    results = []
    for given in variants:
        for recompute in (False, True):
            y = fast.swiglu_mlp(*given, **biases, recompute=recompute, **CLAMPED)
            results.append((y, *gradients(y, [*given, *biases.values()])))
    assert len(inputs) + 1 == len(results[0])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def saved_bytes(function: Callable[[], Tensor], known: list[Tensor]) -> int:
    """Bytes that a call keeps for its backward pass, beside tensors that are known."""
    storages: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with saved_tensors_hooks(note, lambda t: t):
        y = function()
    assert y.requires_grad
    return sum(
        size for at, size in storages.items() if at not in {t.untyped_storage().data_ptr() for t in known}
    )


def test_what_is_saved():
    tensors, biases = block(bias=True)
    known = [*tensors, *biases.values()]
    assert saved_bytes(lambda: fast.swiglu_mlp(*tensors, **biases), known) == 2 * 9 * 100 * 4, "gate and up"
    assert saved_bytes(lambda: fast.swiglu_mlp(*tensors, **biases, recompute=True), known) == 0, (
        "nothing but x"
    )
    gate, up = draw(4, 64), draw(4, 64, seed=1)
    assert saved_bytes(lambda: fast.swiglu(gate, up), [gate, up]) == 0


@pytest.mark.parametrize("watched", ["nobody", "the graph", "a variable", "a view", "a hook"])
def test_gate_and_up_are_written_over_only_where_nobody_can_see_them(watched, monkeypatch):
    """dgate and dup take their memory; not where the graph is kept, nor where someone holds what was saved."""
    tensors, _ = block()
    seen, run = [], _swiglu_mlp.swiglu_bwd

    def noted(dh, gate, up, dgate, dup, *rest):
        seen.append((gate.data_ptr() == dgate.data_ptr(), up.data_ptr() == dup.data_ptr()))
        run(dh, gate, up, dgate, dup, *rest)

    monkeypatch.setattr(_swiglu_mlp, "swiglu_bwd", noted)
    held: list[torch.Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: (held.append(t), t)[1], lambda t: t)
    with hooks if watched == "a hook" else contextlib.nullcontext():
        y = fast.swiglu_mlp(*tensors)
    if watched == "a variable":
        held += y.grad_fn.saved_tensors[-2:]
    if watched == "a view":
        held += [t.view(-1) for t in y.grad_fn.saved_tensors[-2:]]
    before = [t.clone() for t in held]
    first = gradients(y, tensors, retain_graph=watched == "the graph")
    assert set(seen) == {(True, True) if watched == "nobody" else (False, False)}
    assert all(map(torch.equal, before, held))
    if watched == "the graph":
        assert all(map(torch.equal, first, gradients(y, tensors)))
    else:
        with pytest.raises(RuntimeError, match="second time"):
            gradients(y, tensors)


@pytest.mark.parametrize("trained", [(), (0,), (1,), (2,), (3,), (0, 3), (1, 2)])
def test_frozen_tensors_cost_no_product(trained, monkeypatch):
    """Products of the backward pass over one slice: dh unless nothing upstream of it, then one for each gradient (two for dx)."""
    tensors, _ = block(5, 16, 24)
    for i, t in enumerate(tensors):
        t.requires_grad_(i in trained)
    y = fast.swiglu_mlp(*tensors)
    products = []
    for name in ("matmul", "add_matmul"):
        run = getattr(_swiglu_mlp, name)
        monkeypatch.setattr(_swiglu_mlp, name, lambda *a, run=run, **k: (products.append(1), run(*a, **k))[1])
    if not trained:
        assert not y.requires_grad
        return
    gradients(y, [tensors[i] for i in trained])
    assert len(products) == 1 + sum(2 if i == 0 else 1 for i in trained)
