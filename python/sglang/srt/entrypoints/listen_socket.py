"""Owns the server's listening socket: taken first, so that a port in use is said before anything is loaded.

Used by the server's main. It must stay light: it runs before the web framework is imported.
"""

from __future__ import annotations

import socket

#: Connections that may wait for the event loop; a burst of a thousand clients must not be refused.
BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on `host:port`; `ValueError` with the cure when the address cannot be taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host.strip("[]"), port))
        # Listening at once, because two sockets that only bind can share an address: the second start would
        # then fail after it has loaded its weights.
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ValueError(
            f"cannot listen on {host}:{port} ({error.strerror or error}); choose another --port, or end what "
            "uses it"
        ) from error
    return sock
