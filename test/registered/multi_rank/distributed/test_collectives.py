"""Every collective on two and on three ranks, against plain torch on the inputs of all ranks."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="multi-rank-cpu")

from typing import Any

import pytest
import torch

from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.device_communicators import gloo_exchange
from sglang.srt.distributed.device_communicators.torch_dist import TorchDist
from sglang.test.multi_rank import run_ranks
from sglang.test.waiting import HANG_GUARD_S

DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def _input(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What a rank brings; any rank can compute it for any other."""
    generator = torch.Generator().manual_seed(100 + rank)
    return (torch.randn(shape, generator=generator) * 50).to(dtype)


def _sum(pieces: list[torch.Tensor]) -> torch.Tensor:
    """In rank order, half precision in fp32."""
    total = pieces[0].float() if pieces[0].is_floating_point() else pieces[0].clone()
    for piece in pieces[1:]:
        total = total + piece
    return total.to(pieces[0].dtype)


def _same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype and found.shape == wanted.shape, (found.shape, wanted.shape)
    assert found.is_contiguous() and torch.equal(found, wanted)


def _reductions(group: Any, dtype: torch.dtype) -> None:
    width, rank = group.world_size, group.rank_in_group
    for shape in ((), (1,), (5, 7), (2 * width, 3), (0, 4)):
        inputs = [_input(other, shape, dtype) for other in range(width)]
        _same(group.all_reduce(inputs[rank].clone()), _sum(inputs))
        stacked = torch.stack(inputs)
        _same(group.all_reduce(inputs[rank].clone(), "max"), stacked.amax(0))
        _same(group.all_reduce(inputs[rank].clone(), op="min"), stacked.amin(0))
    inputs = [_input(other, (2 * width, 3 * width), dtype) for other in range(width)]
    for dim in (0, 1, -1):
        _same(group.reduce_scatter(inputs[rank], dim), _sum(inputs).chunk(width, dim)[rank].contiguous())
    _same(group.reduce_scatter(inputs[rank].t(), 0), _sum(inputs).t().chunk(width)[rank].contiguous())
    _same(group.reduce_scatter(torch.empty(0, 4, dtype=dtype)), torch.empty(0, 4, dtype=dtype))
    for sizes in _uneven(width):
        inputs = [_input(other, (sum(sizes), 3), dtype) for other in range(width)]
        _same(group.reduce_scatterv(inputs[rank], sizes), _sum(inputs).split(sizes)[rank])


def _movements(group: Any, dtype: torch.dtype) -> None:
    width, rank = group.world_size, group.rank_in_group
    for shape in ((1,), (3, 2), (0, 5), (2, 0)):
        inputs = [_input(other, shape, dtype) for other in range(width)]
        for dim in range(len(shape)):
            _same(group.all_gather(inputs[rank], dim), torch.cat(inputs, dim))
    inputs = [_input(other, (3, 2, 4), dtype) for other in range(width)]
    _same(
        group.all_gather(inputs[rank].transpose(0, 2), 1), torch.cat([i.transpose(0, 2) for i in inputs], 1)
    )
    for sizes in _uneven(width):
        inputs = [_input(other, (sizes[other], 3), dtype) for other in range(width)]
        _same(group.all_gatherv(inputs[rank], sizes), torch.cat(inputs))
        # Rank a sends (a + b) % 3 rows to rank b.
        plan = [[(a + b) % 3 for b in range(width)] for a in range(width)]
        inputs = [_input(other, (sum(plan[other]), 2), dtype) for other in range(width)]
        came = [inputs[other].split(plan[other])[rank] for other in range(width)]
        out_sizes = [plan[other][rank] for other in range(width)]
        _same(group.all_to_all(inputs[rank], out_sizes, plan[rank]), torch.cat(came))
    inputs = [_input(other, (2 * width, 3), dtype) for other in range(width)]
    _same(group.all_to_all(inputs[rank]), torch.cat([i.chunk(width)[rank] for i in inputs]))
    for src in range(width):
        for shape in ((), (2, 3), (0, 3)):
            value = _input(rank, shape, dtype)
            _same(group.broadcast(value.clone(), src), _input(src, shape, dtype))
        turned = _input(rank, (2, 3), dtype).t()
        _same(group.broadcast(turned, src), _input(src, (2, 3), dtype).t().contiguous())


def _uneven(width: int) -> list[list[int]]:
    """Rows per rank: all different, one rank without, all without but the last, none at all."""
    return [
        [2 * rank + 1 for rank in range(width)],
        [3 * rank for rank in range(width)],
        [0] * (width - 1) + [4],
        [0] * width,
    ]


def _objects(group: Any) -> None:
    width, rank = group.world_size, group.rank_in_group
    small = {"text": "ü", "list": [1, -2, 3.5, None, True], "bytes": b"\0\xff", "nested": {"a": [[], {}]}}
    for value in (small, None, [], {"big": b"\0\xff" * 40_000, "more": ["x" * 5000]}, "y" * 4086, "y" * 4085):
        for src in range(width):
            assert group.broadcast_object(value if rank == src else "not read", src) == value
    assert group.broadcast_object((1, 2)) == ((1, 2) if rank == 0 else [1, 2])
    assert group.all_gather_object({"rank": rank}) == [{"rank": other} for other in range(width)]
    # One rank with much to say, one with nothing.
    assert group.all_gather_object(b"z" * (9000 * rank)) == [b"z" * (9000 * other) for other in range(width)]
    with pytest.raises(TypeError):
        group.all_gather_object(object())  # on every rank, before anything is sent

    dictionary = {
        "rows": _input(7, (3, 2), torch.bfloat16),
        "turned": _input(8, (2, 3), torch.float32).t(),
        "none": torch.empty(0, 4),
        "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(3),
        "plain": {"step": 4, "raw": b"\1"},
    }
    last = width - 1
    _same_dict(group.broadcast_tensor_dict(dictionary if rank == last else None, last), dictionary)
    assert group.broadcast_tensor_dict(None) is None
    if rank == 0:
        group.send_tensor_dict(dictionary, last)
        group.send_object({"big": b"q" * 9000}, last)
        assert group.recv_object(last) == "thanks"
    if rank == last:
        _same_dict(group.recv_tensor_dict(0), dictionary)
        assert group.recv_object(0) == {"big": b"q" * 9000}
        group.send_object("thanks", 0)


def _same_dict(found: Any, wanted: dict[str, Any]) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


def _rows_stand_alone(group: Any) -> None:
    """A row's sum is the same bits alone, among others, and whichever way the bytes went."""
    rows = _input(group.rank_in_group, (64, 48), torch.float32) / 7
    whole = group.all_reduce(rows.clone())
    for start in (0, 13, 63):
        assert torch.equal(group.all_reduce(rows[start : start + 1].clone())[0], whole[start])
    keep, gloo_exchange.ONE_SHOT_BYTES = gloo_exchange.ONE_SHOT_BYTES, 16
    try:
        assert torch.equal(group.all_reduce(rows.clone()), whole)
        assert torch.equal(group.all_reduce(rows[:1].clone())[0], whole[0])
    finally:
        gloo_exchange.ONE_SHOT_BYTES = keep
    sizes = [64 - 5 * (group.world_size - 1)] + [5] * (group.world_size - 1)
    assert torch.equal(group.all_gatherv(group.reduce_scatterv(rows, sizes), sizes), whole)
    seen = group.all_gather_object(whole.numpy().tobytes())
    assert all(other == seen[0] for other in seen), "all ranks hold the same bits"


def _native(group: Any) -> None:
    """The communicator of accelerator groups, here over gloo, which knows the same calls: same answers."""
    width, rank = group.world_size, group.rank_in_group
    native = TorchDist(group.cpu_group, rank, width)
    even, uneven = [2] * width, [2 * other + 1 for other in range(width)]
    inputs = [_input(other, (2 * width, 3), torch.int64) for other in range(width)]
    _same(native.all_reduce(inputs[rank].clone(), "sum"), _sum(inputs))
    _same(native.all_reduce(inputs[rank].clone(), "max"), torch.stack(inputs).amax(0))
    _same(native.all_gather(inputs[rank].t(), [3] * width), torch.cat([i.t() for i in inputs]))
    _same(native.reduce_scatter(inputs[rank], even, "sum"), _sum(inputs).chunk(width)[rank])
    _same(native.all_to_all(inputs[rank], even, even), torch.cat([i.chunk(width)[rank] for i in inputs]))
    _same(native.broadcast(inputs[rank].clone(), width - 1), inputs[width - 1])
    inputs = [_input(other, (sum(uneven), 3), torch.int64) for other in range(width)]
    _same(native.reduce_scatter(inputs[rank], uneven, "sum"), _sum(inputs).split(uneven)[rank])
    if rank == 0:
        native.send(inputs[0].t(), 1)
    if rank == 1:
        _same(native.recv(torch.empty_like(inputs[0].t().contiguous()), 0), inputs[0].t().contiguous())


def check_collectives(rank: int) -> dict[str, int]:
    group = parallel_state.get_world_group()
    _native(group)
    for dtype in DTYPES:
        _reductions(group, dtype)
        _movements(group, dtype)
    _objects(group)
    _rows_stand_alone(group)
    group.barrier()
    before = group.calls.copy()
    group.all_reduce(torch.ones(2))
    group.all_reduce(torch.ones(0, 2))
    group.all_gatherv(torch.ones(1, 2), [1] * group.world_size)
    group.broadcast_object("once")
    group.broadcast_tensor_dict({"t": torch.ones(2)})
    group.barrier(timeout_s=HANG_GUARD_S)
    return dict(group.calls - before)


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_collective_is_what_torch_computes_from_the_inputs_of_all_ranks(world_size: int) -> None:
    """Also without rows, with uneven rows, from strided inputs; and each call is counted once."""
    once = {"all_gatherv": 1, "broadcast_object": 1, "broadcast_tensor_dict": 1, "barrier": 1}
    assert run_ranks(check_collectives, world_size=world_size) == [{"all_reduce": 2, **once}] * world_size
