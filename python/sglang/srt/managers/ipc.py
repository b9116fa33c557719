"""Owns the wires between the server process and its ranks: the socket folder and the two ends of each ZMQ
pair.

Used by whoever starts ranks (`SocketFolder`), by the request side (`ServerChannel`) and by a rank
(`RankChannel`). Every message is one of `messages/io_struct.py`, in msgpack; it must not carry anything else
and never blocks on a send.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import pathlib
import shutil
import tempfile
import threading
from collections.abc import Sequence

import zmq
import zmq.asyncio

from sglang.srt.configs.utf8 import check_utf8
from sglang.srt.environ import envs
from sglang.srt.messages import io_struct

logger = logging.getLogger(__name__)

_PREFIX = "sglang-"
_LOCK = "owner.lock"
# sun_path of a unix socket holds 108 bytes with its closing zero.
_MAX_SOCKET_PATH = 107
_folder_numbers = itertools.count()


class SocketFolder:
    """A 0700 folder named by pid that holds the sockets and heartbeats of one engine.

    The owner holds a lock inside it for as long as it lives, so a later start can tell a folder in use from
    one whose owner was killed, also between containers that share a temporary folder but not their pids.
    """

    def __init__(self) -> None:
        root = _root()
        sweep_dead_folders(root)
        self.path = root / f"{_PREFIX}{os.getpid()}-{next(_folder_numbers)}-{os.urandom(3).hex()}"
        try:
            self.path.mkdir(mode=0o700)
        except OSError as error:
            raise ValueError(
                f"no folder for sockets can be made in {root} ({error.strerror}); set SGLANG_RUNTIME_DIR to "
                "a folder that this user may write to"
            ) from error
        self._lock_fd: int | None = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX)

    @property
    def server_address(self) -> str:
        """Where ranks send."""
        return _address(self.path, "server")

    def rank_address(self, world_rank: int) -> str:
        """Where one rank listens."""
        return _address(self.path, f"rank{world_rank}")

    def heartbeat_path(self, world_rank: int) -> pathlib.Path:
        return self.path / f"heartbeat{world_rank}"

    def remove(self) -> None:
        """Take it away with everything in it; safe to call twice."""
        remove_socket_folder(self.path)
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def remove_socket_folder(path: pathlib.Path) -> None:
    """Remove one folder (owner or survivor); someone else may be doing the same."""
    shutil.rmtree(path, ignore_errors=True)


def sweep_dead_folders(root: pathlib.Path | None = None) -> list[pathlib.Path]:
    """Remove folders of ours whose owner is gone; returns what was removed."""
    removed = []
    for path in sorted((root or _root()).glob(f"{_PREFIX}[0-9]*-*")):
        if _is_ours(path) and not _owner_lives(path):
            logger.debug("removing %s: its owner is gone", path)
            remove_socket_folder(path)
            removed.append(path)
    return removed


def _root() -> pathlib.Path:
    stated = envs.SGLANG_RUNTIME_DIR.get()
    try:
        # Absolute: ranks may work in another folder.
        root = pathlib.Path(stated or tempfile.gettempdir()).absolute()
    except OSError as error:
        raise ValueError(
            f"there is no folder for sockets ({error.strerror}); set SGLANG_RUNTIME_DIR to a folder that "
            "this user may write to"
        ) from error
    if not root.is_dir():
        raise ValueError(f"SGLANG_RUNTIME_DIR={stated}: is not a folder; create it or leave the variable out")
    check_utf8(root, "the folder for sockets (SGLANG_RUNTIME_DIR, else TMPDIR)")
    return root


def _address(folder: pathlib.Path, name: str) -> str:
    path = str(folder / name)
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        raise ValueError(
            f"the socket path {path} is longer than {_MAX_SOCKET_PATH} bytes; "
            "set SGLANG_RUNTIME_DIR to a shorter folder"
        )
    return f"ipc://{path}"


def _is_ours(path: pathlib.Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return path.is_dir() and not path.is_symlink() and status.st_uid == os.getuid()


def _owner_lives(path: pathlib.Path) -> bool:
    pid = path.name.removeprefix(_PREFIX).split("-", 1)[0]
    try:
        fd = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        # Born a moment ago and not locked yet, or half removed: the pid decides.
        return pid.isdecimal() and pathlib.Path(f"/proc/{pid}").exists()
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


class ServerChannel:
    """The server's end: sends to the leaders of all replicas, receives from all. Lives on the event loop
    that awaits `recv`.

    `leaders` are their addresses, replica by replica: `ipc://` on this host, `tcp://` on another. `bind` is a
    `tcp://HOST:PORT` on which to receive as well, for leaders that cannot see this host's folder.
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
        self._junk = None if bind is None else _Junk(bind)
        # Plain sockets: `send` must work in clean-up code that cannot await.
        self._out_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(self._context.underlying)
        self._outs: list[zmq.Socket[bytes]] = []
        # An Engine's user may abort from any thread; a socket bears one thread at a time.
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
        """Queue one message for one leader; there is no limit on the queue, so this never waits. Any thread
        may call it.
        """
        with self._send_lock:
            self._outs[leader].send(io_struct.encode(message), zmq.NOBLOCK)

    async def recv(self) -> io_struct.Message:
        while True:
            message = _message(await self._in.recv(), self._junk)
            if message is not None:
                return message

    def close(self, *, linger_ms: int = 200) -> None:
        """Close all sockets; what is still queued (a shutdown) gets `linger_ms` to leave."""
        self._in.close(linger=0)
        for out in self._outs:
            out.close(linger=linger_ms)
        self._context.term()


class _Junk:
    """What strangers have sent to a port that everybody can reach: dropped and counted, so that no stray
    client ends the engine.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._count = 0

    def drop(self, data: bytes) -> None:
        """Log the first, the tenth, the hundredth: a flood must not fill the log."""
        self._count += 1
        if str(self._count).strip("0") == "1":
            logger.warning(
                "dropped %d bytes received on %s that are no message of this engine (%d times so far); only "
                "its own machines should reach this port",
                len(data),
                self._address,
                self._count,
            )


def _message(data: bytes, junk: _Junk | None) -> io_struct.Message | None:
    """One message. In the socket folder (no `junk`) only we write, and nonsense is our own fault: it
    raises.
    """
    try:
        return io_struct.decode(data)
    except (ValueError, RecursionError):
        if junk is None:
            raise
        junk.drop(data)
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
    """A rank's end, used by the scheduler loop: non-blocking receive, bounded wait, send."""

    def __init__(self, *, listen: str, server: str) -> None:
        self._context = zmq.Context()
        self._in = self._context.socket(zmq.PULL)
        self._in.setsockopt(zmq.RCVHWM, 0)
        _bind_tcp(self._in, listen) if listen.startswith("tcp:") else self._in.bind(listen)
        #: Where it listens; a port left open (`tcp://HOST:*`) has a number now.
        self.address: str = self._in.getsockopt_string(zmq.LAST_ENDPOINT)
        self._junk = _Junk(self.address) if listen.startswith("tcp:") else None
        self._out = self._context.socket(zmq.PUSH)
        self._out.setsockopt(zmq.SNDHWM, 0)
        self._out.setsockopt(zmq.IPV6, "[" in server)
        self._out.connect(server)

    def recv_all(self) -> list[io_struct.Message]:
        """Everything that has arrived, in order; never waits."""
        messages: list[io_struct.Message] = []
        while True:
            try:
                data = self._in.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            message = _message(data, self._junk)
            if message is not None:
                messages.append(message)

    def wait(self, timeout_s: float) -> bool:
        """Wait until something can be received, at most `timeout_s` seconds."""
        return bool(self._in.poll(int(timeout_s * 1000)))

    def send(self, message: io_struct.Message) -> None:
        self._out.send(io_struct.encode(message), zmq.NOBLOCK)

    def close(self, *, linger_ms: int = 200) -> None:
        self._in.close(linger=0)
        self._out.close(linger=linger_ms)
        self._context.term()
