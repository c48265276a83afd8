"""GPU time by CUDA-graph replay, host time per call, peak memory. paper_notes/measuring.md says why it is done so.

A thunk does one call on one set of inputs. What is compared is raced: every contestant runs once a round, so that a clock
that drifts or a chip that warms up meets all of them alike.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Thunk = Callable[[], Any]

WARM_UP_CALLS = 3
# One timed run lasts about RUN_MS, so that starting a graph (µs) does not count.
RUN_MS, MAX_CYCLES = 2.0, 50
RACE_MS, MIN_ROUNDS, MAX_ROUNDS = 60.0, 7, 200
HOST_BATCH, HOST_BATCHES = 25, 8  # a batch must fit the launch queue (1024): a full queue would time the GPU
COPY_BYTES, GEMM_SIZE = 2**31, 8192


@dataclass(frozen=True)
class Contestant:
    """run() enqueues `calls` calls on the current stream. A graph's memory lives as long as `keeps` does."""

    run: Thunk
    calls: int
    keeps: Sequence[Any] = ()


@dataclass(frozen=True)
class Timing:
    """Median milliseconds of one call, and the interquartile range over the median."""

    ms: float
    spread: float


def captured(thunks: Sequence[Thunk], stream: torch.cuda.Stream) -> Contestant:
    """A CUDA graph that calls the thunks in turn, over and over for about RUN_MS; first warmed up on the same stream."""
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_CALLS):
            for thunk in thunks:
                thunk()
    stream.synchronize()
    once = _graph(thunks, 1, stream)
    ms = race({"once": once}, stream, budget_ms=0.0)["once"].ms * len(thunks)
    cycles = min(MAX_CYCLES, max(1, round(RUN_MS / max(ms, 1e-3))))
    return once if cycles == 1 else _graph(thunks, cycles, stream)


def _graph(thunks: Sequence[Thunk], cycles: int, stream: torch.cuda.Stream) -> Contestant:
    graph = torch.cuda.CUDAGraph()
    # Results of one cycle: no call may reuse the memory of the one before.
    alive: deque[Any] = deque(maxlen=len(thunks))
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(cycles):
            for thunk in thunks:
                alive.append(thunk())
    return Contestant(graph.replay, cycles * len(thunks), keeps=thunks)


def race(
    contestants: dict[str, Contestant],
    stream: torch.cuda.Stream,
    before_each: Thunk | None = None,
    budget_ms: float = RACE_MS,
) -> dict[str, Timing]:
    """Time each contestant about `budget_ms`, one run of each per round; before_each runs untimed before every run."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    rounds = MIN_ROUNDS
    done = 0
    with torch.cuda.stream(stream):
        while done < rounds:
            marks = {}
            for name, contestant in contestants.items():
                if before_each is not None:
                    before_each()
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record(stream)
                contestant.run()
                end.record(stream)
                marks[name] = (start, end)
            stream.synchronize()
            for name, (start, end) in marks.items():
                times[name].append(start.elapsed_time(end))
            done += 1
            if done == MIN_ROUNDS:
                slowest = max(statistics.median(found) for found in times.values())
                rounds = min(MAX_ROUNDS, max(MIN_ROUNDS, int(budget_ms / max(slowest, RUN_MS))))
    return {name: _summary(found, contestants[name].calls) for name, found in times.items()}


def _summary(times: list[float], calls: int) -> Timing:
    low, median, high = statistics.quantiles(times, n=4)
    return Timing(median / calls, (high - low) / median)


def host_us(thunk: Thunk, stream: torch.cuda.Stream) -> float:
    """Microseconds of Python and launch work per call, the GPU not waited for: the median over batches of calls."""
    batches = []
    with torch.cuda.stream(stream):
        for _ in range(HOST_BATCHES):
            stream.synchronize()
            start = time.perf_counter()
            for _ in range(HOST_BATCH):
                thunk()
            batches.append((time.perf_counter() - start) / HOST_BATCH * 1e6)
        stream.synchronize()
    return statistics.median(batches)


def peak_mib(thunk: Thunk, stream: torch.cuda.Stream) -> float:
    """MiB that one call needs at its peak beyond what was allocated before it, its results included."""
    with torch.cuda.stream(stream):
        thunk()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = thunk()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak / 2**20


def copy_contestant(device: torch.device) -> Contestant:
    """A device-to-device copy of COPY_BYTES, which moves twice as many."""
    source = torch.randint(256, (COPY_BYTES,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Contestant(lambda: target.copy_(source), 1)


def copy_gbps(copy: Timing) -> float:
    """GB/s of that copy, read and written bytes together."""
    return 2 * COPY_BYTES / copy.ms / 1e6


def gemm_contestant(device: torch.device) -> Contestant:
    """A bf16 matrix product through cuBLAS: 2·GEMM_SIZE³ FLOPs on random contents."""
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return Contestant(lambda: torch.mm(a, b, out=out), 1)


def gemm_tflops(gemm: Timing) -> float:
    """TFLOP/s of that product."""
    return 2 * GEMM_SIZE**3 / gemm.ms / 1e9
