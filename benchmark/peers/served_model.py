"""The model that all sides serve: its file, the bytes that a step reads, and its tokenizer.

Owns the facts that come from the GGUF file. Read by the command. It must not load weights.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import NamedTuple

from peers.workloads import Prompts

from sglang.srt.configs.gguf.parts import open_gguf
from sglang.srt.configs.model_path import resolve_model_path
from sglang.srt.tokenizer.tokenizer import load_tokenizer

BYTES_OF_A_WEIGHT = {"int8": 1, "bf16": 2, "fp32": 4}


class ServedModel(NamedTuple):
    """`weight_bytes` is by form, as a decode step of one row reads them; `kv_values` are numbers a token."""

    file: Path
    weight_bytes: dict[str, int]
    kv_values: int
    prompts: Prompts

    def step_bytes(self, form: str, weight_bytes: int, context: int) -> int:
        """Weights and cache that a decode step reads. With fp32 the cache is fp32, else it has 16 bits."""
        return weight_bytes + context * self.kv_values * (4 if form == "fp32" else 2)


def context_of(row: str) -> int | None:
    """The context of a decode row, by its name."""
    found = re.fullmatch(r"decode, context (\d+)", row)
    return int(found[1]) if found else None


def open_model(name: str) -> ServedModel:
    file = resolve_model_path(name)
    if file.suffix != ".gguf":
        raise ValueError(f"--model-path is {name}; give a .gguf file, which llama.cpp can serve as well")
    header = open_gguf(file)
    numbers = sum(math.prod(tensor.shape) for tensor in header.tensors.values())
    weight_bytes = {form: size * numbers for form, size in BYTES_OF_A_WEIGHT.items()}
    weight_bytes["4-bit"] = sum(tensor.nbytes for tensor in header.tensors.values())
    arch = header.architecture
    heads, width = (
        header.require(f"{arch}.{key}", int) for key in ("attention.head_count", "embedding_length")
    )
    kv_heads = header.optional(f"{arch}.attention.head_count_kv", int, heads)
    head_dim = header.optional(f"{arch}.attention.key_length", int, width // heads)
    kv_values = 2 * header.require(f"{arch}.block_count", int) * kv_heads * head_dim
    tokenizer = load_tokenizer(file)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    return ServedModel(file, weight_bytes, kv_values, Prompts(encode))
