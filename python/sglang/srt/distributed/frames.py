"""Owns how a plain object becomes bytes that ranks exchange: a first frame of fixed size, then the rest.

Read by `GroupCoordinator`. Must not know a process group, and must not pickle: what arrives is msgpack, so
it can only be plain values, lists, dicts and bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch

__all__ = [
    "FRAME_BYTES",
    "decode",
    "describe",
    "encode",
    "first_frame",
    "rest_bytes",
    "rest_frame",
    "tensors_of",
    "unfold",
]

#: One transfer of this size carries nearly every message between ranks; measured as cheap as one of 64 bytes.
FRAME_BYTES = 4096
_LENGTH_BYTES = 8
_ROOM = FRAME_BYTES - _LENGTH_BYTES

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()


def encode(value: object) -> bytes:
    """Encode a plain value; anything else is a `TypeError`, and a tuple arrives as a list."""
    return _encoder.encode(value)


def decode(first: torch.Tensor, rest: torch.Tensor | None) -> Any:
    """The object behind a first frame and, where `rest_bytes` said so, the rest of its bytes."""
    length = _length(first)
    body = first[_LENGTH_BYTES : _LENGTH_BYTES + min(length, _ROOM)].numpy().tobytes()
    return _decoder.decode(body if rest is None else body + rest.numpy().tobytes())


def first_frame(payload: bytes) -> torch.Tensor:
    """Length and as much of the payload as fits."""
    frame = torch.zeros(FRAME_BYTES, dtype=torch.uint8)
    head = bytearray(len(payload).to_bytes(_LENGTH_BYTES, "little") + payload[:_ROOM])
    frame[: len(head)] = torch.frombuffer(head, dtype=torch.uint8)
    return frame


def rest_bytes(first: torch.Tensor) -> int:
    """How many bytes follow in a second transfer; usually none."""
    return max(0, _length(first) - _ROOM)


def rest_frame(payload: bytes) -> torch.Tensor:
    """What did not fit into the first frame."""
    rest = payload[_ROOM:]
    if not rest:  # this rank's share of a gather in which another rank has more to say
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(rest), dtype=torch.uint8)


def _length(first: torch.Tensor) -> int:
    return int.from_bytes(first[:_LENGTH_BYTES].numpy().tobytes(), "little")


def describe(tensors: dict[str, object] | None) -> dict[str, list[Any]] | None:
    """What a peer must know before the tensors arrive: their shapes and dtypes, and the plain values."""
    if tensors is None:
        return None
    return {
        name: [
            "tensor",
            list(value.shape),
            str(value.dtype).removeprefix("torch."),
            value.device.type == "cpu",
        ]
        if isinstance(value, torch.Tensor)
        else ["plain", value]
        for name, value in tensors.items()
    }


def unfold(
    table: dict[str, list[Any]] | None, empty: Callable[[list[int], torch.dtype, bool], torch.Tensor]
) -> dict[str, object] | None:
    """The dict behind a description, with tensors still to be filled."""
    if table is None:
        return None
    return {
        name: empty(entry[0], _dtype_of(entry[1]), entry[2]) if kind == "tensor" else entry[0]
        for name, (kind, *entry) in table.items()
    }


def tensors_of(tensors: dict[str, object] | None) -> list[torch.Tensor]:
    """The tensors to send, in order; those without elements are left out."""
    values = () if tensors is None else tensors.values()
    return [value for value in values if isinstance(value, torch.Tensor) and value.numel()]


def _dtype_of(name: str) -> torch.dtype:
    """`"bfloat16"` -> `torch.bfloat16`."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a peer announced a tensor of dtype {name!r}, which torch does not have")
    return dtype
