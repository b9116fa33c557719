"""Owns `--incremental-streaming-output`: a native stream whose events carry what is new instead of everything
so far.

Used by the native route and the Engine. It must not change anything but the lists and the text that grow.
"""

from __future__ import annotations

from typing import Any

#: Lists in `meta_info` that grow with the output; the ones about the prompt are sent once and stay whole.
_GROWING = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")


class IncrementalView:
    """Remembers, for each sample of one stream, how much was handed out."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, str], int] = {}

    def news(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The same answer with only the new part of what grows."""
        index = answer.get("index", 0)
        meta = dict(answer["meta_info"])
        for name in _GROWING:
            if name in meta:
                meta[name] = self._tail(index, name, meta[name])
        return {
            **answer,
            "text": self._tail(index, "text", answer["text"]),
            "output_ids": self._tail(index, "output_ids", answer["output_ids"]),
            "meta_info": meta,
        }

    def _tail(self, index: int, name: str, value: Any) -> Any:
        seen = self._seen.get((index, name), 0)
        self._seen[index, name] = len(value)
        return value[seen:]
