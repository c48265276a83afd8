"""chunked_cross_entropy and cross_entropy: algebra, the contract for labels, options alone and combined, PyTorch around them."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import fast
import reference
from equivalence_tests.harness.interpreter import interpreting
from equivalence_tests.harness.real import DEVICE
from reference.chunked_cross_entropy import chunked_cross_entropy_backward, cross_entropy_backward

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
IGNORED = -100
WAYS = ("gradients", "nothing")


def draw(*shape: int, dtype: torch.dtype = F32, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(DEVICE, dtype).requires_grad_()


def labels(*shape: int, V: int) -> Tensor:
    target = torch.randint(V, shape, generator=torch.Generator().manual_seed(sum(shape)))
    target.view(-1)[::4] = IGNORED
    return target.to(DEVICE)


def head(M: int = 12, D: int = 20, V: int = 130, dtype: torch.dtype = F32) -> tuple[Tensor, Tensor, Tensor]:
    return draw(M, D, dtype=dtype), draw(V, D, dtype=dtype, seed=1, scale=D**-0.5), labels(M, V=V)


def gradients(loss: Tensor, tensors: list[Tensor], **options) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, tensors, **options)


def near(got, wanted, tolerance: float = 2**-18) -> None:
    for a, b in zip(got, wanted, strict=True):
        assert (a.double() - b.double()).norm() <= tolerance * b.double().norm() + 1e-30


def wide(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in tensors]


OPTIONS = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "weights": {"class_weight": True, "token_weight": True, "label_smoothing": 0.2},
    "caps": {"softcap": 3.0, "logit_scale": 0.5, "z_loss": 0.02},
    "normalizer": {"normalizer": 12.0},
    "device normalizer": {"normalizer": torch.tensor([12])},
    "shift": {"shift": True, "token_weight": True},
    "lora": {"lora": True, "softcap": 3.0},
    "everything": {"class_weight": True, "token_weight": True, "label_smoothing": 0.1, "z_loss": 0.1, "softcap": 4.0,
                   "logit_scale": 0.5, "shift": True, "lora": True, "bias": True, "ignore_index": 3},
}  # fmt: skip


def call(function, dtype: torch.dtype, given: dict, **more):
    """Loss and gradients of everything that has one."""
    M, D, V, R = 12, 20, 130, 4
    x, w, _ = head(M, D, V, dtype)
    leaves, options = [x.detach().view(3, 4, D).requires_grad_(), w], dict(given) | more
    target = labels(3, 4, V=V)
    if options.get("bias"):
        options["bias"] = draw(V, dtype=dtype, seed=2)
        leaves.append(options["bias"])
    if options.get("lora"):
        pair = draw(R, D, seed=3, scale=D**-0.5), draw(V, R, seed=4)
        options["lora"] = (*pair, 0.5)
        leaves += pair
    if options.get("class_weight"):
        options["class_weight"] = draw(V, seed=5).detach().abs() + 0.1
    if options.get("token_weight"):
        options["token_weight"] = draw(3, 4, seed=6).detach().abs()
    if isinstance(options.get("normalizer"), Tensor):
        options["normalizer"] = options["normalizer"].to(DEVICE)
    loss = function(leaves[0], w, target, **options)
    return loss, gradients(loss if not loss.dim() else (loss * draw(3, 4, seed=7).detach()).sum(), leaves)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("way", [*WAYS, "none"])
@pytest.mark.parametrize("chunk_bytes", [None, 6000])
def test_options_alone_and_combined(name: str, way: str, chunk_bytes: int | None):
    options = OPTIONS[name] | ({"reduction": "none"} if way == "none" else {"keep": way})
    if way == "none":
        options.pop("normalizer", None)  # it divides a mean
    got, grads = call(fast.chunked_cross_entropy, F32, options, chunk_bytes=chunk_bytes)
    wanted, exact = call(reference.chunked_cross_entropy, F64, options)
    near([got], [wanted])
    near(grads, exact)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_backward_by_hand_is_autograds(name: str):
    given = {
        k: v for k, v in OPTIONS[name].items() if k not in ("lora", "bias", "class_weight", "token_weight")
    }
    logits, target = draw(3, 4, 30, dtype=F64), labels(3, 4, V=30)
    loss = reference.cross_entropy(logits, target, **given)
    near(
        cross_entropy_backward((torch.ones_like(loss),), logits, target, **given).values(),
        gradients(loss, [logits]),
        1e-12,
    )
    x, w, b = draw(3, 4, 8, dtype=F64), draw(30, 8, dtype=F64), draw(30, dtype=F64)
    a, up = draw(2, 8, dtype=F64, seed=1), draw(30, 2, dtype=F64)
    tensors = [x, w, b, a, up]
    loss = reference.chunked_cross_entropy(x, w, target, bias=b, lora=(a, up, 0.5), **given)
    by_hand = chunked_cross_entropy_backward(
        (torch.ones_like(loss),), x, w, target, bias=b, lora=(a, up, 0.5), **given
    )
    near([by_hand[n] for n in ("x", "weight", "bias", "lora_a", "lora_b")], gradients(loss, tensors), 1e-12)
    assert torch.autograd.gradcheck(
        lambda *t: reference.chunked_cross_entropy(t[0], t[1], target, bias=t[2], **given), tensors[:3]
    )


def test_torch_agrees_where_it_has_the_option():
    logits, target, w = draw(9, 40, dtype=F64), labels(9, V=40), draw(40, dtype=F64).detach().abs()
    for reduction in ("mean", "sum", "none"):
        options = {"reduction": reduction, "label_smoothing": 0.1}
        wanted = functional.cross_entropy(logits, target, weight=w, **options)
        near([reference.cross_entropy(logits, target, class_weight=w, **options)], [wanted], 1e-12)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_statistics_and_their_gradients(dtype: torch.dtype):
    x, w, target = head(dtype=dtype)
    loss, stats = fast.chunked_cross_entropy(
        x, w, target, reduction="sum", return_stats=True, chunk_bytes=9000
    )
    exact = wide(x, w)
    truth, right = reference.chunked_cross_entropy(*exact, target, reduction="sum", return_stats=True)
    near([loss, stats.lse, stats.log_prob, stats.entropy], [truth, right.lse, right.log_prob, right.entropy])
    assert torch.equal(stats.prediction, right.prediction)
    assert torch.equal(stats.correct, right.correct)
    dl, dp = draw(12, seed=8).detach(), draw(12, seed=9).detach()
    got = gradients(loss + (stats.lse * dl).sum() + (stats.log_prob * dp).sum(), [x, w])
    near(
        got,
        gradients(truth + (right.lse * dl).sum() + (right.log_prob * dp).sum(), exact),
        {F32: 2**-18}.get(dtype, 2**-6),
    )


@pytest.mark.parametrize("way", WAYS)
def test_C2_labels_that_are_no_class(way: str):
    x, w, target = head()
    target[1], target[2] = 130, -7
    one = fast.chunked_cross_entropy(x, w, target, reduction="none")
    assert one[1:3].isnan().all()
    assert not one[3:].isnan().any()
    dx, dw = gradients(fast.chunked_cross_entropy(x, w, target, reduction="sum", keep=way), [x, w])
    valid = (target >= 0) & (target < 130)
    exact = wide(x[valid], w)
    wanted = gradients(reference.chunked_cross_entropy(*exact, target[valid], reduction="sum"), exact)
    near([dx[valid], dw], wanted)
    assert not dx[~valid].any()


@pytest.mark.parametrize("way", WAYS)
def test_C3_everything_ignored(way: str):
    x, w, target = head()
    loss = fast.chunked_cross_entropy(x, w, torch.full_like(target, IGNORED), keep=way)
    assert loss == 0
    assert all(not g.any() for g in gradients(loss, [x, w]))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_ignored_rows_are_as_if_deleted(way: str, bad: float):
    x, w, target = head()
    dirty = x.detach().clone()
    dirty[target == IGNORED] = bad
    dirty.requires_grad_()
    kept = target != IGNORED
    loss = fast.chunked_cross_entropy(dirty, w, target, keep=way, return_stats=False)
    dx, dw = gradients(loss, [dirty, w])
    short = x.detach()[kept].requires_grad_()
    wanted = fast.chunked_cross_entropy(short, w, target[kept], keep=way)
    near([loss, dx[kept], dw], [wanted, *gradients(wanted, [short, w])])
    assert not dx[~kept].any()
    logits = (x @ w.T).detach()
    logits[~kept] = bad
    logits.requires_grad_()
    loss = fast.cross_entropy(logits, target)
    assert loss.isfinite()
    assert not gradients(loss, [logits])[0][~kept].any()


def test_C4_a_first_block_of_minus_infinity():
    logits = draw(2, 12288).detach()
    logits[:, :8192] = -torch.inf
    logits.requires_grad_()
    target = torch.tensor([12000, 8200], device=DEVICE)
    loss = fast.cross_entropy(logits, target)
    exact = wide(logits)
    truth = reference.cross_entropy(*exact, target)
    near([loss, *gradients(loss, [logits])], [truth, *gradients(truth, exact)])


def test_C1_logits_keep_their_bits():
    logits, target = draw(5, 300, dtype=BF16), labels(5, V=300)
    before = logits.detach().clone()
    gradients(fast.cross_entropy(logits, target), [logits])
    with torch.no_grad():
        fast.cross_entropy(logits, target)
    assert torch.equal(logits, before)


def test_C5_padding_does_not_count_behind_a_cap():
    logits, target = draw(3, 130), labels(3, V=130)
    near(
        [fast.cross_entropy(logits, target, softcap=1.0)],
        [reference.cross_entropy(*wide(logits), target, softcap=1.0)],
    )


def test_C7_the_labels_gradient_when_it_is_nearly_certain():
    for p in (0.9, 0.99, 0.999):
        logits = torch.zeros(1, 65, device=DEVICE)
        logits[0, 7] = torch.tensor(p * 64 / (1 - p)).log()
        logits = logits.to(BF16).requires_grad_()
        target = torch.tensor([7], device=DEVICE)
        exact = wide(logits)
        (got,), (wanted,) = (
            gradients(m.cross_entropy(t, target), [t]) for m, t in ((fast, logits), (reference, exact[0]))
        )
        assert (
            abs(got[0, 7].double() / wanted[0, 7] - 1) <= 2**-8 + 2**-12
        )  # one rounding to bf16, and 1 − p in fp32


def test_C8_dw_does_not_lose_with_more_chunks():
    x, w, target = head(M=256, D=16, V=40, dtype=BF16)
    exact = wide(x, w)
    (wanted,) = gradients(reference.chunked_cross_entropy(*exact, target), exact[1:])
    errors = []
    for rows in (256, 16):
        (dw,) = gradients(fast.chunked_cross_entropy(x, w, target, chunk_bytes=rows * 40 * 6), [w])
        errors.append((dw.double() - wanted).norm() / wanted.norm())
    assert errors[1] <= 1.1 * errors[0]


def test_C9_a_flat_softmax_loses_nothing():
    D, V = 16, 4096
    x, w, target = draw(8, D), draw(V, D, seed=1, scale=0.02), labels(8, V=V)
    w = (w.detach() + draw(D, seed=3).detach()).requires_grad_()
    exact = wide(x, w)
    wanted = gradients(reference.chunked_cross_entropy(*exact, target), exact)
    got = gradients(fast.chunked_cross_entropy(x, w, target, keep="nothing"), [x, w])
    near(got, wanted, 2**-11)  # what is common to the rows of w cancels in dx, all but some thousandths
    logits = (x @ w.T).detach().requires_grad_()
    (dlogits,) = gradients(fast.cross_entropy(logits, target, reduction="sum"), [logits])
    # p is exp(z − lse), whose exponent is rounded: to 2⁻²⁴ of |z| + |lse|, here below 2⁶.
    assert dlogits.double().sum(-1).abs().max() < 2**-17


@pytest.mark.parametrize("way", WAYS)
def test_C10_C11_frozen_tensors_scaled_losses_and_second_backwards(way: str):
    x, w, target = head()
    b = draw(130, seed=2)
    full = gradients(fast.chunked_cross_entropy(x, w, target, bias=b, keep=way), [x, w, b])
    loss = fast.chunked_cross_entropy(x.detach(), w, target, bias=b, keep=way)
    assert all(map(torch.equal, gradients(loss, [w, b]), full[1:]))
    loss = 3 * fast.chunked_cross_entropy(x, w, target, bias=b, keep=way)
    once, twice = (gradients(loss, [x, w, b], retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, once, twice))
    near(once, [3 * g for g in full], 2**-20)


def test_C13_micro_batches_add_up():
    x, w, target = head()
    n = torch.tensor(int((target != IGNORED).sum()), device=DEVICE)
    halves = [fast.chunked_cross_entropy(x[i : i + 6], w, target[i : i + 6], normalizer=n) for i in (0, 6)]
    near([halves[0] + halves[1]], [fast.chunked_cross_entropy(x, w, target)])


@pytest.mark.parametrize("way", WAYS)
def test_C14_fp16_gains_from_a_scaled_loss(way: str):
    x, w, target = head(M=16, D=16, V=3000, dtype=F16)
    exact = wide(x, w)
    wanted = gradients(reference.chunked_cross_entropy(*exact, target), exact)
    got = gradients(fast.chunked_cross_entropy(x, w, target, keep=way) * 65536, [x, w])
    near([g.double() / 65536 for g in got], wanted, 2**-10)


def test_double_backward_checkpoint_autocast_and_compile():
    x, w, target = head()
    for function in (
        lambda m, x, w: m.chunked_cross_entropy(x, w, target, z_loss=0.1),
        lambda m, x, w: (
            m.chunked_cross_entropy(x, w, target, keep="nothing", reduction="none").square().sum()
        ),
        lambda m, x, w: m.cross_entropy(x @ w.T, target, softcap=2.0),
    ):
        found = []
        for m, tensors in ((fast, [x, w]), (reference, wide(x, w))):
            first = gradients(function(m, *tensors), tensors, create_graph=True)
            found.append(gradients(sum(g.pow(3).sum() for g in first), tensors))
        near(*found, 2**-16)
    loss = checkpoint(fast.chunked_cross_entropy, x, w, target, use_reentrant=False)
    assert all(
        map(torch.equal, gradients(loss, [x, w]), gradients(fast.chunked_cross_entropy(x, w, target), [x, w]))
    )
    with torch.autocast(DEVICE, BF16):
        cast = fast.chunked_cross_entropy(x, w, target)
    assert torch.equal(cast, fast.chunked_cross_entropy(x.to(BF16), w.to(BF16), target))

    def loss(x, w, target):
        whole = fast.chunked_cross_entropy(x, w, target, label_smoothing=0.1)
        _, stats = fast.chunked_cross_entropy(x, w, target, reduction="none", return_stats=True)
        return whole + stats.log_prob.sum() + fast.cross_entropy(x @ w.T, target)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager" if interpreting() else "inductor")
    got, wanted = (gradients(f(x, w, target), [x, w]) for f in (compiled, loss))
    near(got, wanted)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"target": torch.zeros(12)}, TypeError, "target must be int32 or int64"),
        ({"target": torch.zeros(11, dtype=torch.int64)}, ValueError, r"target must have shape \[12\]"),
        ({"reduction": "avg"}, ValueError, "reduction must be"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing must be in"),
        ({"softcap": 0.0}, ValueError, "softcap must be positive"),
        ({"z_loss": "0.1"}, TypeError, "z_loss must be a number"),
        ({"normalizer": 3.0, "reduction": "sum"}, ValueError, "normalizer replaces"),
        ({"keep": "gradients", "reduction": "none"}, ValueError, 'keep="gradients" is for scalar losses'),
        ({"keep": "all"}, ValueError, "keep must be"),
        ({"chunk_bytes": 0}, ValueError, "chunk_bytes must be at least 1"),
        ({"class_weight": torch.ones(130, requires_grad=True)}, ValueError, "class_weight counts as a constant"),
        ({"weight": torch.zeros(130, 20, dtype=F16)}, TypeError, "weight must have x's dtype"),
        ({"lora": (torch.zeros(4, 20),)}, TypeError, "lora must be a tuple"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(change: dict, error: type, words: str):
    x, w, target = head()
    given = {"x": x, "weight": w, "target": target} | {
        k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in change.items()
    }
    if isinstance(change.get("class_weight"), Tensor):
        given["class_weight"] = torch.ones(130, device=DEVICE, requires_grad=True)
    for m in (fast, reference):
        with pytest.raises(error, match=words):
            m.chunked_cross_entropy(**given)


def test_the_module_is_the_function():
    from fast.nn import ChunkedCrossEntropyLoss

    x, w, target = head()
    classes = draw(130, seed=5).detach().abs()
    module = ChunkedCrossEntropyLoss(classes, label_smoothing=0.1, softcap=4.0)
    wanted = fast.chunked_cross_entropy(
        x, w, target, class_weight=classes, label_smoothing=0.1, softcap=4.0, normalizer=9.0
    )
    assert torch.equal(module(x, w, target, normalizer=9.0), wanted)
    assert "softcap=4.0" in repr(module)
    assert list(module.state_dict()) == ["weight"]
    with pytest.raises(ValueError, match="softcap must be positive"):
        ChunkedCrossEntropyLoss(softcap=-1.0)
