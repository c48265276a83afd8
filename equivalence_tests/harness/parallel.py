"""Jobs beside each other. In the interpreter a job keeps one core busy, so there is one process for each core."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from equivalence_tests.harness import runner
from equivalence_tests.harness.result import Job, Result

_jobs: list[Job] = []  # what forked processes find, so that no function needs to be pickled


def run_all(jobs: list[Job], advance: Callable[[Job, str], None]) -> Iterator[Result]:
    """The results in the order of the jobs; `advance` is told of each step done, other processes' all at once."""
    processes = min(len(jobs), len(os.sched_getaffinity(0)))
    if processes < 2 or any(job.device != "cpu" for job in jobs):
        for job in jobs:
            yield runner.run(job, partial(advance, job))
        return
    _jobs[:] = jobs
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
        for job, result in zip(jobs, pool.map(_result, range(len(jobs))), strict=True):
            result.job = job
            for _ in range(runner.steps(job)):
                advance(job, "done")
            yield result


def _result(number: int) -> Result:
    result = runner.run(_jobs[number])
    result.job = None  # the parent has it
    return result
