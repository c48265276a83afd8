"""Quantised weights measured: the rows that bench times, the peers beside them, and the fusion ladders."""

import random
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from experiments._ladder import Ladder, Step, main
from experiments._work import Call, Row

WORDS = {"nf4", "single", "group32", "asymmetric", "clipped", *(f"block{2**k}" for k in range(5, 13))}


def row(shape: str, phases: tuple[str, ...] = ("fwd",)) -> Row:
    """`shape` is "M×N", with words behind it. Of fake_quantize, 8 bits for each row: group32 (4 bits, groups of 32),
    asymmetric, clipped. nf4: dequantising [M, N] in blocks of 64, doubly quantised; single, block32 … block4096.
    """
    sizes, words = [int(size) for size in shape.split()[0].split("×")], shape.split()[1:]
    if unknown := set(words) - WORDS:
        raise ValueError(f"shape: {', '.join(sorted(unknown))} is none of {', '.join(sorted(WORDS))}")
    if "nf4" in words:
        block = next((int(word[5:]) for word in words if word.startswith("block")), 64)
        return Row(
            "quantized_weights",
            "NF4Weight.dequantize",
            shape,
            _weight(sizes, block, "single" not in words),
            phases,
        )
    options = {"bits": 4, "per": "group", "group": 32} if "group32" in words else {"bits": 8}
    options |= {"symmetric": "asymmetric" not in words, "clip_gradient": "clipped" in words}
    phases = ("fwd", "bwd") if "clipped" in words else phases
    return Row("quantized_weights", "fake_quantize", shape, _activation(sizes, options), phases)


def _activation(sizes: list[int], options: dict[str, Any]) -> Callable:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator | None) -> Call:
        x, dy = (_fresh(sizes, dtype, device, generator) for _ in range(2))
        return Call((x.requires_grad_(),), dict(options), (dy,))

    return make


def _weight(sizes: list[int], block: int, double_quant: bool) -> Callable:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator | None) -> Call:
        return Call((random_weight(sizes, block, double_quant, dtype, device, generator),), {}, ())

    return make


def random_weight(
    sizes: list[int],
    block: int,
    double_quant: bool,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator | None,
) -> Any:
    """An NF4 weight of random codes, scales like those of normal numbers; without quantising any."""
    from reference._quantized_weights_tables import dynamic_map, nf4_table

    N = sizes[0] * sizes[1]
    blocks = -(-N // block)

    def draw(size: int) -> Tensor:
        return torch.randint(0, 256, (size,), dtype=torch.uint8, device=device, generator=generator)

    given = {"shape": tuple(sizes), "block": block, "dtype": dtype}
    if double_quant:
        a = _fresh([-(-blocks // 256)], torch.float32, device, generator).abs()
        state = {"absmax_codes": draw(blocks), "absmax2": a, "code": dynamic_map(device)}
        state["offset"] = torch.full((), 2.5, device=device)
    else:
        state = {"absmax": _fresh([blocks], torch.float32, device, generator).abs() + 1}
    return import_module("reference").NF4Weight(draw(-(-N // 2)), nf4_table(device), **state, **given)


def _fresh(
    sizes: list[int], dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
) -> Tensor:
    if generator is None:
        return torch.zeros(sizes, dtype=dtype, device=device)
    return torch.randn(sizes, dtype=dtype, device=device, generator=generator)


ROWS = [
    row("4096×14336 nf4"),
    row("4096×14336 nf4 single"),
    row("14336×4096 nf4"),
    row("14336×4096 nf4 single"),
    row("4096×14336 group32"),
    row("4096×14336 group32 asymmetric"),
    row("4096×14336 group32 clipped"),
    row("16384×4096"),
    row("16384×4096 asymmetric"),
]


def compiled(architecture: int) -> Iterator[Row]:
    """Rows that reach every configuration of the tables: groups at and past each limit, every block, quantising too."""
    tables = import_module("fast.quantized_weights")
    lengths = sorted({limit for limit, _ in tables.FAKE.rows[80]})
    for L in lengths:
        yield row(f"48×{L} clipped")
        yield row(f"48×{L} asymmetric clipped")
    yield row(f"47×{2 * max(lengths) - 1} clipped")
    yield row("48×4096 group32")
    for block in (limit for limit, _ in tables.DEQUANTIZE.rows[80]):
        yield row(f"64×{block} nf4 block{block}")
        yield row(f"64×{block} nf4 single block{block}")
        yield _quantising(block)
    yield row("47×77 nf4")


def _quantising(block: int) -> Row:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator | None) -> Call:
        w = _fresh([64 * block], dtype, device, generator)
        table, code = (torch.zeros(size, device=device) for size in (16, 256))
        return Call((w, table, code), {"shape": w.shape, "block": block}, ())

    return Row("quantized_weights", "NF4Weight._quantize", f"64×{block}", make, ("fwd",))


def random_shape(generator: random.Random) -> str:
    """Any length of a row that is promised, few enough elements for a CPU to allocate, in any form."""
    N = int(2 ** generator.uniform(0, 16))
    form = generator.choice(("", " asymmetric", " clipped", " asymmetric clipped", " group32"))
    N = max(32, N // 32 * 32) if "group32" in form else N
    return f"{generator.randint(1, max(1, 2**17 // N))}×{N}{form}"


def _bitsandbytes() -> Callable:
    from bitsandbytes import functional

    @lru_cache(maxsize=64)
    def state(weight: Any) -> Any:
        nested = {}
        if weight.absmax is None:
            a = functional.QuantState(weight.absmax2, code=weight.code, blocksize=256, dtype=torch.float32)
            nested = {"offset": weight.offset, "state2": a}
        scales = weight.absmax_codes if nested else weight.absmax
        shape = {"shape": weight.shape, "code": weight.table, "blocksize": weight.block}
        return functional.QuantState(scales, quant_type="nf4", dtype=weight.dtype, **shape, **nested)

    def dequantize(weight: Any) -> Tensor:
        return functional.dequantize_4bit(weight.codes[:, None], state(weight))

    return dequantize


def _torchao() -> Callable:
    from torchao.quantization.qat.fake_quantize_config import IntxFakeQuantizeConfig
    from torchao.quantization.qat.fake_quantizer import IntxFakeQuantizer

    @lru_cache
    def quantizer(bits: int, group: int | None, symmetric: bool) -> torch.nn.Module:
        integer = getattr(torch, f"int{bits}")
        if group is None:
            return IntxFakeQuantizer(IntxFakeQuantizeConfig(integer, "per_token", is_symmetric=symmetric))
        return IntxFakeQuantizer(IntxFakeQuantizeConfig(integer, group_size=group, is_symmetric=symmetric))

    def fake_quantize(x, *, bits=8, per="token", group=None, symmetric=True, clip_gradient=False):
        if symmetric == (group is None):
            raise NotImplementedError(
                "torchao's rows are asymmetric; its asymmetric groups have another zero point"
            )
        return quantizer(bits, group, symmetric)(x)

    return fake_quantize


PEERS = {
    "bitsandbytes": {"NF4Weight.dequantize": _bitsandbytes},
    "torchao": {"fake_quantize": _torchao},
}

NOTES = {
    "torchao": "computes scales and levels in x's dtype; its gradient is the clipped one",
    "bitsandbytes": "with double quantisation two kernels: scales, then the weight",
}


def ladders() -> tuple[Ladder, ...]:
    """Dequantising, and fake quantisation forward, each from separate eager operations to what `fast` does."""
    return _dequantize_ladder(), _fake_ladder()


STATE = ("codes", "table", "absmax_codes", "absmax2", "code", "offset")


def _dequantize_ladder() -> Ladder:
    from experiments import _quantized_weights_kernels as kernels

    classes, definition = import_module("fast"), import_module("reference")

    def make(
        sizes: list[int], dtype: torch.dtype, device: torch.device, generator: torch.Generator
    ) -> dict[str, Tensor]:
        weight = random_weight(sizes, kernels.BLOCK, True, dtype, device, generator)
        like = torch.empty(sizes, dtype=dtype, device="meta")
        return {name: getattr(weight, name) for name in STATE} | {"like": like}

    def weight(tree: Any, inputs: dict[str, Tensor]) -> Any:
        state = {name: inputs[name] for name in STATE[2:]}
        shape = {"shape": inputs["like"].shape, "block": kernels.BLOCK, "dtype": inputs["like"].dtype}
        return tree.NF4Weight(inputs["codes"], inputs["table"], **state, **shape)

    def pairs(**inputs: Tensor) -> tuple[Tensor]:
        table, like = inputs["table"], inputs["like"]
        both = torch.stack([table.repeat_interleave(16), table.repeat(16)], 1)  # of each byte
        values = both[inputs["codes"].to(torch.int32)].view(-1)[: like.numel()]
        rows = torch.nn.functional.pad(values, (0, -len(values) % kernels.BLOCK)).view(-1, kernels.BLOCK)
        w = rows.mul_(weight(definition, inputs).scales()[:, None]).view(-1)[: like.numel()]
        return (w.to(like.dtype).view(like.shape),)

    def kernel(**inputs: Tensor) -> tuple[Tensor]:
        scales = weight(definition, inputs).scales()
        like = torch.empty_like(inputs["like"], device=scales.device)
        return (kernels.dequantize(inputs["codes"], inputs["table"], scales, like),)

    steps = (
        Step(
            "eager",
            "The reference: nibbles, 64-bit indices, values and scales each in memory.",
            lambda **inputs: (weight(definition, inputs).dequantize(),),
        ),
        Step(
            "eager, two values at a time", "A byte finds both of its values in a table of 256 pairs.", pairs
        ),
        Step("one kernel, scales before it", "Nibbles and values stay in registers.", kernel),
        Step(
            "fast.NF4Weight",
            "Scales, too, are decoded where they are used.",
            lambda **inputs: (weight(classes, inputs).dequantize(),),
        ),
    )

    def work(inputs: dict[str, Tensor]) -> Any:
        cost = import_module("reference.quantized_weights").COST["NF4Weight.dequantize"]
        return cost(weight(definition, inputs)).forward

    names = {"metered_at": "256×1024", "timed_at": "4096×14336", "function": "NF4Weight.dequantize"}
    return Ladder("quantized_weights", "dequantize", ("w",), make, work, steps, **names)


def _fake_ladder() -> Ladder:
    from experiments import _quantized_weights_kernels as kernels

    fast, definition = import_module("fast"), import_module("reference.quantized_weights")

    def make(
        sizes: list[int], dtype: torch.dtype, device: torch.device, generator: torch.Generator
    ) -> dict[str, Tensor]:
        return {"x": _fresh(sizes, dtype, device, generator)}

    def fewer(x: Tensor) -> tuple[Tensor]:
        wide = x.to(torch.float32, copy=True)
        scale = (torch.linalg.vector_norm(wide, float("inf"), dim=-1, keepdim=True) / 127.5).clamp_(
            min=2.0**-126
        )
        return (wide.mul_(1 / scale).round_().clamp_(-128, 127).mul_(scale).to(x.dtype),)

    steps = (
        Step(
            "eager",
            "The reference: one launch per operation, each with its result in memory in fp32.",
            lambda x: (definition.fake_quantize(x),),
        ),
        Step("eager, in place", "One copy in fp32, written over and over; |x| never reaches memory.", fewer),
        Step(
            "scale, then quantise",
            "Levels stay in registers; x is read by both kernels.",
            lambda x: (kernels.scale_then_quantise(x),),
        ),
        Step(
            "fast.fake_quantize",
            "The extent of a group and its levels in one kernel: the floor.",
            lambda x: (fast.fake_quantize(x),),
        ),
    )

    def work(inputs: dict[str, Tensor]) -> Any:
        return definition.COST["fake_quantize"](inputs["x"]).forward

    return Ladder("quantized_weights", "fake fwd", ("y",), make, work, steps, function="fake_quantize")


if __name__ == "__main__":
    sys.exit(main("quantized_weights"))
