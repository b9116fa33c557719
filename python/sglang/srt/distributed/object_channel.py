"""Owns how plain objects travel inside one group: one transfer of fixed size, another only for the rest.

Built by `communicators`, read by `GroupCoordinator`. Must not count calls or translate errors; the
encoding is in `frames`.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang.srt.distributed import frames
from sglang.srt.distributed.device_communicators.cpu_shm import CpuShm
from sglang.srt.distributed.device_communicators.gloo_exchange import GlooExchange

__all__ = ["ObjectChannel"]


class ObjectChannel:
    """Objects over the control communicator. Ranks are ranks in the group."""

    def __init__(self, transport: CpuShm | GlooExchange, rank: int, world_size: int) -> None:
        self._transport = transport
        self._rank = rank
        self._world_size = world_size

    def broadcast(self, value: object, src: int) -> Any:
        own = self._rank == src
        payload = frames.encode(value) if own else b""
        first = self._transport.broadcast(frames.first_frame(payload), src)
        size = frames.rest_bytes(first)
        rest = None
        if size:
            rest = frames.rest_frame(payload) if own else _buffer(size)
            rest = self._transport.broadcast(rest, src)
        return value if own else frames.decode(first, rest)

    def all_gather(self, payload: bytes) -> list[Any]:
        """Every rank's encoded value, decoded, in rank order."""
        sizes = [frames.FRAME_BYTES] * self._world_size
        firsts = torch.split(self._transport.all_gather(frames.first_frame(payload), sizes), sizes)
        sizes = [frames.rest_bytes(first) for first in firsts]
        if not any(sizes):
            return [frames.decode(first, None) for first in firsts]
        rests = torch.split(self._transport.all_gather(frames.rest_frame(payload), sizes), sizes)
        return [frames.decode(first, rest) for first, rest in zip(firsts, rests, strict=True)]

    def send(self, payload: bytes, dst: int) -> None:
        first = frames.first_frame(payload)
        self._transport.send(first, dst)
        if frames.rest_bytes(first):
            self._transport.send(frames.rest_frame(payload), dst)

    def recv(self, src: int) -> Any:
        first = self._transport.recv(_buffer(frames.FRAME_BYTES), src)
        size = frames.rest_bytes(first)
        return frames.decode(first, self._transport.recv(_buffer(size), src) if size else None)


def _buffer(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)
