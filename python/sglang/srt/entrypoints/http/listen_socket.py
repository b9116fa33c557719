"""Owns the server's address: its listening socket, and how the address is written in a URL.

Used by the server's main, first of all: a port in use is refused before anything is loaded. It must not
import the web framework.
"""

from __future__ import annotations

import errno
import ipaddress
import socket

from sglang.srt.distributed.meeting_place import bracketed

#: Connections that may wait for the event loop; a burst of a thousand clients must not be refused.
BACKLOG = 2048
_CURES = {
    errno.EADDRINUSE: "choose another --port, or end what uses it",
    errno.EACCES: "choose another --port: low ones need more rights",
    errno.EADDRNOTAVAIL: "--host must be an address of this machine, or 0.0.0.0 for all of them",
}


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on `host:port`; `ValueError` with the cure when the address cannot be taken."""
    plain = host.strip("[]")
    try:
        found = socket.getaddrinfo(plain or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"--host {host!r} is neither an address nor a name that is known here "
            f"({getattr(error, 'strerror', None) or error})"
        ) from error
    # A name may stand for IPv4 and IPv6 addresses; most clients try IPv4.
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        # Listening at once, because two sockets that only bind can share an address: the second start would
        # then fail after it has loaded its weights.
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        cure = _CURES.get(error.errno or 0, "choose another --host or --port")
        raise ValueError(
            f"cannot listen on {bracketed(plain)}:{port} ({error.strerror or error}); {cure}"
        ) from error
    return sock


def url_of(host: str, port: int, *, tls: bool = False) -> str:
    """A URL that a client on this machine can use, whatever `--host` says."""
    plain = host.strip("[]")
    try:
        address = ipaddress.ip_address(plain or "0.0.0.0")
    except ValueError:
        pass  # a name
    else:
        if address.is_unspecified:  # every address of this machine
            plain = "127.0.0.1" if address.version == 4 else "::1"
    # The % before a zone (fe80::1%eth0) is one of the characters that a URL escapes.
    return f"{'https' if tls else 'http'}://{bracketed(plain).replace('%', '%25')}:{port}"
