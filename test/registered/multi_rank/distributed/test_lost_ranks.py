"""A rank that stops, leaves or does not come gives each of the others one error that names it."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=14, suite="multi-rank-cpu")

import gc
import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed

from sglang.srt.constants import DIST_TIMEOUT_S
from sglang.srt.distributed import parallel_state, shared_memory
from sglang.srt.distributed.errors import CollectiveError
from sglang.test.multi_rank import come_together, run_ranks
from sglang.test.waiting import HANG_GUARD_S, outlast

#: Limit for collectives in the world in which a rank is stopped.
STOPPED_LIMIT_S = 2.0


def _fresh_world(folder: str, name: str, timeout_s: float | None) -> Any:
    """Leave the present world and meet the same ranks in another, with another limit."""
    old = parallel_state.get_world_group()
    rank, world_size = old.rank_in_group, old.world_size
    parallel_state.destroy_distributed_environment()
    come_together(folder, f"{name}-begins", rank, range(world_size))
    store = torch.distributed.FileStore(str(Path(folder) / name), world_size)
    parallel_state.init_distributed_environment(
        world_size=world_size, rank=rank, local_rank=rank, store=store, timeout_s=timeout_s
    )
    return parallel_state.get_world_group()


def _stop_until(files: list[Path]) -> None:
    """Stop this process; a child lets it go on when the files are there."""
    absent = " || ".join(f"[ ! -e '{file}' ]" for file in files)
    wait = f"while kill -0 {os.getpid()} && {{ {absent}; }}; do sleep 0.05; done"
    child = subprocess.Popen(["sh", "-c", f"{wait}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    child.wait()


def _failure(call: Any) -> str:
    with pytest.raises(CollectiveError) as caught:
        call()
    assert "--dist-timeout" in str(caught.value)
    return str(caught.value)


def check_lost(rank: int, folder: str) -> dict[str, str]:
    """On three ranks, of which rank 1 is lost each time; each world ends with its first loss. The errors."""
    errors, peers = {}, (0, 2)
    group = _fresh_world(folder, "stopped", STOPPED_LIMIT_S)
    if rank == 1:
        outlast(STOPPED_LIMIT_S)
    group.barrier(timeout_s=HANG_GUARD_S)  # its own limit, longer than the group's
    if rank == 1:
        _stop_until([Path(folder, f"failed.{peer}") for peer in peers])
    errors["stopped"] = _failure(lambda: group.all_reduce(torch.ones(4)))
    Path(folder, f"failed.{rank}").touch()

    group = _fresh_world(folder, "left", 3600.0)  # too long to wait for: the loss itself ends the call
    group.all_gather(torch.ones(4))
    if rank == 1:
        parallel_state.destroy_distributed_environment()
        errors["left"] = ""
    else:
        errors["left"] = _failure(lambda: group.broadcast_object("anyone there?", src=1))
        parallel_state.destroy_distributed_environment()
    store = torch.distributed.FileStore(str(Path(folder) / "barrier"), 3)
    parallel_state.init_distributed_environment(world_size=3, rank=rank, local_rank=rank, store=store)
    group = parallel_state.get_world_group()
    assert group.timeout_s == DIST_TIMEOUT_S
    group.barrier()
    if rank == 1:
        come_together(folder, "alone", rank, peers)
    errors["barrier"] = _failure(lambda: group.barrier(timeout_s=1.5))
    Path(folder, f"alone.{rank}").touch()
    _fresh_world(folder, "end", None)  # so that all leave together
    return errors


def test_a_lost_rank_is_a_named_error_in_the_others(tmp_path: Path) -> None:
    first, lost, last = run_ranks(check_lost, world_size=3, folder=str(tmp_path))
    for errors, rank in ((first, 0), (last, 2)):
        assert (
            f"all_reduce over group 'world' of world ranks [0, 1, 2] failed on world rank {rank}"
            in (errors["stopped"])
        )
        assert "raise --dist-timeout (now 2 s)" in errors["stopped"]
        assert (
            f"broadcast_object over group 'world' of world ranks [0, 1, 2] failed on world rank {rank}"
            in (errors["left"])
        )
        missing = re.search(r"world ranks (\[[\d, ]+\]) did not come", errors["barrier"])
        # The other one is missing, too, when it comes later than the limit of the first.
        assert missing is not None and {1} <= set(json.loads(missing[1])) <= {1, 2 - rank}
    assert "all came, but one left before the end" in lost["barrier"]


def _build_with_kernels_that_refuse(rank: int, folder: str) -> list[str]:
    """Type and text of the error, which itself is forgotten: it holds the connections of this rank."""

    def kernels() -> None:
        # Rank 1 must not leave while its peer still opens its connections: that would fail otherwise.
        come_together(folder, "connected", rank, range(2))
        if rank == 1:
            raise RuntimeError("sgl_kernel has interface 1 and this engine needs 2")

    with patch.object(shared_memory, "compiled_kernels", side_effect=kernels):
        try:
            # Another limit than the world's: a communicator of its own.
            parallel_state.init_model_parallel_group(
                [[0, 1]], rank, "gloo", group_name="tp", timeout_s=1800.0
            )
        except RuntimeError as error:
            return [type(error).__name__, str(error)]
    return []


def refuse_while_a_group_is_built(rank: int, folder: str) -> list[str]:
    """On two ranks, of which rank 1 finds kernels that it cannot use: what each of them says."""
    _fresh_world(folder, "refuses", 3600.0)
    said = _build_with_kernels_that_refuse(rank, folder)
    parallel_state.destroy_distributed_environment()
    gc.collect()
    store = torch.distributed.FileStore(str(Path(folder) / "end"), 2)
    parallel_state.init_distributed_environment(world_size=2, rank=rank, local_rank=rank, store=store)
    return said


def test_a_rank_that_cannot_build_a_group_says_why_and_only_its_peers_speak_of_a_lost_rank(
    tmp_path: Path,
) -> None:
    peer, cause = run_ranks(refuse_while_a_group_is_built, world_size=2, folder=str(tmp_path))
    assert cause == ["RuntimeError", "sgl_kernel has interface 1 and this engine needs 2"]
    assert peer[0] == "CollectiveError" and "building the group over group 'tp'" in peer[1]
