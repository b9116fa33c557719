"""Tensors through shared memory: the bits of gloo, one decision for all ranks, errors that name a rank."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=16, suite="multi-rank-cpu")

import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch

from sglang.kernels.compiled import compiled_kernels
from sglang.srt.distributed import parallel_state, shared_memory
from sglang.srt.distributed.device_communicators import gloo_exchange
from sglang.srt.distributed.device_communicators.cpu_shm import CpuShm
from sglang.srt.distributed.device_communicators.gloo_exchange import GlooExchange
from sglang.srt.distributed.errors import CollectiveError
from sglang.srt.distributed.shared_memory import cpu_transport
from sglang.srt.environ import envs
from sglang.test.multi_rank import run_ranks

pytestmark = pytest.mark.skipif(
    not envs.SGLANG_USE_CPU_KERNELS.get() or compiled_kernels() is None,
    reason="only the compiled kernels share memory",
)

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
#: Not reduced in shared memory, only moved.
ODD_DTYPE = torch.complex64
#: Beyond one buffer of a rank in the widest dtype.
LARGE = (1 << 18) // 8 + 5
LIMIT_S = 60.0


def _drawn(rank: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(shape, generator=generator) * 9).to(dtype)


def _answers(on: CpuShm | GlooExchange, rank: int, width: int) -> Iterator[torch.Tensor]:
    """What a transport gives for the same calls."""
    for dtype in (*DTYPES, ODD_DTYPE):
        ops = ("sum",) if dtype == ODD_DTYPE else ("sum", "max", "min")
        for op, shape in itertools.product(ops, ((1,), (3, 5), (), (LARGE,))):
            yield on.all_reduce(_drawn(rank, dtype, *shape), op)
        yield on.all_reduce(_drawn(rank, dtype, 6, 4).t(), "sum")
        for sizes in ([2] * width, [3 * other for other in range(width)], [0] * (width - 1) + [7]):
            yield on.all_gather(_drawn(rank, dtype, sizes[rank], 3), sizes)
            yield on.reduce_scatter(_drawn(rank, dtype, sum(sizes), 3), sizes, "sum")
            yield on.reduce_scatter(_drawn(rank, dtype, 3, sum(sizes)).t(), sizes, "sum")
        for src in range(width):
            yield on.broadcast(_drawn(rank, dtype, 4, 3).t(), src)
        yield on.all_to_all(_drawn(rank, dtype, width, 2), [1] * width, [1] * width)
    if rank == 0:
        on.send(torch.arange(5), 1)
    if rank == 1:
        yield on.recv(torch.zeros(5, dtype=torch.int64), 0)


def compare_with_gloo(rank: int, backwards: bool) -> list[int]:
    """The calls whose bits differ; `backwards` plants a sum in the opposite order of the ranks."""
    group = parallel_state.get_world_group()
    shared = group._transport_for(torch.ones(1))
    assert isinstance(shared, CpuShm), "the test would compare gloo with itself"
    gloo = GlooExchange(group.cpu_group, rank, group.world_size)

    combine = gloo_exchange.combine

    def turned(pieces: Sequence[torch.Tensor], op: str) -> torch.Tensor:
        return combine(list(pieces)[::-1], op)

    found = list(_answers(shared, rank, group.world_size))
    with ExitStack() as stack:
        if backwards:
            stack.enter_context(patch.object(gloo_exchange, "combine", turned))
        wanted = list(_answers(gloo, rank, group.world_size))
    differing = []
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one.dtype == other.dtype and one.shape == other.shape and one.is_contiguous(), number
        bits = [tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)]
        if not torch.equal(*bits):
            differing.append(number)
    return differing


@pytest.mark.parametrize("world_size", [2, 3])
def test_shared_memory_gives_the_bits_of_gloo(world_size: int) -> None:
    """A server that moves from one to the other must not change its answers."""
    assert run_ranks(compare_with_gloo, world_size=world_size, backwards=False) == [[]] * world_size


def test_a_sum_in_another_order_of_the_ranks_is_seen() -> None:
    """The twin, on three ranks: of two, either order gives the same sum."""
    for differing in run_ranks(compare_with_gloo, world_size=3, backwards=True):
        assert differing


class _Heard(logging.Handler):
    """What the decision was, in words."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _decide(rank: int, plant: Any) -> list[Any]:
    """Whether a transport made under `plant` is shared memory, whether it works, and what was logged."""
    group = parallel_state.get_world_group()
    gloo, heard = GlooExchange(group.cpu_group, rank, group.world_size), _Heard()
    shared_memory.logger.addHandler(heard)
    shared_memory.logger.setLevel(logging.INFO)
    held = len(os.listdir("/proc/self/fd"))
    with plant:
        made = cpu_transport(gloo, rank, group.ranks, LIMIT_S)
    shared_memory.logger.removeHandler(heard)
    assert len(os.listdir("/proc/self/fd")) == held, "a descriptor stayed open"
    assert made.all_reduce(torch.ones(3), "sum").tolist() == [group.world_size] * 3
    if isinstance(made, CpuShm):
        made.close()
    return [isinstance(made, CpuShm), heard.lines]


def decide_under_obstacles(rank: int) -> dict[str, list[Any]]:
    kernels: Any = compiled_kernels()
    refused = patch.object(kernels.shm, "open_segment", side_effect=PermissionError(13, "not yours"))
    no_memory = patch.object(kernels.shm, "create_segment", side_effect=OSError(12, "no memory"))
    elsewhere = patch.object(shared_memory, "_host", return_value="another boot")
    plain = patch.object(shared_memory, "compiled_kernels", return_value=None)
    older = patch.object(shared_memory, "compiled_kernels", return_value=object())
    nothing: Any = ExitStack()
    return {
        "none": _decide(rank, nothing),
        "refused": _decide(rank, refused if rank == 1 else nothing),
        "no memory": _decide(rank, no_memory),
        "elsewhere": _decide(rank, elsewhere if rank == 2 else nothing),
        "plain": _decide(rank, plain if rank == 2 else nothing),
        "older": _decide(rank, older if rank == 1 else nothing),
    }


def test_all_ranks_come_to_the_same_decision_and_one_says_why() -> None:
    """One that took gloo alone would wait for ever. Who cannot map the segment is found by trying."""
    first, *others = run_ranks(decide_under_obstacles, world_size=3)
    for obstacle, (shares, lines) in first.items():
        assert shares is (obstacle == "none"), obstacle
        assert [other[obstacle] for other in others] == [[shares, []]] * 2, obstacle
        (line,) = lines
        assert line.startswith("Tensors on the CPU go between world ranks [0, 1, 2] through"), line
    said = {obstacle: lines[0] for obstacle, (_, lines) in first.items()}
    assert said["none"].endswith("through shared memory")
    assert "through gloo (world rank 1: PermissionError: [Errno 13] not yours)" in said["refused"]
    assert "through gloo (world rank 0: OSError: [Errno 12] no memory)" in said["no memory"]
    assert "through gloo (the ranks are not all on one host" in said["elsewhere"]
    assert "through gloo (world rank 2: it does not use the compiled kernels)" in said["plain"]
    assert "through gloo (world rank 1: its sgl_kernel is older" in said["older"]


def transport_by_default(rank: int) -> str:
    return type(parallel_state.get_world_group()._transport_for(torch.ones(1))).__name__


def test_without_the_compiled_kernels_tensors_go_through_gloo() -> None:
    assert run_ranks(transport_by_default, world_size=2) == ["CpuShm"] * 2
    with envs.SGLANG_USE_CPU_KERNELS.override(False):
        assert run_ranks(transport_by_default, world_size=2) == ["GlooExchange"] * 2


def mistake_a_call(rank: int) -> str:
    group = parallel_state.get_world_group()
    with pytest.raises(CollectiveError) as caught:
        group.all_reduce(torch.ones(2 + rank))
    return str(caught.value)


def test_ranks_in_different_calls_are_told_so_at_once() -> None:
    """Through gloo they got each other's bytes, or waited for their limit."""
    answers = run_ranks(mistake_a_call, world_size=2)
    assert any(
        f"failed on world rank {rank}: world rank {1 - rank} is in all_reduce (sum) of {4 * (3 - rank)} bytes"
        in answer
        for rank, answer in enumerate(answers)
    ), answers
