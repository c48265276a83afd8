"""bf16 in Triton's corrected interpreter, beyond what its self-test already compares. Runs only where kernels are interpreted."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from equivalence_tests.harness import interpreter
from equivalence_tests.harness.bf16 import bf16_bits, from_bf16_bits, round_to_bf16
from equivalence_tests.harness.interpreter import interpreting

pytestmark = pytest.mark.skipif(
    not interpreting(), reason="kernels are compiled for a GPU here; there is no interpreter to correct"
)

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def corrected():
    interpreter.correct()


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def _reduce(X, Y, M: tl.constexpr, N: tl.constexpr):
    x = tl.load(X + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    offs = tl.arange(0, M)
    tl.store(Y + offs, tl.reduce(x, 1, _add))
    tl.store(Y + M + offs, tl.max(x, 1))
    tl.store(Y + 2 * M + offs, tl.min(x, 1))
    tl.store(Y + 3 * M + offs, tl.reduce(x, 1, _larger))
    tl.store(Y + 4 * M + offs, tl.argmax(x, 1))
    tl.store(Y + 5 * M + offs, tl.sum(x.to(tl.float32), 1))
    tl.store(Y + 6 * M + offs, tl.sum(x, 1))


@triton.jit
def _scan(X, Y, Z, N: tl.constexpr):
    offs = tl.arange(0, N)
    x = tl.load(X + offs)
    tl.store(Y + offs, tl.associative_scan(x, 0, _add))
    tl.store(Z + offs, tl.cumsum(x.to(tl.float32), 0))


@triton.jit
def _constants(X, Y, scale, N: tl.constexpr):
    offs = tl.arange(0, N)
    x = tl.load(X + offs, mask=offs < N - 1, other=3.14159)
    tl.store(Y + offs, x + 1)
    tl.store(Y + N + offs, tl.full((N,), 3.14159, tl.bfloat16))
    tl.store(Y + 2 * N + offs, tl.zeros((N,), tl.bfloat16) + x)
    tl.store(Y + 3 * N + offs, x * scale)
    tl.store(Y + 4 * N + offs, x / 3)
    tl.store(Y + 5 * N + offs, offs.to(tl.bfloat16) * 129)
    tl.store(Y + 6 * N + offs, (x > 1).to(tl.bfloat16) + (x < 2).to(tl.int32))
    tl.store(Y + 7 * N + offs, tl.sort(x.to(tl.float32)).to(tl.bfloat16))


@triton.jit
def _toward_zero(X, Y, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(Y + offs, tl.load(X + offs).to(tl.bfloat16, fp_downcast_rounding="rtz"))


@triton.jit
def _fused(X, Y, Z, OUT, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(OUT + offs, tl.fma(tl.load(X + offs), tl.load(Y + offs), tl.load(Z + offs)))


@triton.jit
def _atomic(X, Y, OLD, N: tl.constexpr):
    offs = tl.arange(0, N)
    old = tl.atomic_add(Y + offs % 2, tl.load(X + offs), mask=offs < N - 2)
    tl.store(OLD + offs, old, mask=offs < N - 2)


@triton.jit
def _through_descriptor(X, Y, M: tl.constexpr, N: tl.constexpr):
    tile = X.load([0, 0])
    Y.store([0, 0], tile * tile)


@triton.jit
def _matmul(A, B, C, M, N, K, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    offs_m, offs_n = tl.program_id(0) * BLOCK + offs, tl.program_id(1) * BLOCK + offs
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, BLOCK):
        a = tl.load(A + offs_m[:, None] * K + (k + offs)[None, :], mask=(k + offs)[None, :] < K, other=0.0)
        b = tl.load(B + (k + offs)[:, None] * N + offs_n[None, :], mask=(k + offs)[:, None] < K, other=0.0)
        acc = tl.dot(a, b, acc)
    tl.store(C + offs_m[:, None] * N + offs_n[None, :], acc.to(tl.bfloat16))


def test_rounding_by_hand():
    cases = [  # fp32 bits, bf16 bits
        (0x3F808000, 0x3F80),  # a tie goes to the even one, below
        (0x3F818000, 0x3F82),  # and above
        (0x3F808001, 0x3F81),
        (0x7F7F8000, 0x7F80),  # overflow
        (0xFF7F7FFF, 0xFF7F),
        (0x00008000, 0x0000),  # subnormals
        (0x00018000, 0x0002),
        (0x80000001, 0x8000),
        (0x7F800001, 0x7FC0),  # a NaN whose payload is in the lower half stays a NaN
        (0x7FFFFFFF, 0x7FFF),
    ]
    given, want = np.array(cases, np.uint32).T
    np.testing.assert_array_equal(bf16_bits(round_to_bf16(given.view(np.float32))), want)
    every = np.arange(1 << 16, dtype=np.uint16)
    np.testing.assert_array_equal(bf16_bits(round_to_bf16(from_bf16_bits(every))), every)


def test_reductions():
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1)).to(BF16)
    y = torch.empty(7, 4, dtype=BF16)
    _reduce[(1,)](x, y, 4, 32)
    halves = x
    while halves.shape[1] > 1:
        halves = halves[:, : halves.shape[1] // 2] + halves[:, halves.shape[1] // 2 :]
    in_order = x[:, 0]
    for column in x.T[1:]:
        in_order = in_order + column
    # A user's combine function is folded in order by one Triton, by halves by another.
    assert torch.equal(y[0], halves[:, 0]) or torch.equal(y[0], in_order)
    assert torch.equal(y[1:4], torch.stack([x.amax(1), x.amin(1), x.amax(1)]))
    assert torch.equal(y[4], x.argmax(1).to(BF16))
    torch.testing.assert_close(y[5], x.float().sum(1).to(BF16), rtol=2**-7, atol=0)


def test_scan_rounds_every_step():
    x = torch.rand(64, generator=torch.Generator().manual_seed(2)).to(BF16)
    y, z = torch.empty_like(x), torch.empty(64)
    _scan[(1,)](x, y, z, 64)
    steps = [x[0]]
    for value in x[1:]:
        steps.append(steps[-1] + value)
    assert torch.equal(y, torch.stack(steps))
    torch.testing.assert_close(
        z, x.float().cumsum(0), rtol=64 * 2**-24, atol=0
    )  # positive addends, in any order


def test_constants_scalars_and_casts():
    N, scale = 16, 1.7
    x = torch.linspace(-3, 3, N).to(BF16)
    y = torch.full((8, N), torch.nan, dtype=BF16)
    _constants[(1,)](x, y, scale, N)
    x = torch.cat([x[:-1], torch.tensor([3.14159]).to(BF16)])
    offs = torch.arange(N).to(BF16)
    # Only a literal or a constexpr takes the block's dtype; a run-time float is an fp32 scalar, and promotes.
    scaled = (x.float() * torch.tensor(scale)).to(BF16)
    wants = [x + 1, torch.full((N,), 3.14159).to(BF16), x, scaled, (x.float() / 3).to(BF16), offs * 129]
    wants += [(x > 1).to(BF16) + (x < 2).to(BF16), x.sort().values]
    for got, want in zip(y, wants, strict=True):
        assert torch.equal(got, want)


def test_rounding_toward_zero():
    x = torch.tensor([1.0, 1.00390625, 1.0078, -1.0078, 3.4e38, torch.inf, torch.nan, 1e-40])
    y = torch.empty(8, dtype=BF16)
    _toward_zero[(1,)](x, y, 8)
    want = (x.view(torch.int32) & -65536).view(torch.float32).to(BF16)
    torch.testing.assert_close(y, want, rtol=0, atol=0, equal_nan=True)


def test_fma_rounds_once():
    # 1.0078125 · 1.0078125 = 1 + 2⁻⁶ + 2⁻¹⁴; a tie that a far smaller addend breaks; plain numbers.
    x = torch.tensor([1.0078125, 1.5, 1.5, 0.1])
    y = torch.tensor([1.0078125, 1.0078125, 1.0078125, 0.3])
    z = torch.tensor([2.0**-100, 2.0**-100, -(2.0**-100), 0.7])
    x, y, z = x.to(BF16), y.to(BF16), z.to(BF16)
    out = torch.empty(4, dtype=BF16)
    _fused[(1,)](x, y, z, out, 4)
    assert x[1].double() * y[1].double() == 1.51171875  # halfway between 1.5078125 and 1.515625
    assert out.tolist() == [
        1.015625,
        1.515625,
        1.5078125,
        (x[3].double() * y[3].double() + z[3].double()).to(BF16).item(),
    ]


def test_atomic_add_adds_lane_after_lane():
    x = torch.tensor([256.0, 3.0, 1.0, 5.0, 1.0, 7.0, 9.0, 9.0]).to(BF16)
    y, old = torch.zeros(2, dtype=BF16), torch.full((8,), -1.0, dtype=BF16)
    _atomic[(1,)](x, y, old, 8)
    assert y.tolist() == [256.0, 15.0]  # 256 + 1 rounds back to 256 each time
    assert old.tolist() == [0.0, 0.0, 256.0, 3.0, 256.0, 8.0, -1.0, -1.0]


def test_tensor_descriptors():
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(3)).to(BF16)
    y = torch.full((8, 16), torch.nan, dtype=BF16)
    describe = (TensorDescriptor(t, list(t.shape), list(t.stride()), [8, 16]) for t in (x, y))
    _through_descriptor[(1,)](*describe, 8, 16)
    assert torch.equal(y, x * x)


def test_matmul_accumulates_in_fp32():
    generator = torch.Generator().manual_seed(4)
    a, b = (torch.randn(shape, generator=generator).to(BF16) for shape in ((32, 40), (40, 32)))
    c = torch.empty(32, 32, dtype=BF16)
    _matmul[(2, 2)](a, b, c, 32, 32, 40, 16)
    truth = a.double() @ b.double()
    # 40 additions in fp32 of products that fp32 holds exactly, then one rounding to bf16.
    bound = 2**-8 * truth.abs() + (1 + 2**-8) * 40 * 2**-24 * (a.double().abs() @ b.double().abs())
    assert ((c.double() - truth).abs() <= bound).all()


def test_correcting_twice_is_correcting_once():
    before = triton.runtime.interpreter.TensorHandle.__post_init__
    interpreter.correct()
    assert triton.runtime.interpreter.TensorHandle.__post_init__ is before


def test_a_truncating_cast_fails_the_self_test_by_name(monkeypatch):
    truncate = lambda x: (np.asarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)  # noqa: E731
    monkeypatch.setattr(interpreter, "round_to_bf16", truncate)
    with pytest.raises(RuntimeError, match=rf"Triton {triton.__version__}.*cast of fp32 to bf16") as caught:
        interpreter.self_test()
    assert "fp32 to fp16" not in str(caught.value)


def test_raw_bits_in_a_bf16_value_are_refused():
    with pytest.raises(TypeError, match="held as uint16"):
        triton.runtime.interpreter.TensorHandle(np.zeros(2, np.uint16), tl.bfloat16)
