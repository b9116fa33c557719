"""Owns how the ranks of one world meet: the store, the comparison of what they were started with, the first
group.

Called by the rank process, once. Must not read flags: what is compared comes in as plain values, without
secrets and without facts of one machine. Nobody builds a process group before all ranks said the same.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed

from sglang.srt.constants import DIST_TIMEOUT_S
from sglang.srt.distributed.meeting_place import Meeting, interface_towards, listen_at, parse_meeting
from sglang.srt.distributed.parallel_state import init_distributed_environment
from sglang.srt.distributed.utils import set_global_tcp_store
from sglang.srt.environ import envs

__all__ = ["join_world"]

logger = logging.getLogger(__name__)

#: How long the rank that holds the store waits before it leaves with an error, so that the others can read
#: why.
_FAREWELL_S = 5.0
#: Where a rank that came twice is written down.
_TWINS = "meeting/twins"
#: How often a rank says for whom it waits.
_SAY_EVERY_S = 20.0


def join_world(
    *,
    rendezvous: str,
    world_rank: int,
    world_size: int,
    local_rank: int,
    timeout_s: float | None,
    configuration: dict[str, Any],
    meeting_timeout_s: float | None = None,
    backend: str = "gloo",
) -> None:
    """Meet at ``file:PATH`` or ``tcp://HOST:PORT``, compare, build the world and keep the store.

    ``configuration`` is the public record of this rank as JSON values. ``ValueError`` on every rank when one
    differs from world rank 0's; ``RuntimeError`` naming the ranks that did not come within
    ``meeting_timeout_s``, which is ``timeout_s`` where nothing else is said.
    """
    limit = DIST_TIMEOUT_S if timeout_s is None else timeout_s
    meeting = parse_meeting(rendezvous)
    if world_size > 1 and not envs.GLOO_SOCKET_IFNAME.is_set():
        envs.GLOO_SOCKET_IFNAME.set(interface_towards(meeting))
    patience = limit if meeting_timeout_s is None else meeting_timeout_s
    store = _open(meeting, world_rank, world_size, patience)
    _StartCheck(store, meeting, world_rank, world_size, patience).compare(configuration)
    init_distributed_environment(
        world_size=world_size,
        rank=world_rank,
        local_rank=local_rank,
        backend=backend,
        store=store,
        timeout_s=limit,
    )
    set_global_tcp_store(store)


def _open(meeting: Meeting, rank: int, world_size: int, limit: float) -> torch.distributed.Store:
    """World rank 0 holds the port; the others come to it. One rank alone needs no place."""
    if world_size == 1:
        return torch.distributed.HashStore()
    if meeting.path is not None:
        return torch.distributed.FileStore(meeting.path, world_size)
    handle = None
    if rank == 0:
        handle = listen_at(meeting)
    else:
        _await_listener(meeting, rank, limit)
    return torch.distributed.TCPStore(
        meeting.host,
        meeting.port,
        world_size,
        rank == 0,
        timeout=timedelta(seconds=limit),
        wait_for_workers=False,
        master_listen_fd=handle,
    )


def _await_listener(meeting: Meeting, rank: int, limit: float) -> None:
    deadline = time.monotonic() + limit
    patience = _Patience(meeting, rank, limit)
    while True:
        try:
            left = max(deadline - time.monotonic(), 0.1)
            socket.create_connection((meeting.host, meeting.port), timeout=left).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise RuntimeError(
                    f"world rank 0 did not come to {meeting} within {limit:g} s ({error}; this is world rank "
                    f"{rank}). Start machine 0 with the same --dist-init-addr and see whether the port is "
                    "open between the machines; raise --dist-timeout if it only starts slowly"
                ) from None
        patience.say([0])
        time.sleep(0.1)


class _Patience:
    """Says now and then for whom a rank waits, so that a log that stands still has a reason in it."""

    def __init__(self, meeting: Meeting, rank: int, limit: float) -> None:
        self._where = f"world rank {rank} waits at {meeting}"
        self._limit = limit
        self._began = self._said = time.monotonic()

    def say(self, missing: Sequence[int]) -> None:
        now = time.monotonic()
        if now - self._said < _SAY_EVERY_S:
            return
        self._said = now
        logger.info(
            "%s for world ranks %s: %.0f s so far, at most %g s",
            self._where,
            list(missing),
            now - self._began,
            self._limit,
        )


class _StartCheck:
    """Whether every rank came to the meeting once, and all with the same configuration."""

    def __init__(
        self, store: torch.distributed.Store, meeting: Meeting, rank: int, world_size: int, limit: float
    ) -> None:
        self._store = store
        self._meeting = meeting
        self._rank = rank
        self._world_size = world_size
        self._limit = limit
        self._deadline = time.monotonic() + limit

    def compare(self, configuration: dict[str, Any]) -> None:
        """Return when every rank said the same as rank 0."""
        mine = json.loads(json.dumps({"world_size": self._world_size} | configuration, sort_keys=True))
        if self._store.add(self._key("arrivals", self._rank), 1) > 1:
            # Told to all: they would wait for the rank that the second one should have been.
            self._store.set(_TWINS, str(self._rank))
            self._refuse_twins()
        if self._rank == 0:
            self._store.set(self._key("configuration", 0), json.dumps(mine))
            self._say("")
        else:
            self._await("configuration", [0])
            first = json.loads(self._store.get(self._key("configuration", 0)))
            self._say(_difference(self._rank, mine, first))
        verdicts = self._verdicts()
        self._store.set(self._key("read", self._rank), "")
        if not verdicts:
            return
        self._see_off(verdicts)
        raise ValueError("\n".join([*verdicts.values(), "Start every machine with the same flags."]))

    def _refuse_twins(self) -> None:
        if not self._came(_TWINS):
            return
        raise ValueError(
            f"world rank {self._store.get(_TWINS).decode()} came to {self._meeting} twice: two machines have "
            "the same --node-rank, or one was started again; start all of them again, each with its own"
        )

    def _say(self, verdict: str) -> None:
        self._store.set(self._key("verdict", self._rank), verdict)
        self._own = verdict

    def _verdicts(self) -> dict[int, str]:
        """What ranks found different. A rank that differs itself need not wait for what others find."""
        if self._own:
            return {self._rank: self._own}
        self._await("verdict", range(self._world_size))
        said = {
            rank: self._store.get(self._key("verdict", rank)).decode() for rank in range(self._world_size)
        }
        return {rank: text for rank, text in said.items() if text}

    def _see_off(self, verdicts: dict[int, str]) -> None:
        """The store goes down with rank 0, so rank 0 leaves last, when the others have read."""
        if self._rank == 0:
            self._deadline = time.monotonic() + _FAREWELL_S
            with suppress(RuntimeError):
                self._await("read", range(self._world_size))

    def _await(self, kind: str, ranks: Iterable[int]) -> None:
        """Until the ranks left their mark; the error names those that did not."""
        missing, pause = list(ranks), 0.005
        patience = _Patience(self._meeting, self._rank, self._limit)
        while missing := [rank for rank in missing if not self._came(self._key(kind, rank))]:
            if time.monotonic() >= self._deadline:
                self._store.set(self._key("left", self._rank), "")
                raise RuntimeError(
                    f"world ranks {missing} of {self._world_size} did not come to {self._meeting} within "
                    f"{self._limit:g} s (this is world rank {self._rank}). Their own logs say why they did "
                    "not start; raise --dist-timeout if they only start slowly"
                )
            self._refuse_twins()
            patience.say(missing)
            time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def _came(self, key: str) -> bool:
        try:
            return self._store.check([key])
        except torch.distributed.DistNetworkError as error:
            raise RuntimeError(
                f"world rank 0, which holds {self._meeting}, left before world rank {self._rank} could join; "
                "its own log says why"
            ) from error

    @staticmethod
    def _key(kind: str, rank: int) -> str:
        return f"meeting/{kind}/{rank}"


def _difference(rank: int, mine: dict[str, Any], first: dict[str, Any]) -> str:
    """Empty when equal, else each name with both values."""
    absent = object()
    names = [name for name in sorted(mine | first) if mine.get(name, absent) != first.get(name, absent)]
    if not names:
        return ""
    parts = [
        f"{name} is {_shown(mine, name)} there and {_shown(first, name)} on world rank 0" for name in names
    ]
    return f"world rank {rank} was started with other settings than world rank 0: {'; '.join(parts)}."


def _shown(values: dict[str, Any], name: str) -> str:
    return repr(values[name]) if name in values else "not known"
