"""Owns how many replicas follow from the settings, before anything is published.

Used by hooks, `runtime_context/widths.py` and the placement plan. A running process asks `get_parallel()`.
"""

from __future__ import annotations


def attn_dp_size(enable_dp_attention: bool, dp_size: int) -> int:
    """Attention replicas inside one tensor group."""
    return dp_size if enable_dp_attention else 1


def num_worlds(enable_dp_attention: bool, dp_size: int) -> int:
    """Worlds of ranks, each with the whole model; they share nothing but the server."""
    return dp_size // attn_dp_size(enable_dp_attention, dp_size)
