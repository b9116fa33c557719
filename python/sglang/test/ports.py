"""Owns ports of this host for tests: held from the moment they are chosen until their process listens.

Read by the server lane and by tests of sockets. No other process may get a held port in between, and the
holder itself must not listen on it.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

HOST = "127.0.0.1"


@contextlib.contextmanager
def held_ports(count: int = 1) -> Iterator[int]:
    """The first of `count` neighbouring ports that no other process is given for the length of the block.

    A socket that is bound and does not listen reserves its port, and still lets in a listener that sets
    `SO_REUSEADDR`, as every listener of the product does.
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
    """Listen on a held port, as a stranger would."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((HOST, port))
    listener.listen()
    return listener


def port_is_free(port: int) -> bool:
    """Whether nobody listens on it."""
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) != 0
