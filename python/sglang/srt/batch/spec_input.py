"""Owns what a forward of a speculative round has beside its tokens, and the tokens that a draft proposes.

Built by drafters and the speculative worker; read by the attention back ends, the logits processor, the draft
models and acceptance. It must not know how a tree was drafted or which of its tokens are accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.kernels.draft_trees import tree_mask


@dataclass(slots=True)
class SpecInput:
    """What a forward of a speculative round has beside its tokens; each request has `width` rows.

    `tail_mask`: the last `tail` of a request's `seq_lens[b]` keys are seen where it says so, all keys before
    them are seen by every row. None: causal, row r of `width` sees all keys up to its own, which is
    `seq_lens[b] - width + r`.
    """

    width: int
    hidden: torch.Tensor | None = None  # [num_tokens, features]: what an EAGLE draft reads beside the ids
    tail_mask: torch.Tensor | None = None  # [batch, width, tail] bool
    logit_rows: torch.Tensor | None = None  # [rows] int64: the rows of the batch that are scored; None: all


@dataclass(frozen=True, slots=True)
class DraftTree:
    """The tokens proposed for each request of a round, as trees of equal size: one node a row of the verify.

    Node 0 is the root: the newest known token, which the target has not computed yet. Every other node
    follows its parent in the text, and parents stand before their children.
    """

    token_ids: torch.Tensor  # [batch, N] int64
    parents: torch.Tensor  # [batch, N] int64: an index into the same row; -1 for the root
    #: Every node of every request has the node before it as parent: causal attention does, and no row moves.
    is_chain: bool = False

    @classmethod
    def chain(cls, token_ids: torch.Tensor) -> DraftTree:
        """Trees without branches from token_ids [batch, N], the root first."""
        num_nodes = token_ids.shape[1]
        parents = torch.arange(-1, num_nodes - 1, device=token_ids.device)
        return cls(token_ids, parents.expand(token_ids.shape[0], num_nodes), is_chain=True)

    @property
    def num_nodes(self) -> int:
        """N, the nodes of each request with the root."""
        return int(self.token_ids.shape[1])

    def depths(self) -> torch.Tensor:
        """How many tokens after the root each node stands: [batch, N] int64, 0 for the root."""
        return self.parents + 1 if self.is_chain else tree_mask(self.parents)[1]

    def ancestor_mask(self) -> torch.Tensor:
        """What each node sees of its own tree: [batch, N, N] bool.

        True at [b, i, j] where j is i or one of its ancestors.
        """
        if self.is_chain:
            batch, num_nodes = self.parents.shape
            nodes = torch.arange(num_nodes, device=self.parents.device)
            return (nodes[:, None] >= nodes).expand(batch, num_nodes, num_nodes)
        return tree_mask(self.parents)[0]
