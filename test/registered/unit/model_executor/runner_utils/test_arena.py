"""A piece of memory is used again once nobody looks at it, and never before."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit-cpu")

import torch

from sglang.srt.model_executor.runner_utils.arena import Arena


def test_memory_is_used_again_once_the_last_tensor_over_it_is_gone():
    arena = Arena()
    first = arena.like(torch.empty(100, 30))
    address, taken = first.data_ptr(), arena.bytes
    view = first[3:5].t()
    del first
    other = arena.like(torch.empty(100, 30))
    assert other.data_ptr() != address, "a view of the first one is alive"
    del view
    third = arena.like(torch.empty(50, 30))
    assert third.data_ptr() == address
    assert arena.bytes == 2 * taken


def test_memory_that_nobody_owns_is_handed_out_again_and_still_read_where_it_lies():
    arena = Arena()
    whole = arena.like(torch.empty(40, 30))
    part = whole[5:20, 3:].t()
    unowned = arena.unowned(part)
    assert (unowned.data_ptr(), unowned.shape, unowned.stride()) == (
        part.data_ptr(),
        part.shape,
        part.stride(),
    )
    address, elsewhere = whole.data_ptr(), torch.empty(3)
    del whole, part
    again = arena.like(torch.empty(40, 30))
    assert again.data_ptr() == address
    again.fill_(7.0)
    assert unowned.eq(7.0).all()
    assert arena.unowned(elsewhere) is elsewhere


def test_the_smallest_piece_that_fits_is_taken():
    arena = Arena()
    pieces = [arena.like(torch.empty(size)) for size in (9000, 3000, 6000)]
    addresses = [piece.data_ptr() for piece in pieces]
    del pieces
    assert arena.like(torch.empty(2500)).data_ptr() == addresses[1]


def test_type_shape_and_gaps_are_those_of_the_example():
    arena = Arena()
    for example in (
        torch.empty(3, 5, dtype=torch.bfloat16),
        torch.empty(4, 6).t(),
        torch.empty(8, 10, dtype=torch.int64)[:, ::2],
        torch.empty(2, 3, dtype=torch.bool),
        torch.empty(()),
        torch.empty(0, 7),
    ):
        made = arena.like(example)
        assert (made.dtype, made.shape, made.stride()) == (example.dtype, example.shape, example.stride())
        made.fill_(1)
        assert made.eq(1).all()


def test_many_tensors_that_come_and_go_take_the_memory_of_those_that_live_together():
    arena = Arena()
    draw = torch.Generator().manual_seed(0)
    for _ in range(1000):
        sizes = torch.randint(1, 50_000, (2,), generator=draw).tolist()
        alive = [arena.like(torch.empty(size)) for size in sizes]
        alive[0].fill_(1)
        alive[1].fill_(2)
        assert alive[0].eq(1).all()
        del alive
    assert arena.bytes <= 20 * 200_000
