"""NF4 weights: both trees to the bit, the faults of others' kernels, planted bugs, states, bad input."""

import pytest
import torch
from torch import Tensor

import fast
import reference
from equivalence_tests.harness import instruments
from equivalence_tests.harness.interpreter import interpreting
from equivalence_tests.harness.mutants import Mutant, planted
from equivalence_tests.harness.probes import poisoned
from equivalence_tests.harness.real import DEVICE
from equivalence_tests.test_quantized_weights import BF16, F16, F32, TREES, draw
from experiments._work import experiment
from fast import _quantized_weights_nf4 as kernels
from fast._triton import tuning
from reference import _quantized_weights_state as states

on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: no streams and no CUDA graphs on a CPU")
F64 = torch.float64
STATE = ("codes", "absmax", "absmax_codes", "absmax2", "offset")
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)


def same(a: reference.NF4Weight, b: reference.NF4Weight, *dtypes: torch.dtype) -> bool:
    """Whether both hold, and dequantise to, the same bits."""
    pairs = [(getattr(a, name), getattr(b, name)) for name in STATE]
    pairs += [(a.dequantize(dtype), b.dequantize(dtype)) for dtype in dtypes or (a.dtype,)]
    return all(x is y is None or (x.dtype == y.dtype and torch.equal(x, y)) for x, y in pairs)


def trees(w: Tensor, **options) -> list[reference.NF4Weight]:
    return [tree.NF4Weight.quantize(w, **options) for tree in TREES]


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("double_quant", [True, False])
def test_both_trees_give_the_same_bits(dtype: torch.dtype, double_quant: bool):
    for shape in ((1,), (63,), (64,), (10, 10), (257, 3), (5, 64, 3), (0,), (0, 4)):
        assert same(*trees(draw(*shape, dtype=dtype), double_quant=double_quant), F32, F16, BF16, F64), shape
    w = draw(260, 65, dtype=dtype)  # 265 blocks: two blocks of scales
    assert same(*trees(w, double_quant=double_quant))
    assert same(*trees(w.T[::2], double_quant=double_quant)), "not contiguous"


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_of_every_size(block: int):
    w = draw(3 * block + block // 2 + 1)
    for double_quant in (True, False):
        assert same(*trees(w, block=block, double_quant=double_quant), F32, BF16)


@pytest.mark.parametrize(
    "table", [kernels.DEQUANTIZE, kernels.QUANTIZE, kernels.SCALES], ids=lambda t: t.name
)
def test_every_tile_gives_the_same_bits(table: tuning.Table):
    w = draw(69, 33)
    for tile in table.configs():
        with tuning.forced({table.name: tile}), poisoned():
            assert same(*trees(w)), tile


def test_small_and_large_numbers():
    """Subnormal ones, those whose reciprocal would overflow, those near the end of the range (whose mean would overflow)."""
    for scale in (1e-44, 1e-39, 1e-38, 3e-38, 1e-30, 1e30):
        assert same(*trees(draw(200) * scale)), scale
        assert same(*trees(draw(200) * scale, double_quant=False)), scale
    assert same(*trees(draw(200) * 5e37, double_quant=False))


def test_boundaries_belong_below():
    """x = midpoint is the lower code: strictly above counts."""
    table = trees(draw(1))[0].table
    middle = (table[1:] + table[:-1]) / 2
    around = [middle, *(torch.nextafter(middle, torch.full_like(middle, end)) for end in (-2.0, 2.0))]
    w = torch.stack([torch.ones_like(middle), *around], 1).flatten()  # absmax is 1
    for weight in trees(torch.cat([w, w.new_zeros(4)]), double_quant=False):
        found = torch.stack([weight.codes >> 4, weight.codes & 15], 1).flatten()[:60].view(15, 4)
        below = torch.arange(15, dtype=torch.uint8, device=DEVICE)
        assert torch.equal(found, torch.stack([torch.full_like(below, 15), below, below, below + 1], 1))


@pytest.mark.parametrize("tree", TREES)
def test_quantising_again_changes_nothing_where_a_block_keeps_its_largest(tree):
    """Of such a block the scale is the same again, and each value is the nearest one to itself."""
    once = tree.NF4Weight.quantize(draw(40, 64), double_quant=False)
    again = tree.NF4Weight.quantize(once.dequantize(), double_quant=False)
    ends = torch.stack([once.codes >> 4, once.codes & 15], 1).view(40, 64)
    kept = ((ends == 0) | (ends == 15)).any(1)
    assert kept.all(), "the largest magnitude is ±1 times the scale"
    assert torch.equal(once.dequantize(), again.dequantize())


@pytest.mark.parametrize("tree", TREES)
def test_the_error_is_half_a_gap_at_most(tree):
    w = draw(64, 64)
    weight = tree.NF4Weight.quantize(w, double_quant=False)
    half = (weight.table[1:] - weight.table[:-1]).max() / 2
    assert ((weight.dequantize() - w).abs().view(64, 64) <= 1.0001 * half * weight.absmax[:, None]).all()
    fine, coarse = (tree.NF4Weight.quantize(w, double_quant=d).dequantize() for d in (False, True))
    assert (coarse - w).norm() <= 1.05 * (fine - w).norm()


@pytest.mark.parametrize("tree", TREES)
def test_known_bug_q1_the_last_block_has_its_own_absmax(tree):
    storage = torch.full((200,), 1e4, device=DEVICE)
    w = storage[:100].view(10, 10)
    w.copy_(draw(10, 10))
    weight = tree.NF4Weight.quantize(w, double_quant=False)
    assert torch.equal(weight.absmax, torch.stack([w.view(-1)[:64].abs().max(), w.view(-1)[64:].abs().max()]))


def test_known_bug_q2_nothing_is_stored_past_the_scales():
    N, guard = 1_000_000, 64
    blocks = N // 64
    w, table = draw(1000, 1000), trees(draw(1))[0].table
    codes = torch.full((N // 2 + guard,), 0xA5, dtype=torch.uint8, device=DEVICE)
    absmax = torch.full((blocks + guard,), -1.0, device=DEVICE)
    with tuning.forced({"nf4_quantize": tuning.config(BLOCK_B=256)}):  # 15,625 is no multiple of that either
        kernels.nf4_quantize(w, table, codes[: N // 2], absmax[:blocks], 64)
    assert (codes[N // 2 :] == 0xA5).all()
    assert (absmax[blocks:] == -1).all()
    wanted = reference.NF4Weight.quantize(w, double_quant=False)
    assert torch.equal(codes[: N // 2], wanted.codes)
    assert torch.equal(absmax[:blocks], wanted.absmax)


def test_known_bug_q3_scales_are_rounded_twice():
    weight = fast.NF4Weight.quantize(draw(4096, 64, dtype=BF16))
    a = weight.absmax2.repeat_interleave(256)[: len(weight.absmax_codes)]
    exact = weight.code[weight.absmax_codes.long()].double() * a.double() + weight.offset.double()
    fused = (exact.float() != weight.scales()).double().mean().item()
    assert 0.02 < fused < 0.15, "a fused multiply-add would be seen"
    ones = fast.NF4Weight.of(weight)
    ones.codes = torch.full_like(weight.codes, 0xFF)  # all 1: what is left is the scale
    assert torch.equal(ones.dequantize(F32)[:, 0], weight.scales())


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("double_quant", [True, False])
def test_known_bug_q4_a_block_of_zeros(tree, double_quant: bool):
    w = torch.cat([torch.zeros(64), torch.ones(64), torch.zeros(3)]).to(DEVICE)
    got = tree.NF4Weight.quantize(w, double_quant=False).dequantize()
    assert torch.equal(got, w)
    assert torch.equal(tree.NF4Weight.quantize(torch.zeros_like(w)).dequantize(), torch.zeros_like(w))


@on_gpu
def test_known_bug_q5_streams_and_graphs():
    weight, side, out = fast.NF4Weight.quantize(draw(512, 512)), torch.cuda.Stream(), []
    wanted = weight.dequantize(BF16)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        out.append(weight.dequantize(BF16))
        graph, static = torch.cuda.CUDAGraph(), torch.empty_like(wanted)
        with torch.cuda.graph(graph, stream=side):
            weight.dequantize(out=static)
            out.append(weight.dequantize(BF16))
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(w, wanted) for w in (*out, static))


def test_known_bug_q5_in_one_graph_of_the_compiler():
    weight = fast.NF4Weight.quantize(draw(48, 40))

    def run(x: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        return x @ weight.dequantize().T, weight.dequantize(out=out) + 1

    x, out, mine = draw(3, 40), *(torch.empty(48, 40, dtype=BF16, device=DEVICE) for _ in range(2))
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager" if interpreting() else "inductor")
    torch.testing.assert_close(compiled(x, out), run(x, mine))
    assert torch.equal(out, mine)


@pytest.mark.skipif(not interpreting(), reason="what kernels do in memory is seen in the interpreter only")
@pytest.mark.parametrize("double_quant", [True, False])
def test_memory_is_used_as_declared(double_quant: bool):
    """No access out of bounds, no race, nothing read that is an output; and every byte of a weight is written."""
    with poisoned(), instruments.traced() as trace:
        weight = fast.NF4Weight.quantize(draw(257, 65), double_quant=double_quant)
        weight.dequantize(F16)
    assert trace.findings() == []
    assert len(trace.launches) == 2 + double_quant


DEQUANTIZE, QUANTIZE, SCALES, NORMALISED = (
    f"fast._quantized_weights_nf4:{n}"
    for n in ("_nf4_dequantize", "_nf4_quantize", "_nf4_quantize_scales", "_normalised")
)
MUTANTS = [
    Mutant("nibbles_swapped", DEQUANTIZE, "_looked_up(table, byte >> 4), _looked_up(table, byte & 15)",
           "_looked_up(table, byte & 15), _looked_up(table, byte >> 4)"),
    Mutant("last_element_dropped", DEQUANTIZE, "mask=offs_n < left", "mask=offs_n < left - 1"),
    Mutant("last_byte_dropped", DEQUANTIZE, "< BYTES - first_b", "< BYTES - 1 - first_b"),
    Mutant("scale_of_the_first_256", DEQUANTIZE, "(first_b + offs_b) // 256", "offs_b // 256"),
    Mutant("offset_forgotten", DEQUANTIZE, " * a + tl.load(OFFSET)", " * a"),
    Mutant("scale_in_16_bits", DEQUANTIZE, "high * scale[:, None]", "high * scale[:, None].to(tl.bfloat16).to(tl.float32)"),
    Mutant("table_in_16_bits", DEQUANTIZE, "tl.load(TABLE + tl.arange(0, 16))",
           "tl.load(TABLE + tl.arange(0, 16)).to(tl.bfloat16).to(tl.float32)"),
    Mutant("fused_multiply_add", DEQUANTIZE, "tl.load(CODE + c) * a + tl.load(OFFSET)",
           "(tl.load(CODE + c).to(tl.float64) * a + tl.load(OFFSET)).to(tl.float32)"),
    Mutant("boundaries_belong_above", QUANTIZE, "(x > (", "(x >= ("),
    Mutant("low_nibble_first", QUANTIZE, "high * 16 + low", "low * 16 + high"),
    Mutant("absmax_of_its_neighbours", QUANTIZE, "mask=offs_n < N", "mask=offs_n < N + BLOCK"),
    Mutant("short_block_keeps_0", QUANTIZE, "short & (absmax < 1e-38)", "short & (absmax < 0.0)"),
    Mutant("odd_byte_dropped", QUANTIZE, "(N + 1) // 2", "N // 2"),
    Mutant("one_boundary_less", QUANTIZE, "static_range(15)", "static_range(14)"),
    Mutant("offset_of_nothing", SCALES, "tl.where(mask, s - tl.load(OFFSET), 0.0)", "s - tl.load(OFFSET)"),
    Mutant("one_step_of_the_search_less", SCALES, "static_range(8)", "static_range(7)"),
    Mutant("search_above_the_midpoint", SCALES, "tl.load(CODE + middle)) * 0.5", "tl.load(CODE + middle)) * 0.501"),
    Mutant("short_block_multiplied", NORMALISED, "quotient.to(tl.float32)", "rows * tl.div_rn(1.0, safe)"),
    Mutant("all_blocks_divided", NORMALISED, "rows * tl.div_rn(1.0, safe)", "quotient.to(tl.float32)"),
    Mutant("absmax_is_max", NORMALISED, "tl.max(tl.abs(rows), axis=1)", "tl.max(rows, axis=1)"),
]  # fmt: skip


def boundary_weights() -> Tensor:
    """Numbers whose quotient by their block's largest lies on either side of a boundary, by how it is rounded."""
    absmax = 1 + torch.rand(2000, 1, generator=torch.Generator().manual_seed(0))
    table = reference.NF4Weight.quantize(torch.ones(1)).table
    x = ((table[1:] + table[:-1]) / 2 * absmax).flatten()
    absmax, middle = absmax.expand(-1, 15).flatten(), ((table[1:] + table[:-1]) / 2).repeat(2000)
    torn = ((x * (1 / absmax)) > middle) != ((x / absmax) > middle)
    return torch.stack([absmax[torn], x[torn]], 1)[:40].to(DEVICE)


def inputs() -> list[tuple[Tensor, bool]]:
    torn = boundary_weights()
    assert len(torn) > 8
    whole = torch.zeros(len(torn), 64, device=DEVICE)
    whole[:, :2] = torn
    short = [(pair, False) for pair in torn[:4]]
    zeros = torch.zeros(65, device=DEVICE)
    middle = (draw(1) * 0 + 1, trees(draw(1))[0].table)
    on_boundary = torch.cat([middle[0], (middle[1][1:] + middle[1][:-1]) / 2, zeros[:48]])
    return [(draw(131), False), (draw(77, 3), True), (zeros, False), (on_boundary, False), (whole, False), *short,
            (draw(260, 65), True)]  # fmt: skip


@pytest.mark.skipif(
    not interpreting(), reason="the kernels are the same on a GPU; their bugs are planted here"
)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_killed(mutant: Mutant):
    wanted = [(w, d, reference.NF4Weight.quantize(w, double_quant=d)) for w, d in inputs()]
    with planted(mutant), poisoned():
        assert not all(same(weight, fast.NF4Weight.quantize(w, double_quant=d)) and same(weight, fast.NF4Weight.of(weight))
                       for w, d, weight in wanted)  # fmt: skip


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("double_quant", [True, False])
def test_states(tree, double_quant: bool):
    weight = tree.NF4Weight.quantize(draw(33, 5, dtype=BF16), block=128, double_quant=double_quant)
    state = weight.to_state_dict("up")
    assert all(name == "up" or name.startswith("up.") for name in state)
    again = tree.NF4Weight.from_state_dict({**state, "other.weight": draw(1)}, "up")
    assert type(again) is type(weight)
    assert same(weight, again)
    assert (again.shape, again.block, again.dtype) == ((33, 5), 128, BF16)
    assert weight.to(DEVICE) is weight
    kept = [v for v in states.fields(weight).values() if isinstance(v, Tensor)]
    assert weight.nbytes == sum(t.numel() * t.element_size() for t in kept)
    shared = tree.NF4Weight.of(weight)
    assert shared.codes is weight.codes
    with pytest.raises(ValueError, match=r"state has no entry up\.absmax"):
        tree.NF4Weight.from_state_dict({n: t for n, t in state.items() if n != "up.absmax"}, "up")
    with pytest.raises(ValueError, match="one entry weight"):
        tree.NF4Weight.from_state_dict(state)


@pytest.mark.parametrize("tree", TREES)
def test_bad_input_is_named(tree):
    quantize, w = tree.NF4Weight.quantize, draw(4, 16)
    for bad in (float("inf"), -float("inf"), float("nan")):
        with pytest.raises(ValueError, match="w must be finite"):
            quantize(torch.where(w == w[1, 1], bad, w))
    for error, words, call in (
        (TypeError, "w must be float32, float16 or bfloat16", lambda: quantize(w.double())),
        (TypeError, r"w must be a torch\.Tensor", lambda: quantize([1.0])),
        (ValueError, "block must be one of", lambda: quantize(w, block=48)),
        (TypeError, "double_quant must be a bool", lambda: quantize(w, double_quant=1)),
    ):
        with pytest.raises(error, match=words):
            call()
    weight = quantize(w)
    with pytest.raises(TypeError, match="dtype must be a floating-point"):
        weight.dequantize(torch.int8)
    for out in (torch.empty(4, 16, dtype=F16), torch.empty(16, 4), torch.empty(16, 4).T):
        with pytest.raises(ValueError, match="out must be a contiguous"):
            weight.dequantize(F32, out=out.to(DEVICE))
    with pytest.raises(ValueError, match="absmax2 must be"):
        tree.NF4Weight(**states.fields(weight) | {"absmax2": weight.absmax2[:0]})


LADDER = next(ladder for ladder in experiment("quantized_weights").ladders() if ladder.phase == "dequantize")


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("step", LADDER.steps, ids=lambda step: step.name)
def test_steps_of_the_ladder_give_the_same_bits(step, dtype: torch.dtype):
    for shape in ("37×300", "1×1", "5×4096"):
        inputs = LADDER.inputs(shape, dtype, DEVICE)
        (got,), (wanted,) = step.run(**inputs), LADDER.steps[0].run(**inputs)
        assert got.dtype == dtype
        assert torch.equal(got, wanted)
