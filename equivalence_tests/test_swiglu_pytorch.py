"""PyTorch around swiglu and swiglu_mlp: double backward, registration, autocast, compile, CUDA graphs; bad input; known bugs."""

import importlib
from itertools import combinations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import fast
import reference
from equivalence_tests.harness.cases import Spec, example
from equivalence_tests.harness.interpreter import interpreting
from equivalence_tests.harness.oracle import Sample, judge
from equivalence_tests.harness.real import DEVICE
from equivalence_tests.test_swiglu import (
    BF16,
    BIASES,
    CLAMPED,
    F16,
    F32,
    block,
    close,
    draw,
    gradients,
    saved_bytes,
)

on_gpu = pytest.mark.skipif(
    DEVICE == "cpu", reason="needs a GPU: no CUDA graphs, and no room for 2³¹ elements, on a CPU"
)
kernels = importlib.import_module("fast.swiglu")


def second(y, wanted):
    """First gradients, and the gradients of the sum of their cubes."""
    first = gradients(y, wanted, create_graph=True)
    total = sum((g.pow(2) * g).sum() for g in first)
    if not total.requires_grad:  # linear in what was asked for: only up, or one weight
        return first
    return first + torch.autograd.grad(total, wanted, materialize_grads=True)


@pytest.mark.parametrize("names", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "relu2"])
def test_double_backward(activation, names):
    tensors = [draw(3, 20).detach(), draw(3, 20, seed=1).detach()]
    wanted = [tensors[i].requires_grad_() for i in names]
    options = {"activation": activation, **CLAMPED}
    close(*(second(m.swiglu(*tensors, **options), wanted) for m in (fast, reference)), 2**-17)


@pytest.mark.parametrize("names", [n for k in (1, 2, 4) for n in combinations(range(4), k)])
@pytest.mark.parametrize("recompute", [False, True])
def test_double_backward_of_the_block(recompute, names):
    tensors, _ = block(3, 8, 12)
    for i, t in enumerate(tensors):
        t.requires_grad_(i in names)
    wanted = [tensors[i] for i in names]
    got = second(fast.swiglu_mlp(*tensors, recompute=recompute), wanted)
    close(got, second(reference.swiglu_mlp(*tensors), wanted), 2**-17)


def test_operators_are_registered_right():
    gate, up = draw(4, 32).detach(), draw(4, 32, seed=1).detach()
    options = ("silu", 1.0, 7.0, 0.0)
    torch.library.opcheck(torch.ops.tandem.swiglu_fwd.default, (gate, up, *options))
    torch.library.opcheck(torch.ops.tandem.swiglu_bwd.default, (gate, gate, up, *options, True, False))
    tensors, biases = block(5, 16, 80, bias=True)
    call = [t.detach() for t in (*tensors, *biases.values())]
    _, *saved = torch.ops.tandem.swiglu_mlp_fwd(*call, *options, True)
    torch.library.opcheck(torch.ops.tandem.swiglu_mlp_fwd.default, (*call, *options, True))
    torch.library.opcheck(
        torch.ops.tandem.swiglu_mlp_bwd.default, (call[0], saved, *call, *options, [True] * 7)
    )


def test_compile_in_one_graph():
    def loss(x, *weights):
        h = fast.swiglu(x, 2 * x, limit=1.5, up_offset=0.1)
        return fast.swiglu_mlp(h, *weights, activation="gelu_tanh") + fast.swiglu_mlp(
            x, *weights, recompute=True
        )

    tensors, _ = block(6, 16, 40, BF16)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager" if interpreting() else "inductor")
    got, wanted = compiled(*tensors), loss(*tensors)
    assert torch.equal(got, wanted)
    close(
        *((g.float() for g in gradients(y, tensors)) for y in (got, wanted)), 2**-7
    )  # sums over two uses in another order


def test_autocast_casts_as_linear_does_and_checkpoint_changes_nothing():
    tensors, biases = block(6, 16, 40, bias=True)
    with torch.autocast(DEVICE, BF16):
        y = fast.swiglu_mlp(*tensors, **biases)
        assert functional.linear(tensors[0], tensors[1]).dtype == y.dtype == BF16
    cast = [t.detach().to(BF16) for t in tensors], {n: b.detach().to(BF16) for n, b in biases.items()}
    assert torch.equal(y, fast.swiglu_mlp(*cast[0], **cast[1]))
    assert all(g.dtype == F32 for g in gradients(y, tensors))
    wanted = gradients(fast.swiglu_mlp(*tensors, **biases), tensors)
    again = checkpoint(fast.swiglu_mlp, *tensors, use_reentrant=False, **biases)
    assert all(
        map(torch.equal, gradients(again, tensors), gradients(fast.swiglu_mlp(*tensors, **biases), tensors))
    )
    assert len(wanted) == 4


def test_hooks_on_saved_tensors_may_pack_them_closer():
    """As offloading does: rows 50 elements apart come back 48 apart. Where that chooses other kernels, nothing is misread."""
    tensors, _ = block(5, 48, 100, BF16)
    wide = torch.empty(5, 50, dtype=BF16, device=DEVICE)[:, :48].copy_(tensors[0].detach()).requires_grad_()
    inputs = [wide, *tensors[1:]]
    wanted = gradients(fast.swiglu_mlp(*inputs), inputs)
    with saved_tensors_hooks(lambda t: t.clone(memory_format=torch.contiguous_format), lambda t: t):
        y = fast.swiglu_mlp(*inputs)
    assert all(map(torch.equal, gradients(y, inputs), wanted))


def test_one_tensor_as_both_and_mixed_dtypes():
    x = draw(3, 24)
    close(*((y := m.swiglu(x, x), *gradients(y, [x])) for m in (fast, reference)))
    gate, up = draw(3, 24, dtype=BF16), draw(3, 24, seed=1)
    h = fast.swiglu(gate, up)
    assert (h.dtype, *(g.dtype for g in gradients(h, [gate, up]))) == (F32, BF16, F32)
    assert fast.swiglu(gate, up.detach().half()).dtype == F32


@on_gpu
def test_cuda_graph():
    tensors, _ = block(256, 512, 1024, BF16)
    dy = draw(256, 512, dtype=BF16, seed=9).detach()
    call = lambda: (y := fast.swiglu_mlp(*tensors), *torch.autograd.grad(y, tensors, dy))  # noqa: E731
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        wanted = call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    graph.replay()
    assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("module", [fast, reference])
@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"activation": "swish"}, ValueError, "activation must be one of"),
        ({"alpha": float("nan")}, ValueError, "alpha must be finite"),
        ({"alpha": "1"}, TypeError, "alpha must be a number"),
        ({"limit": 0.0}, ValueError, "limit must be > 0"),
        ({"limit": float("inf")}, ValueError, "limit must be finite"),
        ({"up_offset": None}, TypeError, "up_offset must be a number"),
        ({"w_up": torch.ones(7, 16)}, ValueError, r"w_up must have shape \[F=12, D=16\], got \[7, 16\]"),
        ({"w_down": torch.ones(12, 16)}, ValueError, r"w_down must have shape"),
        ({"b_down": torch.ones(12)}, ValueError, r"b_down must have shape \[D=16\]"),
        ({"w_gate": torch.ones(12, 16, dtype=BF16)}, TypeError, "w_gate must have x's dtype"),
        ({"x": torch.ones(2, 16, dtype=torch.int64)}, TypeError, "x must have a floating-point dtype"),
        ({"recompute": 1}, TypeError, "recompute must be a bool"),
        ({"x": torch.ones(2, 16).to("meta")}, ValueError, "on one device"),
    ],
)
def test_bad_input_is_named(module, changes, error, said):
    call = {
        "x": torch.ones(2, 16),
        "w_gate": torch.ones(12, 16),
        "w_up": torch.ones(12, 16),
        "w_down": torch.ones(16, 12),
    }
    with pytest.raises(error, match=said):
        module.swiglu_mlp(**(call | changes))
    if not changes.keys() & {"x", "w_gate", "w_up", "w_down", "b_down", "recompute"}:
        with pytest.raises(error, match=said):
            module.swiglu(call["x"], call["x"], **changes)


def test_float64_is_refused_by_name():
    x = torch.ones(2, 4, dtype=torch.float64, device=DEVICE)
    with pytest.raises(TypeError, match=r"gate has dtype torch.float64.*reference.swiglu"):
        fast.swiglu(x, x)


def test_empty_inputs():
    tensors, biases = block(0, 16, 40, bias=True)
    y = fast.swiglu_mlp(*tensors, **biases)
    grads = gradients(y, [*tensors, *biases.values()])
    assert y.shape == (0, 16)
    assert all(not g.any() for g in grads)
    assert fast.swiglu(draw(0, 8), draw(0, 8)).shape == (0, 8)
    assert fast.swiglu(draw(3, 0), draw(3, 0)).shape == (3, 0)


def test_known_bug_s1_what_another_operation_saved_is_not_overwritten():
    x, u = draw(4, 64), draw(4, 64, seed=1)
    e = x.exp()
    before = e.detach().clone()
    (dx,) = torch.autograd.grad(fast.swiglu(e, u).sum(), x)
    wide = x.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(reference.swiglu(wide.exp(), u.detach().double()).sum(), wide)
    assert torch.equal(e, before)
    close((dx.double(),), (exact,))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("recompute", [False, True])
def test_known_bug_s2_rows_that_are_not_aligned(recompute, dtype):
    case = example("swiglu_mlp", dtype, {"*": (33,), "D": 42, "F": 431}, BIASES, {"recompute": recompute})
    case = case.replace(tensors=tuple((n, Spec("offset") if n == "x" else s) for n, s in case.tensors))
    assert not judge(Sample.of_case(case, DEVICE), fast.swiglu_mlp, again=False).findings


def test_known_bug_s3_recompute_is_read():
    tensors, _ = block(7, 16, 48, F16)
    sizes = [saved_bytes(lambda r=r: fast.swiglu_mlp(*tensors, recompute=r), tensors) for r in (False, True)]
    assert sizes == [2 * 7 * 48 * 2, 0]
