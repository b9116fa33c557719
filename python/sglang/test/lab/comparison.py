"""Owns the verdict of the layout lab: reports of a cell's ranks, compared with one rank and with arithmetic.

Read by `layout_lab`. Every problem is a sentence that names the rank or the request and both values; a cell
passes when there is none. It must not run anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sglang.srt.messages.io_struct import TokenLogprob
from sglang.test.lab import arithmetic as lab_arithmetic
from sglang.test.lab.arithmetic import Layout, ModelShape
from sglang.test.lab.drafts import LabDraft
from sglang.test.lab.messages import GROUPS, ModelReport, RankReport, RequestReport
from sglang.test.lab.round_arithmetic import DraftWork, expected_round_calls
from sglang.test.lab.round_comparison import (
    acceptance_problems,
    placement_problems,
    round_problems,
)
from sglang.test.lab.scenario import CHUNK, SHARED_PREFIX, Placed, Scenario

#: How far a logit may lie from that of one rank.
LOGIT_TOLERANCE = 1e-4
#: A step whose two best logits are closer than this could go either way.
MARGIN = 1e-4
#: Logits of a random model must lie apart at least so much.
LEAST_STD = 3.0


@dataclass(frozen=True)
class Reference:
    """What one rank answers, by the name of the request."""

    requests: dict[str, RequestReport]
    draws: dict[str, np.ndarray]  # [tokens, vocab]

    @classmethod
    def of(cls, scenario: Scenario, report: RankReport) -> Reference:
        """The reference of a scenario that one rank alone has run."""
        requests = {rid.partition("@")[0]: request for rid, request in report.requests.items()}
        draws = {name: draws_of(report, scenario.seed_of(name)) for name in scenario.names}
        return cls(requests, draws)


def draws_of(report: RankReport, seed: int) -> np.ndarray:
    """Logits [tokens, vocab] of one request."""
    return np.frombuffer(report.draws.get(seed, b""), dtype=np.float32).reshape(-1, report.vocab_size)


def fitness_problems(scenario: Scenario, reference: Reference) -> Iterator[str]:
    """Why the reference cannot be compared with: logits without spread, or a choice that rounding decides."""
    spread = float(np.std(np.concatenate(list(reference.draws.values()))))
    if spread < LEAST_STD:
        yield f"logits of the reference have a standard deviation of {spread:.2f}, below {LEAST_STD}"
    for name in scenario.greedy_names:
        best = np.sort(reference.draws[name], axis=1)[:, -2:]
        close = int(np.sum(best[:, 1] - best[:, 0] < MARGIN))
        if close:
            yield f"{name}: {close} steps whose two best logits lie closer than {MARGIN}; take another seed"
        if not len(best):
            yield f"{name}: the reference drew nothing"


def problems_of(
    scenario: Scenario,
    reference: Reference,
    layout: Layout,
    shape: ModelShape,
    worlds: Sequence[Sequence[RankReport]],
    *,
    asked: Sequence[Placed],
    draft: LabDraft | None = None,
    is_proof: bool = True,
    is_recorded: bool = False,
) -> list[str]:
    """Everything that is wrong with a cell; `worlds` holds the reports in world and rank order.

    With `is_proof` the requests `asked` are those that meet every case: `Scenario.phases`.
    """
    work = None if draft is None else draft.work(shape)
    found: list[str] = []
    for w, ranks in enumerate(worlds):
        for r, report in enumerate(ranks):
            who = f"world {w} rank {r}"
            replica = layout.replica_rank(w, r)
            found += (f"{who}: {p}" for p in _memory(layout, shape, report.target))
            found += (f"{who}: {p}" for p in _collectives(layout, shape, report, work))
            found += (f"{who}: {p}" for p in _coverage(layout, report.target))
            if is_recorded != (report.target.num_replays > 0):
                found.append(f"{who}: {report.target.num_replays} forwards were replayed from a list")
            found += (f"{who}: {p}" for p in placement_problems(layout, r, report.target))
            if work is not None:
                found += (f"{who}: draft: {p}" for p in round_problems(work, shape, layout, r, report))
            if layout.is_attn_tp_leader(r):
                mine = [one for one in asked if one.replica == replica]
                answers = _answers(scenario, reference, report, mine, has_draft=draft is not None)
                found += (f"replica {replica}: {p}" for p in answers)
                if is_proof:
                    found += (f"replica {replica}: {p}" for p in _cases(report, has_draft=draft is not None))
                if draft is not None:
                    seeds = {one.rid: scenario.seed_of(one.name) for one in mine}
                    greedy = {scenario.seed_of(name) for name in scenario.greedy_names}
                    accepted = acceptance_problems(draft, seeds, greedy, report)
                    found += (f"replica {replica}: {p}" for p in accepted)
        found += (f"world {w}: {p}" for p in _agreement(layout, ranks))
    return found


def furthest_logit(scenario: Scenario, reference: Reference, worlds: Sequence[Sequence[RankReport]]) -> float:
    """The largest distance of a logit from that of one rank, over all that were drawn from."""
    return max(
        _distance(draws_of(report, scenario.seed_of(name)), reference.draws[name])
        for ranks in worlds
        for report in ranks
        for name in scenario.names
        if scenario.seed_of(name) in report.draws
    )


def _distance(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference; rows that a round drew past the end of a request have no counterpart."""
    return float(np.max(np.abs(got[: len(want)] - want), initial=0.0))


def _answers(
    scenario: Scenario,
    reference: Reference,
    report: RankReport,
    asked: Sequence[Placed],
    *,
    has_draft: bool,
) -> Iterator[str]:
    unknown = set(report.requests) ^ {one.rid for one in asked}
    if unknown:
        yield f"answered and asked requests differ by {sorted(unknown)}"
        return
    for one in asked:
        got, want = report.requests[one.rid], reference.requests[one.name]
        if got.ids != want.ids:
            yield f"{one.name}: ids {got.ids}, one rank gives {want.ids}"
        if got.finish_reason != want.finish_reason:
            yield f"{one.name}: ended by {got.finish_reason}, on one rank by {want.finish_reason}"
        drawn, expected = draws_of(report, scenario.seed_of(one.name)), reference.draws[one.name]
        if has_draft:  # the last round may go past the end of the request
            drawn = drawn[: len(expected)]
        yield from _logits(one.name, drawn, expected)
        yield from _logprobs(f"{one.name} output", got.output_logprobs, want.output_logprobs)
        yield from _logprobs(f"{one.name} prompt", got.input_logprobs or [], want.input_logprobs or [])


def _cases(report: RankReport, *, has_draft: bool) -> Iterator[str]:
    """Whether the requests of a replica met the cases that the scenario is made for."""
    retracted = sum(request.num_retractions for request in report.requests.values())
    if not retracted:
        yield "nothing was retracted: the crowd fits"
    hits = {rid: request.cached_tokens for rid, request in report.requests.items() if "again" in rid}
    for rid, cached in hits.items():
        if not 0 < cached <= SHARED_PREFIX:
            yield f"{rid}: {cached} cached tokens, expected a hit of at most {SHARED_PREFIX}"
    if not report.unfinished_prompts:
        yield f"no prompt was computed in chunks of {CHUNK}"
    if has_draft and not any(nodes == 1 for rounds in report.rounds.values() for nodes, _ in rounds):
        yield "no round was narrow: the pool always had room for a draft"


def _logits(name: str, got: np.ndarray, want: np.ndarray) -> Iterator[str]:
    if got.shape != want.shape:
        yield f"{name}: logits {got.shape}, on one rank {want.shape}"
        return
    far = _distance(got, want)
    if not far <= LOGIT_TOLERANCE:  # a NaN is far
        step = int(np.argmax(np.max(np.abs(got - want), axis=1)))
        yield f"{name}: logits differ by {far:.3g}, first most at token {step}; at most {LOGIT_TOLERANCE:g}"


def _logprobs(what: str, got: Sequence[TokenLogprob], want: Sequence[TokenLogprob]) -> Iterator[str]:
    if [entry.token_id for entry in got] != [entry.token_id for entry in want]:
        yield f"{what}: log-probabilities of other tokens than on one rank"
        return
    pairs = [(a, b) for x, y in zip(got, want, strict=True) for a, b in zip(_flat(x), _flat(y), strict=True)]
    # A log-probability moves by a logit and by the sum over all of them.
    far = [pair for pair in pairs if not abs(pair[0] - pair[1]) <= 2 * LOGIT_TOLERANCE]
    if far:
        yield f"{what}: {len(far)} log-probabilities differ, as {far[0][0]:.6f} from {far[0][1]:.6f}"


def _flat(entry: TokenLogprob) -> list[float]:
    own = [] if entry.logprob is None else [entry.logprob]
    return [*own, *(value for value, _ in (*(entry.top or ()), *(entry.chosen or ())))]


def _memory(layout: Layout, shape: ModelShape, report: ModelReport) -> Iterator[str]:
    want = lab_arithmetic.parameter_bytes(shape, layout)
    if report.parameter_bytes != want:
        yield f"holds {report.parameter_bytes} bytes of weights, its share is {want}"
    want = lab_arithmetic.kv_bytes_per_token(shape, layout)
    if report.kv_bytes_per_token != want:
        yield f"caches {report.kv_bytes_per_token} bytes a token, its share is {want}"


def _collectives(
    layout: Layout, shape: ModelShape, report: RankReport, work: DraftWork | None
) -> Iterator[str]:
    """Exactly the calls expected, over exactly the groups expected."""
    if work is None:
        expected = lab_arithmetic.expected_calls(shape, layout, report)
    else:
        expected = expected_round_calls(work, shape, layout, report)
    for name in GROUPS:
        got, want = report.calls[name], dict(expected.get(name, {}))
        if got != want:
            yield f"{name} group: {got}, its steps and forwards need {want}"


def _coverage(layout: Layout, report: ModelReport) -> Iterator[str]:
    """Whether the cell met the cases that the scenario is made for."""
    if layout.attn_dp_size == 1:
        if report.paddings or report.num_idle:
            yield f"paddings {report.paddings} and forwards {report.forwards} without attention replicas"
        return
    for padding in ("max_len", "sum_len"):
        if not report.paddings.get(padding):
            yield f"no forward was padded by {padding}: {report.paddings}"
    if not report.num_idle:
        yield f"this replica was never idle: {report.forwards}"
    if sum(report.paddings.values()) != report.num_forwards:
        yield f"paddings {report.paddings} of forwards {report.forwards}: one forward is not sized"


def _agreement(layout: Layout, ranks: Sequence[RankReport]) -> Iterator[str]:
    """Whether the ranks of a group took part in the same calls."""
    blocks = {"tp": layout.tp_size, "attn_tp": layout.attn_tp_size}
    for name, width in blocks.items():
        for first in range(0, len(ranks), width):
            members = ranks[first : first + width]
            if any(member.calls[name] != members[0].calls[name] for member in members):
                yield f"{name} group from rank {first} on: {[member.calls[name] for member in members]}"
    if len({rank.steps for rank in ranks}) > 1:
        yield f"steps differ: {[rank.steps for rank in ranks]}"
