"""Owns how the ranks of a group find out, together, whether they exchange tensors through shared memory.

Called by `communicators` when a communicator is made. All ranks come to the same decision: each tells the
others what it has, then whether it mapped the segment, and one that did not is enough for gloo. Must not be
asked again later: a group that changed its transport would wait for peers that did not.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang.kernels.compiled import compiled_kernels
from sglang.srt.distributed import frames
from sglang.srt.distributed.device_communicators.cpu_shm import CpuShm
from sglang.srt.distributed.device_communicators.gloo_exchange import GlooExchange
from sglang.srt.distributed.errors import transport_errors
from sglang.srt.distributed.object_channel import ObjectChannel

__all__ = ["cpu_transport"]

logger = logging.getLogger(__name__)


def cpu_transport(
    gloo: GlooExchange, rank: int, world_ranks: Sequence[int], timeout_s: float
) -> CpuShm | GlooExchange:
    """Shared memory where every rank can use it, else `gloo`. `rank` is this rank's place in `world_ranks`.

    The first rank says in one line which it is, and why not the faster one.
    """
    attempt = _Attempt(gloo, rank, world_ranks, timeout_s)
    try:
        reason = attempt.agree()
    finally:
        attempt.end()
    if rank == 0:
        how = f"gloo ({reason})" if reason else "shared memory"
        logger.info("Tensors on the CPU go between world ranks %s through %s", list(world_ranks), how)
    if reason:
        return gloo
    return CpuShm(attempt.shared, attempt.kernels.shm.REDUCED_DTYPES, gloo)


class _Attempt:
    """This rank's part in finding out."""

    def __init__(self, gloo: GlooExchange, rank: int, world_ranks: Sequence[int], timeout_s: float) -> None:
        self._channel = ObjectChannel(gloo, rank, len(world_ranks))
        self._rank = rank
        self._world_ranks = world_ranks
        self._timeout_s = timeout_s
        self._descriptor: int | None = None
        self.kernels: Any = compiled_kernels()
        self.shared: Any = None
        self._agreed = False

    def agree(self) -> str:
        """Why gloo it is, the same on every rank; empty where all share memory."""
        said = self._tell(self._introduction())
        reason = _first(self._world_ranks, [one["obstacle"] for one in said])
        if not reason and len({one["host"] for one in said}) > 1:
            reason = "the ranks are not all on one host, or not in one process namespace"
        if reason:
            return reason
        problem = ""
        try:
            self._attach(said[0])
            # Where a peer that ends is noticed later.
            for one in said:
                Path(f"/proc/{one['pid']}/stat").read_bytes()
        except (OSError, RuntimeError) as error:
            problem = _one_line(error)
        reason = _first(self._world_ranks, self._tell(problem))
        self._agreed = not reason
        return reason

    def _tell(self, value: object) -> list[Any]:
        """What every rank tells the others, in rank order."""
        payload = frames.encode(value)
        with transport_errors():
            return self._channel.all_gather(payload)

    def end(self) -> None:
        """Give back what is not needed: a mapped segment needs no descriptor and ends with its mappings."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        if self.shared is not None and not self._agreed:
            self.shared.close()

    def _introduction(self) -> dict[str, Any]:
        found: dict[str, Any] = {"host": "", "obstacle": "", "pid": os.getpid()}
        if self.kernels is None:
            return found | {"obstacle": "it does not use the compiled kernels"}
        shm = getattr(self.kernels, "shm", None)
        if shm is None:
            return found | {
                "obstacle": "its sgl_kernel is older than shared memory; `make kernels` builds it"
            }
        if len(self._world_ranks) > shm.MOST_RANKS:
            return found | {"obstacle": f"a group of more than {shm.MOST_RANKS} ranks"}
        try:
            found["host"] = _host()
            if self._rank == 0:
                self._descriptor = shm.create_segment(len(self._world_ranks))
                found |= {"descriptor": self._descriptor, "cookie": secrets.randbits(62)}
                self._attach(found)
        except (OSError, RuntimeError) as error:
            found["obstacle"] = _one_line(error)
        return found

    def _attach(self, mark: dict[str, Any]) -> None:
        """Map the segment of the first rank, who does so before it tells the others."""
        if self.shared is not None:
            return
        if self._descriptor is None:
            self._descriptor = self.kernels.shm.open_segment(mark["pid"], mark["descriptor"])
        self.shared = self.kernels.shm.ShmGroup(
            self._descriptor,
            self._rank,
            self._world_ranks,
            cookie=mark["cookie"],
            timeout_s=self._timeout_s,
        )


def _host() -> str:
    """Equal for two processes where they run under one kernel and see each other's process numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _first(world_ranks: Sequence[int], obstacles: Sequence[str]) -> str:
    """The first obstacle and whose it is."""
    for rank, obstacle in zip(world_ranks, obstacles, strict=True):
        if obstacle:
            return f"world rank {rank}: {obstacle}"
    return ""
