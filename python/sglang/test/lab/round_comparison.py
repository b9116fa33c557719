"""Owns the verdict on what is drafted: a rank's report of its rounds, compared with arithmetic.

Read by `comparison`, which judges answers and everything that plain cells have as well. Every problem is a
sentence with both values. It must not run anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from sglang.test.lab import round_arithmetic
from sglang.test.lab.arithmetic import Layout, ModelShape
from sglang.test.lab.drafts import LabDraft
from sglang.test.lab.messages import PLACEMENT_NAMES, ModelReport, RankReport
from sglang.test.lab.round_arithmetic import DraftWork

#: A random draft that gives more tokens a round than this knows something.
MOST_OF_A_RANDOM_DRAFT = 1.2


def accept_length(worlds: Sequence[Sequence[RankReport]]) -> float:
    """Mean tokens that a request got out of a round with room for a draft; 0 without such rounds."""
    counts = _counts(report for ranks in worlds for report in ranks)
    return sum(counts) / max(len(counts), 1)


def round_problems(
    work: DraftWork, shape: ModelShape, layout: Layout, rank: int, report: RankReport
) -> Iterator[str]:
    """What is wrong with the rounds of one rank, by its number in its world."""
    modes = {name.partition(" ")[0] for name in report.target.forwards}
    if not {"extend", "target_verify"} <= modes <= {"extend", "target_verify", "idle"}:
        yield f"the target ran {report.target.forwards}"
    if f"target_verify x{work.num_nodes}" not in report.target.forwards:
        yield f"no round verified {work.num_nodes} nodes: {report.target.forwards}"
    entries = round_arithmetic.expected_scope_entries(work, layout, report.target)
    if report.scope_entries != entries:
        yield f"its scope was entered {report.scope_entries} times, its phases need {entries}"
    if (report.draft is None) != (work.model is None):
        yield f"a model of a draft is {'missing' if report.draft is None else 'there'}"
    if report.draft is None or work.model is None:
        return
    draft = report.draft
    forwards = dict(round_arithmetic.expected_draft_forwards(work, layout, report.target))
    if draft.forwards != forwards:
        yield f"forwards {draft.forwards}, those of the target need {forwards}"
    want = round_arithmetic.draft_parameter_bytes(work, shape, layout)
    if draft.parameter_bytes != want:
        yield f"holds {draft.parameter_bytes} bytes of weights, its share is {want}"
    want = round_arithmetic.draft_kv_bytes_per_token(work, layout)
    if draft.kv_bytes_per_token != want:
        yield f"caches {draft.kv_bytes_per_token} bytes a token, its share is {want}"
    yield from placement_problems(work.layout(layout), rank, draft)


def placement_problems(layout: Layout, rank: int, report: ModelReport) -> Iterator[str]:
    """Whether construction and every forward of a model read the place that a rank has in its layout."""
    place = rank % layout.tp_size
    replica, seat = divmod(place, layout.attn_tp_size)
    want = [layout.tp_size, place, layout.attn_tp_size, seat, layout.attn_dp_size, replica]
    for name, found in report.placements.items():
        if found != want:
            yield f"forward {name!r} read {dict(zip(PLACEMENT_NAMES, found, strict=True))}, expected {want}"


def acceptance_problems(
    draft: LabDraft, seeds: Mapping[str, int], greedy: Set[int], report: RankReport
) -> Iterator[str]:
    """What is wrong with what the requests of one replica got out of their rounds.

    A draft that is always right is always believed, except by requests with a random draw, and one that knows
    nothing hardly ever. `seeds` are by rid; `greedy` are those of requests without a random draw.
    """
    for rid, seed in seeds.items():
        rounds = report.rounds.get(seed, [])
        if report.requests[rid].num_rounds != len(rounds):
            yield f"{rid}: {report.requests[rid].num_rounds} rounds reported, {len(rounds)} ran"
        short = [tokens for nodes, tokens in rounds if nodes > 1 and tokens != draft.most_accepted]
        if draft.is_oracle and seed in greedy and short:
            yield f"{rid}: rounds gave {short} tokens, and {draft.most_accepted} were right"
    counts = _counts([report])
    if draft.is_random and sum(counts) > MOST_OF_A_RANDOM_DRAFT * len(counts):
        yield f"a random draft gave {sum(counts)} tokens in {len(counts)} rounds of a request"


def _counts(reports: Iterable[RankReport]) -> list[int]:
    """Tokens of every round with room for a draft."""
    return [
        tokens
        for report in reports
        for rounds in report.rounds.values()
        for nodes, tokens in rounds
        if nodes > 1
    ]
