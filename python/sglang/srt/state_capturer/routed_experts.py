"""Who records the experts that tokens were routed to. Capturing arrives with expert models.

Read by expert layers. The capturer in force lives in the context's resources; None records nothing.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_resources

__all__ = ["get_global_experts_capturer", "set_global_experts_capturer"]


def get_global_experts_capturer() -> Any | None:
    return get_resources().experts_capturer


def set_global_experts_capturer(capturer: Any) -> None:
    get_resources().experts_capturer = capturer
