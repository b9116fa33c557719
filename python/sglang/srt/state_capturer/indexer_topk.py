"""Who records the indices that sparse attention chose. Capturing comes with sparse attention.

Read by attention layers. The capturer is one of the context's resources; None records nothing.
"""

from __future__ import annotations

from sglang.srt.runtime_context import get_resources

__all__ = ["get_global_indexer_capturer", "set_global_indexer_capturer"]


def get_global_indexer_capturer() -> object:
    return get_resources().indexer_capturer


def set_global_indexer_capturer(capturer: object) -> None:
    get_resources().indexer_capturer = capturer
