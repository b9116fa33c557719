"""Owns ports of this host for tests: held from the moment they are chosen, so that neither another run of the
suite nor somebody's client gets one before the process that is to listen on it.

Read by the server lane and by tests of sockets. A port that is only held must not be listened on.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

HOST = "127.0.0.1"


@contextlib.contextmanager
def held_ports(count: int = 1) -> Iterator[int]:
    """The first of `count` neighbouring ports that nobody else is given for the length of the block.

    A socket that is bound and does not listen keeps its port from being handed to somebody else, and lets a
    listener in that sets `SO_REUSEADDR`, as every listener of the product does.
    """
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            first = 0
            for number in range(count):
                holder = stack.enter_context(socket.socket())
                holder.bind((HOST, first + number if number else 0))
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                first = first or holder.getsockname()[1]
            held = stack.pop_all()
            break
    with held:
        yield first


def listen_on(port: int) -> socket.socket:
    """Take a held port for good: the listener of a stranger."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((HOST, port))
    listener.listen()
    return listener


def port_is_free(port: int) -> bool:
    """Whether nobody listens on it."""
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) != 0
