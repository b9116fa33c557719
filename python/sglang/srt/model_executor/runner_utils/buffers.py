"""Owns the tensors that recorded graphs read: allocated once, written before a replay, never rebound.

Made and written by graph runners. One function writes all of them and resets what a smaller batch leaves
free, so that a new buffer cannot be forgotten. It must not know what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """One buffer: `rows` rows of `shape` for each request; `padding` is what rows without a request hold."""

    name: str
    dtype: torch.dtype = torch.int64
    rows: int = 1
    shape: tuple[int, ...] = ()
    padding: float | bool = 0


class StaticBuffers:
    """Buffers for up to `max_requests` requests."""

    def __init__(self, specs: Sequence[BufferSpec], max_requests: int, device: torch.device) -> None:
        self._specs = {spec.name: spec for spec in specs}
        if len(self._specs) != len(specs):
            raise ValueError(f"two static buffers have one name: {[spec.name for spec in specs]}")
        self._tensors = {
            spec.name: torch.full(
                (max_requests * spec.rows, *spec.shape), spec.padding, dtype=spec.dtype, device=device
            )
            for spec in specs
        }
        self._hosts = {
            name: tensor.numpy()
            for name, tensor in self._tensors.items()
            if tensor.device.type == "cpu" and tensor.dtype is not torch.bfloat16
        }

    def views(self, size: int) -> dict[str, torch.Tensor]:
        """What a graph of `size` requests reads, by name: [size * rows, *shape] of each buffer."""
        return {name: tensor[: size * self._specs[name].rows] for name, tensor in self._tensors.items()}

    def write(self, values: Mapping[str, torch.Tensor], num_requests: int, size: int) -> None:
        """Copy the values of `num_requests` requests in, and reset every row from there up to `size`.

        `RuntimeError` unless there is a value of the right shape for each buffer; nothing is written then.
        """
        wanted = {name: (num_requests * spec.rows, *spec.shape) for name, spec in self._specs.items()}
        found = {name: tuple(value.shape) for name, value in values.items()}
        if found != wanted:
            raise RuntimeError(
                f"static buffers of {num_requests} requests take {wanted} and were given {found}"
            )
        for name, spec in self._specs.items():
            rows, end = num_requests * spec.rows, size * spec.rows
            host = self._hosts.get(name)
            if host is not None:  # a fraction of what two operators of torch cost
                host[:rows] = values[name].numpy()
                host[rows:end] = spec.padding
            else:
                self._tensors[name][:rows].copy_(values[name])
                self._tensors[name][rows:end].fill_(spec.padding)

    def reset(self, size: int) -> None:
        """Make the first `size` requests padding."""
        self.write({name: tensor[:0] for name, tensor in self._tensors.items()}, 0, size)
