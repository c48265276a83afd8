"""A test case: what can be said of a call without holding its numbers, so that it can be drawn, shrunk, printed and replayed."""

import dataclasses
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equivalence_tests.harness import contents, layouts, tiles
from equivalence_tests.harness.operations import Argument, Operation, operation

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Spec:
    """One tensor: layout (layouts.LAYOUTS), content (contents.CONTENTS), dtype (DTYPES; None: as `Dims` and the case say)."""

    layout: str = "contiguous"
    content: str = "normal"
    dtype: str | None = None


@dataclass(frozen=True)
class Case:
    """One call of `function` and of its backward.

    sizes:         of each dimension word; "*" has a tuple of leading dims
    tensors:       by argument name; None is an optional tensor that is not given
    requires_grad: the tensors whose gradients are asked for
    cotangents:    of the outputs in order, cyclically; None is an output that the loss does not use
    config:        which tile configuration the kernels are forced to take; None leaves it to the tuning tables
    """

    function: str
    dtype: str
    sizes: tuple[tuple[str, Any], ...]
    tensors: tuple[tuple[str, Spec | None], ...]
    options: tuple[tuple[str, Any], ...]
    requires_grad: tuple[str, ...]
    cotangents: tuple[Spec | None, ...]
    seed: int = 0
    config: int | None = None

    @property
    def operation(self) -> Operation:
        return operation(self.function)

    def replace(self, **changes: Any) -> "Case":
        return dataclasses.replace(self, **changes)

    def build(
        self, device: torch.device | str
    ) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Tensor | None, ...]]:
        """args, kwargs and cotangents on the device; every tensor a view into a guarded storage of its own."""
        arguments = self.arguments(device)
        args, kwargs = self.operation.split(arguments)
        return args, kwargs, self.draw_cotangents(arguments, "cotangent")

    def arguments(self, device: torch.device | str) -> dict[str, Any]:
        """Tensors and options by name."""
        made: dict[str, Tensor | None] = {}
        for name, spec in self.tensors:
            made |= {name: None} if spec is None else self._tensors(name, spec, device)
        return {**made, **dict(self.options)}

    def draw_cotangents(self, arguments: Mapping[str, Any], salt: str) -> tuple[Tensor | None, ...]:
        """Random cotangents, one for each floating output of the reference; another salt gives other numbers of the same kind."""
        args, kwargs = self.operation.split(dict(arguments))
        with torch.no_grad():
            outputs = self.operation.definition(*args, **kwargs)
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        specs = [self.cotangents[i % len(self.cotangents)] for i in range(len(outputs))]
        if not any(specs):  # the loss must use something
            specs[0] = next(spec for spec in self.cotangents if spec)
        drawn = enumerate(zip(specs, outputs, strict=True))
        return tuple(self._cotangent(f"{salt} {i}", spec, output) for i, (spec, output) in drawn)

    def shape(self, argument: Argument) -> tuple[int, ...]:
        sizes, shape = dict(self.sizes), ()
        for word in argument.dims.shape.split():
            shape += tuple(sizes[word]) if word == "*" else (sizes[word],)
        return shape

    def dtype_of(self, name: str) -> str:
        """Name of a tensor's dtype: its own, another argument's, or the working one."""
        spec, dims = dict(self.tensors)[name], next(a.dims for a in self.operation.tensors if a.name == name)
        if dims.dtype.startswith("labels "):
            return "int64"
        if spec is not None and spec.dtype:
            return spec.dtype
        return self.dtype if dims.dtype in ("working", "own") else self.dtype_of(dims.dtype)

    def describe(self) -> str:
        """The case in words: shapes, strides, dtypes, options."""
        lines = [f"{self.function}, working dtype {self.dtype}, seed {self.seed}"]
        for argument in self.operation.tensors:
            spec = dict(self.tensors)[argument.name]
            lines.append(f"  {argument.name}: {'not given' if spec is None else self._words(argument, spec)}")
        lines.append("  " + ", ".join(f"{name}={value!r}" for name, value in self.options))
        used = ("not used by the loss" if c is None else f"{c.layout}, {c.content}" for c in self.cotangents)
        lines.append(f"  cotangents: {'; '.join(used)}")
        lines.append(f"  gradients of: {', '.join(self.requires_grad) or 'nothing'}")
        if self.config is not None:
            lines.append(f"  tiles: {tiles.describe(self.operation.op, self.config)}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Case":
        """The inverse of to_json, from what a JSON parser gives; raises ValueError for what is no case."""
        try:
            return cls(
                function=operation(data["function"]).function,
                dtype=data["dtype"],
                sizes=tuple((word, tuple(size) if word == "*" else size) for word, size in data["sizes"]),
                tensors=tuple(
                    (name, None if spec is None else Spec(**spec)) for name, spec in data["tensors"]
                ),
                options=tuple((name, value) for name, value in data["options"]),
                requires_grad=tuple(data["requires_grad"]),
                cotangents=tuple(None if spec is None else Spec(**spec) for spec in data["cotangents"]),
                seed=data["seed"],
                config=data["config"],
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a test case: {error!r}") from error

    def _tensors(self, name: str, spec: Spec, device: torch.device | str) -> dict[str, Tensor]:
        """The tensor; where it lies in one packed tensor with another, that other one again, too."""
        argument = next(a for a in self.operation.tensors if a.name == name)
        if argument.labels:
            return {name: self._labels(argument, spec, device)}
        shape, dtype = self.shape(argument), DTYPES[self.dtype_of(name)]
        partner = self.partner(argument, spec)
        if partner is None:
            layout = "contiguous" if spec.layout in layouts.PAIRED else spec.layout
            return {name: self._fill(layouts.allocate(layout, shape, dtype, device), spec, name)}
        dim = argument.dims.shape.split()[::-1].index(argument.dims.beside[1])
        first, second = layouts.pair(spec.layout, shape, len(shape) - 1 - dim, dtype, device)
        return {
            partner: self._fill(first, dict(self.tensors)[partner], partner),
            name: self._fill(second, spec, name),
        }

    def _labels(self, argument: Argument, spec: Spec, device: torch.device | str) -> Tensor:
        """Classes, and in every fourth place the option ignore_index, which leaves the row out."""
        shape, classes = self.shape(argument), dict(self.sizes)[argument.labels]
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {argument.name}".encode()))
        values = torch.randint(classes, shape, generator=generator)
        left_out = torch.rand(shape, generator=generator) < 0.25
        values = torch.where(left_out, dict(self.options)["ignore_index"], values)
        return layouts.fill(layouts.allocate(spec.layout, shape, torch.int64, device), values.to(device))

    def partner(self, argument: Argument, spec: Spec) -> str | None:
        """The tensor that this one shares a packed tensor with: where its layout says so and both have one dtype."""
        if spec.layout not in layouts.PAIRED or argument.dims.beside is None:
            return None
        name = argument.dims.beside[0]
        given = dict(self.tensors)[name] is not None
        return name if given and self.dtype_of(name) == self.dtype_of(argument.name) else None

    def _cotangent(self, salt: str, spec: Spec | None, output: Tensor) -> Tensor | None:
        if spec is None or not output.is_floating_point():
            return None
        view = layouts.allocate(spec.layout, tuple(output.shape), output.dtype, output.device)
        return self._fill(view, spec, salt)

    def _fill(self, view: Tensor, spec: Spec, name: str) -> Tensor:
        # A sum of huge fp32 numbers and fp16 ones overflows where it is stored as fp16: the narrowest dtype sets the range.
        exponent = min(
            contents.EXPONENT[DTYPES[self.dtype_of(name)]]
            for name, given in self.tensors
            if given and name in self.operation.differentiable
        )
        fan_in = {a.name: a.dims.fan_in for a in self.operation.tensors}
        if any(fan_in.values()):
            # An operation with weights makes products of the fifth degree, and rounds them on the way.
            exponent //= 5
        scale = dict(self.sizes)[fan_in[name]] ** -0.5 if fan_in.get(name) else 1.0
        seed = zlib.crc32(f"{self.seed} {name}".encode())
        shape = tuple(view.shape)
        values = contents.values(spec.content, shape, view.dtype, view.device, seed, exponent, scale)
        return layouts.fill(view, values)

    def _words(self, argument: Argument, spec: Spec) -> str:
        shape, dtype = self.shape(argument), self.dtype_of(argument.name)
        if partner := self.partner(argument, spec):
            return f"{dtype} {list(shape)}, packed with {partner} ({spec.layout}), {spec.content} numbers"
        place = layouts.LAYOUTS["contiguous" if spec.layout in layouts.PAIRED else spec.layout](shape)
        return (
            f"{dtype} {list(shape)}, strides {list(place.stride)}, storage offset {place.offset} "
            f"({spec.layout}), {spec.content} numbers"
        )


def example(
    function: str,
    dtype: str,
    sizes: Mapping[str, Any],
    tensors: Mapping[str, Spec] | None = None,
    options: Mapping[str, Any] | None = None,
    cotangents: tuple[Spec | None, ...] = (Spec(),),
    seed: int = 0,
    config: int | None = None,
) -> Case:
    """A case written by hand: required tensors and those named in `tensors` are given, options have their defaults,
    every gradient is asked for."""
    op, tensors, options = operation(function), dict(tensors or {}), dict(options or {})
    for given, known in ((tensors, op.tensors), (options, op.options)):
        if unknown := set(given) - {a.name for a in known}:
            raise ValueError(
                f"{function} has no argument {', '.join(sorted(unknown))}; it has {[a.name for a in known]}"
            )
    chosen = tuple((a.name, tensors.get(a.name, None if a.optional else Spec())) for a in op.tensors)
    return Case(
        function=function,
        dtype=dtype,
        sizes=tuple(sizes.items()),
        tensors=chosen,
        options=tuple((a.name, options.get(a.name, a.default)) for a in op.options),
        requires_grad=tuple(name for name, spec in chosen if spec and name in op.differentiable),
        cotangents=cotangents,
        seed=seed,
        config=config,
    )
