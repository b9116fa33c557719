"""A burst of streamed completions against an OpenAI server, timed with as little work as possible.

Owns the request and the reading of its stream. The client shares its cores with the servers, so it only notes
when bytes come and parses them after the burst. Read by `openai_side`. It must not know any server.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from peers.side import Answer

Arrivals = list[tuple[float, bytes]]


def answer_burst(
    port: int, bodies: Sequence[Mapping[str, Any]], at_once: int, patience_s: float
) -> list[Answer]:
    """Send all bodies to `/v1/completions`, never more than `at_once` under way."""
    return asyncio.run(asyncio.wait_for(_burst(port, bodies, at_once), patience_s))


async def _burst(port: int, bodies: Sequence[Mapping[str, Any]], at_once: int) -> list[Answer]:
    turnstile = asyncio.Semaphore(at_once)
    begin = time.perf_counter()

    async def one(body: Mapping[str, Any]) -> tuple[float, Arrivals]:
        async with turnstile:
            sent = time.perf_counter() - begin
            return sent, await _stream(port, body, begin)

    streams = await asyncio.gather(*(one(body) for body in bodies))
    return [read_answer(sent, arrivals) for sent, arrivals in streams]


async def _stream(port: int, body: Mapping[str, Any], begin: float) -> Arrivals:
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + content)
        status = await reader.readline()
        headers = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b" 200 " not in status:
            refusal = await reader.read(400)
            raise RuntimeError(f"the server answered {status.decode().strip()}: {refusal.decode()}")
        arrivals: Arrivals = []
        if b"transfer-encoding: chunked" not in headers:
            while data := await reader.read(65536):
                arrivals.append((time.perf_counter() - begin, data))
            return arrivals
        while size := int(await reader.readline(), 16):
            data = await reader.readexactly(size + 2)
            arrivals.append((time.perf_counter() - begin, data[:-2]))
        return arrivals
    finally:
        writer.close()


def read_answer(sent: float, arrivals: Arrivals) -> Answer:
    """Times of the first and last piece of text; tokens as the server's usage counts them, else pieces.

    An event may arrive in parts; its time is that of its end.
    """
    first = last = 0.0
    pieces, counted, rest = 0, None, b""
    for when, data in arrivals:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            event = _event(line)
            if event is None:
                continue
            usage = event.get("usage")
            if usage:
                counted = usage["completion_tokens"]
            # A piece without text may be half a character; one without a finish reason opens a stream.
            if any(choice.get("text") for choice in event.get("choices") or []):
                first, last, pieces = first or when, when, pieces + 1
    if not arrivals:
        raise RuntimeError("the server ended the stream before it sent anything")
    end = arrivals[-1][0]
    return Answer(sent, first or end, last or end, pieces if counted is None else counted)


def _event(line: bytes) -> dict[str, Any] | None:
    data = line.strip().removeprefix(b"data:").strip()
    if not data.startswith(b"{"):
        return None
    event: dict[str, Any] = json.loads(data)
    if "error" in event:
        raise RuntimeError(f"the server reports an error in the stream: {event['error']}")
    return event
