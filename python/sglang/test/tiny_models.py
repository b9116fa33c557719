"""Owns tiny random models on disk, for tests that need a real checkpoint and no download.

Shapes, seeds and scales of the weights, and a small byte-level tokenizer. Read by model, loader, tokenizer
and server tests. It must not need transformers; only the GGUF form needs the `gguf` package.
"""

from __future__ import annotations

import itertools
import json
import math
import pathlib
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from sglang.srt.tokenizer.byte_level import BYTE_TO_CHAR
from sglang.test.gguf_q6_k import q6_k_blocks

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MODEL_TYPES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
# The logits of a random model must lie apart, or rounding would decide which token is the best one.
LOGITS_STD = 4.0

_CORPUS = (
    "the quick brown fox jumps over the lazy dog and the capital of france is paris while one two three four "
    "five people say hello to the world and there is another thing that they know about this and that "
    "in a small test of words that are common in english so the model can learn to write them as one token"
)


def write_tiny_model(
    folder: str | pathlib.Path,
    *,
    architecture: str = "LlamaForCausalLM",
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    intermediate_size: int = 128,
    vocab_size: int = 512,
    tie: bool = False,
    max_position_embeddings: int = 512,
    rope_theta: float = 10000.0,
    rope_scaling: dict[str, Any] | None = None,
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
    add_bos: bool = False,
    chat_template: str | None = CHAT_TEMPLATE,
    generation: dict[str, Any] | None = None,
) -> pathlib.Path:
    """Write a Hugging Face folder: config, random weights, tokenizer. The same arguments give the same bytes.

    `shards` above 1 splits the weights and writes the index file; `generation` is merged into
    generation_config.json.
    """
    if architecture not in MODEL_TYPES:
        raise ValueError(f"architecture {architecture!r} is not one of {sorted(MODEL_TYPES)}")
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[architecture],
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_position_embeddings,
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tie,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": dtype,
    }
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": 0, "eos_token_id": [2, 0], "pad_token_id": 0, **(generation or {})},
    )
    write_tiny_tokenizer(folder, vocab_size=vocab_size, add_bos=add_bos, chat_template=chat_template)
    _write_weights(folder, tiny_weights(config, seed=seed), shards)
    return folder


def tiny_weights(config: dict[str, Any], *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights under Hugging Face names for a config as written above.

    The scales make every part matter: attention scores differ, each layer adds about as much as it receives,
    and the head is scaled so that the logits' standard deviation is about LOGITS_STD.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden, inter, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    dtype = getattr(torch, config["torch_dtype"])

    def matrix(rows: int, cols: int, gain: float = 1.0) -> torch.Tensor:
        return (torch.randn(rows, cols, generator=generator) * (gain / math.sqrt(cols))).to(dtype)

    def norm(size: int) -> torch.Tensor:
        return (1.0 + 0.1 * torch.randn(size, generator=generator)).to(dtype)

    weights = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden, LOGITS_STD)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        weights[prefix + "input_layernorm.weight"] = norm(hidden)
        weights[prefix + "self_attn.q_proj.weight"] = matrix(q_size, hidden, 1.5)
        weights[prefix + "self_attn.k_proj.weight"] = matrix(kv_size, hidden, 1.5)
        weights[prefix + "self_attn.v_proj.weight"] = matrix(kv_size, hidden)
        weights[prefix + "self_attn.o_proj.weight"] = matrix(hidden, q_size, 2.0)
        if config["model_type"] == "qwen3":
            weights[prefix + "self_attn.q_norm.weight"] = norm(head_dim)
            weights[prefix + "self_attn.k_norm.weight"] = norm(head_dim)
        weights[prefix + "post_attention_layernorm.weight"] = norm(hidden)
        weights[prefix + "mlp.gate_proj.weight"] = matrix(inter, hidden)
        weights[prefix + "mlp.up_proj.weight"] = matrix(inter, hidden)
        weights[prefix + "mlp.down_proj.weight"] = matrix(hidden, inter, 3.0)
    weights["model.norm.weight"] = norm(hidden)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(config["vocab_size"], hidden, LOGITS_STD)
    return weights


def write_tiny_tokenizer(
    folder: pathlib.Path, *, vocab_size: int, add_bos: bool = False, chat_template: str | None = CHAT_TEMPLATE
) -> None:
    """A byte-level BPE tokenizer with exactly `vocab_size` entries: specials, all bytes, then merges."""
    backend = tokenizers.Tokenizer(models.BPE(*tiny_vocabulary(vocab_size)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel()
    save_tokenizer(folder, backend, add_bos=add_bos, chat_template=chat_template, pad_token=SPECIAL_TOKENS[0])


def save_tokenizer(
    folder: pathlib.Path,
    backend: tokenizers.Tokenizer,
    *,
    add_bos: bool,
    chat_template: str | None,
    unk_token: str | None = None,
    **roles: str,
) -> None:
    """Write the files of a tokenizer; its special tokens are `SPECIAL_TOKENS` and `unk_token`."""
    bos, _, eos = SPECIAL_TOKENS
    roles |= {"bos_token": bos, "eos_token": eos}
    special = [*SPECIAL_TOKENS]
    if unk_token is not None:
        roles["unk_token"] = unk_token
        special.append(unk_token)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B:1"], special_tokens=[(bos, 0)]
        )
    backend.save(str(folder / "tokenizer.json"))
    if chat_template is not None:
        roles["chat_template"] = chat_template
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **roles})


def tiny_vocabulary(vocab_size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges: specials, the 256 bytes, then the pairs most frequent in a fixed text."""
    smallest = len(SPECIAL_TOKENS) + 256
    if vocab_size < smallest:
        raise ValueError(
            f"vocab_size={vocab_size} is below {smallest}, which the bytes and the special tokens need"
        )
    vocab = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *BYTE_TO_CHAR))}
    merges: list[tuple[str, str]] = []
    words = [[BYTE_TO_CHAR[value] for value in f" {word}".encode()] for word in _CORPUS.split()]
    while len(vocab) < vocab_size:
        counts: dict[tuple[str, str], int] = {}
        for word in words:
            for pair in itertools.pairwise(word):
                counts[pair] = counts.get(pair, 0) + 1
        if not counts:
            break
        best = max(counts, key=lambda pair: (counts[pair], pair))
        merges.append(best)
        vocab.setdefault(best[0] + best[1], len(vocab))
        words = [_merge(word, best) for word in words]
    # A text this short runs out of pairs; pairs of bytes in order fill whatever is left.
    for first in BYTE_TO_CHAR:
        for second in BYTE_TO_CHAR:
            if len(vocab) >= vocab_size:
                return vocab, merges
            if first + second not in vocab:
                merges.append((first, second))
                vocab[first + second] = len(vocab)
    if len(vocab) < vocab_size:
        raise ValueError(f"vocab_size={vocab_size} is above {len(vocab)}, the largest tiny vocabulary")
    return vocab, merges


def write_tiny_gguf(
    folder: str | pathlib.Path,
    path: str | pathlib.Path | None = None,
    *,
    quantization: str = "F32",
    part_tensors: int = 0,
    bare_first_part: bool = False,
) -> pathlib.Path:
    """The GGUF form of a folder made by `write_tiny_model`: same weights, same tokenizer, same template.

    `quantization` names a GGUF tensor type that the `gguf` package can write, or Q6_K; 1-D tensors stay F32.
    `part_tensors` above 0 splits the file into parts of so many tensors and gives back the first one, which
    with `bare_first_part` holds metadata alone.
    """
    import gguf
    import numpy as np
    from safetensors.torch import load_file

    folder = pathlib.Path(folder)
    path = pathlib.Path(path) if path is not None else folder.with_suffix(".gguf")
    config = json.loads((folder / "config.json").read_text())
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights.update(load_file(file))

    arch = config["model_type"]
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=part_tensors, small_first_shard=bare_first_part)
    _write_gguf_metadata(writer, config, folder)
    kind = gguf.GGMLQuantizationType[quantization]
    for name, tensor in weights.items():
        array = tensor.to(torch.float32)
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            array = array.reshape(heads, 2, -1, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        data = array.contiguous().numpy()
        stored = kind if data.ndim > 1 else gguf.GGMLQuantizationType.F32
        is_q6_k = stored == gguf.GGMLQuantizationType.Q6_K
        packed = q6_k_blocks(data) if is_q6_k else np.ascontiguousarray(gguf.quants.quantize(data, stored))
        writer.add_tensor(_gguf_name(name), packed, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob(f"{path.stem}-*-of-*.gguf")) if part_tensors else path


def _write_gguf_metadata(writer: Any, config: dict[str, Any], folder: pathlib.Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    vocab = tokenizer["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(tokenizer["post_processor"]["type"] == "TemplateProcessing")
    if "chat_template" in tokenizer_config:
        writer.add_chat_template(tokenizer_config["chat_template"])


_GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    # Spelled out here and not taken from the loader, so that a wrong entry there is noticed.
    flat = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    flat["lm_head.weight"] = "output.weight"
    if name in flat:
        return flat[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_GGUF_PARTS[part]}.{kind}"


def _merge(word: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    i = 0
    while i < len(word):
        if i + 1 < len(word) and (word[i], word[i + 1]) == pair:
            merged.append(word[i] + word[i + 1])
            i += 2
        else:
            merged.append(word[i])
            i += 1
    return merged


def _write_weights(folder: pathlib.Path, weights: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(weights)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / "model.safetensors.index.json", index)


def _write_json(path: pathlib.Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
