"""Translates GGUF metadata into the keys of a Hugging Face config.json.

Read by the model config, which hands the result to the architecture's reader like any other config. It must
not read tensor data, except the small table of rotary factors that some files carry.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping

from sglang.srt.configs.architectures import ARCHITECTURES
from sglang.srt.configs.architectures.rope_scaling import llama3_from_factors
from sglang.srt.configs.gguf.header import GGUFHeader

#: Architecture name in a GGUF file -> class name in a Hugging Face config.
GGUF_ARCHITECTURES = {item.gguf_name: item.name for item in ARCHITECTURES.values()}
ROPE_FACTORS_TENSOR = "rope_freqs.weight"

_TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def config_from_gguf(header: GGUFHeader) -> dict[str, object]:
    """The config.json that the model behind this file would have."""
    arch = header.architecture
    if arch not in GGUF_ARCHITECTURES:
        known = ", ".join(sorted(GGUF_ARCHITECTURES))
        raise ValueError(f"{header.path}: GGUF architecture {arch!r} is not served; known: {known}")
    if _integer(header, f"{arch}.expert_count", 0):
        raise ValueError(f"{header.path}: {arch} with experts (mixture of experts) is not served yet")
    heads = _integer(header, f"{arch}.attention.head_count")
    hidden = _integer(header, f"{arch}.embedding_length")
    head_dim = _head_dim(header, arch, hidden, heads)
    theta = float(header.optional(f"{arch}.rope.freq_base", (float, int), 10000.0))
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError(
            f"{header.path} has no tensor token_embd.weight, so it holds no model of type {arch}"
        )
    if len(embedding.shape) != 2:
        raise ValueError(
            f"{header.path}: tensor token_embd.weight has shape {embedding.shape}; it must have two sizes"
        )
    layers = _integer(header, f"{arch}.block_count")
    feed_forward = _integer(header, f"{arch}.feed_forward_length")
    kv_heads = _integer(header, f"{arch}.attention.head_count_kv", heads)
    _compare_with_tensors(
        header,
        layers,
        {
            "token_embd.weight": (embedding.shape[0], hidden),
            "blk.0.attn_q.weight": (heads * head_dim, hidden),
            "blk.0.attn_k.weight": (kv_heads * head_dim, hidden),
            "blk.0.ffn_up.weight": (feed_forward, hidden),
        },
    )
    return {
        "architectures": [GGUF_ARCHITECTURES[arch]],
        "model_type": arch,
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": _integer(header, f"{arch}.context_length"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(header, arch, theta, head_dim),
        "rms_norm_eps": header.require(f"{arch}.attention.layer_norm_rms_epsilon", float),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        "torch_dtype": dominant_type(header),
        "bos_token_id": _token(header, "bos_token_id"),
        "eos_token_id": _end_tokens(header),
        "pad_token_id": _token(header, "padding_token_id"),
    }


def _compare_with_tensors(header: GGUFHeader, layers: int, shapes: dict[str, tuple[int, ...]]) -> None:
    """The metadata must agree with the tensors: a damaged number must not decide how much is allocated."""
    numbers = (name.split(".")[1] for name in header.tensors if name.startswith("blk."))
    held = max((int(number) + 1 for number in numbers if number.isdecimal()), default=0)
    if layers > held:
        raise ValueError(
            f"{header.path}: the metadata announces {layers} layers, the file holds tensors of {held}; "
            f"fetch the file again"
        )
    for name, shape in shapes.items():
        tensor = header.tensors.get(name)
        if tensor is not None and tensor.shape != shape:
            raise ValueError(
                f"{header.path}: tensor {name} has shape {tensor.shape}, by the metadata it must be {shape}; "
                f"fetch the file again"
            )


def dominant_type(header: GGUFHeader) -> str:
    """The type of most values: torch's name for it, or the GGUF name of a quantised type."""
    values: Counter[str] = Counter()
    for tensor in header.tensors.values():
        values[tensor.type.name] += tensor.nbytes // tensor.type.block_bytes * tensor.type.block_elements
    if not values:
        raise ValueError(f"{header.path} holds no tensors")
    name = values.most_common(1)[0][0]
    return _TORCH_NAMES.get(name, name)


def _head_dim(header: GGUFHeader, arch: str, hidden: int, heads: int) -> int:
    # A head count of 0 is refused later, with the other counts.
    key_length = _integer(header, f"{arch}.attention.key_length", hidden // max(heads, 1))
    value_length = _integer(header, f"{arch}.attention.value_length", key_length)
    rotated = _integer(header, f"{arch}.rope.dimension_count", key_length)
    if not key_length == value_length == rotated:
        raise ValueError(
            f"{header.path}: key length {key_length}, value length {value_length} and rotated dimensions "
            f"{rotated} must be equal; other shapes of attention are not served"
        )
    return key_length


def _rope_scaling(header: GGUFHeader, arch: str, theta: float, head_dim: int) -> Mapping[str, object] | None:
    tensor = header.tensors.get(ROPE_FACTORS_TENSOR)
    if tensor is not None:
        if tensor.type.name != "F32":
            raise ValueError(f"{header.path}: {ROPE_FACTORS_TENSOR} is {tensor.type.name}; only F32 is read")
        factors = struct.unpack(f"<{tensor.nbytes // 4}f", header.data(tensor))
        return llama3_from_factors(factors, theta, head_dim, str(header.path))
    kind = header.optional(f"{arch}.rope.scaling.type", str, "none")
    return None if kind == "none" else {"rope_type": kind}


def _integer(header: GGUFHeader, key: str, default: int | None = None) -> int:
    return header.require(key, int) if default is None else header.optional(key, int, default)


def _token(header: GGUFHeader, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}"
    return _integer(header, key) if key in header.metadata else None


def _end_tokens(header: GGUFHeader) -> list[int]:
    # A chat model ends its turn with eot and a tool call with eom; both end an answer, as eos does.
    tokens = (_token(header, name) for name in ("eos_token_id", "eot_token_id", "eom_token_id"))
    return [token for token in tokens if token is not None]
