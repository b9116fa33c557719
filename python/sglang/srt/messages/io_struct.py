"""Owns which messages cross a process border, and their bytes: msgspec structs in msgpack, never pickle.

Used by both ends of every wire. The messages are declared in `requests.py` and `control.py`, and can be
imported from here as well. It must not open a socket.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from sglang.srt.messages.control import (
    DispatchedReq,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    GetPlacementReq,
    GetPlacementReqOutput,
    RankFailed,
    RankReady,
    ShutdownReq,
)
from sglang.srt.messages.requests import (
    LOGPROB_FLOOR,
    AbortReq,
    BatchTokenIDOutput,
    FinishReason,
    TokenizedGenerateReqInput,
    TokenLogprob,
    TokenOutput,
)

ToScheduler: TypeAlias = (
    TokenizedGenerateReqInput
    | AbortReq
    | FlushCacheReqInput
    | GetInternalStateReq
    | GetPlacementReq
    | DispatchedReq
    | ShutdownReq
)
FromScheduler: TypeAlias = (
    BatchTokenIDOutput | FlushCacheReqOutput | GetInternalStateReqOutput | GetPlacementReqOutput
)
#: What a rank says to the process that started it, over its pipe.
FromRank: TypeAlias = RankReady | RankFailed
Message: TypeAlias = ToScheduler | FromScheduler | FromRank

__all__ = [
    "LOGPROB_FLOOR",
    "AbortReq",
    "BatchTokenIDOutput",
    "DispatchedReq",
    "FinishReason",
    "FlushCacheReqInput",
    "FlushCacheReqOutput",
    "FromRank",
    "FromScheduler",
    "GetInternalStateReq",
    "GetInternalStateReqOutput",
    "GetPlacementReq",
    "GetPlacementReqOutput",
    "Message",
    "RankFailed",
    "RankReady",
    "ShutdownReq",
    "ToScheduler",
    "TokenLogprob",
    "TokenOutput",
    "TokenizedGenerateReqInput",
    "decode",
    "encode",
]

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Message -> msgpack bytes."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """The message that these bytes are; `msgspec.ValidationError` (a `ValueError`) where they are none."""
    return _decoder.decode(data)
