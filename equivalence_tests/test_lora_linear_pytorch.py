"""PyTorch around lora_linear: registration, compile, autocast, checkpointing, double backward, quantised bases; known bugs."""

import importlib

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import fast
import reference
from equivalence_tests.harness.interpreter import interpreting
from equivalence_tests.harness.real import DEVICE
from equivalence_tests.test_lora_linear import BF16, F16, F32, draw, layer, near, results, with_tensors

kernels = importlib.import_module("fast._lora_linear_stack")
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: no CUDA graphs on a CPU")


def double(t: Tensor) -> Tensor:
    return t.detach().double().requires_grad_(t.requires_grad)


def test_double_backward():
    """Of everything that there is to ask for, with and without what it needs."""
    for options in ({}, {"bias": True, "magnitude": True, "activation": "silu", "dropout_p": 0.3, "seed": 5}):
        tensors = layer(7, 6, 5, 2)
        tensors[1].requires_grad_()
        named = with_tensors(options, 5)
        wanted = [*tensors, *(v for v in named.values() if isinstance(v, Tensor))]
        found = []
        for module in (fast, reference):
            y = module.lora_linear(*tensors, **named)
            first = torch.autograd.grad(y, wanted, draw(7, 5, seed=9).detach(), create_graph=True)
            found.append(
                [
                    *first,
                    *torch.autograd.grad(sum(g.pow(3).sum() for g in first), wanted, materialize_grads=True),
                ]
            )
        near(*found, tolerance=2**-15)


def test_operators_are_registered_right():
    x, weight, a, b = (t.detach() for t in layer(20, 32, 24, 4))
    scale, bias, magnitude = torch.ones(1, device=DEVICE), draw(24).detach(), draw(1, 24).detach().abs() + 1
    # An output that is not asked for is an empty tensor without a value, which opcheck would compare: here all are.
    layers = ([weight] * 2, [a[None]] * 2, [b[None]] * 2, [scale] * 2, [1.0] * 2, [bias] * 2, [magnitude] * 2)
    rest = (torch.tensor(5, device=DEVICE), None, 0.3, "silu")
    torch.library.opcheck(torch.ops.tandem.lora_stack_fwd.default, (x, *layers, *rest, True))
    outputs = torch.ops.tandem.lora_stack_fwd(x, *layers, *rest, True)
    call = (outputs[:2], outputs[2:], x, *layers, *rest, [True] * 11)
    torch.library.opcheck(torch.ops.tandem.lora_stack_bwd.default, call)


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.3, "seed": 5, "bias": True, "activation": "silu"}])
def test_compile_in_one_graph(options):
    torch._dynamo.reset()
    tensors, named = layer(9, 16, 8, 2), with_tensors(options, 8)
    backend = "aot_eager" if interpreting() else "inductor"
    compiled = torch.compile(lambda *t: fast.lora_linear(*t, **named).sin(), fullgraph=True, backend=backend)
    near(results(compiled, tensors), results(lambda *t: fast.lora_linear(*t, **named).sin(), tensors))


def test_autocast_casts_x_and_weight_alone():
    x, weight, a, b = layer(9, 16, 8, 2)
    with torch.autocast(torch.device(DEVICE).type, dtype=BF16):
        y = fast.lora_linear(x, weight, a, b)
    assert y.dtype == BF16
    assert torch.equal(y, fast.lora_linear(x.bfloat16(), weight.bfloat16(), a, b))
    assert all(g.dtype == F32 for g in torch.autograd.grad(y.sum(), [x, a, b]))


def test_a_trained_weight_gets_its_gradient():
    for dtype in (F32, BF16):
        tensors = layer(33, 20, 12, 3, dtype=dtype, adapters=F32)
        tensors[1].requires_grad_()
        got, wanted = (
            results(fast.lora_linear, tensors),
            results(reference.lora_linear, [double(t) for t in tensors]),
        )
        for mine, truth in zip(got, wanted, strict=True):
            assert (mine.double() - truth).norm() <= (2**-20 if dtype == F32 else 2**-8) * truth.norm()


@pytest.mark.parametrize("double_quant", [False, True])
def test_nf4_base_is_the_dequantised_base(double_quant):
    x, weight, a, b = layer(17, 64, 24, 4, dtype=BF16, adapters=F32)
    packed = fast.NF4Weight.quantize(weight, double_quant=double_quant)
    got = results(lambda x, a, b: fast.lora_linear(x, packed, a, b, scale=2.0), [x, a, b])
    assert all(
        map(
            torch.equal,
            got,
            results(lambda x, a, b: fast.lora_linear(x, packed.dequantize(BF16), a, b, scale=2.0), [x, a, b]),
        )
    )
    with torch.no_grad():
        assert torch.equal(got[0], fast.lora_linear(x, packed, a, b, scale=2.0))


def test_no_dense_copy_of_a_quantised_weight_outlives_a_product():
    x, weight, a, b = layer(17, 64, 24, 4, dtype=BF16, adapters=F32)
    packed = fast.NF4Weight.quantize(weight)
    sizes: list[int] = []
    with saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
        fast.lora_linear(x, packed, a, b)
    assert weight.numel() not in sizes


def test_fake_quantised_base_trains_its_master():
    x, weight, a, b = layer(17, 64, 24, 4)
    master = weight.clone().requires_grad_()
    y = fast.lora_linear(x, fast.FakeQuantWeight(master), a, b)
    dy = draw(*y.shape, seed=9).detach()
    (dmaster,) = torch.autograd.grad(y, [master], dy)
    near([dmaster], [dy.T @ x.detach()])


@on_gpu
def test_cuda_graph_draws_a_new_mask_at_each_replay():
    x, weight, a, b = layer(64, 64, 64, 8, dtype=BF16, adapters=F32)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            fast.lora_linear(x.detach(), weight, a.detach(), b.detach(), dropout_p=0.5)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fast.lora_linear(x.detach(), weight, a.detach(), b.detach(), dropout_p=0.5)
    graph.replay()
    first = y.clone()
    graph.replay()
    assert not torch.equal(first, y)


def test_L1_x_is_not_written_to_and_a_second_backward_agrees():
    x, weight, a, b = layer()
    y = fast.lora_linear(x, weight, a, b)
    other, before = x.exp(), x.detach().clone()
    dy = draw(*y.shape, seed=9).detach()
    first = torch.autograd.grad([y, other], [x, a, b], [dy, torch.ones_like(x)], retain_graph=True)
    second = torch.autograd.grad([y, other], [x, a, b], [dy, torch.ones_like(x)])
    assert all(map(torch.equal, first, second))
    assert torch.equal(x, before)


def test_L2_dx_carries_the_forward_s_mask():
    x, weight, a, b = layer(30, 20, 16, 4)
    _, dx, _, _ = results(fast.lora_linear, [x, torch.zeros_like(weight), a, b], dropout_p=0.5, seed=3)
    kept = importlib.import_module("reference._philox").dropout_mask(
        torch.tensor(3, device=DEVICE), 30, 20, 0.5, x.device
    )
    assert not dx[~kept].any()
    near([dx], [2 * (draw(30, 16, seed=9).detach() @ b.detach() @ a.detach()) * kept])


@pytest.mark.parametrize(
    ("x_dtype", "w_dtype", "own"), [(F32, BF16, F32), (F32, F16, BF16), (BF16, F32, F32), (F16, BF16, F16)]
)
def test_L3_any_mixture_of_dtypes(x_dtype, w_dtype, own):
    x, weight, a, b = layer(9, 24, 16, 3, dtype=x_dtype, adapters=own)
    weight = weight.to(w_dtype)
    y, dx, da, db = results(fast.lora_linear, [x, weight, a, b])
    assert (y.dtype, dx.dtype, da.dtype, db.dtype) == (x_dtype, x_dtype, own, own)
    dy = draw(*y.shape, dtype=y.dtype, seed=9).detach()
    wanted = results(reference.lora_linear, [double(x), weight.double(), double(a), double(b)], dy)
    for mine, truth in zip((y, dx, da, db), wanted, strict=True):
        assert (mine.double() - truth).norm() <= 2 * torch.finfo(
            mine.dtype
        ).eps * truth.norm() + 2**-15 * truth.norm()


@pytest.mark.parametrize("options", [{"dropout_p": 0.05, "seed": 1}, {"bias": True}])
def test_L4_dropout_and_bias_stay_fused(options, monkeypatch):
    """As many launches as without them: no path of their own."""
    counts = []
    for given in ({}, options):
        launches: list[int] = []
        for name in ("_lora_linear_skinny", "_lora_linear_matmul", "_lora_linear_epilogue"):
            module = importlib.import_module(f"fast.{name}")
            run = module.launch
            monkeypatch.setattr(
                module, "launch", lambda *a, run=run, log=launches, **k: (log.append(1), run(*a, **k))[1]
            )
        results(fast.lora_linear, layer(), **with_tensors(given, 40))
        monkeypatch.undo()
        counts.append(len(launches))
    assert counts[0] == counts[1]


def test_L5_checkpointing_keeps_the_adapters_of_rows():
    tensors, ids = layer(20, 16, 12, 3, 2), {"adapter": torch.arange(20, device=DEVICE) % 2}
    plain = results(lambda *t: fast.lora_linear(*t, **ids), tensors)
    kept = results(lambda *t: checkpoint(fast.lora_linear, *t, use_reentrant=False, **ids), tensors)
    assert all(map(torch.equal, plain, kept))


def test_L6_x_and_s_are_all_that_is_kept():
    x, weight, a, b = layer(512, 256, 128, 16, dtype=BF16, adapters=F32)
    kept: dict[int, int] = {}
    with saved_tensors_hooks(
        lambda t: (kept.__setitem__(t.data_ptr(), t.numel() * t.element_size()), t)[1], lambda t: t
    ):
        fast.lora_linear(x, weight, a, b)
    for known in (x, weight, a, b):
        kept.pop(known.data_ptr(), None)
    assert sum(kept.values()) == 512 * 16 * 4, "S in fp32"


@pytest.mark.parametrize("R", [1, 3, 17, 33])
@pytest.mark.parametrize("dropout", [{}, {"dropout_p": 0.0, "seed": 3}])
def test_L7_any_rank_and_a_seed_without_dropout(R, dropout):
    tensors = layer(21, 30, 100, R)
    near(results(fast.lora_linear, tensors, **dropout), results(reference.lora_linear, tensors))


def test_module_parameters_train():
    """A step of SGD on a frozen base moves what it must."""
    base, a, b = nn.Linear(16, 8), nn.Parameter(torch.randn(2, 16) / 4), nn.Parameter(torch.zeros(8, 2))
    base, a, b = base.to(DEVICE).requires_grad_(False), *(nn.Parameter(p.detach().to(DEVICE)) for p in (a, b))
    x = draw(9, 16).detach()
    before = [p.detach().clone() for p in (base.weight, a, b)]
    fast.lora_linear(x, base.weight, a, b, bias=base.bias).square().sum().backward()
    assert a.grad is not None
    assert not a.grad.any(), "dA is exactly 0 at B = 0"
    torch.optim.SGD([a, b], lr=0.1).step()
    assert [torch.equal(p, q) for p, q in zip((base.weight, a, b), before, strict=True)] == [
        True,
        True,
        False,
    ]
