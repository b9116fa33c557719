"""Owns the one error that a collective ends in when the ranks could not finish it together, and what marks
such a failure while a group is made.

Raised by `GroupCoordinator`; read by the rank process, which reports it as the consequence of another rank's
failure. A caller's own mistake is a `ValueError` instead, before anything is sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

__all__ = ["CollectiveError", "TransportError", "transport_errors"]


class CollectiveError(RuntimeError):
    """A peer left, stopped or came too late. The communicator is of no further use afterwards."""

    def __init__(
        self,
        operation: str,
        *,
        group_name: str,
        ranks: Sequence[int],
        rank: int,
        timeout_s: float | None,
        cause: str,
    ) -> None:
        self.operation = operation
        self.group_name = group_name
        self.ranks = list(ranks)
        self.rank = rank
        limit = "" if timeout_s is None else f" (now {timeout_s:g} s)"
        super().__init__(
            f"{operation} over group '{group_name}' of world ranks {self.ranks} failed on world rank {rank}: "
            f"{_shortened(cause)}. A rank of this group died, hangs or takes other steps than the rest; if "
            f"all are alive and merely slow, raise --dist-timeout{limit}"
        )


class TransportError(RuntimeError):
    """A transport failed while a communicator was made. The group that it is made for says whose it was."""


@contextmanager
def transport_errors() -> Iterator[None]:
    """Mark what a transport raises in the block: torch's transports raise the same type as anybody else.

    What fails outside such a block is this rank's own failure and no lost peer.
    """
    try:
        yield
    except RuntimeError as error:
        raise TransportError(str(error)) from error


def _shortened(text: str) -> str:
    """The first sentence of a transport's error, without the source position before it."""
    said = re.sub(r"^\[[^\]]*\.\w+:\d+\]\s*", "", text.strip()).splitlines()
    return said[0].split(". ")[0].rstrip(". ") if said else "no reason given"
