"""Owns the gated activations of feed-forward layers, by their Hugging Face names.

Read by models. It must not know how gate and up were computed: both arrive in one tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from sglang.kernels.compiled_for import kernels_for


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[rows, gate | up] -> silu(gate) * up."""
    half = gate_up.shape[-1] // 2
    kernels = kernels_for(gate_up)
    if kernels is not None:
        out: torch.Tensor = kernels.elementwise.silu_and_mul(
            gate_up, gate_up.new_empty(gate_up.shape[0], half)
        )
        return out
    return F.silu(gate_up[..., :half]).mul_(gate_up[..., half:])


_GATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": silu_and_mul}


def gated_activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The gated form of a named activation."""
    if name not in _GATED:
        raise ValueError(f"hidden_act is {name!r}; served are {', '.join(_GATED)}")
    return _GATED[name]
