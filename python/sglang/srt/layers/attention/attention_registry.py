"""Owns the names of the attention back ends and how each is built.

Read by the model runner's set-up. The names are those that the command line serves; a difference is an error
at import, so a flag can never name a back end that is not there.
"""

from __future__ import annotations

import torch

from sglang.srt.arg_groups.fields import LEAVES
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, KVLayout, KVPool
from sglang.srt.layers.attention.torch_native_backend import TorchNativeBackend
from sglang.srt.runtime_context import assert_role

ATTENTION_BACKENDS: dict[str, type[AttentionBackend]] = {"torch_native": TorchNativeBackend}

_served = LEAVES["attention_backend"].arg.served
if not isinstance(_served, tuple) or set(_served) != set(ATTENTION_BACKENDS):
    raise ImportError(
        f"attention back ends {sorted(ATTENTION_BACKENDS)} are not what --attention-backend serves: {_served}"
    )


def _known(name: str | None) -> type[AttentionBackend]:
    if name not in ATTENTION_BACKENDS:
        raise ValueError(
            f"attention_backend: {name!r} is not served; choose one of {', '.join(ATTENTION_BACKENDS)}"
        )
    return ATTENTION_BACKENDS[name]


def kv_layout_of(name: str | None) -> KVLayout:
    """The page layout that the back end wants; asked before the pool exists."""
    return _known(name).kv_layout


def make_attention_backend(name: str | None, pool: KVPool, req_to_token: torch.Tensor) -> AttentionBackend:
    """A back end over one pool and the table of slots."""
    assert_role("scheduler")
    return _known(name)(pool, req_to_token)
