"""The words of the comparison: a prompt, the times of an answer, and a side that answers.

Owns what every side, ours or a peer, must be able to do. Read by the workloads and by each peer's file. It
must not know any peer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Prompt(NamedTuple):
    """The same prompt twice: as token ids, and as the text that they stand for."""

    ids: tuple[int, ...]
    text: str


class Answer(NamedTuple):
    """When an answer came, in seconds since the whole burst began, and how many tokens it had."""

    sent: float
    first: float
    last: float
    tokens: int

    @property
    def time_to_first(self) -> float:
        return self.first - self.sent

    @property
    def time_per_token(self) -> float:
        """Seconds between two tokens; 0 for a single one."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else 0.0


@dataclass(frozen=True)
class Label:
    """Who a side is. `form` is how it holds the weights: 4-bit, int8, bf16 or fp32.

    `speculates` sides take part in the row of repeated text alone. `at_most` is how many requests it can
    answer at once; rows with more are left out.
    """

    name: str
    form: str
    is_ours: bool = False
    speculates: bool = False
    at_most: int = 1024
    #: Bytes of weights that a decode step reads; 0 where nobody knows.
    weight_bytes: int = field(default=0, compare=False)


class Side(ABC):
    """A program that answers prompts greedily, ignoring the end-of-sequence token."""

    def __init__(self, label: Label) -> None:
        self.label = label

    @abstractmethod
    def start(self) -> float:
        """Start it and wait until it answers; seconds from the start of the command to ready."""

    @abstractmethod
    def answer(self, prompts: Sequence[Prompt], new_tokens: int, at_once: int) -> list[Answer]:
        """Answer all prompts, never more than `at_once` under way."""

    @abstractmethod
    def memory_bytes(self) -> int:
        """Resident memory of its process tree."""

    @abstractmethod
    def stop(self) -> None:
        """End it and everything it started; stopping twice, or what never started, is fine."""


@dataclass(frozen=True)
class Found:
    """What a peer's file found: sides to compare, and a line for each part that is missing."""

    sides: list[Side] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
