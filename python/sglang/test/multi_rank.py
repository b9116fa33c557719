"""Owns running a function of a test file on several gloo ranks of this host, and collecting their answers.

Read by multi-rank tests: `answers = run_ranks(check_layouts, world_size=2)`. Ranks meet in a file. It must
not leave a rank behind.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from sglang.srt.environ import envs
from sglang.test.rank_nursery import Rank, nursery
from sglang.test.waiting import HANG_GUARD_S, holds_within, wait_until

#: Peers of a dead rank usually fail soon after it, and what they print is part of the report.
_PEERS_FAIL_S = 2.0


class RankFailed(AssertionError):
    """A rank raised, hung or died; the text holds what every failed rank printed."""


def run_ranks(
    function: Callable[..., Any], *, world_size: int, timeout_s: float = HANG_GUARD_S, **arguments: Any
) -> list[Any]:
    """Call `function(rank, **arguments)` on each rank of a fresh gloo world; answers and arguments are JSON.

    Each rank finds the function by its name in its file, so it must stand at the top level of that file.
    """
    source = inspect.getsourcefile(function)
    if source is None or "." in function.__qualname__:
        raise ValueError(
            f"{function.__qualname__} cannot be found by name in a file; define it at the top level"
        )
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks: list[Rank] = []
        try:
            with envs.OMP_NUM_THREADS.override(1), envs.OMP_WAIT_POLICY.override("PASSIVE"):
                for rank in range(world_size):
                    spec = {
                        "rank": rank,
                        "world_size": world_size,
                        "folder": folder,
                        "source": source,
                        "function": function.__name__,
                        "arguments": arguments,
                        "timeout_s": timeout_s,
                    }
                    ranks.append(_start(spec))
            _wait(ranks, timeout_s)
        finally:
            for process in ranks:
                process.kill()
                process.wait(timeout_s)
        _raise_failures(ranks, Path(folder), timeout_s)
        return [json.loads(_file(Path(folder), rank, "answer").read_text()) for rank in range(world_size)]


def come_together(folder: str, name: str, rank: int, among: Iterable[int]) -> None:
    """A barrier of these ranks through files; `name` serves for one meeting in this folder.

    It works where no group exists, or one that is about to fail.
    """
    marks = [Path(folder, f"{name}.{other}") for other in among]
    Path(folder, f"{name}.{rank}").touch()
    wait_until(lambda: all(mark.exists() for mark in marks))


def _file(folder: Path, rank: int, kind: str) -> Path:
    return folder / f"rank{rank}.{kind}"


def _start(spec: dict[str, Any]) -> Rank:
    with _file(Path(spec["folder"]), spec["rank"], "log").open("wb") as log:
        return nursery().start("sglang.test.multi_rank", json.dumps(spec), log=log)


def _wait(ranks: list[Rank], timeout_s: float) -> None:
    """Wait until all have ended, one has failed (its peers may wait in a collective), or time is up."""

    def codes() -> list[int | None]:
        return [process.poll() for process in ranks]

    if holds_within(timeout_s, lambda: any(codes()) or None not in codes()):
        holds_within(_PEERS_FAIL_S, lambda: None not in codes())


def _raise_failures(ranks: list[Rank], folder: Path, timeout_s: float) -> None:
    failed = [rank for rank, process in enumerate(ranks) if process.returncode != 0]
    if not failed:
        return
    parts = []
    for rank in failed:
        log = _file(folder, rank, "log").read_text(errors="replace").strip()
        parts.append(f"-- rank {rank}, exit code {ranks[rank].returncode}\n{log or '(printed nothing)'}")
    raise RankFailed(
        f"{len(failed)} of {len(ranks)} ranks failed (limit {timeout_s:.0f} s)\n" + "\n".join(parts)
    )


def _load(source: str, name: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location("multi_rank_subject", source)
    if spec is None or spec.loader is None:
        raise ImportError(f"{source} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules["multi_rank_subject"] = module
    spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, name)
    return function


def _run_rank(spec: dict[str, Any]) -> None:
    import torch.distributed

    from sglang.srt.distributed import parallel_state

    folder = Path(spec["folder"])
    store = torch.distributed.FileStore(str(folder / "meeting"), spec["world_size"])
    parallel_state.init_distributed_environment(
        world_size=spec["world_size"],
        rank=spec["rank"],
        local_rank=spec["rank"],
        store=store,
        timeout_s=spec["timeout_s"],
    )
    answer = _load(spec["source"], spec["function"])(spec["rank"], **spec["arguments"])
    _file(folder, spec["rank"], "answer").write_text(json.dumps(answer))
    torch.distributed.barrier()  # no rank leaves while a peer still needs it
    parallel_state.destroy_distributed_environment()


def main() -> int:
    """Run what `run_ranks` wrote into the one argument; the exit code is 1 where it failed."""
    try:
        _run_rank(json.loads(sys.argv[1]))
    except BaseException:  # noqa: BLE001 - the report of a rank says why it failed
        traceback.print_exc()
        return 1
    return 0
