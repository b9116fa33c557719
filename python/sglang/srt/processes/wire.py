"""Owns the wires between the server process and its ranks: the two ends of each ZMQ pair.

Used by the request side (`open_wire`) and by a rank (`RankChannel`). It must not carry anything but the
messages of `io_struct`, in msgpack, and must not block on a send.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import zmq
import zmq.asyncio

from sglang.srt.managers.data_parallel_controller import DataParallelController
from sglang.srt.messages import io_struct
from sglang.srt.messages.channel import Channel
from sglang.srt.processes.arrivals import Arrivals
from sglang.srt.processes.sockets import SocketFolder
from sglang.srt.runtime_context import get_parallel

logger = logging.getLogger(__name__)

Read = TypeVar("Read")


def open_wire(folder: SocketFolder, leaders: Sequence[str], *, bind: str | None = None) -> Channel:
    """The wire to the leaders of the published layout, replica by replica. One leader needs no controller."""
    parallel = get_parallel()
    if len(leaders) != parallel.num_replicas:
        raise ValueError(f"leaders: one per replica, so {parallel.num_replicas}, got {len(leaders)}")
    channel = ServerChannel(folder, leaders, bind=bind)
    if len(leaders) == 1:
        return channel
    return DataParallelController(
        channel,
        replicas=len(leaders),
        attention_dp=parallel.attn_dp_size > 1,
        method=parallel.load_balance_method,
    )


class ServerChannel:
    """The server's end: sends to the leaders of all replicas, receives from all.

    It belongs to the event loop that awaits `recv`. `leaders` are their addresses, replica by replica:
    `ipc://` on this host, `tcp://` on another. `bind` is a `tcp://HOST:PORT` on which to receive as well, for
    leaders that cannot see this host's folder.
    """

    def __init__(
        self, folder: SocketFolder, leaders: Sequence[str] | None = None, *, bind: str | None = None
    ) -> None:
        addresses = [folder.rank_address(0)] if leaders is None else list(leaders)
        if not addresses:
            raise ValueError("leaders: at least one address is needed, got none")
        self._context = zmq.asyncio.Context()
        self._in = self._context.socket(zmq.PULL)
        self._in.setsockopt(zmq.RCVHWM, 0)
        self._strangers = None if bind is None else _StrangerLog(bind)
        # Plain sockets, because `send` must work in clean-up code that cannot await.
        self._out_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(self._context.underlying)
        self._outs: list[zmq.Socket[bytes]] = []
        # An Engine's user may abort from any thread; a socket serves one thread at a time.
        self._send_lock = threading.Lock()
        try:
            self._in.bind(folder.server_address)
            if bind is not None:
                _bind_tcp(self._in, bind)
            for address in addresses:
                out = self._out_context.socket(zmq.PUSH)
                self._outs.append(out)
                out.setsockopt(zmq.SNDHWM, 0)
                out.setsockopt(zmq.IPV6, "[" in address)
                out.connect(address)
        except BaseException:
            self.close(linger_ms=0)
            raise

    def send(self, message: io_struct.Message, leader: int = 0) -> None:
        """Queue one message for one leader; the queue has no limit, so this never waits on any thread."""
        with self._send_lock:
            self._outs[leader].send(io_struct.encode(message), zmq.NOBLOCK)

    async def recv(self) -> io_struct.Message:
        while True:
            message = _decode(await self._in.recv(), self._strangers, io_struct.decode)
            if message is not None:
                return message

    def close(self, *, linger_ms: int = 200) -> None:
        """Close all sockets; what is still queued (a shutdown) gets `linger_ms` to leave."""
        self._in.close(linger=0)
        for out in self._outs:
            out.close(linger=linger_ms)
        self._context.term()


class _StrangerLog:
    """Drops and counts what strangers send to an open port, so that none of them ends the engine."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._count = 0

    def drop(self, data: bytes) -> None:
        """Log the first, the tenth, the hundredth, so that a flood does not fill the log."""
        self._count += 1
        if str(self._count).strip("0") == "1":
            logger.warning(
                "dropped %d bytes received on %s that are no message of this engine (%d times so far); only "
                "its own machines should reach this port",
                len(data),
                self._address,
                self._count,
            )


def _decode(data: bytes, strangers: _StrangerLog | None, read: Callable[[bytes], Read]) -> Read | None:
    """One message as `read` gives it, or None of a stranger's bytes.

    Without `strangers` only we can write to the socket, so bytes that are no message are our own fault.
    """
    try:
        return read(data)
    except (ValueError, RecursionError):
        if strangers is None:
            raise
        strangers.drop(data)
        return None


def _bind_tcp(socket: zmq.asyncio.Socket | zmq.Socket[bytes], address: str) -> None:
    try:
        socket.setsockopt(zmq.IPV6, "[" in address)
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ValueError(
            f"cannot receive on {address}: {error.strerror}; another process may hold the port, "
            "or the host is none of this machine's addresses"
        ) from error


class RankChannel:
    """A rank's end, used by the scheduler loop; only `wait` waits."""

    def __init__(self, *, listen: str, server: str) -> None:
        self._context = zmq.Context()
        self._in = self._context.socket(zmq.PULL)
        self._in.setsockopt(zmq.RCVHWM, 0)
        _bind_tcp(self._in, listen) if listen.startswith("tcp:") else self._in.bind(listen)
        #: Where it listens; a port left open (`tcp://HOST:*`) has a number now.
        self.address: str = self._in.getsockopt_string(zmq.LAST_ENDPOINT)
        strangers = _StrangerLog(self.address) if listen.startswith("tcp:") else None
        self._arrivals = Arrivals(
            lambda data: _decode(data, strangers, io_struct.decode),
            lambda data: _decode(data, strangers, io_struct.decode_head),
        )
        self._out = self._context.socket(zmq.PUSH)
        self._out.setsockopt(zmq.SNDHWM, 0)
        self._out.setsockopt(zmq.IPV6, "[" in server)
        self._out.connect(server)

    def recv_all(self, most: int | None = None) -> list[io_struct.Message]:
        """What has arrived, in order, at most so many messages; never waits.

        Of a crowd requests stay here. What is no request goes past them, with those that an abort names.
        """
        return self._arrivals.take(iter(self._receive, None), most)

    def _receive(self) -> bytes | None:
        # Asked first: an exception in each step of a decode costs more than the question.
        events = self._in.getsockopt(zmq.EVENTS)
        assert isinstance(events, int)
        return self._in.recv(zmq.NOBLOCK) if events & zmq.POLLIN else None

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is something to hand out, at most `timeout_s` seconds."""
        return self._arrivals.has_waiting or bool(self._in.poll(int(timeout_s * 1000)))

    def send(self, message: io_struct.Message) -> None:
        self._out.send(io_struct.encode(message), zmq.NOBLOCK)

    def close(self, *, linger_ms: int = 200) -> None:
        self._in.close(linger=0)
        self._out.close(linger=linger_ms)
        self._context.term()
