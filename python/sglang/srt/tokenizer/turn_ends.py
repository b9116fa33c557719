"""Tokens that end a turn of a chat, even where the metadata of the model does not name them.

Owns the list of their texts, with the reason for each, and which of them count for one template. Read by the
tokenizer facade. It must not decide what ends a plain completion: that is in the metadata alone.
"""

from __future__ import annotations

#: The text of a token -> who writes it and what it ends.
TURN_ENDS = {
    "<|im_end|>": "ChatML (Qwen, SmolLM, Yi, InternLM): every message",
    "<|eot_id|>": "Llama 3: every message",
    "<|eom_id|>": "Llama 3: a message that calls a tool and waits for its answer",
    "<|eot|>": "Llama 4: every message",
    "<|eom|>": "Llama 4: a message that calls a tool and waits for its answer",
    "<end_of_turn>": "Gemma: every message",
    "<|end|>": "Phi: every message",
    "<|return|>": "gpt-oss: the whole answer",
    "<|call|>": "gpt-oss: a call of a tool, which waits for its answer",
    "<|end_of_turn|>": "OpenChat: every message",
    "<|END_OF_TURN_TOKEN|>": "Command R: every message",
    "<|end_of_text|>": "Granite: every message; Llama 3: a document",
    "<end_of_utterance>": "Idefics, SmolVLM: every message",
    "[|endofturn|]": "EXAONE: every message",
    "<\uff5cend\u2581of\u2581sentence\uff5c>": "DeepSeek: the assistant's message",
    "<|endoftext|>": "GPT-2, Qwen, StableLM: a document, with some templates the assistant's message",
    "</s>": "Llama 2, Mistral, Zephyr: the assistant's message, a document",
}
#: A text of `TURN_ENDS` -> the token whose presence makes it the end of one of several messages in an answer:
#: gpt-oss thinks in one channel, ends it, and goes on with the next.
ENDS_A_PIECE = {"<|end|>": "<|channel|>"}


def turn_ends_in(written: str) -> list[str]:
    """The known ends among what a template writes."""
    return [end for end in TURN_ENDS if end in written and not _ends_a_piece(end, written)]


def _ends_a_piece(end: str, written: str) -> bool:
    return end in ENDS_A_PIECE and ENDS_A_PIECE[end] in written
