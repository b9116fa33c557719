"""Owns reading a request body: content type, UTF-8 JSON, no NaN or Infinity, no integer over 64 bits.

Read by all routes with a body before anything is parsed. It must not know about fields.
"""

from __future__ import annotations

import re

import msgspec
from starlette.requests import ClientDisconnect, Request

from sglang.srt.messages.errors import RequestRejected
from sglang.srt.messages.request_fields import INT64_MAX, INT64_MIN

#: Only a body with a digit run this long can hold an integer over 64 bits; others are not walked.
_LONG_DIGITS = re.compile(rb"[0-9]{19}")


async def read_json(request: Request) -> object:
    """The decoded body, or `RequestRejected` (400) that says what is wrong with it."""
    given = request.headers.get("content-type", "")
    media_type, _, parameters = given.partition(";")
    if media_type.strip().lower() != "application/json":
        raise RequestRejected(f"the content type must be application/json, got {given!r}")
    charset = re.search(r'charset\s*=\s*"?([\w-]+)', parameters, re.IGNORECASE)
    if charset and charset[1].lower() not in ("utf-8", "utf8", "us-ascii"):
        raise RequestRejected(f"the charset must be utf-8, got {charset[1]!r}")
    return decode_json(await read_body(request))


async def read_body(request: Request) -> bytes:
    """The bytes; a client that hangs up while it sends them is no failure of the server's."""
    try:
        return await request.body()
    except ClientDisconnect as error:
        raise RequestRejected("the client closed the connection before its body was complete", 499) from error


def decode_json(raw: bytes) -> object:
    """JSON bytes -> plain values."""
    try:
        body: object = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise RequestRejected(f"the body is not valid JSON (UTF-8, no NaN or Infinity): {error}") from error
    except RecursionError as error:
        raise RequestRejected("the body is nested too deeply") from error
    if _LONG_DIGITS.search(raw):
        _refuse_wide_integers(body, "")
    return body


def _refuse_wide_integers(value: object, path: str) -> None:
    if isinstance(value, dict):
        for key, part in value.items():
            _refuse_wide_integers(part, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for position, part in enumerate(value):
            _refuse_wide_integers(part, f"{path}[{position}]")
    elif isinstance(value, int) and not INT64_MIN <= value <= INT64_MAX:
        raise RequestRejected(
            f"{path or 'the body'}: integers must fit 64 bits, got one of {value.bit_length()} bits",
            param=re.split(r"[.\[]", path)[0] or None,
        )
