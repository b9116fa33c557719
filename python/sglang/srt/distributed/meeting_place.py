"""Owns where ranks meet: how the place is written, listened at, and reached from this machine.

Read by `rendezvous` and, before ranks exist, by the server. Must not open a store, know ranks or load torch.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from sglang.srt.arg_groups.hooks.parallel import split_address

__all__ = [
    "Meeting",
    "address_towards",
    "bracketed",
    "interface_towards",
    "listen_at",
    "look_up",
    "parse_meeting",
]


@dataclass(frozen=True)
class Meeting:
    """A file on this machine, or a port of a machine."""

    path: str | None = None
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        if self.path is not None:
            return f"file:{self.path}"
        return f"{bracketed(self.host)}:{self.port}"


def parse_meeting(text: str) -> Meeting:
    """`file:PATH` or `tcp://HOST:PORT`; an IPv6 address stands in brackets."""
    if text.startswith("file:") and len(text) > len("file:"):
        return Meeting(path=text.removeprefix("file:"))
    if text.startswith("tcp://"):
        with suppress(ValueError):
            host, port = split_address(text.removeprefix("tcp://"))
            return Meeting(host=host, port=port)
    raise ValueError(f"ranks meet at file:PATH or tcp://HOST:PORT with a port in 1..65535, got {text!r}")


def bracketed(host: str) -> str:
    """A host as it stands before a port."""
    return f"[{host}]" if ":" in host else host


def listen_at(meeting: Meeting) -> int:
    """A listening socket on that address only (never on all interfaces); the caller owns the descriptor."""
    kind, address = look_up(meeting.host, meeting.port)
    listener = socket.socket(kind, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, _listen_error(meeting, error)) from None
    return listener.detach()


def _listen_error(meeting: Meeting, error: OSError) -> str:
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
    """The interface by which this machine reaches the place; loopback when the place is on this machine.

    Without a stated interface gloo looks up its own host name, which is slow, fails, or finds an address that
    other machines cannot reach.
    """
    if meeting.path is not None:
        return "lo"
    own = address_towards(meeting.host, meeting.port).partition("%")[0]
    if ipaddress.ip_address(own).is_loopback:
        return "lo"
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == own for entry in addresses):
            return name
    raise ValueError(
        f"no network interface of this machine has the address {own}, by which {meeting} is reached; set "
        "GLOO_SOCKET_IFNAME to the interface that leads there"
    )


def address_towards(host: str, port: int) -> str:
    """The address by which this machine reaches a host: a datagram socket picks a route and sends nothing."""
    kind, there = look_up(host, port)
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(there)
        except OSError as error:
            raise ValueError(f"--dist-init-addr: no way leads to {host} ({error.strerror})") from error
        return str(probe.getsockname()[0])


def look_up(host: str, port: int | None = None) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """Family and socket address of a host, as this machine resolves it; an IPv6 address is longer."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ValueError(f"--dist-init-addr: the host {host} is not known here ({error.strerror})") from error
    return family, address
