"""Owns what speculative rounds need of each rank of a layout, from the shape of the draft alone.

Read by `comparison`, as `arithmetic` is for plain cells. It must not import the layers, the drafters or the
scopes that it checks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from sglang.test.lab import arithmetic
from sglang.test.lab.arithmetic import FLOAT32, Calls, Layout, ModelShape, ceil_div, heads_per_rank
from sglang.test.lab.messages import ModelReport, RankReport

_INT64 = 8


@dataclass(frozen=True)
class HeadShape:
    """What sizes an EAGLE or EAGLE3 draft of one layer beside what it has in common with its target.

    `own_vocab`: tokens of a head of its own; None: it scores all the target's, with the target's head where
    it can.
    """

    is_third: bool
    heads: int
    kv_heads: int
    head_dim: int
    own_vocab: int | None = None


@dataclass(frozen=True)
class DraftWork:
    """What a draft is and what it does in a round.

    `levels` are the rows of each request in each of its forwards before verification. `model` is None
    where no model drafts. `owns_attention` where it has one set of rows in each replica.
    """

    num_nodes: int
    levels: tuple[int, ...] = ()
    model: HeadShape | ModelShape | None = None
    works_in_one_group: bool = False

    def layout(self, target: Layout) -> Layout:
        """What the draft runs on: the target's layout, or each attention-TP group by itself."""
        return target.of_a_draft() if self.owns_attention(target) else target

    def owns_attention(self, target: Layout) -> bool:
        return self.works_in_one_group and target.attn_dp_size > 1

    @property
    def layers(self) -> int:
        return self.model.layers if isinstance(self.model, ModelShape) else 1


def draft_parameter_bytes(work: DraftWork, target: ModelShape, layout: Layout) -> int:
    """Weights of the draft on one rank in float32, without those that are the target's."""
    mine, shape = work.layout(layout), work.model
    if isinstance(shape, ModelShape):
        return arithmetic.parameter_bytes(shape, mine)
    assert shape is not None
    hidden = target.hidden
    inputs = 2 * hidden if shape.is_third else hidden
    q, kv = heads_per_rank(shape.heads, shape.kv_heads, mine.attn_tp_size)
    attention = (q + 2 * kv) * shape.head_dim * inputs + hidden * q * shape.head_dim
    feed_forward = 3 * hidden * ceil_div(target.inner, mine.tp_size)
    fused = (3 if shape.is_third else 2) * hidden * hidden + (0 if shape.is_third else hidden)
    norms = (4 if shape.is_third else 1) * hidden
    ids = 0 if shape.own_vocab is None else _INT64 * shape.own_vocab
    return FLOAT32 * (attention + feed_forward + fused + norms + _head(work, shape, target, layout)) + ids


def _head(work: DraftWork, shape: HeadShape, target: ModelShape, layout: Layout) -> int:
    """Numbers in a head of the draft's own.

    A draft that owns its attention cannot use the target's, unless that is cut over each replica alone.
    """
    mine = work.layout(layout)
    if shape.own_vocab is not None:
        return ceil_div(shape.own_vocab, mine.tp_size) * target.hidden
    if not work.owns_attention(layout) or layout.dp_lm_head:
        return 0
    return ceil_div(target.vocab, mine.tp_size) * target.hidden


def draft_kv_bytes_per_token(work: DraftWork, layout: Layout) -> int:
    """Keys and values that the draft caches of one token on one rank."""
    shape = work.model
    assert shape is not None
    _, kv = heads_per_rank(shape.heads, shape.kv_heads, layout.attn_tp_size)
    return 2 * work.layers * kv * shape.head_dim * FLOAT32


def expected_draft_forwards(work: DraftWork, layout: Layout, target: ModelReport) -> Counter[str]:
    """The draft's forwards by name, from those of its target.

    One beside each over prompts; in a round with room for a draft its levels, and in every round one over
    the rows that were verified. An idle replica runs as many with as many rows, unless the draft owns its
    attention.
    """
    expected: Counter[str] = Counter()
    for name, count in target.forwards.items():
        is_idle = name.startswith("idle")
        if work.model is None or (is_idle and work.owns_attention(layout)):
            continue
        if name.endswith("extend"):
            expected[name] += count
            continue
        rows = int(name.rpartition("x")[2])
        if rows == 1 and _puts_off(layout):
            continue
        expected[f"idle x{rows}" if is_idle else f"draft_extend x{rows}"] += count
        for width in work.levels if rows == work.num_nodes else ():
            expected[f"idle x{width}" if is_idle else f"decode x{width}"] += count
    return expected


def expected_scope_entries(work: DraftWork, layout: Layout, target: ModelReport) -> dict[str, int]:
    """Entries into the draft's scope: one for prompts, and in a round one to draft and one to go on."""
    if work.model is None:
        return {}
    owns = work.owns_attention(layout)
    entries = 0
    for name, count in target.forwards.items():
        if not (name.startswith("idle") and owns) and not (name.endswith("x1") and _puts_off(layout)):
            entries += count * (2 if name.endswith(f"x{work.num_nodes}") else 1)
    return {"owning" if owns else "following": entries}


def _puts_off(layout: Layout) -> bool:
    """Whether a draft reads the rows of rounds without guesses later, together.

    It does so before it guesses again, which no request of a cell does after a round that found no room.
    """
    return layout.attn_dp_size == 1


def expected_round_calls(work: DraftWork, shape: ModelShape, layout: Layout, report: RankReport) -> Calls:
    """Calls of the steps and forwards of one rank with a draft, by group.

    Target and draft call for their forwards as `arithmetic.forward_calls` says, each on its own layout. Only
    the ranks of an attention-TP group hear of proposals and of what was accepted: one tensor, and one
    object in place of a plain result. Replicas vote before each step.
    """
    rounds = sum(n for name, n in report.target.forwards.items() if name.startswith("target_verify"))
    heard = arithmetic.broadcasts(report) + Counter(broadcast=rounds)
    parts: list[Calls] = [
        arithmetic.forward_calls(shape.layers, layout, report.target),
        {"tp": arithmetic.replica_gathers(layout, report, each_step=2), "attn_tp": heard},
    ]
    if report.draft is not None:
        mine = work.layout(layout)
        parts.append(arithmetic.by_group(mine, [arithmetic.forward_calls(work.layers, mine, report.draft)]))
    return arithmetic.by_group(layout, parts)
