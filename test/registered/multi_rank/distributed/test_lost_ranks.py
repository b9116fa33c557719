"""A rank that stops, leaves or goes elsewhere is one named error in the others, within the timeout."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=14, suite="multi-rank-cpu")

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

from sglang.srt.constants import DIST_TIMEOUT_S
from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.errors import CollectiveError
from sglang.test.multi_rank import run_ranks


def _fresh_world(folder: str, name: str, timeout_s: float | None) -> Any:
    """Leave the world that stands and meet the same ranks in another, with another limit."""
    old = parallel_state.get_world_group()
    rank, world_size = old.rank_in_group, old.world_size
    parallel_state.destroy_distributed_environment()
    store = torch.distributed.FileStore(str(Path(folder) / name), world_size)
    parallel_state.init_distributed_environment(
        world_size=world_size, rank=rank, local_rank=rank, store=store, timeout_s=timeout_s
    )
    return parallel_state.get_world_group()


def _be_stopped(seconds: float) -> None:
    """This very process stands still, and a child of it sets it going again."""
    child = subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    child.wait()


def _failure(call: Any) -> str:
    with pytest.raises(CollectiveError) as caught:
        call()
    assert "--dist-timeout" in str(caught.value)
    return str(caught.value)


def check_lost(rank: int, folder: str) -> dict[str, str]:
    """On three ranks: rank 1 is the one that gets lost each time. Each world ends with its first loss."""
    told = {}
    group = _fresh_world(folder, "stopped", 2.0)
    if rank == 1:
        time.sleep(3.0)
    group.barrier(timeout_s=60)  # its own limit, longer than the group's
    if rank == 1:
        _be_stopped(4.0)
    told["stopped"] = _failure(lambda: group.all_reduce(torch.ones(4)))

    group = _fresh_world(folder, "left", 30.0)
    group.all_gather(torch.ones(4))
    started = time.monotonic()
    if rank == 1:
        parallel_state.destroy_distributed_environment()
        told["left"] = ""
    else:
        told["left"] = _failure(lambda: group.broadcast_object("anyone there?", src=1))
        assert time.monotonic() - started < 25, "a closed connection is seen at once, not after the timeout"
        parallel_state.destroy_distributed_environment()
    store = torch.distributed.FileStore(str(Path(folder) / "barrier"), 3)
    parallel_state.init_distributed_environment(world_size=3, rank=rank, local_rank=rank, store=store)
    group = parallel_state.get_world_group()
    assert group.timeout_s == DIST_TIMEOUT_S
    group.barrier()
    if rank == 1:
        time.sleep(3.0)
    told["barrier"] = _failure(lambda: group.barrier(timeout_s=1.5))
    _fresh_world(folder, "end", None)  # so that all leave together
    return told


def test_a_lost_rank_is_a_named_error_in_the_others(tmp_path: Path) -> None:
    first, lost, last = run_ranks(check_lost, world_size=3, folder=str(tmp_path))
    for told, rank in ((first, 0), (last, 2)):
        assert (
            f"all_reduce over group 'world' of world ranks [0, 1, 2] failed on world rank {rank}"
            in (told["stopped"])
        )
        assert "raise --dist-timeout (now 2 s)" in told["stopped"]
        assert (
            f"broadcast_object over group 'world' of world ranks [0, 1, 2] failed on world rank {rank}"
            in (told["left"])
        )
        assert "world ranks [1] did not come" in told["barrier"], "every rank can name who is missing"
    assert "all came, but one left before the end" in lost["barrier"]
