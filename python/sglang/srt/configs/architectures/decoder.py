"""The shape of a plain decoder (attention and a gated feed-forward in each layer), read from its config.

Read by the architectures that have this shape. What is particular to one of them stands in its own file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from sglang.srt.configs.architectures.config_values import ConfigValues
from sglang.srt.configs.architectures.rope_scaling import Llama3Scaling, read_rope


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """What the layers are built from."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    hidden_act: str


class Architecture(NamedTuple):
    """One architecture: its class name in a Hugging Face config, its name in a GGUF file, and its reader."""

    name: str
    model_type: str
    gguf_name: str
    read: Callable[[ConfigValues], DecoderShape]


def read_decoder(config: ConfigValues, *, default_head_dim: int | None = None) -> DecoderShape:
    """Raises ValueError for what is missing, wrong or not served.

    `default_head_dim` is what the architecture takes where the config says nothing; else it is the hidden
    size over the heads.
    """
    _refuse_unserved(config)
    heads = config.positive("num_attention_heads")
    kv_heads = config.positive("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ValueError(
            f"{config.where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    hidden = config.positive("hidden_size")
    head_dim = config.positive("head_dim", default=default_head_dim or hidden // heads)
    if head_dim % 2:
        raise ValueError(f"{config.where}: head_dim {head_dim} is odd, and a rotary embedding turns pairs")
    theta, scaling = read_rope(config.values, config.where)
    return DecoderShape(
        hidden_size=hidden,
        intermediate_size=config.positive("intermediate_size"),
        num_layers=config.positive("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=config.positive("vocab_size"),
        max_position_embeddings=config.positive("max_position_embeddings"),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=config.epsilon("rms_norm_eps", default=1e-6),
        tie_word_embeddings=config.boolean("tie_word_embeddings"),
        attention_bias=config.boolean("attention_bias"),
        mlp_bias=config.boolean("mlp_bias"),
        hidden_act="silu",
    )


def _refuse_unserved(config: ConfigValues) -> None:
    activation = config.values.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"{config.where}: hidden_act {activation!r} is not served; only 'silu' is")
    if config.values.get("use_sliding_window"):
        raise ValueError(
            f"{config.where}: use_sliding_window is true, and sliding windows are not served yet"
        )
