"""What rms_norm must do beyond the drawn cases of `python -m equivalence_tests rms_norm`: algebra, options, PyTorch around it."""

import importlib
from collections.abc import Iterator
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fast
import reference
from equivalence_tests.harness.bounds import elementwise
from equivalence_tests.harness.cases import Spec, example
from equivalence_tests.harness.instruments import traced
from equivalence_tests.harness.interpreter import interpreting
from equivalence_tests.harness.mutants import Mutant
from equivalence_tests.harness.oracle import Sample, judge
from equivalence_tests.harness.real import DEVICE, Site
from fast._triton import tuning

kernels = importlib.import_module("fast.rms_norm")
definition = importlib.import_module("reference.rms_norm")
on_gpu = pytest.mark.skipif(
    DEVICE == "cpu", reason="needs a GPU: no CUDA graphs, and no room for 2³¹ elements, on a CPU"
)
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

FWD, BWD, COLUMNS = "fast.rms_norm:_rms_norm_fwd", "fast.rms_norm:_rms_norm_bwd", "fast._rms_norm_columns"
MUTANTS = [
    Mutant("eps_forgotten", f"{COLUMNS}:inverse_rms", " + eps", ""),
    Mutant("mean_over_too_few", f"{COLUMNS}:inverse_rms", "/ N", "/ (N - 0.1)"),
    Mutant("offset_forgotten", f"{COLUMNS}:gain", " + offset", ""),
    Mutant("weight_forgotten", f"{COLUMNS}:scaled", "xhat * gain(W, offs_n, N, offset)", "xhat"),
    Mutant("bias_subtracted", f"{COLUMNS}:scaled", "y += ", "y -= "),
    Mutant("last_column_dropped", FWD, "(offs_n < N)", "(offs_n < N - 1)"),
    Mutant("last_row_dropped", FWD, "mask_m = offs_m < M", "mask_m = offs_m < M - 1"),
    Mutant("residual_not_added", FWD, "s += tl.load(RESIDUAL", "s = tl.load(RESIDUAL"),
    Mutant("residual_out_not_summed", FWD, "offs_n, rounded, mask", "offs_n, x, mask"),
    Mutant("heads_of_one_token_only", "fast._triton.rows:row_offsets", "first // inner + within // inner", "first // inner"),
    Mutant("strides_merged_wrongly", "fast._triton.rows:as_rows", "== stride * size", ">= stride * size"),
    Mutant("last_tile_only", f"{COLUMNS}:_rms_norm_fwd_columns", "acc += s * s", "acc = s * s"),
    Mutant("projection_forgotten", BWD, "(g - xhat * c[:, None])", "g"),
    Mutant("projection_of_dy", BWD, "tl.sum(g * xhat, axis=1)", "tl.sum(dy * xhat, axis=1)"),
    Mutant("projection_not_divided", BWD, "axis=1) / N", "axis=1)"),
    Mutant("outer_rstd_forgotten", BWD, "ds = rstd * (", "ds = ("),
    Mutant("residual_cotangent_lost", BWD, "ds += tl.load(DS", "g += tl.load(DS"),
    Mutant("dw_of_scaled_dy", BWD, "acc_dw += dy * xhat", "acc_dw += dy * w * xhat"),
    Mutant("dw_keeps_last_tile", BWD, "acc_dw += dy", "acc_dw = dy"),
    Mutant("db_counts_twice", BWD, "acc_db += dy", "acc_db += 2 * dy"),
    Mutant("last_rows_dropped", BWD, "tl.cdiv(M, BLOCK_M)", "M // BLOCK_M"),
    Mutant("dx_over_dy", BWD, "tl.store(DX + ", "tl.store(DY + "),
    Mutant("dot_keeps_last_tile", f"{COLUMNS}:_rms_norm_bwd_dot", "acc += g", "acc = g"),
    Mutant("last_partial_dropped", "fast.rms_norm:_rms_norm_bwd_sum", "offs_p < P", "offs_p < P - 1"),
    Mutant("residual_cotangent_not_passed", "fast.rms_norm:_RMSNorm.backward", "ds, s, weight, rstd", "None, s, weight, rstd"),
]  # fmt: skip
ALL = {"weight": Spec(), "bias": Spec(), "residual": Spec()}
EXAMPLES = [
    example(
        "rms_norm",
        dtype,
        {"*": lead, "N": N},
        tensors,
        {"casting": casting},
        (Spec(), Spec(layout="expanded")),
    )
    for dtype in ("fp32", "fp16", "bf16")
    for lead, N, tensors, casting in (
        ((133,), 100, {"weight": Spec()}, "llama"),
        ((2, 5, 3), 64, {"weight": Spec()}, "gemma"),
        ((9,), 8200, ALL, "llama"),
    )
]
GPU_EXAMPLES = [
    example("rms_norm", dtype, {"*": lead, "N": N}, tensors, cotangents=(Spec(), None))
    for dtype in ("fp32", "fp16", "bf16")
    for lead, N in (((4096, 32), 128), ((4096,), 4096), ((2048,), 8192), ((333,), 16384), ((300,), 32768),
                    ((300,), 24592), ((135,), 65536), ((40,), 131072))
    for tensors in ({"weight": Spec()}, ALL)
]  # fmt: skip


def real_sites(model: nn.Module) -> Iterator[Site]:
    """The norms of the first, a middle and the last layer, and the one before the head."""
    layers = len(model.model.layers)
    names = ("input_layernorm", "post_attention_layernorm")
    paths = [f"model.layers.{i}.{name}" for i in (0, layers // 2, layers - 1) for name in names]
    for path in [*paths, "model.norm"]:
        yield Site(
            path,
            model.get_submodule(path),
            lambda norm, inputs: ((inputs["hidden_states"], norm.weight), {"eps": norm.variance_epsilon}),
        )


def draw(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_()


def gradients(
    outputs: Tensor | tuple[Tensor, ...], inputs: tuple[Tensor, ...], **options
) -> tuple[Tensor, ...]:
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    return torch.autograd.grad(
        outputs, inputs, [draw(*o.shape, dtype=o.dtype, seed=9).detach() for o in outputs], **options
    )


def close(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...], tolerance: float = 2**-20) -> None:
    """Two fp32 results within 16 u of each other in norm. At worst y carries 12 roundings and dx 36, and the sums of these small
    tensors √n (reference.rms_norm_majorant); in a norm they add up like random numbers, √48 u for each of the two."""
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).double().norm() <= tolerance * b.double().norm()


@pytest.mark.parametrize("options", [{}, {"weight_offset": 1.0, "casting": "gemma"}])
@pytest.mark.parametrize("residual", [False, True])
def test_reference_gradients_are_derived_right(options, residual):
    x, w, b, r = (
        draw(*s, seed=i).double().detach().requires_grad_()
        for i, s in enumerate([(2, 3, 5), (5,), (5,), (2, 3, 5)])
    )
    kwargs = {"bias": b, "residual": r if residual else None, "eps": 1e-3, **options}
    inputs = {"x": x, "weight": w, "bias": b} | ({"residual": r} if residual else {})
    outputs = reference.rms_norm(x, w, **kwargs)
    outputs = outputs if residual else (outputs,)
    cotangents = tuple(torch.randn_like(o) for o in outputs)
    derived = definition.rms_norm_backward(cotangents, x, w, **kwargs)
    found = dict(zip(inputs, torch.autograd.grad(outputs, list(inputs.values()), cotangents), strict=True))
    assert derived.keys() == found.keys()
    for name, grad in found.items():
        torch.testing.assert_close(derived[name], grad, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda *t: reference.rms_norm(t[0], t[1], bias=t[2], eps=1e-3), (x, w, b))


@pytest.mark.parametrize("casting", ["llama", "gemma"])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_bits_of_the_reference_where_the_row_sum_is_exact(dtype, casting):
    """Each rounding point is where the reference has it: one more, one less or a truncation would change every other result."""
    powers = torch.randint(-1, 2, (64, 32), generator=torch.Generator().manual_seed(0))
    x = (2.0**powers * (-1.0) ** torch.arange(32)).to(DEVICE, dtype)
    w, b = draw(32, dtype=dtype), draw(32, dtype=dtype, seed=1)
    for kwargs in ({}, {"weight_offset": 1.0}, {"bias": b}, {"residual": x.flip(1) * 1.03125}):
        got, wanted = (
            module.rms_norm(x, w, casting=casting, eps=0.0, **kwargs) for module in (fast, reference)
        )
        for a, c in zip(*((r if isinstance(r, tuple) else (r,)) for r in (got, wanted)), strict=True):
            # On a GPU r may be 4 fp32 ulp, 2⁻²¹, away from torch's: two roundings, at boundaries 2⁻¹¹ apart or more, see that.
            assert (a != c).float().mean() <= (0.0 if interpreting() else 2**-9)


def test_algebra():
    x, w, dy = draw(7, 96), draw(96), draw(7, 96, seed=1).detach()
    y = fast.rms_norm(x, w, eps=0.0)
    assert torch.equal(fast.rms_norm(4 * x, w, eps=0.0), y), "scale invariant, bit for bit for powers of two"
    (dx,) = torch.autograd.grad(y, x, dy)
    bound = elementwise(dx.double(), definition.rms_norm_majorant((dy,), x, w, eps=0.0)["dx"], F32)
    along = (dx.double() * x).sum(-1).abs()
    assert (along <= (bound * x.abs()).sum(-1)).all(), "dx is orthogonal to x at eps = 0"
    assert (along < 1e-3 * (dx * x).abs().sum(-1)).all(), "and the bound is not the reason"
    assert torch.equal(fast.rms_norm(x[3:4], w), fast.rms_norm(x, w)[3:4]), (
        "a row does not depend on the others"
    )
    assert torch.equal(fast.rms_norm(torch.zeros_like(x), w), torch.zeros_like(x)), "zero rows"
    expanded = torch.autograd.grad(fast.rms_norm(x, w), (x, w), dy[:1].expand(7, 96))
    assert all(
        map(torch.equal, expanded, torch.autograd.grad(fast.rms_norm(x, w), (x, w), dy[:1].repeat(7, 1)))
    )


@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, F32), (BF16, BF16), (F32, F16)])
def test_residual_is_add_then_norm_bit_for_bit(dtypes):
    x, r, w = draw(9, 80, dtype=dtypes[0]), draw(9, 80, dtype=dtypes[1], seed=1), draw(80)
    y, s = fast.rms_norm(x, w, residual=r, casting="gemma")
    added = (x.to(F32) + r.to(F32)).to(r.dtype).detach()
    alone = fast.rms_norm(added, w, casting="gemma")
    assert torch.equal(s, added)
    assert x.dtype != r.dtype or torch.equal(y, alone)


@pytest.mark.parametrize("table", tuning.tables(kernels), ids=lambda table: table.name)
def test_every_tile_configuration_is_launched_and_right(table, monkeypatch):
    """The drawn cases force them in turn; here each meets a row that it holds and, where it is narrow, one that it does not."""
    if interpreting() and table in (kernels.FWD_RING, kernels.BWD_RING):
        pytest.skip("Triton's interpreter does not run Gluon: the ring is run on a GPU only")
    launched, run = [], kernels.launch

    def noted(*args, **options):
        launched.append(options.items())
        run(*args, **options)

    monkeypatch.setattr(kernels, "launch", noted)
    narrow = {t.name: t.configs()[0] for t in (kernels.BWD, kernels.BWD_ODD)}  # 304 columns reach BWD_DOT
    for tile in table.configs():
        # How deep a pipeline is follows from the shared memory that is there; the rest is the table's.
        wanted = {item for item in tile.options.items() if item[0] != "STAGES"}
        for N in dict.fromkeys((min(96, tile.options.get("BLOCK_N", 96)), 304)):
            N -= table in (kernels.FWD_ODD, kernels.BWD_ODD)
            x, w = draw(5, N), draw(N)
            with tuning.forced(narrow | {table.name: tile}):
                y = fast.rms_norm(x, w)
                close((y, *gradients(y, (x, w))), (z := reference.rms_norm(x, w), *gradients(z, (x, w))))
        assert any(wanted <= options for options in launched), f"{tile} was never launched"


SUBSETS = [n for k in range(1, 5) for n in combinations("xwbr", k)]


@pytest.mark.parametrize(
    ("names", "with_residual"),
    [(n, given) for n in SUBSETS for given in (True, False) if given or "r" not in n],
)
def test_double_backward(names, with_residual):
    """Every subset of requires_grad, with and without a residual."""
    given = {
        n: draw(*shape, seed=i).detach()
        for i, (n, shape) in enumerate(zip("xwbr", [(3, 20), (20,), (20,), (3, 20)], strict=True))
    }
    wanted = [given[n].requires_grad_() for n in names]

    def second(module) -> tuple[Tensor, ...]:
        residual = given["r"] if with_residual else None
        outputs = module.rms_norm(given["x"], given["w"], bias=given["b"], residual=residual, eps=1e-3)
        used = tuple(o for o in (outputs if with_residual else (outputs,)) if o.requires_grad)
        first = gradients(used, wanted, create_graph=True)
        total = sum((g.pow(2) * g).sum() for g in first)
        if not total.requires_grad:  # linear in what was asked for: only b
            return first
        return first + torch.autograd.grad(total, wanted, materialize_grads=True)

    close(second(fast), second(reference), 2**-18)  # of a sum of cubes: twice and three times the errors


@pytest.mark.parametrize("dtypes", [(F32, BF16), (BF16, F32), (BF16, BF16)])
def test_gradients_with_create_graph_are_those_without(dtypes):
    x, r, w = draw(5, 64, dtype=dtypes[0]), draw(5, 64, dtype=dtypes[1], seed=1), draw(64)
    plain = gradients(fast.rms_norm(x, w, residual=r), (x, r, w))
    graphed = gradients(fast.rms_norm(x, w, residual=r), (x, r, w), create_graph=True)
    for a, b in zip(plain, graphed, strict=True):
        # Both are rounded once from fp32 sums that may differ, so to neighbours at worst.
        assert (a - b).double().norm() <= torch.finfo(a.dtype).eps * b.double().norm()


def test_double_backward_of_x_alone():
    x = draw(2, 4)

    def second(module) -> tuple[Tensor, ...]:
        first = gradients(module.rms_norm(x, eps=1e-3), (x,), create_graph=True)
        return first + torch.autograd.grad(first[0].pow(3).sum(), x)

    close(second(fast), second(reference), 2**-18)


def test_residual_may_be_x_itself():
    x, w = draw(4, 32), draw(32)
    compiled = torch.compile(
        lambda x, w: fast.rms_norm(x, w, residual=x), fullgraph=True, backend="aot_eager"
    )
    got, wanted = compiled(x, w), reference.rms_norm(x, w, residual=x)
    close(got + gradients(got, (x, w)), wanted + gradients(wanted, (x, w)), 2**-20)


def test_residual_out_needs_no_gradient_of_parameters():
    y, s = fast.rms_norm(draw(3, 8).detach(), draw(8), residual=draw(3, 8, seed=1).detach())
    assert y.requires_grad
    assert not s.requires_grad


def test_operators_are_registered_right():
    x, w = draw(4, 32).detach(), draw(32).detach()
    rstd = torch.ones(4, device=DEVICE)
    torch.library.opcheck(torch.ops.tandem.rms_norm_fwd.default, (x, w, None, x, 1e-6, 0.0, "llama"))
    torch.library.opcheck(
        torch.ops.tandem.rms_norm_bwd.default, (x, None, x, w, rstd, 0.0, F32, None, F32, None)
    )


def test_autocast_and_checkpoint():
    x, w = draw(6, 40), draw(40)
    wanted = gradients(fast.rms_norm(x, w), (x, w))
    with torch.autocast(DEVICE, BF16):
        y = fast.rms_norm(x, w)
    assert y.dtype == F32
    assert all(map(torch.equal, gradients(y, (x, w)), wanted))
    again = checkpoint(fast.rms_norm, x, w, use_reentrant=False)
    assert all(map(torch.equal, gradients(again, (x, w)), wanted))


@on_gpu
def test_cuda_graph():
    x, w, dy = draw(64, 512, dtype=BF16), draw(512, dtype=BF16), draw(64, 512, dtype=BF16, seed=1).detach()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        wanted = [fast.rms_norm(x, w), *torch.autograd.grad(fast.rms_norm(x, w), (x, w), dy)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fast.rms_norm(x, w)
        got = [y, *torch.autograd.grad(y, (x, w), dy)]
    graph.replay()
    assert all(map(torch.equal, got, wanted))


@pytest.mark.skipif(not interpreting(), reason="bytes are metered in Triton's interpreter only")
def test_forward_moves_the_floor_and_nothing_leaves_its_bounds():
    x, w, r = (
        draw(33, 200, dtype=BF16).detach(),
        draw(200, dtype=BF16).detach(),
        draw(33, 200, dtype=BF16, seed=1).detach(),
    )
    for kwargs in ({}, {"residual": r}):
        with traced() as trace:
            fast.rms_norm(x, w, **kwargs)
        assert trace.unique_bytes == floor(x, w, **kwargs)
        assert not trace.findings()


def floor(*args, **kwargs) -> int:
    return definition.COST["rms_norm"](*args, **kwargs).forward.bytes


@pytest.mark.parametrize("module", [reference, fast])
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"weight": torch.ones(5)}, ValueError, r"weight must have shape \[N=8\], got \[5\]"),
        ({"residual": torch.ones(4, 8)}, ValueError, r"residual must have shape \[3, N=8\], got \[4, 8\]"),
        ({"x": torch.ones(3, 8).int()}, TypeError, "x must have a floating-point dtype, got torch.int32"),
        ({"x": torch.ones(3, 0), "weight": None}, ValueError, "last dimension of x must be at least 1"),
        ({"x": torch.ones(())}, ValueError, r"x must have shape \[\*, N\], got \[\]"),
        ({"eps": -1e-6}, ValueError, "eps must be a number ≥ 0, got -1e-06"),
        ({"eps": float("nan")}, ValueError, "eps must be a number ≥ 0, got nan"),
        ({"eps": "1e-6"}, TypeError, "eps must be a number, got '1e-6'"),
        ({"weight_offset": None}, TypeError, "weight_offset must be a number, got None"),
        ({"weight_offset": float("inf")}, ValueError, "weight_offset must be finite, got inf"),
        ({"casting": "lama"}, ValueError, r"casting must be one of \('llama', 'gemma'\), got 'lama'"),
        (
            {"weight": None, "weight_offset": 1.0},
            ValueError,
            "weight_offset is added to weight, and weight is None",
        ),
    ],
)
def test_bad_input(module, change, error, words):
    call = {"x": torch.ones(3, 8), "weight": torch.ones(8)} | change
    with pytest.raises(error, match=words):
        module.rms_norm(call.pop("x"), call.pop("weight"), **call)


def test_what_the_kernels_cannot_take_names_the_reference():
    with pytest.raises(
        TypeError, match=r"x has dtype torch.float64; supported are .* reference.rms_norm takes any"
    ):
        fast.rms_norm(torch.ones(2, 8, dtype=torch.float64, device=DEVICE))


@pytest.mark.parametrize("case", EXAMPLES, ids=lambda c: f"{c.dtype}-{dict(c.sizes)}")
def test_examples(case):
    judgement = judge(Sample.of_case(case, DEVICE), fast.rms_norm)
    assert judgement.ok, "\n".join(map(str, judgement.findings))
