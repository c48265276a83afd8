"""Quantised weights against bitsandbytes and torchao, to the bit, on the CPU, where both run."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import fast
import reference
from equivalence_tests.harness.interpreter import interpreting
from equivalence_tests.test_quantized_weights import BF16, F16, F32
from equivalence_tests.test_quantized_weights_nf4 import BLOCKS, same

TREES = [reference, *([fast] if interpreting() else [])]  # fast runs on the CPU in the interpreter only


@pytest.fixture
def bnb() -> Iterator:
    """bitsandbytes; what it would compile for odd shapes runs uncompiled."""
    package = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    with torch.compiler.set_stance("force_eager"):
        yield package


def draw(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def nearest(d: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
    """bitsandbytes' definition of 8-bit quantisation. Its CPU library looks codes up in 65,536 cells instead, and often takes a
    neighbour of the nearest one; its CUDA kernel searches, as this does."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
    return torch.ops.bitsandbytes.quantize_blockwise.default.redispatch(keys, d, code, 256)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("block", BLOCKS)
def test_quantised_as_bitsandbytes_does(bnb, tree, dtype: torch.dtype, block: int):
    """Codes, scales, offset and the scales' own, of odd tails too."""
    sizes = (1, 63, 64, 777, 5 * block, 5 * block + block // 3) if block <= 256 else (2 * block + 77,)
    for size in sizes:
        w = draw(size, dtype=dtype)
        codes, state = bnb.functional.quantize_4bit(
            w, blocksize=block, quant_type="nf4", compress_statistics=False
        )
        weight = tree.NF4Weight.quantize(w, block=block, double_quant=False)
        assert torch.equal(weight.codes, codes.flatten())
        assert torch.equal(weight.absmax, state.absmax)
        assert torch.equal(weight.table, state.code)
        _, state = bnb.functional.quantize_4bit(
            w, blocksize=block, quant_type="nf4", compress_statistics=True
        )
        weight = tree.NF4Weight.quantize(w, block=block)
        assert torch.equal(weight.code, state.state2.code)
        assert torch.equal(weight.offset, state.offset)
        assert torch.equal(weight.absmax2, state.state2.absmax)


@pytest.mark.parametrize("tree", TREES)
def test_scales_are_quantised_to_the_nearest(bnb, tree):
    w = draw(64 * 700 + 5)
    weight, plain = (tree.NF4Weight.quantize(w, double_quant=d) for d in (True, False))
    codes, absmax2 = nearest(plain.absmax - weight.offset, weight.code)
    assert torch.equal(weight.absmax_codes, codes)
    assert torch.equal(weight.absmax2, absmax2)
    looked_up = bnb.functional.quantize_4bit(w, blocksize=64, quant_type="nf4", compress_statistics=True)[
        1
    ].absmax
    assert (weight.absmax_codes.int() - looked_up.int()).abs().max() <= 4
    assert (weight.absmax_codes != looked_up).double().mean() < 0.02


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("double_quant", [True, False])
def test_small_numbers_and_zeros(bnb, tree, double_quant: bool):
    for scale in (0.0, 1e-45, 1e-41, 1e-38, 1e-37, 1e-20, 1e30):
        w = torch.cat([draw(128) * scale, torch.zeros(64), draw(70) * scale])
        codes, state = bnb.functional.quantize_4bit(
            w, blocksize=64, quant_type="nf4", compress_statistics=double_quant
        )
        weight = tree.NF4Weight.quantize(w, double_quant=double_quant)
        assert torch.equal(weight.codes, codes.flatten()), scale
        assert double_quant or torch.equal(weight.absmax, state.absmax)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("block", [64, 128, 1024])
def test_dequantised_as_bitsandbytes_does(bnb, tree, double_quant: bool, block: int):
    """From its own state. Flat: where rows end within blocks, its CPU library starts a new block with each row."""
    for size in (2, 64, 778, 300 * 64, 777):
        for dtype in (F32, F16, BF16):
            w = draw(size, dtype=dtype)
            data, state = bnb.functional.quantize_4bit(
                w, blocksize=block, quant_type="nf4", compress_statistics=double_quant
            )
            weight = tree.NF4Weight.from_bitsandbytes(params(data, state))
            # In fp32: how its CPU library rounds to 16 bits differs from processor to processor.
            state.dtype = F32
            theirs = bnb.functional.dequantize_4bit(data, state).view(size)
            assert torch.equal(weight.dequantize(F32), theirs)
            assert torch.equal(weight.dequantize(), theirs.to(dtype))


def params(data: Tensor, state) -> SimpleNamespace:
    return SimpleNamespace(quant_state=state, detach=lambda: data)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("double_quant", [True, False])
def test_known_bug_q6_storage_of_another_dtype(bnb, tree, double_quant: bool):
    """FSDP flattens floating-point storage: the same bytes."""
    w, found = draw(64, 96, dtype=BF16), []
    for storage in (torch.uint8, BF16, F32):
        options = {"quant_type": "nf4", "compress_statistics": double_quant, "quant_storage": storage}
        weight = bnb.nn.Params4bit(w.clone(), blocksize=64, **options).to("cpu")
        assert weight.dtype == storage
        found.append(tree.NF4Weight.from_bitsandbytes(weight))
    assert all(same(found[0], other) for other in found[1:])
    assert found[0].codes.dtype == torch.uint8


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("double_quant", [True, False])
def test_state_dicts_of_either_are_read_by_the_other(bnb, tree, double_quant: bool):
    layer = bnb.nn.Linear4bit(64, 48, bias=False, quant_type="nf4", compress_statistics=double_quant).to(
        "cpu"
    )
    state, theirs = layer.state_dict(), tree.NF4Weight.from_bitsandbytes(layer.weight)
    weight = tree.NF4Weight.from_state_dict(state)
    assert same(weight, theirs)
    assert torch.equal(
        weight.dequantize(), bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    )
    ours = weight.to_state_dict()
    assert ours.keys() == state.keys()
    assert all(torch.equal(ours[n], state[n]) for n in state if "quant_state" not in n)
    stats = {n.removeprefix("weight."): t for n, t in ours.items() if n != "weight"}
    again = bnb.nn.Params4bit.from_prequantized(ours["weight"], stats, device="cpu")
    assert same(tree.NF4Weight.from_bitsandbytes(again), weight)


@pytest.mark.parametrize("tree", TREES)
def test_what_is_not_nf4_is_refused(bnb, tree):
    with pytest.raises(ValueError, match="quant_type must be 'nf4', got 'fp4'"):
        tree.NF4Weight.from_bitsandbytes(params(*bnb.functional.quantize_4bit(draw(64), quant_type="fp4")))
    with pytest.raises(ValueError, match="no quant_state"):
        tree.NF4Weight.from_bitsandbytes(bnb.nn.Params4bit(draw(64), quant_type="nf4"))


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("bits", [4, 8])
def test_groups_as_torchao_quantises_them(tree, bits: int):
    """Values, and the clipped gradient, of its recipe for weights in fp32."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torchao.quantization.qat import IntxFakeQuantizeConfig
    from torchao.quantization.qat.fake_quantizer import IntxFakeQuantizer

    w, dy = draw(16, 96).requires_grad_(), draw(16, 96, seed=1)
    for group in (32, 96):
        config = IntxFakeQuantizeConfig(getattr(torch, f"int{bits}"), group_size=group, is_symmetric=True)
        theirs = IntxFakeQuantizer(config)(w)
        ours = tree.fake_quantize(w, bits=bits, per="group", group=group, clip_gradient=True)
        assert torch.equal(ours, theirs)
        got, wanted = (torch.autograd.grad(y, w, dy)[0] for y in (ours, theirs))
        assert torch.equal(got == 0, wanted == 0)
        torch.testing.assert_close(got, wanted, rtol=4 * 2**-24, atol=0)  # theirs is times the scale and back
        assert torch.equal(tree.FakeQuantWeight(w, bits=bits, group=group).dequantize(), theirs)


@pytest.mark.parametrize("tree", TREES)
def test_tokens_as_torchao_quantises_them(tree):
    """Its 8-bit asymmetric recipe for activations."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torchao.quantization.qat import IntxFakeQuantizeConfig
    from torchao.quantization.qat.fake_quantizer import IntxFakeQuantizer

    quantizer = IntxFakeQuantizer(IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False))
    for x in (draw(2, 9, 65), draw(4, 64) + 5, draw(4, 64) - 5, torch.zeros(2, 8)):
        assert torch.equal(tree.fake_quantize(x, symmetric=False), quantizer(x))
