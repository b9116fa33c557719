"""Owns how a draft uses its target's embedding and head: which of them it may borrow in the scope in force.

Called when a draft model is built. A borrowed layer keeps the rank and width it was built with, so it must
not be used where the draft's own layers would be cut otherwise.
"""

from __future__ import annotations

import logging

from sglang.srt.layers.communicator import head_axis
from sglang.srt.layers.linear import axis_place
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.models.common.decoder import DecoderForCausalLM

logger = logging.getLogger(__name__)


def borrowed_embedding(target: DecoderForCausalLM) -> VocabParallelEmbedding:
    """The target's embedding; `RuntimeError` with both widths where this scope would cut it otherwise."""
    table = target.model.embed_tokens
    found, wanted = (table.rank, table.width), axis_place("attn_tp")
    if found != wanted:
        raise RuntimeError(
            f"the target's embedding was built as rank {found[0]} of {found[1]}, and the draft is built as "
            f"rank {wanted[0]} of {wanted[1]}: a draft looks its tokens up in the target's attention-TP group"
        )
    return table


def head_can_be_borrowed(head: ParallelLMHead) -> bool:
    """Whether the group over which the target's head is cut is the same in this scope."""
    return (head.rank, head.width) == axis_place(head.axis)


def copied_head(target: DecoderForCausalLM, *, of_table: bool = False) -> ParallelLMHead:
    """A head for the draft alone, to be filled from the target's checkpoint tensor.

    The target's head is cut over ranks of other replicas as well, which a draft that owns its attention
    cannot meet; or the draft's head is the embedding table (`of_table`), and the target has another one.
    """
    config, theirs = target.config, target.lm_head
    name = "model.embed_tokens" if of_table or config.tie_word_embeddings else "lm_head"
    head = ParallelLMHead(name, config.vocab_size, config.hidden_size, dtype=target.dtype, axis=head_axis())
    head.vocab_size = theirs.vocab_size
    if not of_table:
        logger.info(
            "The draft holds a head of its own, cut over %d ranks: the target's is cut over %d, of all "
            "attention-DP replicas. --enable-dp-lm-head lets both share one",
            head.width,
            theirs.width,
        )
    return head
