"""Owns the token counts of an answer: what `usage` says.

Read by both OpenAI routes, in streams and whole answers. It must not estimate: the engine counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.messages.generate_output import MetaInfo


def usage_of(
    metas: Sequence[MetaInfo], *, samples_per_prompt: int = 1, cache_report: bool = False
) -> dict[str, object]:
    """`usage` over all choices. `metas` are their `meta_info`, ordered prompt index * n + sample.

    A prompt is counted once however many samples it has; its cached part is what the first sample found,
    because the later samples always find the prompt that the first one computed.
    """
    first_samples = metas[::samples_per_prompt]
    prompt_tokens = sum(meta["prompt_tokens"] for meta in first_samples)
    completion_tokens = sum(meta["completion_tokens"] for meta in metas)
    usage: dict[str, object] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "reasoning_tokens": sum(meta.get("reasoning_tokens", 0) for meta in metas),
    }
    if cache_report:
        cached = sum(meta["cached_tokens"] for meta in first_samples)
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return usage
