"""Owns which class serves which draft architecture.

Read when a draft is loaded. The names must be those that a draft's config may have; a difference is an error
at import.
"""

from __future__ import annotations

from sglang.srt.configs.draft_config import DRAFT_ARCHITECTURES
from sglang.srt.models.drafts.llama_eagle import LlamaForCausalLMEagle
from sglang.srt.models.drafts.llama_eagle3 import LlamaForCausalLMEagle3

DraftModel = LlamaForCausalLMEagle | LlamaForCausalLMEagle3

DRAFT_MODELS: dict[str, type[LlamaForCausalLMEagle] | type[LlamaForCausalLMEagle3]] = {
    "LlamaForCausalLMEagle": LlamaForCausalLMEagle,
    "LlamaForCausalLMEagle3": LlamaForCausalLMEagle3,
}

if set(DRAFT_MODELS) != set(DRAFT_ARCHITECTURES):
    raise ImportError(
        f"draft models {sorted(DRAFT_MODELS)} differ from what a config names: {sorted(DRAFT_ARCHITECTURES)}"
    )
