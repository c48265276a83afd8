"""What lora_linear and the layers built of it must do beyond the drawn cases: algebra, adapters in a batch, dropout."""

import importlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import fast
import reference
from equivalence_tests.harness.cases import Spec, example
from equivalence_tests.harness.mutants import Mutant
from equivalence_tests.harness.real import DEVICE, Site
from reference._philox import dropout_mask

definition = importlib.import_module("reference.lora_linear")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SKINNY, MATMUL, EPILOGUE, STACK = (
    f"fast._lora_linear_{n}" for n in ("skinny", "matmul", "epilogue", "stack")
)
PASS, SUM = (f"{SKINNY}:{n}" for n in ("_lora_linear_skinny", "_lora_linear_sum"))
SPLIT = "fast._lora_linear_digits:split"
PRODUCT, ADDED, AFFINE = (f"{MATMUL}:{n}" for n in ("_lora_linear_matmul", "added", "affine"))
BEFORE, NORMS = f"{EPILOGUE}:_lora_linear_bwd_epilogue", f"{EPILOGUE}:weight_norms"
BWD, FWD = f"{STACK}:stack_bwd", f"{STACK}:stack_fwd"
MUTANTS = [
    Mutant("last_feature_dropped", ADDED, "mask_k = k + offs_k < K", "mask_k = k + offs_k < K - 1"),
    Mutant("adapter_forgotten", FWD, "if layer.a is None else", "if True else"),
    Mutant("scale_forgotten", SUM, "acc *= scale", "acc *= 1.0"),
    Mutant("last_rank_dropped", PASS, "offs_r < R\n", "offs_r < R - 1\n"),
    Mutant("last_row_of_pass_dropped", PASS, "mask_m = offs_m < M", "mask_m = offs_m < M - 1"),
    Mutant("parts_of_first_column_block", SUM, "part < parts", "part < 1"),
    Mutant("low_digits_dropped", SPLIT, "(value.to(tl.float32) - hi.to(tl.float32))", "(0.0 * hi.to(tl.float32))",
           dtypes=("bf16",)),
    Mutant("bias_before_scale", AFFINE, "u += tl.load(BIAS", "u += 0.5 * tl.load(BIAS"),
    Mutant("no_activation", PRODUCT, "z = z * tl.sigmoid(z)", "z = z * 1.0"),
    Mutant("mask_not_on_dx", BWD, '"dropout": mask', '"dropout": NO_DROPOUT'),
    Mutant("kept_not_scaled_in_dx", PRODUCT, "acc * keep_scale", "acc"),
    Mutant("kept_not_scaled_in_pass", PASS, "p * keep_scale", "p"),
    Mutant("kept_not_scaled_in_da", PASS, "q * keep_scale", "q"),
    Mutant("same_numbers_in_later_bits", "fast._triton.dropout:_dropout_bits", "8 * offs_w + i", "8 * offs_w"),
    Mutant("other_mask_in_later_rows", PASS, "stride_km, offs_m,", "stride_km, offs_m % 16,"),
    Mutant("other_mask_in_later_columns", PRODUCT, "stride_km, offs_m, offs_n,", "stride_km, offs_m, offs_n % BLOCK_N,"),
    Mutant("ds_not_scaled", BWD, "x.device, layer.scale, adapter)", "x.device, 1.0, adapter)"),
    Mutant("slope_without_z", BEFORE, "(1.0 + z * tl.sigmoid(-z))", "1.0"),
    Mutant("du_without_magnitude", BEFORE, "dz *= row_scale(C,", "_ = row_scale(C,"),
    Mutant("dmagnitude_not_normed", BWD, "(dmagnitude / norm)", "dmagnitude"),
    Mutant("norm_of_base_alone", NORMS, "(squares + added)", "(squares + 0.0 * added)"),
    Mutant("norm_without_cross_term", NORMS, "2 * s * across + ", ""),
    Mutant("dbias_of_one_part", BEFORE, "dbias += tl.sum(dz, axis=0)", "dbias = tl.sum(dz, axis=0)"),
]  # fmt: skip
ALL = {"bias": Spec(), "magnitude": Spec(content="mean")}
WIDE = {
    "lora_a": Spec(dtype="fp32"),
    "lora_b": Spec(dtype="fp32"),
}  # the usual case: fp32 adapters on a 16-bit base
EXAMPLES = [
    case
    for dtype in ("fp32", "fp16", "bf16")
    for case in (
        example("lora_linear", dtype, {"*": (2, 70), "K": 300, "N": 70, "R": 5}, WIDE,
                {"scale": 2.0, "dropout_p": 0.3, "seed": 5}),
        example("lora_linear", dtype, {"*": (70,), "K": 40, "N": 140, "R": 17}, ALL, {"scale": 2.0, "activation": "silu"}),
        example("lora_linear", dtype, {"*": (33,), "K": 40, "N": 100, "R": 33}, {"magnitude": Spec(content="mean")},
                {"scale": 2.0}),
        example("lora_linear", dtype, {"*": (530,), "K": 20, "N": 16, "R": 3}, {"bias": Spec()},
                {"activation": "silu", "dropout_p": 0.3, "seed": 5}),
    )
]  # fmt: skip
GPU_EXAMPLES = [
    case
    for dtype in ("fp32", "fp16", "bf16")
    for case in (
        example("lora_linear", dtype, {"*": (4096,), "K": 4096, "N": 1024, "R": 16}, WIDE,
                {"scale": 2.0}),
        example("lora_linear", dtype, {"*": (2048,), "K": 1024, "N": 2048, "R": 64}, ALL, {"activation": "silu"}),
        example("lora_linear", dtype, {"*": (300,), "K": 4096, "N": 4096, "R": 8}, {"bias": Spec()},
                {"dropout_p": 0.3, "seed": 5}),
        example("lora_linear", dtype, {"*": (2, 77), "K": 42, "N": 431, "R": 17}, {}, {"scale": 0.25}),
    )
]  # fmt: skip


def real_sites(model: nn.Module) -> Iterator[Site]:
    """The first layer's key projection, with an adapter: small enough for the interpreter."""
    path = "model.layers.0.self_attn.k_proj"
    yield Site(path, model.get_submodule(path), _adapted)


def _adapted(linear: nn.Linear, inputs: dict) -> tuple[tuple, dict]:
    weight = linear.weight
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randn(shape, generator=generator).to(weight.device)
        for shape in ((8, weight.shape[1]), (weight.shape[0], 8))
    )
    return (inputs["input"], weight, a / weight.shape[1] ** 0.5, b * 0.01), {"scale": 2.0}


def draw(*shape: int, dtype: torch.dtype = F32, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(DEVICE, dtype).requires_grad_()


def layer(
    M: int = 37,
    K: int = 50,
    N: int = 40,
    R: int = 5,
    G: int | None = None,
    dtype: torch.dtype = F32,
    adapters: torch.dtype | None = None,
) -> list[Tensor]:
    """x, weight (frozen), lora_a, lora_b."""
    lead, own = () if G is None else (G,), adapters or dtype
    return [
        draw(M, K, dtype=dtype),
        draw(N, K, dtype=dtype, scale=K**-0.5, seed=1).detach(),
        draw(*lead, R, K, dtype=own, scale=K**-0.5, seed=2),
        draw(*lead, N, R, dtype=own, scale=R**-0.5, seed=3),
    ]


def results(function, tensors: list[Tensor], dy: Tensor | None = None, **options) -> list[Tensor]:
    """y and the gradients of what requires them."""
    y = function(*tensors, **options)
    dy = draw(*y.shape, dtype=y.dtype, seed=9).detach() if dy is None else dy.to(y.dtype)
    given = [t for t in (*tensors, *options.values()) if isinstance(t, Tensor) and t.requires_grad]
    return [y, *torch.autograd.grad(y, given, dy)]


def near(got: list[Tensor], wanted: list[Tensor], tolerance: float = 2**-18) -> None:
    """In norm; fp32 results of sums of up to 100 addends: 64 u."""
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype
        assert (a.double() - b.double()).norm() <= tolerance * b.double().norm()


OPTIONS = [
    {},
    {"scale": 2.0, "bias": True, "dropout_p": 0.3, "seed": 5},
    {"magnitude": True, "activation": "silu"},
    {"bias": True, "magnitude": True, "activation": "silu", "scale": 0.5, "dropout_p": 0.5, "seed": 2**40},
]


def with_tensors(options: dict, N: int, G: int | None = None, dtype: torch.dtype = F32) -> dict:
    made = dict(options)
    if made.pop("bias", False):
        made["bias"] = draw(N, dtype=dtype, seed=4)
    if made.pop("magnitude", False):
        lead = () if G is None else (G,)
        made["magnitude"] = (draw(*lead, N, seed=5).detach().abs() + 0.5).to(dtype).requires_grad_()
    return made


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("G", [None, 3])
def test_reference_gradients_are_derived_right(options, G):
    tensors = [t.double().detach().requires_grad_() for t in layer(7, 6, 5, 2, G)]
    named = {
        k: v.double().detach().requires_grad_() if isinstance(v, Tensor) else v
        for k, v in with_tensors(options, 5, G).items()
    }
    ids = {} if G is None else {"adapter": torch.tensor([0, 2, -1, 1, 2, 0, 7], device=DEVICE)}
    y = reference.lora_linear(*tensors, **named, **ids)
    dy = torch.randn_like(y)
    grads = [n for n, v in named.items() if isinstance(v, Tensor)]
    found = torch.autograd.grad(y, [*tensors, *(named[n] for n in grads)], dy)
    derived = definition.lora_linear_backward((dy,), *tensors, **named, **ids)
    for name, expected in zip(("x", "weight", "lora_a", "lora_b", *grads), found, strict=True):
        torch.testing.assert_close(derived[name], expected, rtol=1e-12, atol=1e-12)
    # DoRA's norm is a constant of the gradient, which finite differences are not told.
    if "magnitude" not in named:
        assert torch.autograd.gradcheck(lambda *t: reference.lora_linear(*t, **named, **ids), tensors)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_batch_of_adapters_is_as_many_calls(dtype, options):
    """Unsorted rows, some without an adapter, one adapter without rows: outputs, gradients, and zeros where nothing arrives."""
    M, K, N, R, G = 41, 50, 40, 5, 4
    x, weight, a, b = layer(M, K, N, R, G, dtype, F32)
    named, ids = with_tensors(options, N, G, F32), torch.tensor([2, 0, -1, 1], device=DEVICE).repeat(11)[:M]
    named["scale"] = torch.tensor([0.5, 1.0, 2.0, 4.0], device=DEVICE)
    got = results(fast.lora_linear, [x, weight, a, b], adapter=ids, **named)
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in (x, weight, a, b)]
    tensors = {
        n: v.detach().double().requires_grad_()
        for n, v in named.items()
        if isinstance(v, Tensor) and n != "scale"
    }
    wanted = results(reference.lora_linear, wide, adapter=ids, **(named | tensors))
    for mine, truth in zip(got, wanted, strict=True):
        assert (mine.double() - truth).norm() <= (2**-18 if dtype == F32 else 2**-7) * truth.norm()
    assert not got[2][3].any(), "the fourth adapter has no rows"
    assert not got[3][3].any()
    base = {k: v for k, v in named.items() if k in ("bias", "activation")}
    alone = fast.lora_linear(x, weight, a[0] * 0, b[0] * 0, **base)
    assert torch.equal(got[0][ids == -1], alone[ids == -1]), "rows without an adapter are the base layer's"


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_what_changes_no_bit(dtype):
    x, weight, a, b = layer(dtype=dtype, adapters=F32)
    y, dx, da, db = results(fast.lora_linear, [x, weight, a, b], scale=2.0)
    padded = [torch.cat([a, a.new_zeros(3, a.shape[1])]), torch.cat([b, b.new_zeros(len(b), 3)], 1)]
    again = results(fast.lora_linear, [x, weight, *(t.detach().requires_grad_() for t in padded)], scale=2.0)
    for mine, other in zip((y, dx, da, db), (*again[:2], again[2][:5], again[3][:, :5]), strict=True):
        assert torch.equal(mine, other), "a rank padded by zeros"
    y0, _, da0, _ = results(fast.lora_linear, [x, weight, a, torch.zeros_like(b).requires_grad_()])
    assert torch.equal(y0, fast.lora_qkv(x, (weight,), (None,))[0])
    assert not da0.any()
    tensor_scale = results(fast.lora_linear, [x, weight, a, b], scale=torch.tensor(2.0, device=DEVICE))
    assert all(map(torch.equal, (y, dx, da, db), tensor_scale))


def test_dropout_is_the_seed_s_alone_and_right_on_average():
    x, weight, a, b = layer(64, 32, 16, 4)
    first, same, other = (fast.lora_linear(x, weight, a, b, dropout_p=0.5, seed=s) for s in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    device_seed = torch.tensor(1, device=DEVICE)
    assert torch.equal(first, fast.lora_linear(x, weight, a, b, dropout_p=0.5, seed=device_seed))
    kept = torch.stack(
        [dropout_mask(torch.tensor(s), 200, 50, 0.3, torch.device("cpu")).float() for s in range(20)]
    )
    assert abs(kept.mean() - 0.7) < 5 * (0.3 * 0.7 / kept.numel()) ** 0.5
    torch.manual_seed(0)
    drawn = fast.lora_linear(x, weight, a, b, dropout_p=0.5)
    assert not torch.equal(drawn, fast.lora_linear(x, weight, a, b, dropout_p=0.5)), (
        "a new mask at every call"
    )
    torch.manual_seed(0)
    assert torch.equal(drawn, fast.lora_linear(x, weight, a, b, dropout_p=0.5))
    zero = fast.lora_linear(x, weight, a, b)
    mean = sum(fast.lora_linear(x, weight, a, b, dropout_p=0.5, seed=s) for s in range(40)) / 40
    assert (mean - zero).norm() < 0.5 * (first - zero).norm()


def test_dora_at_the_norm_is_lora():
    x, weight, a, b = layer()
    norm = (weight + 2 * b @ a).norm(dim=1).detach()
    near(
        [fast.lora_linear(x, weight, a, b, scale=2.0, magnitude=norm)],
        [fast.lora_linear(x, weight, a, b, scale=2.0)],
    )


@pytest.mark.parametrize("shared", [{}, {"dropout_p": 0.3, "seed": 3}, {"adapter": True}])
def test_blocks_are_their_layers(shared):
    """lora_qkv and lora_swiglu_mlp against the references, with an adapter missing and ranks that differ."""
    G = 2 if "adapter" in shared else None
    x, w1, a1, b1 = layer(23, 24, 16, 3, G)
    _, w2, a2, b2 = layer(23, 24, 32, 7, G)
    _, w3, _, _ = layer(23, 24, 32, 1, G)
    if G:
        shared = {"adapter": torch.arange(23, device=DEVICE) % 3 - 1}
    given = [definition.Adapter(a1, b1, 2.0), definition.Adapter(a2, b2, 0.5), None]
    bias = draw(32)
    leaves = [x, a1, b1, a2, b2, bias]
    outputs = []
    for module in (fast, reference):
        ys = module.lora_qkv(x, (w1, w2, w3), given, biases=(None, bias, None), **shared)
        loss = sum((y * draw(*y.shape, seed=6).detach()).sum() for y in ys)
        outputs.append([*ys, *torch.autograd.grad(loss, leaves)])
    near(*outputs)
    down = draw(24, 32, seed=8).detach()
    up = definition.Adapter(a2, b2, 1.0)
    outputs = []
    for module in (fast, reference):
        y = module.lora_swiglu_mlp(x, (w2, w3, down), (up, None, None), **shared)
        outputs.append([y, *torch.autograd.grad(y, [x, a2, b2], draw(*y.shape, seed=6).detach())])
    near(*outputs, tolerance=2**-17)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"weight": draw(4, 9)}, ValueError, "weight must have shape"),
        ({"weight": "W"}, TypeError, "weight must be a torch.Tensor, an NF4Weight"),
        ({"lora_b": draw(40, 4)}, ValueError, "lora_b must have shape"),
        ({"lora_a": draw(300, 50), "lora_b": draw(40, 300)}, ValueError, "rank R in 1 … 256"),
        ({"scale": float("nan")}, ValueError, "scale must be finite"),
        ({"scale": draw(3)}, ValueError, "scale must be a number or a floating-point tensor of 1"),
        ({"scale": draw(1)}, ValueError, "scale has no gradient"),
        ({"dropout_p": 1.0}, ValueError, r"dropout_p must be in \[0, 1\)"),
        ({"seed": 1.5}, TypeError, "seed must be an int"),
        ({"seed": torch.tensor(1, dtype=torch.int32)}, ValueError, "seed must be one int64"),
        ({"adapter": torch.zeros(37)}, TypeError, "adapter must be a tensor of int32 or int64"),
        (
            {"adapter": torch.zeros(37, dtype=torch.int64)},
            ValueError,
            r"lora_a must have shape \[G, R, K\]|lora_a must have shape",
        ),
        ({"activation": "relu"}, ValueError, "activation must be None or 'silu'"),
        ({"bias": draw(41)}, ValueError, "bias must have shape"),
    ],
)
def test_bad_input_is_named(change, error, text):
    x, weight, a, b = layer()
    given = {"x": x, "weight": weight, "lora_a": a, "lora_b": b} | change
    for module in (fast, reference):
        with pytest.raises(error, match=text):
            module.lora_linear(**given)
