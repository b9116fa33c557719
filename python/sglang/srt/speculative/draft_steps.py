"""Owns what a draft model does in a round, as functions of tensors: grow trees, take in what was accepted.

Run by its drafter, one operation after another or recorded as one graph. They take numbers of rows from
shapes, and read neither a length nor a value of a tensor on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from sglang.srt.batch.forward_batch import ForwardBatch
from sglang.srt.batch.spec_input import DraftTree
from sglang.srt.model_executor.runner_backend.base import Outputs
from sglang.srt.speculative.draft_graph_runner import RunForward
from sglang.srt.speculative.draft_tree import DraftBeam, DraftShape

#: Logits [rows, draft vocabulary] of a level -> the best children of each row [rows, k], as ids of the
#: target, and their probabilities; a chain needs none.
BestChildren = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]


def grow_trees(
    shape: DraftShape,
    children: BestChildren,
    inputs: Mapping[str, torch.Tensor],
    batches: Sequence[ForwardBatch],
    run: RunForward,
) -> Outputs:
    """All levels of the trees of a round, from the first one on: `token_ids` and `parents` [batch, N].

    inputs: `root_ids` [batch], `first_ids` [batch, k] and for a tree `first_probs` [batch, k] (the first
    level), `stream` [batch, hidden] (what it goes on from). One batch of k rows a request for each further
    level; its ids, hidden rows and mask are those of the frontier.
    """
    beam = DraftBeam(shape, inputs["root_ids"])
    beam.grow(inputs["first_ids"], inputs.get("first_probs"))
    stream = inputs["stream"][:, None]  # [batch, rows of the level before, hidden]
    width = stream.shape[-1]
    for level, batch in enumerate(batches):
        frontier = beam.frontier
        parents = frontier.parent_rows[:, :, None].expand(-1, -1, width)
        assert batch.spec is not None
        spec = replace(
            batch.spec, hidden=stream.gather(1, parents).reshape(-1, width), tail_mask=frontier.tail_mask
        )
        output = run(level, replace(batch, input_ids=frontier.token_ids.reshape(-1), spec=spec))
        beam.grow(*children(output.logits))
        assert output.hidden is not None
        stream = output.hidden.view(*frontier.token_ids.shape, width)
    return _as_outputs(beam.tree())


def grow_trees_from_roots(
    shape: DraftShape,
    children: BestChildren,
    inputs: Mapping[str, torch.Tensor],
    batches: Sequence[ForwardBatch],
    run: RunForward,
) -> Outputs:
    """All levels of the trees of a round, by a draft that reads tokens alone; answers as `grow_trees` does.

    inputs: `root_ids` [batch]. The first batch is one row a request, the root; each further level has k.
    """
    beam = DraftBeam(shape, inputs["root_ids"], root_in_tail=True)
    for level, batch in enumerate(batches):
        frontier = beam.frontier
        assert batch.spec is not None
        spec = replace(batch.spec, tail_mask=frontier.tail_mask)
        output = run(level, replace(batch, input_ids=frontier.token_ids.reshape(-1), spec=spec))
        beam.grow(*children(output.logits))
    return _as_outputs(beam.tree())


def take_in_accepted(
    inputs: Mapping[str, torch.Tensor], batches: Sequence[ForwardBatch], run: RunForward
) -> Outputs:
    """The rows of accepted paths: `logits` [batch, draft vocabulary], `stream` [batch, hidden] of each end.

    inputs: `hidden` [batch * N, features] beside the tokens of the one batch, `last` [batch]: the row of each
    request at which its path ends. What lies behind it is of no meaning, and the next round writes its slots
    again.
    """
    (batch,) = batches
    assert batch.spec is not None
    first = torch.arange(inputs["last"].shape[0], device=inputs["last"].device) * batch.spec.width
    rows = first + inputs["last"]
    output = run(0, replace(batch, spec=replace(batch.spec, hidden=inputs["hidden"], logit_rows=rows)))
    assert output.hidden is not None
    return {"logits": output.logits, "stream": output.hidden.index_select(0, rows)}


def take_in_tokens(
    inputs: Mapping[str, torch.Tensor], batches: Sequence[ForwardBatch], run: RunForward
) -> Outputs:
    """The tokens of accepted paths, by a draft that reads tokens alone: they are in its cache afterwards."""
    (batch,) = batches
    assert batch.spec is not None
    no_rows = batch.input_ids.new_empty(0)
    run(0, replace(batch, spec=replace(batch.spec, logit_rows=no_rows)))
    return {}


def _as_outputs(tree: DraftTree) -> Outputs:
    return {"token_ids": tree.token_ids, "parents": tree.parents}
