"""Owns which messages cross a process border, and their bytes: msgspec structs in msgpack, never pickle.

Used by both ends of every wire. The messages are declared in `requests.py` and `control.py`, and can be
imported from here as well. It must not open a socket.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from sglang.srt.messages.control import DispatchedReq as DispatchedReq
from sglang.srt.messages.control import FlushCacheReqInput as FlushCacheReqInput
from sglang.srt.messages.control import FlushCacheReqOutput as FlushCacheReqOutput
from sglang.srt.messages.control import GetInternalStateReq as GetInternalStateReq
from sglang.srt.messages.control import GetInternalStateReqOutput as GetInternalStateReqOutput
from sglang.srt.messages.control import GetPlacementReq as GetPlacementReq
from sglang.srt.messages.control import GetPlacementReqOutput as GetPlacementReqOutput
from sglang.srt.messages.control import RankFailed as RankFailed
from sglang.srt.messages.control import RankReady as RankReady
from sglang.srt.messages.control import ShutdownReq as ShutdownReq
from sglang.srt.messages.requests import LOGPROB_FLOOR as LOGPROB_FLOOR
from sglang.srt.messages.requests import AbortReq as AbortReq
from sglang.srt.messages.requests import BatchTokenIDOutput as BatchTokenIDOutput
from sglang.srt.messages.requests import FinishReason as FinishReason
from sglang.srt.messages.requests import RequestHead as RequestHead
from sglang.srt.messages.requests import SpecCounts as SpecCounts
from sglang.srt.messages.requests import TokenizedGenerateReqInput as TokenizedGenerateReqInput
from sglang.srt.messages.requests import TokenLogprob as TokenLogprob
from sglang.srt.messages.requests import TokenOutput as TokenOutput

_CallOfScheduler: TypeAlias = FlushCacheReqInput | GetInternalStateReq | GetPlacementReq
AnswerToCall: TypeAlias = FlushCacheReqOutput | GetInternalStateReqOutput | GetPlacementReqOutput
_NoRequest: TypeAlias = AbortReq | DispatchedReq | ShutdownReq | _CallOfScheduler
ToScheduler: TypeAlias = TokenizedGenerateReqInput | _NoRequest
#: The last two go to the process that started the rank, over its pipe.
FromRank: TypeAlias = BatchTokenIDOutput | AnswerToCall | RankReady | RankFailed
Message: TypeAlias = ToScheduler | FromRank

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_head_decoder: msgspec.msgpack.Decoder[RequestHead | _NoRequest] = msgspec.msgpack.Decoder(
    RequestHead | _NoRequest
)
#: How the bytes of a request begin, and where the string of its rid does; marks of short strings in msgpack.
_REQUEST_BEGIN = b"\xa4type" + msgspec.msgpack.encode(RequestHead.__struct_config__.tag) + b"\xa3rid"
_RID_AT = 1 + len(_REQUEST_BEGIN)
_FIXSTR, _STR8 = 0xA0, 0xD9


def encode(message: Message) -> bytes:
    """Message -> msgpack bytes."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """The message that these bytes are; `msgspec.ValidationError` (a `ValueError`) where they are none."""
    return _decoder.decode(data)


def decode_head(data: bytes) -> RequestHead | _NoRequest:
    """The message to a scheduler that these bytes are, of a request its head only; errors as in `decode`.

    The ids behind the head are not looked at: to skip a thousand takes as long as to decode them.
    """
    # One byte before it counts the fields, and two behind it tell the length of the rid.
    if data.startswith(_REQUEST_BEGIN, 1) and len(data) > _RID_AT + 1:
        kind, at = data[_RID_AT], _RID_AT + 1
        if _FIXSTR <= kind < _FIXSTR + 32:
            return RequestHead(rid=data[at : at + kind - _FIXSTR].decode())
        if kind == _STR8:
            return RequestHead(rid=data[at + 1 : at + 1 + data[at]].decode())
    return _head_decoder.decode(data)
