"""Planted kernels, each caught by its instrument, and clean ones that none of them accuses; only in Triton's interpreter."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from equivalence_tests.harness.instruments import Trace, eager_traffic, memory_map, traced, violations
from equivalence_tests.harness.interpreter import interpreting
from reference.rms_norm import rms_norm, rms_norm_cost

pytestmark = pytest.mark.skipif(
    not interpreting(), reason="kernels are compiled for a GPU here; instruments watch the interpreter"
)

BF16 = torch.bfloat16


# fmt: off
@triton.jit
def _copy(
    X, stride_xm, stride_xn,  # [M, N]  in
    Y, stride_ym,             # [M, N]  out
    M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)[None, :]
        mask = (offs_m < M) & (offs_n < N)
        x = tl.load(X + offs_m.to(tl.int64) * stride_xm + offs_n * stride_xn, mask=mask, other=0.0)
        tl.store(Y + offs_m.to(tl.int64) * stride_ym + offs_n, x, mask=mask)


@triton.jit
def _shift(
    X,  # [N]  in
    Y,  # [N]  out
    N, by_load, by_store, BLOCK: tl.constexpr,
):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + offs + by_load, mask=offs < N, other=0.0)
    tl.store(Y + offs + by_store, x, mask=offs < N)


@triton.jit
def _no_other(
    X,  # [N]  in
    Y,  # [N]  out
    N, BLOCK: tl.constexpr,
):
    offs = tl.arange(0, BLOCK)
    tl.store(Y + offs, tl.load(X + offs, mask=offs < N))


@triton.jit
def _overlapping_tiles(
    Y,  # [N]  out
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    tl.store(Y + pid * (BLOCK - 1) + tl.arange(0, BLOCK), tl.zeros((BLOCK,), tl.float32) + pid)


@triton.jit
def _reads_its_neighbour(
    X,  # [N]  inout
    OFFSET: tl.constexpr,
):
    pid = tl.program_id(0)
    x = tl.load(X + (pid + OFFSET) % tl.num_programs(0))
    tl.store(X + pid, x + 1)


@triton.jit
def _sums_into_one(
    X,  # [N]   in
    Y,  # [1]   inout
    PLAIN: tl.constexpr,
):
    x = tl.load(X + tl.program_id(0))
    if PLAIN:
        tl.store(Y, tl.load(Y) + x)
    else:
        tl.atomic_add(Y, x)


@triton.jit
def _breaks_its_map(
    X,  # [N]  in
    Y,  # [N]  out, fp32
    Z,
    BLOCK: tl.constexpr,
):
    offs = tl.arange(0, BLOCK)
    tl.store(Z + offs, tl.load(Y + offs))
    tl.store(X + offs, tl.load(X + offs) * 2)


@triton.jit
def _rms_norm(
    X,     # [M, N]  in
    W,     # [N]     in
    Y,     # [M, N]  out
    RSTD,  # [M]     out, fp32
    N, eps, BLOCK: tl.constexpr,
):
    pid, offs = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(X + pid * N + offs, mask=offs < N, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / N + eps)
    w = tl.load(W + offs, mask=offs < N, other=0.0).to(tl.float32)
    tl.store(Y + pid * N + offs, ((x * rstd).to(tl.bfloat16).to(tl.float32) * w).to(tl.bfloat16), mask=offs < N)
    tl.store(RSTD + pid, rstd)


@triton.jit
def _halves(
    X,  # [N]     in, int32 read as int16
    Y,  # [2, N]  out
    N: tl.constexpr,
):
    offs = tl.arange(0, 2 * N)
    tl.store(Y + offs, tl.load(X.to(tl.pointer_type(tl.int16)) + offs))


@triton.jit
def _follow(
    POINTERS,  # [N]  in
    Y,         # [N]  out
    N: tl.constexpr,
):
    offs = tl.arange(0, N)
    tl.store(Y + offs, tl.load(tl.load(POINTERS + offs).to(tl.pointer_type(tl.float32))))


@triton.jit
def _described(
    X,  # [M, N]  in
    Y,  # [M, N]  out
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK
    Y.store([row, 0], X.load([row, 0]))


@triton.jit
def _swap_if(
    LOCK,  # [N]  inout
    N: tl.constexpr,
):
    free = tl.zeros((N,), tl.int32)
    tl.atomic_cas(LOCK + tl.arange(0, N), free, free + 1)
# fmt: on


def copy(x: Tensor, y: Tensor, block_m: int = 4, block_n: int = 8, **options) -> Trace:
    M, N = x.shape
    with traced(**options) as trace:
        _copy[(triton.cdiv(M, block_m),)](x, *x.stride(), y, y.stride(0), M, N, block_m, block_n)
    return trace


def shift(x: Tensor, y: Tensor, n: int, by_load: int = 0, by_store: int = 0) -> Trace:
    with traced() as trace:
        _shift[(triton.cdiv(n, 16),)](x, y, n, by_load, by_store, 16)
    return trace


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.int8, torch.float64])
def test_a_copy_moves_its_bytes_and_nothing_else(dtype):
    x = torch.arange(7 * 19).view(7, 19).to(dtype)
    y = torch.zeros_like(x)
    trace = copy(x, y)
    assert torch.equal(x, y)
    assert trace.findings() == []
    nbytes = x.numel() * x.element_size()
    [launch] = trace.launches
    assert (launch.kernel, launch.grid, launch.programs) == ("_copy", (2, 1, 1), 2)
    assert (
        trace.unique_bytes == trace.launch_bytes == trace.requested_bytes == launch.unique_bytes == 2 * nbytes
    )
    read, written = launch.arguments["X"], launch.arguments["Y"]
    assert (read.loaded, read.unique_loaded, read.stored, read.unique_stored) == (nbytes, nbytes, 0, 0)
    assert (written.loaded, written.unique_loaded, written.stored, written.unique_stored) == (
        0,
        0,
        nbytes,
        nbytes,
    )


def test_strides_and_broadcasts_count_bytes_once():
    x = torch.randn(40, 30)[::3, 1::2]
    y = torch.zeros(14, 16)[:, :15]
    trace = copy(x, y)
    assert torch.equal(x, y)
    assert trace.findings() == []
    assert trace.unique_bytes == 2 * 14 * 15 * 4
    trace = copy(torch.randn(1, 30).expand(8, 30), torch.zeros(8, 30))
    assert trace.unique_bytes == (30 + 8 * 30) * 4
    assert trace.requested_bytes == 2 * 8 * 30 * 4


def test_two_launches_count_twice_by_launch_and_once_by_trace():
    x, y = torch.randn(4, 8), torch.zeros(4, 8)
    with traced() as trace:
        for _ in range(2):
            _copy[(1,)](x, 8, 1, y, 8, 4, 8, 4, 8)
    assert trace.unique_bytes == 256
    assert trace.launch_bytes == 512


def test_two_arguments_of_one_storage_are_one_storage():
    both = torch.zeros(2, 32)
    trace = shift(both[0], both[1], 32)
    assert trace.findings() == []
    assert trace.unique_bytes == 256
    trace = shift(both[0], both[0], 32)  # in place
    assert [a.unique_loaded + a.unique_stored for a in trace.launches[0].arguments.values()] == [128, 128]
    assert trace.unique_bytes == trace.launch_bytes == 256


def test_a_fused_rms_norm_moves_exactly_the_floor_and_eager_many_times_it():
    x, w = torch.randn(16, 200).to(BF16), torch.randn(200).to(BF16)
    y, rstd = torch.empty_like(x), torch.empty(16)
    with traced() as trace:
        _rms_norm[(16,)](x, w, y, rstd, 200, 1e-6, 256)
    floor = rms_norm_cost(x, w).forward.bytes
    assert trace.findings() == []
    assert trace.unique_bytes == floor
    with eager_traffic() as eager:
        want = rms_norm(x, w)
    torch.testing.assert_close(y, want, rtol=2**-7, atol=0)  # one step of bf16: the row sums differ in order
    assert eager.launches > 8
    assert 8 < eager.bytes / floor < 16


@pytest.mark.parametrize("by", [1, -5, 2**40])
def test_loads_out_of_bounds_are_seen_and_give_nan(by):
    x, y = torch.ones(32), torch.zeros(32)
    trace = shift(x, y, 32, by_load=by)
    [fault] = trace.out_of_bounds
    assert (fault.kernel, fault.argument, fault.access) == ("_shift", "X", "load")
    assert (fault.element, fault.program) == {
        1: (32, (1, 0, 0)),
        -5: (-5, (0, 0, 0)),
        2**40: (2**40, (0, 0, 0)),
    }[by]
    assert fault.lanes == y.isnan().sum() == min(abs(by), 32)
    assert "_shift: X: load outside its storage of 128 bytes" in trace.findings()[0]


def test_stores_out_of_bounds_are_seen_and_not_performed():
    y, guard = torch.zeros(32), torch.zeros(1024)
    trace = shift(torch.ones(32), y, 32, by_store=20)
    [fault] = trace.out_of_bounds
    assert (fault.argument, fault.access, fault.program, fault.element, fault.lanes) == (
        "Y",
        "store",
        (0, 0, 0),
        32,
        20,
    )
    assert y.sum() == 12
    assert not guard.any()


def test_an_access_that_lands_in_another_tensor_is_out_of_bounds_all_the_same():
    x, y = torch.ones(32), torch.zeros(32)
    distance = (y.data_ptr() - x.data_ptr()) // 4
    trace = shift(x, y, 32, by_load=distance)
    [fault] = trace.out_of_bounds
    assert (fault.argument, fault.element, fault.lanes) == ("X", distance, 32)


def test_views_are_kept_to():
    storage = torch.zeros(64)
    trace = shift(torch.ones(64), storage[:32], 32, by_store=1)
    assert [(f.kind, f.argument, f.element) for f in trace.faults()] == [("outside_view", "Y", 32)]
    trace = shift(torch.ones(64)[8:40], storage, 32, by_load=-1)
    assert [(f.kind, f.argument, f.element) for f in trace.faults()] == [("outside_view", "X", -1)]
    gaps = torch.zeros(4, 16)[:, :8]  # the kernel takes it for contiguous
    trace = shift(torch.ones(64), gaps, 32)
    [fault] = trace.outside_view
    assert (fault.argument, fault.access, fault.element, fault.lanes) == ("Y", "store", 8, 16)
    assert trace.findings()
    assert not shift(gaps, torch.zeros(64), 32).faults()  # loads from a gap hurt nobody


def test_programs_that_store_to_one_place_race():
    with traced() as trace:
        _overlapping_tiles[(3,)](torch.zeros(32), 8)
    [fault] = trace.races
    assert (fault.argument, fault.access, fault.program, fault.element) == ("Y", "store", (1, 0, 0), 7)
    assert "program (0, 0, 0) too store to" in str(fault)
    with traced() as trace:
        _overlapping_tiles[(1,)](torch.zeros(32), 8)
    assert trace.findings() == []


@pytest.mark.parametrize("offset", [1, 3])
def test_reading_what_another_program_stores_is_a_race_in_either_order(offset):
    with traced() as trace:
        _reads_its_neighbour[(4,)](torch.zeros(4), offset)
    assert {f.argument for f in trace.races} == {"X"}
    with traced() as trace:
        _reads_its_neighbour[(4,)](torch.zeros(4), 0)
    assert trace.findings() == []


def test_atomics_do_not_race_and_plain_sums_do():
    y = torch.zeros(1)
    with traced() as trace:
        _sums_into_one[(8,)](torch.ones(8), y, False)
    assert y.item() == 8
    assert trace.findings() == []
    assert trace.launches[0].arguments["Y"].accesses == {"atomic"}
    with traced() as trace:
        _sums_into_one[(8,)](torch.ones(8), y, True)
    assert trace.races


def test_the_memory_map_is_read_and_kept_to():
    assert memory_map(_copy) == {"X": "in", "Y": "out"}
    assert memory_map(_reads_its_neighbour) == {"X": "inout"}
    assert memory_map(_breaks_its_map) == {"X": "in", "Y": "out"}
    with traced() as trace:
        _breaks_its_map[(1,)](torch.ones(8), torch.ones(8), torch.ones(8), 8)
    [launch] = trace.launches
    assert violations(_breaks_its_map, launch) == [
        '_breaks_its_map: X is "in", and is stored to',
        '_breaks_its_map: Y is "out", and is loaded from',
        '_breaks_its_map: Z is a pointer, and the signature does not say "in", "out" or "inout"',
    ]
    assert trace.findings() == violations(_breaks_its_map, launch)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_a_masked_load_without_other_is_seen_and_poisoned(dtype):
    y = torch.zeros(16, dtype=dtype)
    with traced() as trace:
        _no_other[(1,)](torch.ones(10, dtype=dtype), y, 10, 16)
    [fault] = trace.maskless
    assert (fault.argument, fault.element, fault.lanes) == ("X", 10, 6)
    assert y[:10].eq(1).all()
    assert y[10:].isnan().all()
    with traced() as trace:
        _no_other[(1,)](torch.ones(16), torch.zeros(16), 16, 16)
    assert trace.findings() == []


def test_shuffling_shows_what_depends_on_the_order():
    x, runs = torch.tensor([1e8, 1.0, -1e8, 1.0, 3.0, 1e-3, 7.0, 1e7]), set()
    for seed in range(8):
        y = torch.zeros(1)
        with traced(shuffle=seed):
            _sums_into_one[(8,)](x, y, False)
        runs.add(y.item())
    assert len(runs) > 1
    y = torch.zeros(20, 8)
    trace = copy(x.expand(20, 8), y, shuffle=0)
    assert torch.equal(y, x.expand(20, 8))
    assert trace.findings() == []


def test_offsets_past_32_bits_need_no_memory():
    rows = torch.empty(2**31 + 64, dtype=torch.int8).as_strided((2, 16), (2**31, 1))
    rows.fill_(3)
    y = torch.zeros(2, 16, dtype=torch.int8)
    trace = copy(rows, y)
    assert y.eq(3).all()
    assert trace.findings() == []
    assert trace.unique_bytes == 64
    trace = copy(y, rows)
    assert trace.findings() == []


def test_narrower_accesses_than_elements():
    x, y = torch.arange(8, dtype=torch.int32), torch.zeros(16, dtype=torch.int16)
    with traced() as trace:
        _copy[(1,)](x.view(1, 8), 8, 1, torch.zeros(1, 8, dtype=torch.int32), 8, 1, 8, 1, 8)
        _halves[(1,)](x, y, 8)
    assert torch.equal(x.view(torch.int16), y)
    assert trace.findings() == []
    assert (trace.unique_bytes, trace.launch_bytes) == (96, 128)


def test_pointers_from_memory_are_found_or_refused():
    x, y = torch.arange(4.0), torch.zeros(4)
    pointers = torch.tensor([x.data_ptr() + 4 * i for i in range(4)])
    with traced() as trace:
        _follow[(1,)](pointers, y, 4)
    assert {f.argument for f in trace.out_of_bounds} == {"a pointer"}
    assert y.isnan().all()


def test_tensor_descriptors_and_compare_and_swap():
    x, y = torch.randn(8, 16), torch.zeros(8, 16)
    with traced() as trace:
        _described[(2,)](*(TensorDescriptor(t, [8, 16], [16, 1], [4, 16]) for t in (x, y)), 4)
    assert torch.equal(x, y)
    assert trace.findings() == []
    assert trace.unique_bytes == 2 * x.nbytes
    lock = torch.zeros(8, dtype=torch.int32)
    with traced() as trace:
        _swap_if[(1,)](lock[:4], 8)
        _swap_if[(1,)](lock, 16)
    assert lock.eq(1).all()
    assert [(f.kind, f.element) for f in trace.faults()] == [("outside_view", 4), ("out_of_bounds", 8)]


def test_instruments_are_put_away():
    x, y = torch.randn(4, 8), torch.zeros(4, 8)
    trace = copy(x, y)
    _copy[(1,)](x, 8, 1, y, 8, 4, 8, 4, 8)
    assert len(trace.launches) == 1
    with traced(), pytest.raises(RuntimeError, match="inside another"), traced():
        raise AssertionError("not reached")
    with traced() as trace:
        pass
    assert trace.findings() == []


def test_eager_traffic_by_hand():
    x, row = torch.randn(8, 16), torch.randn(16)
    with eager_traffic() as traffic:
        y = torch.empty(8, 16)
        z = x.view(128)[:64].reshape(8, 8)
        x + row.expand(8, 16)
        y.copy_(x)
        y.add_(1)
        y.zero_()
        x.T.reshape(128)
        torch.add(x, x, out=y)
    assert z.shape == (8, 8)
    assert [nbytes for _, nbytes in traffic.ops] == [512 + 64 + 512, 1024, 1024, 512, 1024, 1024]
    assert (traffic.launches, traffic.bytes) == (6, sum(n for _, n in traffic.ops))
