"""Who records the indices that sparse attention chose. Capturing arrives with sparse attention.

Read by attention layers. The capturer in force lives in the context's resources; None records nothing.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_resources

__all__ = ["get_global_indexer_capturer", "set_global_indexer_capturer"]


def get_global_indexer_capturer() -> Any | None:
    return get_resources().indexer_capturer


def set_global_indexer_capturer(capturer: Any) -> None:
    get_resources().indexer_capturer = capturer
