"""Owns one verification: the target's forward over all nodes of the drafts, and what of them is kept.

Called by the speculative worker, outside of every draft scope. The leader of an attention-TP group accepts,
and its peers hear the result before anybody goes on. It must not know how a tree was drafted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.kernels.draft_trees import tree_mask
from sglang.srt.batch.forward_batch import ForwardBatch, ForwardMode
from sglang.srt.batch.spec_input import DraftTree, SpecInput
from sglang.srt.mem_cache.pools.memory_pool import PagedKVPool
from sglang.srt.messages.io_struct import TokenLogprob
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.accept import Accepted
from sglang.srt.speculative.round_batch import Round


@dataclass(slots=True)
class RoundOutcome:
    """What the requests of a round got, in their order; `logprobs` is None where nobody asked.

    `end` is when the leader of the attention-TP group had it, in seconds of its own clock.
    """

    accepted: list[Accepted]
    logprobs: list[list[TokenLogprob]] | None = None
    end: float = 0.0


@dataclass(frozen=True, slots=True)
class VerifiedRound:
    """A round after acceptance, as drafters need it to bring their own state up to date.

    Rows are those of the accepted path first (`counts[b]` of request b), then padding up to the width of the
    round: the path's root again.
    """

    round: Round
    node_ids: torch.Tensor  # [batch, N]: the token of each node on the path
    next_ids: torch.Tensor  # [batch, N]: the token that each node on the path gave, 0 in padding
    counts: list[int]  # at least 1: a request that failed at its root keeps one row of no meaning
    drawn: list[list[int]]  # the tokens that each request got; none of one that failed at its root
    hidden: torch.Tensor | None  # [batch * N, features]: the target's captured rows, in the order of the path

    @property
    def width(self) -> int:
        return int(self.node_ids.shape[1])

    def last_places(self) -> torch.Tensor:
        """The place of the last accepted node of each request [batch], among its own rows."""
        return torch.tensor(self.counts, device=self.node_ids.device) - 1

    def draft_batch(self, token_ids: torch.Tensor, *, logit_rows_each: int) -> ForwardBatch:
        """A draft's forward over the rows of the path, at the positions from `lengths[b]` on.

        What lies behind the last accepted node is of no meaning, and the next round writes its slots again.
        `logit_rows_each` is how many rows of each request the draft will score.
        """
        offsets = torch.arange(self.width, device=token_ids.device)
        return self.round.forward_batch(
            ForwardMode.DRAFT_EXTEND,
            token_ids,
            self.round.lengths[:, None] + offsets,
            spec=SpecInput(self.width),
            logit_rows_each=logit_rows_each,
        )


def verify_batch(round: Round, tree: DraftTree, *, capture_hidden: bool) -> ForwardBatch:
    """The target's forward over all nodes: node i of request b at slot `lengths[b] + i`.

    A chain needs no mask; in a tree each node sees its ancestors and all that was there before.
    """
    width = tree.num_nodes
    tail_mask, depths = (None, tree.depths()) if tree.is_chain else tree_mask(tree.parents)
    spec = SpecInput(width, tail_mask=tail_mask)
    return round.forward_batch(
        ForwardMode.TARGET_VERIFY,
        tree.token_ids,
        round.lengths[:, None] + depths,
        spec=spec,
        logit_rows_each=width,
        capture_hidden=capture_hidden,
    )


def share_tree(tree: DraftTree) -> DraftTree:
    """The leader's proposals on every rank of the attention-TP group.

    Ranks draft alike, but not to the last bit where their processors differ, and they must verify one tree.
    """
    parallel = get_parallel()
    if parallel.attn_tp_size == 1:
        return tree
    packed = torch.stack((tree.token_ids, tree.parents.expand_as(tree.token_ids)))
    packed = parallel.attn_tp_group.broadcast(packed.contiguous(), src=0)
    return DraftTree(packed[0], packed[1], is_chain=tree.is_chain)


def keep_accepted(
    round: Round, tree: DraftTree, accepted: list[Accepted], pool: PagedKVPool, hidden: torch.Tensor | None
) -> VerifiedRound:
    """Bring the keys, values and hidden rows of the accepted paths to the front of each request's slots."""
    batch, width = tree.token_ids.shape
    device = tree.token_ids.device
    counts = [max(len(one.path), 1) for one in accepted]
    drawn = [one.token_ids for one in accepted]
    next_ids = torch.tensor([padded(ids, width) for ids in drawn], device=device)
    if width == 1:  # the root of each request stays where it is
        return VerifiedRound(round, tree.token_ids, next_ids, counts, drawn, hidden)
    paths = torch.tensor([padded(one.path, width) for one in accepted], device=device)
    if not tree.is_chain:
        _move(round, accepted, pool)
    if hidden is not None:
        first = torch.arange(0, batch * width, width, device=device)[:, None]
        hidden = hidden.index_select(0, (first + paths).reshape(-1))
    return VerifiedRound(round, tree.token_ids.gather(1, paths), next_ids, counts, drawn, hidden)


def padded(numbers: list[int], width: int) -> list[int]:
    """The numbers with zeros behind them."""
    return numbers + [0] * (width - len(numbers))


def _move(round: Round, accepted: list[Accepted], pool: PagedKVPool) -> None:
    """Copy what lies at the nodes of a path to the slots of its positions."""
    moves = [
        (b, node, place)
        for b, one in enumerate(accepted)
        for place, node in enumerate(one.path)
        if node != place
    ]
    if not moves:
        return
    requests, nodes, places = torch.tensor(moves, device=round.lengths.device).T
    rows, lengths = round.req_pool_indices[requests], round.lengths[requests]
    pool.move(round.req_to_token[rows, lengths + nodes], round.req_to_token[rows, lengths + places])
