"""Collectives over shared memory, on two to four ranks, against torch on what all ranks bring."""

import itertools
import os

import pytest
import torch
from shm_ranks import run_ranks

from sgl_kernel import shm
from sgl_kernel.shm import REDUCED_DTYPES, ShmGroup, create_segment, reduce_reference

DTYPES = sorted(REDUCED_DTYPES, key=str)
MOVED = (*DTYPES, torch.complex64, torch.float8_e4m3fn)
#: Nothing, one number, around a register and around a part, and several parts.
SIZES = (0, 1, 15, 17, 576, 2047, 2048, 2049, 10_007)
#: The smallest part there may be, so that small tensors go through it several times.
PART = 4096


def drawn(rank, dtype, *shape):
    generator = torch.Generator().manual_seed(100 + rank)
    values = torch.randn(shape, generator=generator) * 50
    return values > 0 if dtype == torch.bool else values.to(dtype)


def same(found, wanted):
    """Bit for bit, also where a dtype has no comparison."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape, (found.shape, wanted.shape)
    bits = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (found, wanted)]
    assert torch.equal(*bits)


def sizes_of(world_size):
    return [
        [3 * rank + 1 for rank in range(world_size)],
        [0] * (world_size - 1) + [1500],
        [700] * world_size,
        [0] * world_size,
    ]


REDUCTIONS = """
for pieces, op in given["all"]:
    own = pieces[rank].clone()
    answer.append(group.all_reduce(own, torch.empty_like(own), op))
    assert torch.equal(own, pieces[rank]), "what came in is not written"
    answer.append(group.all_reduce(own, own, op))
for pieces, sizes, op in given["scatter"]:
    answer.append(group.reduce_scatter(pieces[rank], sizes, op))
"""


def reductions(world_size):
    ranks = range(world_size)
    every = [
        ([drawn(rank, dtype, size) for rank in ranks], op)
        for dtype, op, size in itertools.product(DTYPES, ("sum", "max", "min"), SIZES)
    ]
    scattered = [
        ([drawn(rank, dtype, sum(sizes), 3) for rank in ranks], sizes, op)
        for dtype, op, sizes in itertools.product(DTYPES, ("sum", "max"), sizes_of(world_size))
    ]
    return {"all": every, "scatter": scattered}


@pytest.mark.parametrize("world_size", [2, 3])
def test_reductions_are_those_of_torch_in_rank_order_on_every_rank(level, world_size):
    given = reductions(world_size)
    answers = run_ranks(REDUCTIONS, world_size, level=level, part_bytes=PART, given=given)
    for rank, answer in enumerate(answers):
        found = iter(answer)
        for pieces, op in given["all"]:
            wanted = reduce_reference(pieces, op)
            same(next(found), wanted)
            same(next(found), wanted)
        for pieces, sizes, op in given["scatter"]:
            same(next(found), reduce_reference(pieces, op).split(sizes)[rank])


def test_another_order_of_the_ranks_would_be_seen():
    """The twin of the comparison: the drawn numbers have other sums when they are added backwards."""
    pieces = [drawn(rank, torch.float32, 2049) for rank in range(3)]
    assert not torch.equal(reduce_reference(pieces, "sum"), reduce_reference(pieces[::-1], "sum"))


def test_every_half_precision_number_is_read_and_rounded_as_torch_does(level):
    """All 65,536 of them, alone and beside another that makes ties, overflows and denormals."""
    cases = []
    for dtype in (torch.float16, torch.bfloat16):
        every = torch.arange(65536).to(torch.int32).to(torch.int16).view(dtype)
        for other in (torch.zeros_like(every), every.roll(1), every.roll(4097), every.flip(0)):
            cases += [([every, other], "sum"), ([every, other], "max")]
    body = """
for pieces, op in given:
    answer.append(group.all_reduce(pieces[rank], torch.empty_like(pieces[rank]), op))
"""
    for answer in run_ranks(body, 2, level=level, given=cases):
        for found, (pieces, op) in zip(answer, cases, strict=True):
            torch.testing.assert_close(found, reduce_reference(pieces, op), rtol=0, atol=0, equal_nan=True)


MOVEMENTS = """
for pieces, sizes in given["gather"]:
    answer.append(group.all_gather(pieces[rank], sizes))
for pieces in given["broadcast"]:
    for src in range(len(pieces)):
        answer.append(group.broadcast(pieces[rank].clone(), src))
"""


@pytest.mark.parametrize("world_size", [2, 4])
def test_what_is_only_moved_arrives_as_it_left_in_any_dtype(world_size):
    ranks = range(world_size)
    given = {
        "gather": [
            ([drawn(rank, dtype, sizes[rank], 5) for rank in ranks], sizes)
            for dtype, sizes in itertools.product(MOVED, sizes_of(world_size))
        ],
        "broadcast": [
            [drawn(rank, dtype, size) for rank in ranks] for dtype, size in itertools.product(MOVED, SIZES)
        ],
    }
    for answer in run_ranks(MOVEMENTS, world_size, part_bytes=PART, given=given):
        found = iter(answer)
        for pieces, _ in given["gather"]:
            same(next(found), torch.cat([piece.view(torch.uint8) for piece in pieces]).view(pieces[0].dtype))
        for pieces in given["broadcast"]:
            for src in ranks:
                same(next(found), pieces[src])


def test_a_thousand_calls_on_one_core_with_parts_as_the_engine_has_them():
    """The two buffers are written again and again; a rank that spun would keep the other from its core."""
    body = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
for step in range(1000):
    x = torch.full((1, 576), float(step + rank))
    assert group.all_reduce(x, torch.empty_like(x)).eq(2.0 * step + 1).all()
    if step % 3 == 0:
        x = torch.full((7,), step * (1 - rank))
        assert group.broadcast(x, 0).eq(step).all()
    if step % 5 == 0:
        assert group.all_gather(torch.full((1,), step + rank), [1, 1]).tolist() == [step, step + 1]
answer.append(step)
"""
    assert run_ranks(body, 2) == [[999], [999]]


# -- what goes wrong ---------------------------------------------------------------------------------------

FAIL = """
def reduce(size=4, dtype=torch.float32, op="sum"):
    x = torch.ones(size, dtype=dtype)
    return group.all_reduce(x, torch.empty_like(x), op)
"""


def test_a_killed_rank_is_named_by_each_of_the_others_long_before_their_limit():
    """Also while nobody has collected it, when its number still answers."""
    body = FAIL + (
        """
import os, signal
reduce()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
answer.append(failure(reduce))
answer.append(failure(reduce))
"""
    )
    first, killed, last = run_ranks(body, 3, timeout_s=3600.0)
    assert killed is None
    for said, again in (first, last):
        # Whoever noticed first may have given up before the other looked.
        assert "world rank 11 ended before all_reduce (sum) of 16 bytes of float32: process" in said or (
            "gave up in or before all_reduce" in said
        )
        assert again == "an earlier collective of this group failed"
    assert any("world rank 11 ended" in said for said, _ in (first, last))


def test_a_rank_that_left_is_named_and_what_it_sent_before_still_arrives():
    body = FAIL + (
        """
if rank == 0:
    group.broadcast(torch.full((3,), 5.0), 0)
    group.close()
    group.close()
    note()
    answer.append(failure(reduce))
else:
    until()
    answer.append(group.broadcast(torch.zeros(3), 0).tolist())
    answer.append(failure(reduce))
"""
    )
    (closed,), (arrived, said) = run_ranks(body, 2)
    assert closed.endswith("shared memory: this group was closed")
    assert arrived == [5.0] * 3
    assert said == "world rank 10 left the group before all_reduce (sum) of 16 bytes of float32"


def test_a_rank_that_comes_too_late_is_named_and_fails_when_it_comes():
    body = FAIL + (
        """
if rank == 1:
    until()
answer.append(failure(reduce))
if rank == 0:
    note()
"""
    )
    (said,), (late,) = run_ranks(body, 2, timeout_s=0.3)
    assert said == "world rank 11 did not come to all_reduce (sum) of 16 bytes of float32 within 0.3 s"
    assert late == "world rank 10 gave up in or before all_reduce (sum) of 16 bytes of float32"


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("reduce(size=5)", "all_reduce (sum) of 20 bytes of float32"),
        ("reduce(dtype=torch.int32)", "all_reduce (sum) of 16 bytes of int32"),
        ("reduce(op='max')", "all_reduce (max) of 16 bytes of float32"),
        ("group.broadcast(torch.ones(4), 0)", "broadcast from rank 0 of the group of 16 bytes of float32"),
        ("group.all_gather(torch.ones(2), [2, 2])", "all_gather of 16 bytes of float32"),
    ],
)
def test_two_ranks_in_different_calls_are_told_of_both(other, said):
    body = FAIL + f"answer.append(failure(reduce if rank == 0 else lambda: {other}))"
    (first,), (second,) = run_ranks(body, 2)
    own = "all_reduce (sum) of 16 bytes of float32"
    assert f"world rank 11 is in {said}, and world rank 10 in {own}" in first or "gave up in" in first
    assert f"world rank 10 is in {own}, and world rank 11 in {said}" in second or "gave up in" in second
    assert "is in" in first + second


def test_rows_that_are_split_in_another_way_are_told_apart():
    body = """
sizes = [1, 3] if rank == 0 else [2, 2]
answer.append(failure(lambda: group.all_gather(torch.ones(sizes[rank]), sizes)))
"""
    (first,), (second,) = run_ranks(body, 2)
    assert "split over the ranks in another way" in first + second


def test_other_threads_run_while_a_rank_waits():
    body = FAIL + (
        """
import threading
if rank == 1:
    until()
else:
    threading.Thread(target=lambda: note()).start()
answer.append(reduce().tolist())
"""
    )
    assert run_ranks(body, 2) == [[[2.0] * 4]] * 2


def test_two_threads_of_one_rank_in_the_same_group_are_refused():
    """Both threads of rank 0 try until one waits in its call and the other is refused."""
    body = FAIL + (
        """
import threading
def attempt():
    try:
        answer.append(reduce().tolist())
    except RuntimeError as error:
        answer.append(str(error).splitlines()[0])
        note()
if rank == 1:
    until()
    attempt()
else:
    threads = [threading.Thread(target=attempt) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""
    )
    (refused, added), (peer,) = run_ranks(body, 2)
    assert refused == "two threads of one rank are in a collective of the same group"
    assert added == peer == [2.0] * 4


@pytest.fixture
def alone():
    """A group of one rank, over which a collective is what went in."""
    fd = create_segment(1)
    group = ShmGroup(fd, 0, [7], cookie=1, timeout_s=1.0)
    os.close(fd)
    yield group
    group.close()


def test_nothing_is_left_in_the_file_system_and_no_descriptor_is_needed(alone):
    shared, held = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
    fd = create_segment(2)
    group = ShmGroup(fd, 0, [0, 1], cookie=1, timeout_s=1.0)
    os.close(fd)
    group.close()
    assert set(os.listdir("/dev/shm")) == shared and len(os.listdir("/proc/self/fd")) == held
    x = torch.randn(5)
    assert torch.equal(alone.all_reduce(x, torch.empty_like(x)), x)


def test_a_segment_that_is_not_the_one_of_rank_0_is_refused():
    fd, short = create_segment(2), create_segment(1, PART)
    try:
        ShmGroup(fd, 0, [0, 1], cookie=1, timeout_s=1.0).close()
        with pytest.raises(RuntimeError, match="it is not the one of rank 0"):
            ShmGroup(fd, 1, [0, 1], cookie=2, timeout_s=1.0)
        with pytest.raises(RuntimeError, match=r"has \d+ bytes and needs \d+"):
            ShmGroup(short, 1, [0, 1], cookie=1, timeout_s=1.0)
    finally:
        os.close(fd)
        os.close(short)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 16, shm.MOST_RANKS])
def test_a_group_takes_a_few_mebibytes_at_most(world_size):
    part = shm.part_bytes_of(world_size)
    size = torch.ops.sgl_kernel.shm_segment_bytes(world_size, part)
    assert part >= PART and size <= shm.MOST_BYTES + (1 << 16)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda g: g.all_reduce(torch.ones(4, 2).t(), torch.ones(2, 4)), "contiguous"),
        (lambda g: g.all_reduce(torch.ones(4), torch.ones(5)), "size of input"),
        (
            lambda g: g.all_reduce(torch.ones(2).to(torch.complex64), torch.ones(2).to(torch.complex64)),
            "no other dtype",
        ),
        (lambda g: g.all_gather(torch.ones(2), [2, 2]), "sizes has an entry a rank, 1"),
        (
            lambda g: g.all_gather(torch.ones(2), [3]),
            "sizes say 3 rows, 3 of this rank, and the tensors have 3 and 2",
        ),
        (lambda g: g.reduce_scatter(torch.ones(2), [-1]), "negative"),
        (lambda g: g.broadcast(torch.ones(2), 1), "src is a rank of the group, got 1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_and_cost_nothing(alone, call, said):
    with pytest.raises(RuntimeError, match=said):
        call(alone)
    x = torch.ones(3)
    assert torch.equal(alone.all_reduce(x, torch.empty_like(x)), x), "the group is still of use"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rank": 2}, "got rank 2 of 2"),
        ({"world_ranks": []}, "got rank 0 of 0"),
        ({"part_bytes": 100}, "multiple of 64"),
        ({"timeout_s": 0.0}, "timeout_s is positive"),
    ],
)
def test_a_group_that_cannot_be_is_refused(changed, said):
    arguments = {"fd": -1, "rank": 0, "world_ranks": [0, 1], "cookie": 1, "timeout_s": 1.0} | changed
    with pytest.raises(RuntimeError, match=said):
        ShmGroup(**arguments)


def test_the_operators_keep_torchs_rules(alone):
    ops, x = torch.ops.sgl_kernel, torch.ones(3, 2)
    torch.library.opcheck(ops.shm_all_reduce.default, (alone._handle, x, torch.empty_like(x), 0))
    torch.library.opcheck(ops.shm_all_gather.default, (alone._handle, x, [3], torch.empty_like(x)))
    torch.library.opcheck(ops.shm_reduce_scatter.default, (alone._handle, x, [3], torch.empty_like(x), 1))
    torch.library.opcheck(ops.shm_broadcast.default, (alone._handle, x, 0))
