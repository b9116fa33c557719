"""Owns how the rows of attention-DP replicas are padded before they are gathered.

Read by `dp_attention`. Must not need anything but the attention-DP width: it is asked in processes that
published nothing else.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from sglang.srt.runtime_context import get_parallel

__all__ = ["DpPaddingMode"]


class DpPaddingMode(enum.Enum):
    """MAX_LEN pads every replica to the largest (all-gather); SUM_LEN keeps exact rows (all-reduce)."""

    MAX_LEN = "max_len"
    SUM_LEN = "sum_len"

    def is_max_len(self) -> bool:
        return self is DpPaddingMode.MAX_LEN

    @classmethod
    def get_dp_padding_mode(
        cls, *, is_extend_in_batch: bool, global_num_tokens: Sequence[int]
    ) -> DpPaddingMode:
        """The cheaper mode.

        Prompts differ too much in length to be padded to the longest; decode rows are padded while that at
        most doubles the work.
        """
        replicas = get_parallel().attn_dp_size
        if is_extend_in_batch:
            return cls.MAX_LEN if replicas == 1 else cls.SUM_LEN
        padded = replicas * max(global_num_tokens)
        return cls.MAX_LEN if padded <= 2 * sum(global_num_tokens) else cls.SUM_LEN
