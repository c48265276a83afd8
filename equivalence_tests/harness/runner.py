"""Runs one job: examples, drawn cases, subsets of requires_grad, real tensors, mutants."""

import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch

from equivalence_tests.harness import failures
from equivalence_tests.harness.cases import DTYPES, Case, Spec, example
from equivalence_tests.harness.failures import Failure
from equivalence_tests.harness.mutants import killed
from equivalence_tests.harness.operations import operation, suite
from equivalence_tests.harness.oracle import Judgement, Sample, judge, subsets
from equivalence_tests.harness.result import Job, Result
from equivalence_tests.harness.shrink import shrink
from equivalence_tests.harness.strategies import PROFILES, enough, sample

# An implementation that supports few options is offered this many times as many cases, to be judged on enough of them.
_PATIENCE = 40
# Failures of this many kinds are shrunk and told; the first of each.
_TOLD = 3

# Storages of 2³¹ fp32 elements: two cotangents or one input, their copies, and room to work.
_FAR_BYTES = 60 * 2**30

Advance = Callable[[str], Any]


def steps(job: Job) -> int:
    """How often `run` will call `advance`."""
    return len(examples(job)) + _wanted(job) + 1 + _has_real(job) + len(job.mutants)


def run(job: Job, advance: Advance = lambda text: None) -> Result:
    """Do the job; `advance` is told of each step done."""
    start, result = time.monotonic(), Result(job)
    failed: dict[str, Case] = {}
    cases = examples(job)
    for case in cases:
        _try(result, case, failed)
        advance("examples")
    drawn = sample(job.operation, job.dtype, job.profile, job.seed, job.tuned)
    found = 0
    for case in islice(drawn, _PATIENCE * _wanted(job)):
        if found == _wanted(job):
            break
        if _try(result, case, failed):
            found += 1
            cases.append(case)
            advance("drawn cases")
    for kind, case in list(failed.items())[:_TOLD]:
        result.failures.append(_told(job, kind, case))
    _subsets(result)
    advance("subsets of requires_grad")
    if _has_real(job):
        _real(result)
        advance("real tensors")
    _together(result)
    for mutant in job.mutants:
        dead, _, _ = killed(mutant, job.function, cases, job.device)
        (result.killed if dead else result.survived).append(mutant.name)
        advance("mutants")
    result.seconds = time.monotonic() - start
    return result


def examples(job: Job) -> list[Case]:
    """The operation's own cases in the job's dtype: EXAMPLES of its test file, on a GPU with a large profile GPU_EXAMPLES too."""
    module = suite(job.operation.op)
    given = list(getattr(module, "EXAMPLES", ()))
    if job.profile.large and job.device == "cuda":
        given += [*getattr(module, "GPU_EXAMPLES", ()), *_far(job)]
    return [c for c in given if c.function == job.operation.function and c.dtype == job.dtype]


def _far(job: Job) -> list[Case]:
    """Rows that lie 2³¹ elements apart: of the first tensor, and of the cotangents. Left out where the memory is too small."""
    if torch.cuda.get_device_properties(0).total_memory < _FAR_BYTES:
        return []
    case, required = small(job), {a.name for a in job.operation.tensors if not a.optional}
    (name, _), *others = case.tensors
    return [
        case.replace(tensors=((name, Spec("far")), *others)),
        case.replace(
            cotangents=(Spec("far"),),
            tensors=tuple((n, s if n in required else None) for n, s in case.tensors),
            requires_grad=(name,),
        ),
    ]


def _wanted(job: Job) -> int:
    return enough(job.operation, job.profile, job.tuned)


def small(job: Job) -> Case:
    """A small case with every tensor given."""
    words = dict.fromkeys(word for a in job.operation.tensors for word in a.dims.shape.split())
    sizes = {word: (3,) if word == "*" else 8 for word in words}
    tensors = {a.name: Spec() for a in job.operation.tensors}
    return example(job.operation.function, job.dtype, sizes, tensors)


def replay(record: dict[str, Any], job: Job) -> Judgement | Result:
    """Run exactly what the record of a failure says."""
    if record["what"] == "run":
        return run(job)
    if record["what"] == "real":
        return judge(_real_samples(job)[record["index"]][1], job.function)
    check = {"case": judge, "subsets": subsets}[record["what"]]
    return check(Sample.of_case(Case.from_json(record["case"]), job.device), job.function)


def job_of(record: dict[str, Any], function: Callable, impl: str, device: str) -> Job:
    """The job that a record belongs to. Raises ValueError for what the record cannot mean."""
    if record["dtype"] not in DTYPES or record.get("profile", "quick") not in PROFILES:
        raise ValueError(f"no such dtype or profile: {record['dtype']}, {record.get('profile')}")
    profile, seed = PROFILES[record.get("profile", "quick")], record.get("seed", 0)
    return Job(operation(record["function"]), record["dtype"], impl, function, device, profile, seed)


def _try(result: Result, case: Case, failed: dict[str, Case]) -> bool:
    """Judge a case; False if the implementation does not support it."""
    judgement = judge(Sample.of_case(case, result.job.device), result.job.function)
    if judgement.unsupported:
        result.unsupported[judgement.unsupported] += 1
        return False
    result.count(judgement)
    if judgement.findings:
        failed.setdefault(judgement.findings[0].kind, case)
    return True


def _told(job: Job, kind: str, case: Case) -> Failure:
    def verdict(candidate: Case) -> Judgement:
        return judge(Sample.of_case(candidate, job.device), job.function)

    case = shrink(case, lambda candidate: kind in verdict(candidate).kinds)
    text = next(
        (str(f) for f in verdict(case).findings if f.kind == kind), "did not fail again when it was shrunk"
    )
    return _saved(job, kind, text, case.describe(), what="case", case=case.to_json())


def _subsets(result: Result) -> None:
    case = small(result.job)
    judgement = subsets(Sample.of_case(case, result.job.device), result.job.function)
    if judgement.unsupported:
        return
    result.kinds.update(judgement.kinds)
    if judgement.findings:
        found = judgement.findings[0]
        told = _saved(
            result.job, found.kind, str(found), case.describe(), what="subsets", case=case.to_json()
        )
        result.failures.append(told)


def _has_real(job: Job) -> bool:
    return job.profile.real and hasattr(suite(job.operation.op), "real_sites")


def _real_samples(job: Job) -> list[tuple[str, Sample]]:
    from equivalence_tests.harness import real

    tokens = 2048 if job.device == "cuda" else 64
    op, function = job.operation.op, job.operation.function
    calls = real.recorded(op, job.device, DTYPES[job.dtype], tokens, function)
    return [(c.label, Sample.of_tensors(job.operation, c.args, c.kwargs, c.cotangents)) for c in calls]


def _real(result: Result) -> None:
    for index, (label, recorded) in enumerate(_real_samples(result.job)):
        judgement = judge(recorded, result.job.function)
        if judgement.unsupported:
            result.unsupported[judgement.unsupported] += 1
            continue
        result.count(judgement)
        result.real.append(label)
        if judgement.findings:
            found = judgement.findings[0]
            words = f"real tensors: {label}\n{recorded.describe()}"
            result.failures.append(
                _saved(result.job, found.kind, str(found), words, what="real", index=index)
            )


def _together(result: Result) -> None:
    """What only all cases together can tell."""
    job, words = result.job, "all cases together"
    whole = {"what": "run", "profile": job.profile.name, "seed": job.seed}
    for text in result.pooled():
        result.kinds["normwise"] += 1
        result.failures.append(_saved(job, "normwise", text, words, **whole))
    blind = result.blind()
    if blind and not result.failures:
        text = f"the cases cannot refuse a wrong result: {', '.join(blind)}"
        result.failures.append(_saved(job, "blind", text, words, **whole))


def _saved(job: Job, kind: str, text: str, words: str, **replay: Any) -> Failure:
    key = {"function": job.operation.function, "dtype": job.dtype, "impl": job.impl, "device": job.device}
    return failures.save(Failure(kind, text, words, {**key, **replay}))
