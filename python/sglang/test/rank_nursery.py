"""Owns a process that has imported everything a rank needs, and from which ranks are forked in milliseconds.

Read by `run_ranks` and the layout lab. A rank has its own argument, folder and standard streams, like one
started with `python -m`. The nursery must not start a thread, whose locks a fork would copy, nor run
anything of a rank itself. It must not use `multiprocessing`.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from typing import IO, Any

from sglang.test.waiting import holds_within

#: What ranks import before they do anything else: torch, and the product behind a worker and a scheduler.
_IMPORTED = ("pytest", "torch.distributed", "sglang.test.lab.rank", "sglang.test.worker_driver")
_MESSAGE_SIZE = 1 << 18
#: Differs in every test, and no rank reads it.
_OF_THE_TEST = "PYTEST_CURRENT_TEST"


class Rank:
    """A rank process; of its ends of pipes those are here that were asked for."""

    def __init__(
        self, nursery: RankNursery, pid: int, stdin: IO[bytes] | None, stdout: IO[bytes] | None
    ) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self.returncode: int | None = None
        self._nursery = nursery

    def poll(self) -> int | None:
        """Its exit code once it has ended, minus a signal's number where one ended it."""
        if self.returncode is None:
            self.returncode = self._nursery.code_of(self.pid)
        return self.returncode

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within this time."""
        return holds_within(timeout_s, lambda: self.poll() is not None)

    def kill(self) -> None:
        """End it at once; its number cannot be another's, because nobody has collected it yet."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class RankNursery:
    """Starts ranks with the environment that it was made in."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sglang.test.rank_nursery", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def start(self, module: str, argument: str, *, log: IO[bytes], pipes: bool = False) -> Rank:
        """Run `main()` of a module, with one argument, in a fresh process; what it prints goes to `log`.

        With `pipes` its standard input and output are pipes, and only errors go to the log.
        """
        stdin = stdout = None
        streams = [os.open(os.devnull, os.O_RDONLY), os.dup(log.fileno()), os.dup(log.fileno())]
        if pipes:
            os.close(streams[0])
            os.close(streams[1])
            streams[0], stdin = _pipe_of(0)
            streams[1], stdout = _pipe_of(1)
        order = {"module": module, "argument": argument, "folder": os.getcwd()}
        try:
            answer = self._ask(order, streams)
        finally:
            for stream in streams:
                os.close(stream)
        return Rank(self, answer["pid"], stdin, stdout)

    def code_of(self, pid: int) -> int | None:
        """The exit code of a rank, asked for until there is one; None while it runs."""
        code: int | None = self._ask({"pid": pid}, [])["code"]
        return code

    def close(self) -> None:
        """End the nursery; ranks that still run are nobody's any more."""
        self._socket.close()
        self._process.wait()

    def _ask(self, order: dict[str, Any], streams: list[int]) -> dict[str, Any]:
        socket.send_fds(self._socket, [json.dumps(order).encode()], streams)
        answer = self._socket.recv(_MESSAGE_SIZE)
        if not answer:
            raise RuntimeError(f"the nursery of ranks has ended with code {self._process.wait()}")
        found: dict[str, Any] = json.loads(answer)
        if "error" in found:
            raise RuntimeError(found["error"])
        return found


_nurseries: dict[str, RankNursery] = {}


def nursery() -> RankNursery:
    """The nursery for the environment as it is now: what is imported may have read it."""
    found = json.dumps({name: value for name, value in os.environ.items() if name != _OF_THE_TEST})
    if found not in _nurseries:
        _nurseries[found] = RankNursery()
        atexit.register(_nurseries[found].close)
    return _nurseries[found]


def _pipe_of(stream: int) -> tuple[int, IO[bytes]]:
    """A rank's end of a pipe for its stream 0 or 1, and the other end."""
    read, write = os.pipe()
    theirs, ours = (read, write) if stream == 0 else (write, read)
    return theirs, os.fdopen(ours, "wb" if stream == 0 else "rb", buffering=0)


def _serve(asked: socket.socket) -> dict[str, Any] | None:
    """Take orders until nobody is left who gives any; in each forked rank, the order that made it."""
    while True:
        message, streams, _, _ = socket.recv_fds(asked, _MESSAGE_SIZE, 3)
        if not message:
            return None
        order: dict[str, Any] = json.loads(message)
        if "pid" in order:
            pid, status = os.waitpid(order["pid"], os.WNOHANG)
            answer: dict[str, Any] = {"code": os.waitstatus_to_exitcode(status) if pid else None}
        elif (threads := len(os.listdir("/proc/self/task"))) > 1:
            answer = {"error": f"the nursery of ranks has {threads} threads, and a fork copies one"}
        else:
            pid = os.fork()
            if pid == 0:
                for stream, end in enumerate(streams):
                    os.dup2(end, stream)
                    os.close(end)
                return order
            answer = {"pid": pid}
        for end in streams:
            os.close(end)
        asked.send(json.dumps(answer).encode())


def main() -> int:
    for module in _IMPORTED:
        importlib.import_module(module)
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        order = _serve(asked)
    if order is None:
        return 0
    os.chdir(order["folder"])
    sys.argv[:] = [order["module"], order["argument"]]
    code: int = importlib.import_module(order["module"]).main()
    return code


if __name__ == "__main__":
    sys.exit(main())
