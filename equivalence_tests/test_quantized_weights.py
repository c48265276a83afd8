"""What fake_quantize must do beyond the drawn cases, and quantised weights as their users hold them.

NF4 itself is in test_quantized_weights_nf4.py, bitsandbytes and torchao in test_quantized_weights_peers.py.
"""

import importlib
import json
from collections.abc import Iterator
from random import Random

import pytest
import torch
from torch import Tensor, nn

import fast
import reference
from equivalence_tests.harness import strategies
from equivalence_tests.harness.cases import Case, Spec, example
from equivalence_tests.harness.interpreter import interpreting
from equivalence_tests.harness.mutants import Mutant
from equivalence_tests.harness.operations import operation
from equivalence_tests.harness.oracle import Sample, judge
from equivalence_tests.harness.real import DEVICE, Site

definition = importlib.import_module("reference.quantized_weights")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TREES = [reference, fast]

KERNEL = "fast._quantized_weights_fake"
FAKE, EXTENT, SCALE, LEVELS, CLAMP = (
    f"{KERNEL}:{n}" for n in ("_fake_quantize", "_extent", "_scale_and_zero", "_levels", "_clamped")
)
LAUNCH, BACKWARD = f"{KERNEL}:fake_quantize", "fast.quantized_weights:_FakeQuantize.backward"
MUTANTS = [
    Mutant("last_group_dropped", FAKE, "(offs_m < M)[:, None]", "(offs_m < M - 1)[:, None]"),
    Mutant("extent_of_the_last_tile", FAKE, "tl.minimum(low, x_low), tl.maximum(high, x_high)", "x_low, x_high"),
    Mutant("extent_of_positive_numbers", EXTENT, "tl.max(tl.abs(x), axis=1)", "tl.max(x, axis=1)"),
    Mutant("extent_without_0", EXTENT, "tl.where(low < 0.0, low, 0.0), tl.where(high > 0.0, high, 0.0)", "low, high"),
    Mutant("half_a_level_forgotten", SCALE, "(2 ** (BITS - 1) - 0.5)", "(2 ** (BITS - 1) - 1.0)"),
    Mutant("one_level_more", SCALE, "(2**BITS - 1) * 1.0", "2**BITS * 1.0"),
    Mutant("zero_of_the_top", SCALE, "lowest - _rint(tl.div_rn(low, scale))", "-lowest - 1.0 - _rint(tl.div_rn(low, scale))"),
    Mutant("zero_not_rounded", SCALE, "_rint(tl.div_rn(low, scale))", "tl.div_rn(low, scale)"),
    Mutant("zero_twice", FAKE, "            result = (q - zero) * scale\n        tl.store(out_rows + offs_l",
           "            result = q * scale\n        tl.store(out_rows + offs_l"),
    Mutant("not_rounded", LEVELS, "_rint(x * tl.div_rn(1.0, scale))", "(x * tl.div_rn(1.0, scale))"),
    Mutant("rounded_down", f"{KERNEL}:_rint", "return (t + 12582912.0) - 12582912.0", "return tl.floor(t)"),
    Mutant("symmetric_clamp", CLAMP, "-(2 ** (BITS - 1)) * 1.0", "1.0 - 2 ** (BITS - 1)"),
    Mutant("never_clamped", LEVELS, "_clamped(level, BITS)", "level"),
    Mutant("clipped_though_not_asked", "fast.quantized_weights:_FakeQuantize.forward", "ctx.clip = clip\n        if clip:",
           "ctx.clip = True\n        if True:"),
    Mutant("stride_of_the_first_dim_forgotten", LAUNCH, "xs.tensor, xs.outer_stride", "xs.tensor, xs.inner_stride"),
]  # fmt: skip


PLAIN = Spec()


def groups(dtype: str, lead: tuple[int, ...], N: int, group: int, x: Spec = PLAIN, **options) -> Case:
    """A case of groups: drawn ones have none, since a group must divide a length that is drawn, too."""
    options = {"per": "group", "group": group, **options}
    return example("fake_quantize", dtype, {"*": lead, "N": N}, {"x": x}, options)


ASYMMETRIC, CLIPPED = {"symmetric": False}, {"clip_gradient": True}
EXAMPLES = [
    case
    for dtype in ("fp32", "fp16", "bf16")
    for case in (
        groups(dtype, (9,), 96, 32, bits=4),
        groups(dtype, (3, 5), 60, 12, Spec("transposed"), bits=4, **CLIPPED),
        groups(dtype, (2, 7), 128, 64, Spec("padded"), bits=2, **ASYMMETRIC),
        groups(dtype, (2, 3, 2), 15, 3, Spec("permuted"), **ASYMMETRIC, **CLIPPED),
        groups(dtype, (4,), 6, 1, bits=4, **ASYMMETRIC),
        groups(dtype, (3,), 64, 32, Spec(content="mean"), **ASYMMETRIC),
        example("fake_quantize", dtype, {"*": (3,), "N": 300}, options=ASYMMETRIC, config=0),
        example("fake_quantize", dtype, {"*": (64,), "N": 64}, {"x": Spec(content="signs")}, {"bits": 4, **CLIPPED}),
    )
]  # fmt: skip
GPU_EXAMPLES = [
    case
    for dtype in ("fp32", "fp16", "bf16")
    for case in (
        groups(dtype, (4096,), 14336, 32, bits=4),
        groups(dtype, (4096,), 14336, 128, bits=4, **ASYMMETRIC, **CLIPPED),
        example("fake_quantize", dtype, {"*": (2, 4096), "N": 4096}),
        example("fake_quantize", dtype, {"*": (512,), "N": 128256}, options={**ASYMMETRIC, **CLIPPED}),
    )
]


def real_sites(model: nn.Module) -> Iterator[Site]:
    """What the first and last layers multiply by w_down: activations in 8 bits for each token, rows of the weight in 4."""
    tokens, rows = {"symmetric": False, **CLIPPED}, {"bits": 4, "per": "group", "group": 32}
    for i in (0, len(model.model.layers) - 1):
        path = f"model.layers.{i}.mlp.down_proj"
        linear, name = model.get_submodule(path), "fake_quantize"
        yield Site(
            path, linear, lambda _, inputs: ((inputs["input"],), tokens), name, lambda w, dy: dy @ w.weight
        )
        yield Site(
            f"{path}.weight", linear, lambda w, _: ((w.weight[:64],), rows), name, lambda w, _: w.weight[:64]
        )


def draw(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_drawn_groups(dtype: str):
    """The harness's own cases, as groups: the last dim becomes a multiple of one."""
    op, profile = operation("fake_quantize"), strategies.PROFILES["ci"]
    for seed in range(6):
        case = strategies.draw(Random(f"{dtype} {seed}"), op, dtype, profile, None)
        sizes, group = dict(case.sizes), Random(seed).choice((1, 3, 8, 32))
        sizes["N"] = group * max(1, sizes["N"] // 32)
        options = dict(case.options) | {"per": "group", "group": group}
        case = case.replace(sizes=tuple(sizes.items()), options=tuple(options.items()))
        judgement = judge(Sample.of_case(case, DEVICE), fast.fake_quantize)
        assert judgement.ok, f"{case.describe()}\n{judgement.findings[0]}"
        assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("clip", [False, True])
def test_reference_gradients_are_derived_right(symmetric: bool, clip: bool):
    """The straight-through estimator is no derivative of y, so there is nothing to compare with but the definition."""
    options = {"bits": 4, "symmetric": symmetric, "clip_gradient": clip}
    x, dy = draw(5, 40).double().requires_grad_(), draw(5, 40, seed=1).double()
    (found,) = torch.autograd.grad(reference.fake_quantize(x, **options), x, dy)
    derived = definition.fake_quantize_backward((dy,), x, **options)["x"]
    assert torch.equal(derived, found)
    assert (found == dy).all() or clip
    assert ((found == 0) | (found == dy)).all()


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("symmetric", [True, False])
def test_both_trees_give_the_same_bits(dtype: torch.dtype, symmetric: bool):
    for bits, shape, group in ((8, (7, 33), None), (4, (6, 96), 32), (2, (3, 20000), None)):
        x, dy = draw(*shape, dtype=dtype).requires_grad_(), draw(*shape, dtype=dtype, seed=1)
        options = {"bits": bits, "per": "group" if group else "token", "group": group, "symmetric": symmetric}
        for clip in (False, True):
            y, z = (tree.fake_quantize(x, **options, clip_gradient=clip) for tree in TREES)
            assert torch.equal(y, z)
            assert torch.equal(*(torch.autograd.grad(out, x, dy)[0] for out in (y, z)))


@pytest.mark.parametrize("tree", TREES)
def test_known_bug_q7_the_largest_element_is_clamped_and_keeps_its_gradient(tree):
    """It lies at 7.5 levels: 8 after rounding, 7 after the clamp. By the clipped estimator it gets no gradient."""
    x = torch.tensor([[7.5, 1.0, -2.0, 0.25]], device=DEVICE, requires_grad=True)
    w = tree.FakeQuantWeight(x, group=4)
    y = w.dequantize()
    assert y.tolist() == [[7.0, 1.0, -2.0, 0.0]]
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [[1.0, 1.0, 1.0, 1.0]]
    y = tree.fake_quantize(x, bits=4, per="group", group=4, clip_gradient=True)
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [[0.0, 1.0, 1.0, 1.0]]


def test_known_bug_q7_how_many_maxima_the_clipped_estimator_leaves_out():
    """Of groups whose largest element is positive, those for which 7.5 levels are not rounded below a half."""
    x = draw(4096, 32).abs().requires_grad_()
    y = reference.fake_quantize(x, bits=4, per="group", group=32, clip_gradient=True)
    (dx,) = torch.autograd.grad(y.sum(), x)
    share = (dx.gather(1, x.argmax(1, keepdim=True)) == 0).double().mean().item()
    assert 0.7 < share < 0.9


@pytest.mark.parametrize("tree", TREES)
def test_algebra(tree):
    x = draw(6, 64)
    for options in ({"bits": 8}, {"bits": 4, "per": "group", "group": 16}, {"bits": 8, "symmetric": False}):
        y = tree.fake_quantize(x, **options)
        assert torch.equal(tree.fake_quantize(4 * x, **options), 4 * y), "powers of two"
        assert torch.equal(tree.fake_quantize(torch.zeros_like(x), **options), torch.zeros_like(x))
        step = (x.amax(-1) - x.amin(-1)).max() / (2 ** options["bits"] - 2)
        assert (y - x).abs().max() <= 1.001 * step
        assert len(y[0].unique()) <= 2 ** options["bits"] * (64 // options.get("group", 64))


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("symmetric", [True, False])
def test_what_is_not_finite_spoils_its_group_and_no_other(tree, bad: float, symmetric: bool):
    x = draw(3, 64)
    x[1, 5] = bad
    y = tree.fake_quantize(x, bits=4, per="group", group=32, symmetric=symmetric)
    assert y[1, :32].isnan().all()
    assert y.isfinite().sum() == 3 * 64 - 32


BAD = [
    ({"bits": 9}, ValueError, "bits"),
    ({"bits": 1}, ValueError, "bits"),
    ({"bits": 4.0}, TypeError, "bits"),
    ({"per": "tensor"}, ValueError, "per"),
    ({"group": 8}, ValueError, "group"),
    ({"per": "group"}, ValueError, "group"),
    ({"per": "group", "group": 7}, ValueError, "group"),
    ({"per": "group", "group": 0}, ValueError, "group"),
    ({"per": "group", "group": "8"}, TypeError, "group"),
    ({"symmetric": 1}, TypeError, "symmetric"),
    ({"clip_gradient": None}, TypeError, "clip_gradient"),
]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(("options", "error", "name"), BAD)
def test_bad_input_is_named(tree, options: dict, error: type, name: str):
    with pytest.raises(error, match=f"fake_quantize: {name} must "):
        tree.fake_quantize(draw(2, 16), **options)


@pytest.mark.parametrize("tree", TREES)
def test_bad_tensors_are_named(tree):
    with pytest.raises(TypeError, match="x must have a floating-point dtype"):
        tree.fake_quantize(torch.ones(2, 4, dtype=torch.int32, device=DEVICE))
    with pytest.raises(ValueError, match="last dimension of at least 1"):
        tree.fake_quantize(draw(2, 0))
    with pytest.raises(ValueError, match=r"FakeQuantWeight: group must divide w's last dimension 40"):
        tree.FakeQuantWeight(draw(2, 40))


def test_fast_refuses_what_it_cannot_take():
    with pytest.raises(TypeError, match=r"reference\.fake_quantize takes any floating dtype"):
        fast.fake_quantize(draw(2, 4).double())


@pytest.mark.parametrize("tree", TREES)
def test_a_frozen_master_is_quantised_once_and_again_when_it_changes(tree):
    w = draw(8, 64)
    weight = tree.FakeQuantWeight(w)
    first = weight.dequantize(BF16)
    assert weight.dequantize(BF16) is first
    w.mul_(2)
    assert torch.equal(weight.dequantize(BF16), 2 * first)
    out = torch.empty(8, 64, dtype=F16, device=DEVICE)
    assert weight.dequantize(out=out) is out
    assert torch.equal(out, weight.dequantize(F16))


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("group", [32, None])
def test_a_master_that_is_trained(tree, group: int | None):
    master = draw(8, 64).requires_grad_()
    weight = tree.FakeQuantWeight(master, bits=4, group=group)
    assert (weight.shape, weight.dtype, weight.device) == (master.shape, F32, master.device)
    y = weight.dequantize(BF16)
    assert y.dtype == BF16
    dy = draw(8, 64, dtype=BF16, seed=1)
    assert torch.equal(torch.autograd.grad(y, master, dy)[0], dy.float())
    with pytest.raises(ValueError, match="out must be None"):
        weight.dequantize(out=torch.empty(8, 64, device=DEVICE))
    with torch.no_grad():
        assert torch.equal(weight.dequantize(out=torch.empty(8, 64, device=DEVICE)), weight.dequantize())
    assert torch.equal(
        weight.dequantize(), reference.FakeQuantWeight(master, bits=4, group=group).dequantize()
    )


def test_nothing_is_saved_unless_the_gradient_is_clipped():
    x, kept = draw(4, 32).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        fast.fake_quantize(x)
        assert kept == []
        fast.fake_quantize(x, clip_gradient=True)
    assert [t.data_ptr() for t in kept] == [x.data_ptr()]


def test_compiled_and_traced():
    def run(x: Tensor, master: Tensor) -> Tensor:
        weight = fast.FakeQuantWeight(master, group=16)
        return fast.fake_quantize(x, symmetric=False, clip_gradient=True) @ weight.dequantize().T

    x, master = draw(5, 32).requires_grad_(), draw(8, 32, seed=1).requires_grad_()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager" if interpreting() else "inductor")
    got, wanted = compiled(x, master), run(x, master)
    assert torch.equal(got, wanted)
    dy = torch.ones_like(got)
    assert all(map(torch.equal, *(torch.autograd.grad(y, (x, master), dy) for y in (got, wanted))))
