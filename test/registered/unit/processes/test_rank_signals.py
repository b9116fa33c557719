"""A signal that is meant for the deployment never ends a rank, from the first instruction of the rank on."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit-cpu")

import contextlib
import os
import pathlib
import signal
from collections.abc import Iterator

import pytest

from sglang.srt.environ import envs
from sglang.srt.processes import rank_child
from sglang.srt.processes.rank_config import RankConfig
from sglang.srt.processes.rank_processes import RankProcesses
from sglang.srt.processes.sockets import SocketFolder
from sglang.srt.utils.stop_signals import STOP_SIGNALS

#: Changes no signal by itself, and ends when its starter does.
NO_RANK_YET = "import os, sys\nwhile os.read(int(sys.argv[1]), 4096):\n  pass\n"
#: Says ready and lives on. A signal that a process sends to itself has come when the call returns.
RANK = """
import os, sys, threading
for number in {sent}:
    os.kill(os.getpid(), number)
from sglang.srt.messages import io_struct
from sglang.srt.processes.rank_life import RankLife
life, config = RankLife.begin(sys.argv)
for number in {sent}:
    os.kill(os.getpid(), number)
life.send(io_struct.RankReady(world_rank=0, info={{}}))
threading.Event().wait()
"""


@contextlib.contextmanager
def started(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, source: str) -> Iterator[RankProcesses]:
    (tmp_path / "small_rank.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with envs.SGLANG_RUNTIME_DIR.override(str(tmp_path)):
        folder = SocketFolder()
    config = RankConfig(
        configuration=b"",
        world_rank=0,
        world_size=1,
        local_rank=0,
        ranks_on_host=1,
        rendezvous="tcp://127.0.0.1:1",
        folder=str(folder.path),
        listen=folder.rank_address(0),
        server=folder.server_address,
        heartbeat=str(folder.heartbeat_path(0)),
        parent_pid=os.getpid(),
    )
    ranks = RankProcesses([config], on_death=lambda cause: None, module="small_rank")
    try:
        yield ranks
    finally:
        ranks.stop(grace_s=0.0)
        folder.remove()


def signals_in(ranks: RankProcesses, mask: str) -> set[int]:
    """The stop signals in one mask of the rank, as the kernel shows it."""
    (pid,) = ranks.pids
    rows = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    bits = int(next(row.split()[1] for row in rows if row.startswith(f"{mask}:")), 16)
    return {number for number in STOP_SIGNALS if bits >> (number - 1) & 1}


@pytest.mark.parametrize("planted", [False, True])
def test_a_rank_is_born_deaf_to_what_is_meant_for_the_deployment(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, planted: bool
) -> None:
    """Ctrl-C in a rank's first second was a traceback out of some import. The twin starts it as any child."""
    if planted:
        monkeypatch.setattr(rank_child, "held_from_children", contextlib.nullcontext)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with started(tmp_path, monkeypatch, NO_RANK_YET) as ranks:
        assert signals_in(ranks, "SigBlk") == (set() if planted else {*STOP_SIGNALS})
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before, "the starter must hear them again"


def test_signals_before_and_after_its_imports_leave_a_rank_as_it_is(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(tmp_path, monkeypatch, RANK.format(sent=[*map(int, STOP_SIGNALS)])) as ranks:
        ranks.wait_ready()
        assert ranks.cause is None


def test_what_a_rank_starts_in_its_turn_can_hear_signals(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child keeps what is blocked, whatever it does about signals: a compiler's workers would never end."""
    with started(tmp_path, monkeypatch, RANK.format(sent=[])) as ranks:
        ranks.wait_ready()
        assert signals_in(ranks, "SigBlk") == set()
        assert signals_in(ranks, "SigIgn") == {*STOP_SIGNALS}
