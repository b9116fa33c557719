"""Owns how the ranks of one world meet: they open a store, compare their configurations, build the world.

Called by the rank process, once. Must not read flags: what is compared comes in as plain values, without
secrets and without what differs by machine. No group is built before all configurations were found equal.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed

from sglang.srt.constants import DIST_TIMEOUT_S
from sglang.srt.distributed.meeting_place import Meeting, interface_towards, listen_at, parse_meeting
from sglang.srt.distributed.parallel_state import init_distributed_environment
from sglang.srt.distributed.utils import set_global_tcp_store
from sglang.srt.environ import envs

__all__ = ["join_world"]

logger = logging.getLogger(__name__)

#: After a refusal the rank that holds the store stays this long, so that the others can read the reason.
_STAY_AFTER_REFUSAL_S = 5.0
#: Key under which the number of a rank that two processes claim is stored.
_DUPLICATE_RANK = "meeting/twins"
#: A waiting rank logs the ranks that are missing this often.
_LOG_EVERY_S = 20.0


def join_world(
    *,
    rendezvous: str,
    world_rank: int,
    world_size: int,
    local_rank: int,
    timeout_s: float | None,
    configuration: dict[str, object],
    meeting_timeout_s: float | None = None,
    backend: str = "gloo",
) -> None:
    """Meet at `file:PATH` or `tcp://HOST:PORT`, compare, build the world and keep the store.

    `configuration` is the public record of this rank as JSON values. `ValueError` on every rank when one
    differs from that of world rank 0; `RuntimeError` naming the ranks that did not come within
    `meeting_timeout_s` (by default `timeout_s`).
    """
    limit = DIST_TIMEOUT_S if timeout_s is None else timeout_s
    meeting = parse_meeting(rendezvous)
    if world_size > 1 and not envs.GLOO_SOCKET_IFNAME.is_set():
        envs.GLOO_SOCKET_IFNAME.set(interface_towards(meeting))
    meeting_limit = limit if meeting_timeout_s is None else meeting_timeout_s
    store = _open(meeting, world_rank, world_size, meeting_limit)
    _ConfigurationCheck(store, meeting, world_rank, world_size, meeting_limit).compare(configuration)
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
    """World rank 0 listens at the port and the others connect to it; a single rank needs neither."""
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
    waiting_log = _WaitingLog(meeting, rank, limit)
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
        waiting_log.log_missing([0])
        time.sleep(0.1)


class _WaitingLog:
    """Logs from time to time which ranks a rank still waits for."""

    def __init__(self, meeting: Meeting, rank: int, limit: float) -> None:
        self._prefix = f"world rank {rank} waits at {meeting}"
        self._limit = limit
        self._began_at = self._logged_at = time.monotonic()

    def log_missing(self, missing: Sequence[int]) -> None:
        now = time.monotonic()
        if now - self._logged_at < _LOG_EVERY_S:
            return
        self._logged_at = now
        logger.info(
            "%s for world ranks %s: %.0f s so far, at most %g s",
            self._prefix,
            list(missing),
            now - self._began_at,
            self._limit,
        )


class _ConfigurationCheck:
    """Compares the configurations of all ranks through the store."""

    def __init__(
        self, store: torch.distributed.Store, meeting: Meeting, rank: int, world_size: int, limit: float
    ) -> None:
        self._store = store
        self._meeting = meeting
        self._rank = rank
        self._world_size = world_size
        self._limit = limit
        self._deadline = time.monotonic() + limit

    def compare(self, configuration: dict[str, object]) -> None:
        """Return when every rank has the configuration of rank 0."""
        mine = json.loads(json.dumps({"world_size": self._world_size} | configuration, sort_keys=True))
        if self._store.add(self._key("arrivals", self._rank), 1) > 1:
            # Stored for all: they would wait for the rank that the second process should have been.
            self._store.set(_DUPLICATE_RANK, str(self._rank))
            self._refuse_duplicate()
        if self._rank == 0:
            self._store.set(self._key("configuration", 0), json.dumps(mine))
            self._store_verdict("")
        else:
            self._wait_for("configuration", [0])
            first = json.loads(self._store.get(self._key("configuration", 0)))
            self._store_verdict(_difference(self._rank, mine, first))
        verdicts = self._verdicts()
        self._store.set(self._key("read", self._rank), "")
        if not verdicts:
            return
        self._wait_for_readers()
        raise ValueError("\n".join([*verdicts.values(), "Start every machine with the same flags."]))

    def _refuse_duplicate(self) -> None:
        if not self._is_stored(_DUPLICATE_RANK):
            return
        duplicate = self._store.get(_DUPLICATE_RANK).decode()
        raise ValueError(
            f"world rank {duplicate} came to {self._meeting} twice: two machines have "
            "the same --node-rank, or one was started again; start all of them again, each with its own"
        )

    def _store_verdict(self, verdict: str) -> None:
        self._store.set(self._key("verdict", self._rank), verdict)
        self._own_verdict = verdict

    def _verdicts(self) -> dict[int, str]:
        """What ranks found different. A rank that differs itself does not wait for the others."""
        if self._own_verdict:
            return {self._rank: self._own_verdict}
        self._wait_for("verdict", range(self._world_size))
        found = {
            rank: self._store.get(self._key("verdict", rank)).decode() for rank in range(self._world_size)
        }
        return {rank: text for rank, text in found.items() if text}

    def _wait_for_readers(self) -> None:
        """Rank 0 holds the store, so it waits until the others have read the verdicts."""
        if self._rank == 0:
            self._deadline = time.monotonic() + _STAY_AFTER_REFUSAL_S
            with suppress(RuntimeError):
                self._wait_for("read", range(self._world_size))

    def _wait_for(self, kind: str, ranks: Iterable[int]) -> None:
        """Wait until the ranks stored a key of this kind; the error names those that did not."""
        missing, pause = list(ranks), 0.005
        waiting_log = _WaitingLog(self._meeting, self._rank, self._limit)
        while missing := [rank for rank in missing if not self._is_stored(self._key(kind, rank))]:
            if time.monotonic() >= self._deadline:
                self._store.set(self._key("left", self._rank), "")
                raise RuntimeError(
                    f"world ranks {missing} of {self._world_size} did not come to {self._meeting} within "
                    f"{self._limit:g} s (this is world rank {self._rank}). Their own logs say why they did "
                    "not start; raise --dist-timeout if they only start slowly"
                )
            self._refuse_duplicate()
            waiting_log.log_missing(missing)
            time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def _is_stored(self, key: str) -> bool:
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


def _difference(rank: int, mine: dict[str, object], first: dict[str, object]) -> str:
    """Each name that differs, with both values; empty when none does."""
    absent = object()
    names = [name for name in sorted(mine | first) if mine.get(name, absent) != first.get(name, absent)]
    if not names:
        return ""
    parts = [
        f"{name} is {_shown(mine, name)} there and {_shown(first, name)} on world rank 0" for name in names
    ]
    return f"world rank {rank} was started with other settings than world rank 0: {'; '.join(parts)}."


def _shown(values: dict[str, object], name: str) -> str:
    return repr(values[name]) if name in values else "not known"
