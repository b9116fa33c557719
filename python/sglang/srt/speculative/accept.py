"""Owns the served rule of acceptance, draw and follow, and what all rules share: walk down a tree, result.

Read by the speculative worker once the target has scored every node of the proposed trees, and by the other
rules. It must not know how a tree was drafted, move keys and values, or end a request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from sglang.kernels.draft_trees import follow_best
from sglang.srt.batch.forward_batch import NOT_FINITE, ROW_FAILURES
from sglang.srt.batch.logprobs import LogprobRequest
from sglang.srt.batch.sampling_state import SamplingState
from sglang.srt.batch.spec_input import DraftTree
from sglang.srt.layers.sampler import RowMask, Sampler, prepare_rows, row_logprobs
from sglang.srt.messages.io_struct import TokenLogprob

#: Where structured output enters: called with the request and node of each row and with their logits [rows,
#: vocab], it takes tokens away in place (minus infinity), after penalties and bias and before the draw. Its
#: owner may have filled the masks of all nodes before, in one pass down the tree, or work one out per visit.
NodeMask = Callable[[list[tuple[int, int]], torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Accepted:
    """What one request gets out of a round.

    `token_ids` are the accepted draft tokens and, behind them, the bonus that no node carried. `path[j]` is
    the node whose logits gave `token_ids[j]`, so `path[0]` is the root and `path[j + 1]` carries
    `token_ids[j]`. With a `failure`, the logits of the next node of the path gave no token: there is no
    bonus, and what was accepted before it stands.
    """

    path: list[int]
    token_ids: list[int]
    failure: str | None = None

    @property
    def num_correct_drafts(self) -> int:
        """How many tokens were proposed by the draft."""
        return len(self.token_ids) - (self.failure is None)


class Walk:
    """One request on its way down its tree.

    `node` is where it stands: the node whose logits give the next token; negative at the end. `state` is the
    request's own after the tokens so far, so the draw there is the one that plain decoding would make.
    """

    __slots__ = ("_children", "failure", "node", "path", "request", "state", "token_ids")

    def __init__(self, request: int, token_ids: list[int], parents: list[int], state: SamplingState) -> None:
        self.request = request
        self.state = state.after(())
        self.node = 0
        self.path: list[int] = []
        self.token_ids: list[int] = []
        self.failure: str | None = None
        self._children: list[dict[int, int]] = [{} for _ in token_ids]
        for node, (token_id, parent) in enumerate(zip(token_ids, parents, strict=True)):
            if parent >= 0:
                self._children[parent].setdefault(token_id, node)

    @property
    def under_way(self) -> bool:
        return self.node >= 0

    def candidates(self) -> list[int]:
        """The token ids that the children of `node` carry, in the order of the tree."""
        return list(self._children[self.node])

    def step(self, token_id: int, failure: str | None = None) -> None:
        """Take the token that `node` gave and go on to the child that carries it, or end."""
        if failure is not None:
            self.failure, self.node = failure, -1
            return
        self.path.append(self.node)
        self.token_ids.append(token_id)
        self.state.append(token_id)
        self.node = self._children[self.node].get(token_id, -1)

    def result(self) -> Accepted:
        return Accepted(self.path, self.token_ids, self.failure)


#: Draws at the node of each walk, from these rows of the logits [batch * N, vocab], which stay as they are:
#: the token ids, and indices into `ROW_FAILURES`.
DrawAtNodes = Callable[[torch.Tensor, list[int], list[Walk]], tuple[list[int], list[int]]]


def start_walks(tree: DraftTree, states: Sequence[SamplingState]) -> list[Walk]:
    """One walk a request, at its root; `states[b]` is that of request b before this round."""
    token_ids, parents = tree.token_ids.tolist(), tree.parents.tolist()
    return [Walk(b, token_ids[b], parents[b], state) for b, state in enumerate(states)]


def walk_levels(walks: Sequence[Walk], logits: torch.Tensor, num_nodes: int, draw: DrawAtNodes) -> None:
    """Take all walks to their ends, level by level, so that only visited nodes are drawn.

    logits [batch * num_nodes, vocab]: the rows of a request one after another; they stay as they are.
    """
    while under_way := [walk for walk in walks if walk.under_way]:
        places = [walk.request * num_nodes + walk.node for walk in under_way]
        for walk, token_id, failure in zip(under_way, *draw(logits, places, under_way), strict=True):
            walk.step(token_id, ROW_FAILURES[failure])


def mask_of_rows(mask: NodeMask | None, walks: Sequence[Walk]) -> RowMask | None:
    """What the sampler applies to the rows of these walks."""
    return None if mask is None else partial(mask, [(walk.request, walk.node) for walk in walks])


def follow(
    tree: DraftTree,
    logits: torch.Tensor,
    states: Sequence[SamplingState],
    mask: NodeMask | None = None,
) -> list[Accepted]:
    """Draw at each visited node what plain decoding would draw there, and go on where a child carries it.

    The draw of a node is the sampler's own, with the request's state after the tokens on the path: penalties,
    `min_new_tokens` and the place in the random stream are those of decoding one by one. So every request,
    greedy or sampled, gets token for token what it would get without a draft. A child is accepted with its
    target probability, as in sampling that tries the children first.

    logits [batch * N, vocab], float32, row b * N + i for node i of request b; they stay as they are.
    `states[b]` is that of request b before this round and is not changed. A node whose parent is negative is
    reached by nobody, so a tree may be padded with such.
    """
    plain = [b for b, state in enumerate(states) if mask is None and state.is_plain_greedy]
    accepted: dict[int, Accepted] = {}
    if plain:  # no draw depends on the path
        for b, best in zip(plain, follow_best(logits, tree.token_ids, tree.parents, plain), strict=True):
            accepted[b] = Accepted(best.nodes, best.token_ids, NOT_FINITE if best.failed else None)
    sampler = Sampler()

    def draw(logits: torch.Tensor, places: list[int], walks: list[Walk]) -> tuple[list[int], list[int]]:
        walk_states = [walk.state for walk in walks]
        return sampler(logits, walk_states, mask=mask_of_rows(mask, walks), places=places).read()

    if len(plain) < len(states):
        walks = [walk for walk in start_walks(tree, states) if walk.request not in accepted]
        walk_levels(walks, logits, tree.num_nodes, draw)
        accepted |= {walk.request: walk.result() for walk in walks}
    return [accepted[b] for b in range(len(states))]


def path_logprobs(
    logits: torch.Tensor,
    accepted: Sequence[Accepted],
    states: Sequence[SamplingState],
    requests: Sequence[LogprobRequest | None],
    mask: NodeMask | None = None,
) -> list[list[TokenLogprob]]:
    """The log-probabilities of the accepted tokens, one list a request, empty where it asks for none.

    They are those of plain decoding: from the rows of the path, with the state that each was drawn with.
    logits [batch * N, vocab] as in `follow`, and as little changed; `states` are those before this round.
    """
    entries: list[list[TokenLogprob]] = [[] for _ in accepted]
    num_nodes = logits.shape[0] // max(1, len(accepted))
    drawn = [
        (b, j)
        for b, (result, request) in enumerate(zip(accepted, requests, strict=True))
        for j in range(len(result.token_ids) if request is not None else 0)
    ]
    if not drawn:
        return entries
    nodes = [(b, accepted[b].path[j]) for b, j in drawn]
    rows = logits[torch.tensor([b * num_nodes + node for b, node in nodes], device=logits.device)]
    row_states = [states[b].after(accepted[b].token_ids[:j]) for b, j in drawn]
    failures = prepare_rows(rows, row_states, None if mask is None else partial(mask, nodes))
    token_ids = torch.tensor([accepted[b].token_ids[j] for b, j in drawn], device=logits.device)
    found = row_logprobs(rows, row_states, token_ids, failures, [requests[b] for b, _ in drawn])
    for (b, _), entry in zip(drawn, found, strict=True):
        assert entry is not None  # a failed row gave no token, so it is on no path
        entries[b].append(entry)
    return entries
