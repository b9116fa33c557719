"""Owns what each rank of a layout must store and how many collectives it needs, from the model's shape alone.

Read by `comparison`, which holds it against what ranks report. It must not import the layers, the head
shares, the group layout or anything else that it checks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang.test.lab.messages import ModelReport, RankReport

FLOAT32 = 4


@dataclass(frozen=True)
class Layout:
    """One deployment: worlds of `tp_size` ranks each, with `attn_dp_size` attention replicas inside."""

    tp_size: int = 1
    attn_dp_size: int = 1
    num_worlds: int = 1
    dp_lm_head: bool = False
    #: The tensor group is the attention-TP group, whose counters then include the calls of both.
    one_group: bool = False

    @property
    def attn_tp_size(self) -> int:
        return self.tp_size // self.attn_dp_size

    @property
    def num_replicas(self) -> int:
        return self.attn_dp_size * self.num_worlds

    def replica_rank(self, world: int, rank: int) -> int:
        """Which requests a rank has; the ranks of a replica sit side by side."""
        return world * self.attn_dp_size + rank // self.attn_tp_size

    def of_a_draft(self) -> Layout:
        """What a draft that owns its attention runs on: each attention-TP group is a world of its own."""
        return Layout(tp_size=self.attn_tp_size, num_worlds=self.num_replicas, one_group=True)

    def is_attn_tp_leader(self, rank: int) -> bool:
        return rank % self.attn_tp_size == 0

    @property
    def name(self) -> str:
        if self.num_worlds > 1:
            return f"{self.num_worlds} replicas of {self.tp_size}"
        return f"tp {self.tp_size} attn-dp {self.attn_dp_size}" + (" dp-lm-head" if self.dp_lm_head else "")


@dataclass(frozen=True)
class ModelShape:
    """What sizes a decoder. `head_norms` are the two norms over head features that Qwen3 has."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    tied: bool
    head_norms: bool


def heads_per_rank(heads: int, kv_heads: int, width: int) -> tuple[int, int]:
    """(query, key/value) heads that every rank makes room for.

    When the ranks are a multiple of the key/value heads, each such head is copied to several ranks, which
    share the query heads of its group. Otherwise every rank gets the same number of whole groups.
    """
    group = heads // kv_heads
    if width > kv_heads and width % kv_heads == 0:
        copies = width // kv_heads
        return ceil_div(group, copies), 1
    kv = ceil_div(kv_heads, width)
    return kv * group, kv


def parameter_bytes(shape: ModelShape, layout: Layout) -> int:
    """Weights of one rank in float32; every rank of a layout makes the same room."""
    attn_width, width = layout.attn_tp_size, layout.tp_size
    q, kv = heads_per_rank(shape.heads, shape.kv_heads, attn_width)
    attention = (q + 2 * kv) * shape.head_dim * shape.hidden + shape.hidden * q * shape.head_dim
    feed_forward = 3 * shape.hidden * ceil_div(shape.inner, width)
    norms = 2 * shape.hidden + (2 * shape.head_dim if shape.head_norms else 0)
    table = ceil_div(shape.vocab, attn_width) * shape.hidden
    head_width = attn_width if layout.dp_lm_head else width
    shares_table = shape.tied and head_width == attn_width
    head = 0 if shares_table else ceil_div(shape.vocab, head_width) * shape.hidden
    total = shape.layers * (attention + feed_forward + norms) + shape.hidden + table + head
    return FLOAT32 * total


def kv_bytes_per_token(shape: ModelShape, layout: Layout) -> int:
    """Keys and values of one token on one rank."""
    _, kv = heads_per_rank(shape.heads, shape.kv_heads, layout.attn_tp_size)
    return 2 * shape.layers * kv * shape.head_dim * FLOAT32


Calls = dict[str, Counter[str]]


def expected_calls(shape: ModelShape, layout: Layout, report: RankReport) -> Calls:
    """Calls that the steps and forwards of one rank without a draft need, by group."""
    return by_group(
        layout,
        [
            forward_calls(shape.layers, layout, report.target),
            {"tp": replica_gathers(layout, report), "attn_tp": broadcasts(report)},
        ],
    )


def forward_calls(layers: int, layout: Layout, report: ModelReport) -> Calls:
    """Calls of the forwards of one model.

    Attention and the embedding sum over the attention-TP group, unless the replica was idle: a replayed step
    computes what it recorded on an idle one too. The
    feed-forward of a layer sums over the tensor group; with replicas its rows come from all of them and go
    back: padded rows by all-gather and reduce-scatter (then gathered again inside the replica), exact rows by
    their variable-sized forms, or, where several ranks hold the same rows, by two sums. The head gathers the
    vocabulary, after the rows of all replicas.
    """
    tp: Counter[str] = Counter()
    attn_tp: Counter[str] = Counter()
    every, heads = report.num_forwards, report.head_calls
    attn_tp["all_reduce"] += (every - report.num_idle + report.num_idle_replays) * (layers + 1)
    (attn_tp if layout.dp_lm_head else tp)["all_gather"] += heads
    if layout.attn_dp_size == 1:
        tp["all_reduce"] += every * layers
        return {"tp": tp, "attn_tp": attn_tp}
    equal, exact = report.paddings.get("max_len", 0) * layers, report.paddings.get("sum_len", 0) * layers
    tp["all_gather"] += equal
    tp["reduce_scatter"] += equal
    attn_tp["all_gather"] += equal
    fetched = 0 if layout.dp_lm_head else heads
    if layout.attn_tp_size == 1:
        tp["all_gatherv"] += exact + fetched
        tp["reduce_scatterv"] += exact
    else:
        tp["all_reduce"] += 2 * exact + fetched
    return {"tp": tp, "attn_tp": attn_tp}


def replica_gathers(layout: Layout, report: RankReport, *, each_step: int = 1) -> Counter[str]:
    """What replicas exchange in every step: their sizes and, with a draft, a vote before."""
    return Counter(all_gather=each_step * report.steps if layout.attn_dp_size > 1 else 0)


def broadcasts(report: RankReport) -> Counter[str]:
    """The leader of an attention-TP group sends its inbox in every step and the result of every forward."""
    return Counter(broadcast_object=report.steps + report.target.num_forwards - report.target.num_idle)


def by_group(layout: Layout, parts: Sequence[Mapping[str, Counter[str]]]) -> Calls:
    """The sum of the parts; a group of one rank needs no call."""
    tp = sum((part.get("tp", Counter()) for part in parts), Counter())
    attn_tp = sum((part.get("attn_tp", Counter()) for part in parts), Counter())
    if layout.one_group:
        tp, attn_tp = Counter(), attn_tp + tp
    return {
        "tp": +tp if layout.tp_size > 1 else Counter(),
        "attn_tp": +attn_tp if layout.attn_tp_size > 1 else Counter(),
    }


def ceil_div(total: int, parts: int) -> int:
    return -(-total // parts)
