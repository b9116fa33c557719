"""Owns a tiny model whose output a test writes down: each token has one follower.

Read by server tests about characters, stop strings and ends, where the exact tokens matter. It must not be
used to test the model's mathematics: attention and the feed-forward part are switched off.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sglang.srt.tokenizer.tokenizer import Tokenizer, load_tokenizer
from sglang.test.tiny_models import write_tiny_model

#: Logit of the follower; all others lie far below, so it is drawn at any temperature.
FOLLOWER_LOGIT = 40.0
END = "<|im_end|>"


def write_fake_model(
    folder: pathlib.Path,
    *chains: Sequence[str | bytes],
    write_tokenizer: Callable[[pathlib.Path], Any] | None = None,
    **settings: Any,
) -> pathlib.Path:
    """A model folder in which each piece of a chain is followed by the next one.

    A piece is the bytes that one token adds in the middle of a text, or a special token by name (`END`). A
    token may stand in one chain only, once, except as the last piece; a chain that ends with its first piece
    repeats for ever. `write_tokenizer` puts another tokenizer into the folder.
    """
    write_tiny_model(folder, **settings)
    if write_tokenizer is not None:
        write_tokenizer(folder)
    tokenizer = load_tokenizer(folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    embedding = weights["model.embed_tokens.weight"]
    normal = torch.nn.functional.normalize(embedding, dim=-1) * embedding.shape[1] ** 0.5
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()  # so the last hidden state is the embedding of the last token
    weights["model.norm.weight"].fill_(1.0)
    head = torch.zeros_like(weights["lm_head.weight"])
    for token, follower in followers(tokenizer, chains).items():
        head[follower] += normal[token] * (FOLLOWER_LOGIT / embedding.shape[1])
    weights["lm_head.weight"] = head
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def byte_pieces(text: str | bytes) -> list[bytes]:
    """One piece for each byte: a character beyond ASCII then takes several tokens."""
    raw = text.encode() if isinstance(text, str) else text
    return [raw[i : i + 1] for i in range(len(raw))]


def followers(tokenizer: Tokenizer, chains: Iterable[Sequence[str | bytes]]) -> dict[int, int]:
    """Token id -> id of the token after it; `ValueError` when a token would have two."""
    ids_of: dict[str | bytes, int] = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    ids_of |= {tokenizer.decode([i], skip_special_tokens=False): i for i in tokenizer.all_special_ids}
    found: dict[int, int] = {}
    for chain in chains:
        ids = [ids_of[piece] for piece in chain]
        for token, follower in itertools.pairwise(ids):
            if found.setdefault(token, follower) != follower:
                raise ValueError(f"token {token} ({tokenizer.token_bytes(token)!r}) would have two followers")
    return found
