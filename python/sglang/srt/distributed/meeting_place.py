"""Owns where ranks meet: the address as written, the port held for it, the interface that leads there.

Read by ``rendezvous``. Must not open a store or know ranks.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil

__all__ = ["Meeting", "hold_port", "interface_towards", "parse_meeting"]


@dataclass(frozen=True)
class Meeting:
    """A file on this machine, or a port of a machine."""

    path: str | None = None
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        if self.path is not None:
            return f"file:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_meeting(text: str) -> Meeting:
    """``file:PATH`` or ``tcp://HOST:PORT``; an IPv6 address stands in brackets."""
    if text.startswith("file:") and len(text) > len("file:"):
        return Meeting(path=text.removeprefix("file:"))
    parts = urlsplit(text)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if parts.scheme != "tcp" or not host or not port:
        raise ValueError(f"ranks meet at file:PATH or tcp://HOST:PORT with a port in 1..65535, got {text!r}")
    return Meeting(host=host, port=port)


def hold_port(meeting: Meeting) -> int:
    """A listening socket on that address only (never on all interfaces); the caller owns the descriptor."""
    kind, _, _, _, address = _resolve(meeting)[0]
    listener = socket.socket(kind, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, _why_not(meeting, error)) from None
    return listener.detach()


def _why_not(meeting: Meeting, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"the ranks cannot meet at {meeting}: the port is in use. State a free one with --dist-init-addr "
            "or --nccl-port"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"the ranks cannot meet at {meeting}: that is no address of this machine, and --dist-init-addr "
            "(--nccl-port for the port alone) must name the machine of --node-rank 0"
        )
    return (
        f"the ranks cannot meet at {meeting}: {os.strerror(error.errno or 0)}. State another place with "
        "--dist-init-addr or --nccl-port"
    )


def interface_towards(meeting: Meeting) -> str:
    """The interface whose address this machine uses to reach the place; loopback where the place is on it.

    Without an interface gloo looks its own host name up, which is slow, fails, or finds an address that other
    machines cannot reach.
    """
    if meeting.path is not None:
        return "lo"
    kind, _, _, _, address = _resolve(meeting)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # a datagram socket only picks a route: nothing is sent
        own = probe.getsockname()[0].partition("%")[0]
    if ipaddress.ip_address(own).is_loopback:
        return "lo"
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == own for entry in addresses):
            return name
    raise ValueError(
        f"no network interface of this machine has the address {own}, by which {meeting} is reached; set "
        "GLOO_SOCKET_IFNAME to the interface that leads there"
    )


def _resolve(meeting: Meeting) -> list[tuple[socket.AddressFamily, int, int, str, tuple[str, int]]]:
    try:
        found = socket.getaddrinfo(meeting.host, meeting.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f"--dist-init-addr {meeting}: the host name is not known here ({error})") from None
    return found  # type: ignore[return-value]  # address is wider for IPv6; only passed on
