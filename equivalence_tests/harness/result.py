"""What a job is asked to do, and what it showed."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from equivalence_tests.harness.bounds import LARGE, NOTHING, Norms
from equivalence_tests.harness.failures import Failure
from equivalence_tests.harness.mutants import Mutant
from equivalence_tests.harness.operations import Operation
from equivalence_tests.harness.oracle import Judgement
from equivalence_tests.harness.strategies import Profile

_GRADIENTS = {
    "missing gradient",
    "gradients",
    "second backward",
    "stale gradient",
    "subset",
    "cotangent written",
}


@dataclass(frozen=True)
class Job:
    """One row of the report: a function in a working dtype, by which implementation, on which device, how thoroughly."""

    operation: Operation
    dtype: str
    impl: str
    function: Callable
    device: str
    profile: Profile
    seed: int = 0
    mutants: tuple[Mutant, ...] = ()

    @property
    def tuned(self) -> bool:
        """Whether the tuning tables of fast.<op> have a say."""
        return self.impl == "fast"


@dataclass
class Result:
    """worst: the largest error ÷ bound; over_baseline: the largest norm of the error ÷ that of the working-dtype reference.

    outputs: how many outputs and gradients were compared; exempt: for how many of them a planted result ("zeros", "scaled")
    could not be refused, because the truth is zero or within the bound.
    """

    job: Job
    cases: int = 0
    unsupported: Counter[str] = field(default_factory=Counter)
    worst: float = 0.0
    over_baseline: float = 0.0
    outputs: int = 0
    exempt: Counter[str] = field(default_factory=Counter)
    rejected: set[tuple[str, str]] = field(default_factory=set)
    pools: dict[str, Norms] = field(default_factory=dict)
    kinds: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    real: list[str] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    survived: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.cases > 0 and not self.failures and not self.survived

    @property
    def gradients(self) -> bool:
        return not self.kinds.keys() & _GRADIENTS

    @property
    def determinism(self) -> bool:
        return "determinism" not in self.kinds

    def count(self, judgement: Judgement) -> None:
        """Add one case's figures."""
        self.cases += 1
        self.kinds.update(judgement.kinds)
        for name, verdict in judgement.verdicts.items():
            self.outputs += 1
            self.worst = max(self.worst, verdict.ratio)
            self.exempt.update(verdict.exempt)
            self.rejected |= {(name, planted) for planted in verdict.rejects}
            self.pools.setdefault(name, NOTHING)
            if not verdict.norms.sees:
                continue
            if verdict.norms.n >= LARGE:
                self._norm(verdict.norms)
            else:
                self.pools[name] += verdict.norms

    def pooled(self) -> Iterator[str]:
        """Judge the outputs that were too small to be judged by their norms one by one; what is wrong, in words."""
        for name, norms in self.pools.items():
            if norms.n >= LARGE:
                self._norm(norms)
                if not norms.ok:
                    yield (
                        f"{name}: over {norms.n} elements of small cases the norm of the error is {norms.over_bound:.3g} "
                        f"times what is allowed, {norms.over_baseline:.3g} times that of the reference in this dtype"
                    )

    def blind(self) -> list[str]:
        """Outputs for which no case, nor all of them together, would have refused zeros, or the result × 1.01."""
        return [
            f"{name} ({'zeros' if planted == 'zeros' else '× 1.01'})"
            for name, norms in self.pools.items()
            for planted in ("zeros", "scaled")
            if (name, planted) not in self.rejected and not norms.rejects(planted)
        ]

    def _norm(self, norms: Norms) -> None:
        self.worst = max(self.worst, norms.over_bound)
        self.over_baseline = max(self.over_baseline, norms.over_baseline)
