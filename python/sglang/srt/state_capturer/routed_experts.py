"""Who records the experts that tokens were routed to. Capturing comes with expert models.

Read by expert layers. The capturer is one of the context's resources; None records nothing.
"""

from __future__ import annotations

from sglang.srt.runtime_context import get_resources

__all__ = ["get_global_experts_capturer", "set_global_experts_capturer"]


def get_global_experts_capturer() -> object:
    return get_resources().experts_capturer


def set_global_experts_capturer(capturer: object) -> None:
    get_resources().experts_capturer = capturer
