"""Owns the configuration that a rank process is started with, and the frames on the pipes to its parent.

Sent by `rank_child.py`, read by the rank's entry. A frame is a length and msgpack; nothing is pickled. It
must not start processes and must not resolve anything: the record arrives with its declared results.
"""

from __future__ import annotations

import os
import struct

import msgspec

_LENGTH = struct.Struct("<Q")
_MAX_FRAME = 64 << 20


class RankConfig(msgspec.Struct, kw_only=True):
    """The configuration of one rank.

    `configuration` is the packed record with what resolution declared beside it.
    `world_rank` and `world_size` count one replica's world, `local_rank` and `ranks_on_host` the ranks of all
    worlds on this machine. `gpu_id` is the device of this rank, None on the CPU. `rendezvous` is where a
    world meets: `file:PATH` (one machine) or `tcp://HOST:PORT`. `listen` and `server` are socket addresses of
    the leader of an attention-TP group; its peers have None and get everything from it.
    """

    configuration: bytes
    world_rank: int
    world_size: int
    local_rank: int
    ranks_on_host: int
    rendezvous: str
    dp_rank: int | None = None
    gpu_id: int | None = None
    folder: str
    listen: str | None = None
    server: str | None = None
    heartbeat: str
    parent_pid: int

    @property
    def label(self) -> str:
        """How messages name this rank."""
        if self.dp_rank is None:
            return f"rank {self.world_rank}"
        return f"rank {self.world_rank} of replica {self.dp_rank}"


def write_frame(fd: int, payload: bytes) -> None:
    """Write one whole frame."""
    data = memoryview(_LENGTH.pack(len(payload)) + payload)
    while data:
        data = data[os.write(fd, data) :]


def read_frame(fd: int) -> bytes | None:
    """Read one whole frame; None when the other side is gone."""
    head = _read_exactly(fd, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > _MAX_FRAME:
        raise ValueError(f"a frame of {length} bytes on the rank pipe: at most {_MAX_FRAME}")
    return _read_exactly(fd, length)


def _read_exactly(fd: int, count: int) -> bytes | None:
    parts = []
    while count:
        part = os.read(fd, min(count, 1 << 20))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
