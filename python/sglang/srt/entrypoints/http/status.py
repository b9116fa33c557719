"""Owns the phase of the server, and what health, readiness and the start gate answer by it.

Written by the server's main, read by routes and gates. It must not act on what it knows.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from sglang.srt.managers.tokenizer_manager import TokenizerManager

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine_core import EngineCore


class Phase(enum.Enum):
    STARTING = "starting"
    UP = "up"
    DRAINING = "draining"
    DEAD = "dead"


class ServerStatus:
    """One server's phase and engine; a phase never goes back."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.phase = Phase.STARTING
        self.cause: str | None = None

    @property
    def manager(self) -> TokenizerManager:
        manager = self.core.manager
        if manager is None:
            raise RuntimeError("the engine is not connected yet")
        return manager

    def become(self, phase: Phase, cause: str | None = None) -> None:
        order = list(Phase)
        if order.index(phase) > order.index(self.phase):
            self.phase = phase
            self.cause = cause or self.cause

    def why_unhealthy(self) -> str | None:
        """None only after the self-test, before any drain, and while the loops of the ranks run."""
        match self.phase:
            case Phase.STARTING:
                return "the server is starting: weights are loading or the self-test is running"
            case Phase.DRAINING:
                return "the server is shutting down; requests under way are being finished"
            case Phase.DEAD:
                return self.cause or "the engine has died"
            case Phase.UP:
                return self.core.why_unhealthy()

    def why_closed(self) -> str | None:
        """Why no route but health may be served now; a draining server still answers what is under way."""
        return self.why_unhealthy() if self.phase in (Phase.STARTING, Phase.DEAD) else None
