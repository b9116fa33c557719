"""Owns running a piece of Python on several ranks that share memory, each a process of its own.

Read by test_shm.py. Rank 0 makes the segment, attaches and forks the others; the instruction set is picked
once a process, so every run is started anew.
"""

import os
import select
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import torch

#: World ranks by which errors name the ranks: not their places in the group.
NAMES = (10, 11, 12, 13)
HANG_GUARD_S = 120.0


def run_ranks(body, world_size, *, level=None, part_bytes=None, timeout_s=HANG_GUARD_S, given=None):
    """What `body` puts into `answer` on each rank, None from one that was killed; an assertion if it raises.

    It finds `group`, `rank`, `torch`, `given`, `failure(call)`, the text of a call's RuntimeError, and
    `until()`, which waits for a `note()` of another rank.
    """
    with tempfile.TemporaryDirectory(prefix="shm-") as folder:
        spec = (body, world_size, part_bytes, timeout_s, given)
        torch.save(spec, Path(folder) / "spec.pt")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if level is not None:
            environment["SGL_KERNEL_ISA"] = level
        ended = subprocess.run(
            [sys.executable, "-P", __file__, folder], env=environment, timeout=2 * HANG_GUARD_S, check=False
        )
        answers = []
        for rank in range(world_size):
            path = Path(folder) / f"answer.{rank}.pt"
            failed, answer = torch.load(path, weights_only=False) if path.exists() else (None, None)
            assert not failed, failed
            answers.append(answer)
        assert ended.returncode in (0, -9), ended.returncode
        return answers


def failure(call):
    try:
        call()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    raise AssertionError("the call went well")


def run_rank(folder, rank, group, noted, say):
    body, _, _, _, given = torch.load(folder / "spec.pt", weights_only=False)

    def until():
        assert select.select([noted], [], [], HANG_GUARD_S)[0], "nobody noted anything"

    names = {"group": group, "rank": rank, "torch": torch, "answer": [], "failure": failure, "given": given}
    names |= {"note": lambda: os.write(say, b"1"), "until": until}
    try:
        exec(body, names)
        found = ("", names["answer"])
    except Exception:  # noqa: BLE001 - the test reports it
        found = (f"rank {rank}: {traceback.format_exc()}", None)
    torch.save(found, folder / f"answer.{rank}.pt")


def main():
    from sgl_kernel import shm

    folder = Path(sys.argv[1])
    _, world_size, part_bytes, timeout_s, _ = torch.load(folder / "spec.pt", weights_only=False)
    pid, segment = os.getpid(), shm.create_segment(world_size, part_bytes)

    def attach(rank, descriptor):
        return shm.ShmGroup(
            descriptor,
            rank,
            NAMES[:world_size],
            cookie=4711,
            timeout_s=timeout_s,
            part_bytes=part_bytes,
        )

    group, rank, children = attach(0, segment), 0, []
    ready, say_ready = os.pipe()
    noted, say = os.pipe()
    for other in range(1, world_size):
        child = os.fork()
        if child == 0:
            descriptor = shm.open_segment(pid, segment)
            group, rank = attach(other, descriptor), other
            os.close(descriptor)
            break
        children.append(child)
    os.write(say_ready, b"1")
    if rank == 0:
        for _ in range(world_size):
            os.read(ready, 1)
        os.close(segment)
    run_rank(folder, rank, group, noted, say)
    if rank == 0:
        for child in children:
            os.waitpid(child, 0)
        return 0
    os._exit(0)  # what was forked ends here, without the parent's farewells


if __name__ == "__main__":
    sys.exit(main())
