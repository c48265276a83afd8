"""Does what the command line asks for, once it is known whether kernels are compiled or interpreted."""

import argparse

from rich.console import Console

from equivalence_tests.harness import failures, interpreter, parallel, peers, report, runner
from equivalence_tests.harness.cases import DTYPES
from equivalence_tests.harness.mutants import Mutant, shared
from equivalence_tests.harness.operations import Operation, operation, operations, suite
from equivalence_tests.harness.oracle import Judgement
from equivalence_tests.harness.result import Job, Result
from equivalence_tests.harness.strategies import PROFILES, Profile
from equivalence_tests.harness.usage import UsageError


def execute(given: argparse.Namespace, device: str) -> int:
    """Run what the parsed arguments select; returns the exit status. Raises UsageError before any work is done."""
    console = Console(highlight=False, soft_wrap=True, markup=False)
    if given.list:
        console.print(_listing())
        return 0
    if given.replay:
        return _replay(console, given, device)
    jobs = _jobs(given, device)
    interpreter.correct()
    if device == "cpu":
        reason = "Kernels run" if given.device else "No usable GPU: kernels run"
        console.print(f"{reason} in Triton's interpreter on the CPU")
    results: list[Result] = []
    with report.progress(console, sum(runner.steps(job) for job in jobs)) as advance:
        for result in parallel.run_all(jobs, lambda job, text: advance(f"{_name(job)}: {text}")):
            results.append(result)
            console.print(_line(_name(result.job), result))
    return _conclude(console, given, results)


def _jobs(given: argparse.Namespace, device: str) -> list[Job]:
    chosen, impl = _operations(given.op), "fast" if given.impl is None else given.impl
    if impl in peers.PEERS and not given.op:  # all that it has
        chosen = [o for o in chosen if o.function in peers.PEERS[impl][1]]
    if ":" in impl:  # one function; an operation's name may be the name of one of its functions, too
        chosen = [o for o in chosen if o.function in given.op] or chosen
    if ":" in impl and len(chosen) > 1:
        raise UsageError(f"--impl {impl} is one function; name the operation, one of {_names(operations())}")
    if given.profile not in PROFILES:
        raise UsageError(f"--profile must be one of {', '.join(PROFILES)}, got {given.profile!r}")
    dtypes = given.dtype or list(DTYPES)
    if unknown := [d for d in dtypes if d not in DTYPES]:
        raise UsageError(f"--dtype must be some of {', '.join(DTYPES)}, got {', '.join(unknown)}")
    profile, dtypes = PROFILES[given.profile], list(dict.fromkeys(dtypes))
    functions = [(operation, peers.implementation(impl, operation)) for operation in chosen]
    return [
        Job(operation, dtype, impl, function, device, profile, given.seed, planted[dtype])
        for operation, function in functions
        for planted in (_mutants(given, operation, dtypes, profile),)
        for dtype in dtypes
    ]


def _mutants(
    given: argparse.Namespace, operation: Operation, dtypes: list[str], profile: Profile
) -> dict[str, tuple[Mutant, ...]]:
    """The bugs to plant, by dtype. They live in fast.<op>, so there are none for another implementation."""
    known = (
        getattr(suite(operation.op), "MUTANTS", ()) if given.mutants and given.impl in (None, "fast") else ()
    )
    return shared([m for m in known if m.of in (None, operation.function)], dtypes, profile.thorough)


def _operations(names: list[str]) -> list[Operation]:
    """Those named, by operation or by function; all where none is."""
    known = operations()
    if unknown := [name for name in names if not any(name in (o.op, o.function) for o in known)]:
        raise UsageError(f"OP must be some of {_names(known)}, got {', '.join(unknown)}")
    return [o for o in known if not names or o.op in names or o.function in names]


def _names(known: list[Operation]) -> str:
    return ", ".join(dict.fromkeys(name for o in known for name in (o.op, o.function)))


def _name(job: Job) -> str:
    return f"{job.operation.function} {job.dtype}"


def _line(name: str, result: Result) -> str:
    """One row in words, when it is done."""
    real = f", {len(result.real)} of them real tensors" if result.real else ""
    missing = f", {sum(result.unsupported.values())} unsupported" if result.unsupported else ""
    verdict = "pass" if result.ok else "FAIL"
    return f"{name}: {verdict}, {result.cases} cases{real}{missing}, {result.seconds:.0f} s"


def _conclude(console: Console, given: argparse.Namespace, results: list[Result]) -> int:
    """Tell what failed, write the files, print the table last."""
    for result in results:
        _tell(console, result)
    found = report.records(results)
    for path, text in ((given.json, report.dumps), (given.html, report.page)):
        if path:
            report.write(path, text(path, found))
    # Wide enough that no figure is cut, whatever the terminal.
    Console(width=max(console.width, report.WIDTH)).print(report.table(found))
    return 0 if all(result.ok for result in results) else 1


def _tell(console: Console, result: Result) -> None:
    job, name = result.job, _name(result.job)
    for failure in result.failures:
        console.print(f"\n{name} by {job.impl} {failure}")
    if result.survived:
        console.print(f"\n{name}: the harness did not notice these bugs: {', '.join(result.survived)}")
    if not result.cases:
        console.print(f"\n{name}: no case is supported by {job.impl}")
    if result.unsupported:
        reasons = ", ".join(f"{reason} ({n})" for reason, n in result.unsupported.most_common(5))
        console.print(f"{name}: {job.impl} does not support: {reasons}")
    if exempt := {planted: n for planted, n in result.exempt.items() if n}:
        words = " and ".join(
            f"{'zeros' if p == 'zeros' else '× 1.01'} in {n}" for p, n in sorted(exempt.items(), reverse=True)
        )
        console.print(f"{name}: of {result.outputs} outputs, the truth is too small to refuse {words}")
    if labels := {label.rsplit(", ", 1)[0] for label in result.real}:
        console.print(f"{name}: real tensors from {', '.join(sorted(labels))}")


def _replay(console: Console, given: argparse.Namespace, device: str) -> int:
    """Run a saved failure again: status 1 if it still fails, 0 if not."""
    try:
        record = failures.load(given.replay)
        impl = record["impl"] if given.impl is None else given.impl
        function = peers.implementation(impl, operation(record["function"]))
        job = runner.job_of(record, function, impl, device)
        interpreter.correct()
        outcome = runner.replay(record, job)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # A record that somebody edited: what the implementation raises is a finding and does not come here.
        raise UsageError(f"--replay {given.replay}: {error}") from error
    console.print(
        f"{record['function']} {record['dtype']} by {impl}, as in {given.replay}\n  {record['words']}"
    )
    if isinstance(outcome, Judgement) and outcome.unsupported:
        console.print(f"does not support this: {outcome.unsupported}")
        return 1
    for finding in outcome.findings if isinstance(outcome, Judgement) else outcome.failures:
        console.print(str(finding))
    console.print("passes" if outcome.ok else "still fails")
    return 0 if outcome.ok else 1


def _listing() -> str:
    """Operations and their functions, implementations, dtypes, profiles."""
    known = operations()
    lines = [
        f"{op}: {', '.join(o.function for o in known if o.op == op)}"
        for op in dict.fromkeys(o.op for o in known)
    ]
    profiles = [f"{p.name}: {p.examples} drawn cases, dims up to {p.size}" for p in PROFILES.values()]
    blocks = {
        "operations and their functions": lines,
        "implementations (--impl)": [*peers.NAMES, "package.module:function, with the reference's signature"],
        "dtypes (--dtype)": list(DTYPES),
        "profiles (--profile), for each function and dtype": profiles,
    }
    return "\n".join(
        f"{title}\n" + "\n".join(f"  {line}" for line in block) for title, block in blocks.items()
    )
