"""Cases: drawn from the signature, built as guarded views, described, saved, read back, and made simpler."""

import json
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equivalence_tests.harness import contents, layouts, tiles
from equivalence_tests.harness.cases import DTYPES, Case, Spec, example
from equivalence_tests.harness.interpreter import interpreting
from equivalence_tests.harness.operations import operation, operations
from equivalence_tests.harness.shrink import shrink, steps
from equivalence_tests.harness.strategies import PROFILES, cases, enough, sample

RMS_NORM = operation("rms_norm")
DEVICE = "cpu" if interpreting() else "cuda"
QUICK = PROFILES["quick"]
SHAPES = [(), (1,), (7,), (5, 3), (1, 4), (0, 6), (2, 3, 4), (2, 0, 4), (2, 3, 2, 5)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", layouts.DRAWN)
def test_a_view_lies_within_its_guard_and_holds_what_is_put_there(layout: str, shape: tuple[int, ...]):
    view = layouts.allocate(layout, shape, torch.bfloat16, "cpu")
    assert view.shape == shape
    assert (layouts.storage(view).view(torch.int16) == layouts.GUARD).all()
    values = torch.randn(shape).to(torch.bfloat16)
    layouts.fill(view, values)
    if 0 not in view.stride():
        assert torch.equal(view, values)
    written = (layouts.storage(view).view(torch.int16) != layouts.GUARD).sum()
    assert written <= view.numel()
    whole = layouts.storage(view).view(torch.int16)
    assert (whole[: layouts.MARGIN] == layouts.GUARD).all()
    assert (whole[-layouts.MARGIN :] == layouts.GUARD).all()


def test_the_layouts_are_what_their_names_say():
    strides = {name: layouts.LAYOUTS[name]((2, 3, 4, 5)).stride for name in layouts.DRAWN}
    assert strides == {
        "contiguous": (60, 20, 5, 1),
        "offset": (60, 20, 5, 1),
        "padded": (96, 32, 8, 1),
        "step2": (120, 40, 10, 2),
        "transposed": (60, 20, 1, 4),
        "permuted": (5, 10, 30, 1),
        "packed": (180, 60, 5, 1),
        "expanded": (0, 20, 5, 1),
    }
    assert layouts.far((3, 8)).stride[0] * 2 > 2**31


@pytest.mark.parametrize("content", contents.CONTENTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_contents_are_finite_and_never_all_ones(dtype: str, content: str):
    for shape in ((5, 7), (9,), (1, 1), (0, 3), ()):
        made = contents.values(content, shape, DTYPES[dtype], "cpu", 3, contents.EXPONENT[DTYPES[dtype]])
        assert made.shape == shape
        assert made.isfinite().all()
        assert made.float().square().sum().isfinite()
        assert not made.numel() or not (made == 1).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sample_covers_layouts_contents_dims_and_tiles(dtype: str):
    found = list(islice(sample(RMS_NORM, dtype, QUICK, seed=0), enough(RMS_NORM, QUICK, configs=True)))
    assert {c.tensors[0][1].layout for c in found} == set(layouts.DRAWN)
    assert {s.content for c in found for _, s in c.tensors if s} >= set(contents.CONTENTS) - {"signs"}
    assert {len(dict(c.sizes)["*"]) for c in found} >= {0, 1, 2, 3}
    assert {c.config for c in found} == {None, *range(tiles.count("rms_norm"))}
    assert {dict(c.options)["casting"] for c in found} == {"llama", "gemma"}
    assert all(dict(c.options)["weight_offset"] == 0 for c in found if not dict(c.tensors)["weight"])
    assert any(0 in dict(c.sizes)["*"] for c in islice(sample(RMS_NORM, dtype, QUICK, seed=0), 60))
    assert any(dict(c.tensors)["weight"] and c.dtype_of("weight") != dtype for c in found)


def test_dimensions_with_a_limit_stay_within_it():
    lora, drawn = operation("lora_linear"), {}
    for case in islice(sample(lora, "bf16", PROFILES["gpu"], seed=0), 100):
        for name, size in case.sizes:
            drawn.setdefault(name, set()).add(size)
    assert max(drawn["R"]) == lora.largest["R"] == 256
    assert max(drawn["K"]) > 4096
    assert RMS_NORM.largest == {}


def test_a_seed_gives_the_same_cases_every_time_and_another_seed_others():
    draws = [list(islice(sample(RMS_NORM, "bf16", QUICK, seed), 8)) for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize("function", operations(), ids=lambda o: o.function)
@given(data=st.data())
def test_a_drawn_case_survives_json_and_is_built_as_described(function, data):
    case = data.draw(cases(function, "bf16", QUICK))
    assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case
    args, kwargs, cotangents = case.build("cpu")
    values = function.bind(args, kwargs)
    words = case.describe()
    for name, tensor in values.items():
        if isinstance(tensor, torch.Tensor):
            assert f"{name}: {case.dtype_of(name)} {list(tensor.shape)}, " in words
            if "packed with" not in words:  # the two tensors of a pair say that, not their strides
                assert f"{list(tensor.shape)}, strides {list(tensor.stride())}" in words
    outputs = function.definition(*args, **kwargs)
    outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    for output, cotangent in zip(outputs, cotangents, strict=True):
        assert cotangent is None or (cotangent.shape, cotangent.dtype) == (output.shape, output.dtype)


@pytest.mark.parametrize(("layout", "step", "apart"), [("halves", 1, 8), ("alternating", 2, 1)])
def test_a_pair_shares_one_guarded_tensor(layout: str, step: int, apart: int):
    case = example("swiglu", "bf16", {"*": (3, 2), "F": 8}, {"up": Spec(layout)})
    (gate, up), _, _ = case.build("cpu")
    assert gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
    assert gate.stride() == up.stride() == (32, 16, step)
    assert up.storage_offset() - gate.storage_offset() == apart
    alone = case.replace(tensors=tuple((n, Spec()) for n, _ in case.tensors)).build("cpu")[0]
    assert all(map(torch.equal, (gate, up), alone)), "the numbers do not depend on the layout"
    whole = layouts.storage(gate).view(torch.int16)
    assert (whole != layouts.GUARD).sum() <= 2 * gate.numel()
    other = case.replace(tensors=(("gate", Spec(dtype="fp32")), ("up", Spec(layout))))
    assert other.build("cpu")[0][1].is_contiguous(), "tensors of two dtypes share nothing"


@pytest.mark.parametrize(
    "data", [{}, {"function": "rms_norm"}, {"function": "no_such"}, {"function": "rms_norm", "sizes": 3}]
)
def test_what_is_no_case_is_refused(data: dict):
    with pytest.raises(ValueError, match=r"not a test case|function must be one of"):
        Case.from_json(data)


def test_an_example_names_arguments_that_exist():
    with pytest.raises(ValueError, match="no argument wieght"):
        example("rms_norm", "fp32", {"*": (2,), "N": 4}, {"wieght": Spec()})
    with pytest.raises(ValueError, match="no argument epsilon"):
        example("rms_norm", "fp32", {"*": (2,), "N": 4}, options={"epsilon": 0.1})


def test_shrinking_ends_at_the_simplest_case_that_fails():
    def fails(case: Case) -> bool:
        sizes, bias = dict(case.sizes), dict(case.tensors)["bias"]
        return sizes["N"] >= 5 and bias is not None and bias.layout == "step2"

    start = next(
        c
        for c in sample(RMS_NORM, "bf16", QUICK, seed=0)
        if dict(c.tensors)["residual"] and dict(c.sizes)["N"] > 60
    )
    start = start.replace(
        tensors=tuple((n, Spec("step2", "huge", "fp32") if n == "bias" else s) for n, s in start.tensors)
    )
    found = shrink(start, fails)
    assert fails(found)
    assert not any(fails(simpler) for simpler in steps(found))
    assert dict(found.sizes) == {"*": (), "N": 5}
    assert dict(found.tensors) == {"x": Spec(), "weight": None, "bias": Spec("step2"), "residual": None}
    assert dict(found.options) == {"eps": 1e-6, "weight_offset": 0.0, "casting": "llama"}


def test_every_step_of_shrinking_is_a_case_that_can_be_built():
    for case in islice(sample(RMS_NORM, "fp16", QUICK, seed=2), 4):
        for simpler in steps(case):
            simpler.build("cpu")
