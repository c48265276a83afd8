"""The judge: one call of an implementation, and its backward passes, against the float64 reference.

Truth is the reference in float64 on the same rounded inputs, its gradients by autograd; baseline is the reference in the
working dtype. The implementation runs with poisoned memory and, in the interpreter, under the instruments; then again
without, asked for fewer gradients. A Judgement says everything that was wrong, each finding with its kind.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from equivalence_tests.harness import tiles
from equivalence_tests.harness.bounds import Verdict, compare
from equivalence_tests.harness.cases import Case
from equivalence_tests.harness.interpreter import interpreting
from equivalence_tests.harness.operations import Operation
from equivalence_tests.harness.probes import Saved, Watch, poisoned, repeats, same_bits, stir
from reference._numerics import Term

Cotangents = tuple[Tensor | None, ...]
KINDS = {
    "error": "raises",
    "output": "wrong number, shape or dtype of outputs",
    "unwritten": "leaves memory of its result unwritten",
    "values": "wrong values",
    "missing gradient": "gives no gradient",
    "gradients": "wrong gradients",
    "second backward": "gives other gradients the second time",
    "stale gradient": "ignores later cotangents",
    "input written": "writes to an input",
    "guard written": "writes outside of a tensor",
    "cotangent written": "writes to a cotangent",
    "saved written": "changes what was saved for the backward pass",
    "determinism": "gives other bits from run to run",
    "subset": "depends on which gradients are asked for",
    "instruments": "misbehaves in memory",
    "normwise": "is less accurate than the reference in the working dtype",
}


class Unsupported(Exception):
    """An implementation's way to say that it lacks an option or a kind of input: counted, not failed."""


@dataclass(frozen=True)
class Finding:
    """Something wrong: kind (one of KINDS), and what exactly."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{KINDS[self.kind]}: {self.text}"


@dataclass
class Judgement:
    """What one case showed. verdicts: of every output and gradient, by name."""

    verdicts: dict[str, Verdict] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    unsupported: str = ""

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def kinds(self) -> set[str]:
        return {f.kind for f in self.findings}

    def add(self, kind: str, text: str) -> None:
        if Finding(kind, text) not in self.findings:
            self.findings.append(Finding(kind, text))


@dataclass(frozen=True)
class Sample:
    """Ready tensors of one call. others: a second set of cotangents; required: whose gradients are asked for at first."""

    operation: Operation
    arguments: dict[str, Any]
    cotangents: Cotangents
    others: Cotangents
    required: tuple[str, ...]
    config: int | None = None

    @classmethod
    def of_case(cls, case: Case, device: str) -> "Sample":
        arguments = case.arguments(device)
        cotangents, others = (case.draw_cotangents(arguments, salt) for salt in ("cotangent", "other"))
        return cls(case.operation, arguments, cotangents, others, case.requires_grad, case.config)

    @classmethod
    def of_tensors(
        cls, operation: Operation, args: tuple, kwargs: dict[str, Any], cotangents: Cotangents
    ) -> "Sample":
        """Tensors from elsewhere, such as a real model; the second cotangents are the first ones in another order, and of a
        single number −½ times it."""
        arguments = operation.bind(args, kwargs)
        others = tuple(
            None if c is None else c.flatten().roll(c.shape[-1] + 1).view(c.shape) if c.dim() else -0.5 * c
            for c in cotangents
        )
        given = (a.name for a in operation.tensors if arguments[a.name] is not None)
        required = tuple(name for name in given if name in operation.differentiable)
        return cls(operation, arguments, cotangents, others, required)

    def describe(self) -> str:
        """Shapes, strides, dtypes and options, in words."""
        lines = [f"  {name}: {_words(t)}, strides {list(t.stride())}" for name, t in self.tensors.items()]
        options = ", ".join(f"{a.name}={self.arguments[a.name]!r}" for a in self.operation.options)
        return "\n".join([*lines, f"  {options}"])

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {
            a.name: self.arguments[a.name]
            for a in self.operation.tensors
            if self.arguments[a.name] is not None
        }

    @property
    def differentiable(self) -> tuple[str, ...]:
        """Names of the given tensors that may have a gradient."""
        return tuple(name for name in self.tensors if name in self.operation.differentiable)

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device


class Run:
    """One forward pass of `impl` on fresh leaves that share the sample's memory, and backward passes through it."""

    def __init__(
        self, impl: Callable, sample: Sample, required: tuple[str, ...], dtype: torch.dtype | None = None
    ):
        cast = {
            name: t.detach().to(dtype) if dtype is not None and t.is_floating_point() else t.detach()
            for name, t in sample.tensors.items()
        }
        self.leaves = {name: t.requires_grad_(name in required) for name, t in cast.items()}
        self.required, self.dtype, self.saved = required, dtype, Saved()
        args, kwargs = sample.operation.split({**sample.arguments, **self.leaves})
        with self.saved.recording() if dtype is None else nullcontext():
            outputs = impl(*args, **kwargs)
        self.outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)

    def backward(self, cotangents: Cotangents) -> dict[str, Tensor | None]:
        """Gradients by name; the graph is kept."""
        used = [
            (o, c) for o, c in zip(self.outputs, cotangents, strict=True) if c is not None and o.requires_grad
        ]
        if not used or not self.required:
            return dict.fromkeys(self.required)
        wanted = [self.leaves[name] for name in self.required]
        outputs, cotangents = zip(*used, strict=True)
        given = cotangents if self.dtype is None else [c.to(self.dtype) for c in cotangents]
        return dict(
            zip(
                self.required,
                torch.autograd.grad(outputs, wanted, given, retain_graph=True, allow_unused=True),
                strict=True,
            )
        )


def judge(sample: Sample, impl: Callable, again: bool = True) -> Judgement:
    """Run `impl` on the sample and say what is wrong with it. Exceptions of `impl` and exits are findings, except Unsupported.

    again: run it a second time, and with fewer gradients, for what shows only then.
    """
    judgement, everything, definition = Judgement(), sample.differentiable, sample.operation.definition
    named = [*_named("cotangent", sample.cotangents), *_named("other cotangent", sample.others)]
    watch = Watch([*sample.tensors.items(), *named])
    try:
        with tiles.forced(sample.operation.op, sample.config):
            with poisoned(), _instruments(judgement):
                first = Run(impl, sample, everything)
                _writes(judgement, watch)
                baseline = Run(definition, sample, everything)
                if not _structure(judgement, first, baseline):
                    return judgement
                grads = first.backward(sample.cotangents)
                repeat, third = first.backward(sample.cotangents), first.backward(sample.others)
                _synchronize(sample.device)
            _writes(judgement, watch, first.saved)
            if again:
                _rerun(judgement, sample, impl, first, grads)
                _writes(judgement, watch)
    except Unsupported as reason:
        return Judgement(unsupported=str(reason) or "what it does not name")
    except (Exception, SystemExit) as error:
        judgement.add("error", f"{type(error).__name__}: {error}")
        return judgement
    truth = Run(definition, sample, everything, torch.float64)
    _values(judgement, sample, first, truth, baseline)
    _gradients(judgement, sample, (grads, repeat, third), truth, baseline)
    judgement.findings.sort(key=lambda finding: list(KINDS).index(finding.kind))
    return judgement


def subsets(sample: Sample, impl: Callable) -> Judgement:
    """Whether values and gradients keep their bits under every subset of requires_grad."""
    judgement, everything = Judgement(), sample.differentiable
    try:
        with tiles.forced(sample.operation.op, sample.config):
            full = Run(impl, sample, everything)
            grads = full.backward(sample.cotangents)
            for size in range(len(everything)):
                for required in combinations(everything, size):
                    _same(judgement, "subset", sample, Run(impl, sample, required), full, grads)
    except Unsupported as reason:
        return Judgement(unsupported=str(reason) or "what it does not name")
    except (Exception, SystemExit) as error:
        judgement.add("error", f"{type(error).__name__}: {error}")
    return judgement


def _rerun(
    judgement: Judgement, sample: Sample, impl: Callable, first: Run, grads: dict[str, Tensor | None]
) -> None:
    """Again, without poison: the same bits, whatever ran before and whichever gradients are asked for."""
    everything = sample.differentiable
    other = {
        name: t.detach().flip(-1) * -0.5 if name in everything else t for name, t in sample.tensors.items()
    }
    args, kwargs = sample.operation.split({**sample.arguments, **other})
    impl(*args, **kwargs)
    stir(sample.device)
    second = Run(impl, sample, everything)
    repeated = second.backward(sample.cotangents)
    _unwritten(judgement, sample, first, grads, second, repeated)
    # Deterministic mode, which poisons, lets torch's own operations on a GPU take other algorithms: compare a third run.
    if sample.device.type == "cuda":
        _same(judgement, "determinism", sample, Run(impl, sample, everything), second, repeated)
    if set(sample.required) != set(everything):
        _same(judgement, "subset", sample, Run(impl, sample, sample.required), second, repeated)


def _unwritten(
    judgement: Judgement,
    sample: Sample,
    first: Run,
    grads: dict[str, Tensor | None],
    second: Run,
    repeated: dict[str, Tensor | None],
) -> None:
    """Poisoned and unpoisoned runs must agree: else memory that nobody wrote has got into the result, or bits vary."""
    pairs = [
        (f"output {i}", a, b) for i, (a, b) in enumerate(zip(first.outputs, second.outputs, strict=True))
    ]
    pairs += [(f"gradient of {name}", grads[name], repeated[name]) for name in grads]
    for name, a, b in pairs:
        if a is None or b is None or same_bits(a, b):
            continue
        nan = a.isnan() & ~b.isnan()
        if nan.any():
            judgement.add(
                "unwritten",
                f"{name} is NaN in {int(nan.sum())} elements where torch.empty was filled with NaN",
            )
        elif sample.device.type == "cpu":
            judgement.add("determinism", f"{name} has other bits in a second run")


def _same(
    judgement: Judgement, kind: str, sample: Sample, run: Run, full: Run, grads: dict[str, Tensor | None]
) -> None:
    """`run`, asked for the gradients of run.required only, has the bits of the full run."""
    asked = f"with gradients of {', '.join(run.required) or 'nothing'}"
    for i, (a, b) in enumerate(zip(run.outputs, full.outputs, strict=True)):
        if not same_bits(a, b):
            judgement.add(kind, f"output {i} has other bits {asked}")
        if a.requires_grad and not run.required:
            judgement.add(kind, f"output {i} requires grad {asked}")
    for name, grad in run.backward(sample.cotangents).items():
        if (grad is None) != (grads[name] is None):
            judgement.add(kind, f"{name} has {'no' if grad is None else 'a'} gradient {asked}")
        elif grad is not None and not same_bits(grad, grads[name]):
            judgement.add(kind, f"the gradient of {name} has other bits {asked}")


def _structure(judgement: Judgement, run: Run, baseline: Run) -> bool:
    """Number, shape, dtype and device of the outputs are the reference's."""
    got, wanted = ([_words(o) for o in r.outputs] for r in (run, baseline))
    if got != wanted:
        judgement.add("output", f"returns {'; '.join(got)}; the reference returns {'; '.join(wanted)}")
    return got == wanted


def _values(judgement: Judgement, sample: Sample, run: Run, truth: Run, baseline: Run) -> None:
    terms, repeated = _bounds(sample, sample.cotangents, truth)
    gradients = {f"d{a.name}" for a in sample.operation.tensors}
    names = [name for name in terms if name not in gradients]
    for name, got, exact, working in zip(names, run.outputs, truth.outputs, baseline.outputs, strict=True):
        verdict = compare(name, got, exact.detach(), working, terms[name], repeated=repeated)
        judgement.verdicts[name] = verdict
        if not verdict.ok:
            judgement.add("values" if verdict.wrong else "normwise", str(verdict))


def _gradients(
    judgement: Judgement,
    sample: Sample,
    got: tuple[dict, dict, dict],
    truth: Run,
    baseline: Run,
) -> None:
    grads, again, third = got
    for cotangents, result, kind in (
        (sample.cotangents, grads, "gradients"),
        (sample.others, third, "stale gradient"),
    ):
        terms, repeated = _bounds(sample, cotangents, truth)
        exact, working = truth.backward(cotangents), baseline.backward(cotangents)
        for name, grad in result.items():
            if exact[name] is None and grad is None:
                continue
            if grad is None:
                judgement.add("missing gradient", f"{name} has none")
                continue
            tensor = sample.tensors[name]
            if grad.shape != tensor.shape or grad.dtype != tensor.dtype:
                judgement.add(
                    "gradients", f"that of {name} is {_words(grad)}, but {name} is {_words(tensor)}"
                )
                continue
            zero = torch.zeros_like(tensor, dtype=torch.float64)
            exactly = zero if exact[name] is None else exact[name]
            wide = zero if working[name] is None else working[name]
            unused = any(c is None for c in cotangents)
            verdict = compare(f"d{name}", grad, exactly, wide, terms[f"d{name}"], unused, repeated)
            if kind == "gradients":
                judgement.verdicts[f"d{name}"] = verdict
                if again[name] is None or not same_bits(grad, again[name]):
                    judgement.add("second backward", f"d{name} has other bits")
            # Wrong at once is wrong; right at first and wrong for later cotangents is stale; missing at first has been said.
            first = judgement.verdicts.get(f"d{name}")
            if not verdict.ok and (kind == "gradients" or (first is not None and first.ok)):
                judgement.add(kind if verdict.wrong else "normwise", str(verdict))


def _writes(judgement: Judgement, watch: Watch, saved: Saved | None = None) -> None:
    """What was written that must not be. It is restored, so that the rest is judged on the numbers that were given."""
    for name, own in watch.undo():
        if not own:
            judgement.add("guard written", f"the memory around {name} changed")
        else:
            judgement.add("cotangent written" if "cotangent" in name else "input written", f"{name} changed")
    for words in saved.changed() if saved else ():
        judgement.add("saved written", f"a saved {words} changed")


def _terms(sample: Sample, cotangents: Cotangents, truth: Run) -> dict[str, list[Term]]:
    """The reference's majorant; an output that the loss does not use has a cotangent of zeros."""
    filled = tuple(
        torch.zeros_like(o) if c is None else c for c, o in zip(cotangents, truth.outputs, strict=True)
    )
    args, kwargs = sample.operation.split(sample.arguments)
    with torch.no_grad():
        return sample.operation.majorant(filled, *args, **kwargs)


def _bounds(sample: Sample, cotangents: Cotangents, truth: Run) -> tuple[dict[str, list[Term]], int]:
    """The majorant, and how often a row of the inputs occurs at most, where the majorant counts on independent roundings.

    Equal rows are rounded alike: in a sum over rows that occur r times at most, the root of the sum of the squares (Term.rms)
    is √r times that of independent roundings.
    """
    terms = _terms(sample, cotangents, truth)
    if not any(t.rms is not None for found in terms.values() for t in found):
        return terms, 1
    rows = {a.name for a in sample.operation.tensors if "*" in a.dims.shape.split() and a.labels is None}
    given = [
        *(t for name, t in sample.tensors.items() if name in rows),
        *(c for c in cotangents if c is not None and c.dim()),
    ]
    repeated = max(map(repeats, given))
    summed = {f"d{name}" for name in sample.tensors if name not in rows}

    def scaled(term: Term) -> Term:
        return term if term.rms is None else replace(term, rms=term.rms * repeated**0.5)

    return {n: [scaled(t) for t in found] if n in summed else found for n, found in terms.items()}, repeated


@contextmanager
def _instruments(judgement: Judgement) -> Iterator[None]:
    """In the interpreter, what the kernels do in memory; on a GPU there is nothing to see."""
    if not interpreting():
        yield
        return
    from equivalence_tests.harness import instruments

    with instruments.traced() as trace:
        yield
    for text in trace.findings():
        judgement.add("instruments", text)


def _named(name: str, tensors: Cotangents) -> list[tuple[str, Tensor | None]]:
    return [(f"{name} {i}", t) for i, t in enumerate(tensors)]


def _words(tensor: Tensor) -> str:
    place = "" if tensor.device.type == "cpu" else f" on {tensor.device}"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{place}"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
