"""What the layout lab expects of drafts, worked out by hand, and each mistake in a right report named."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

from collections import Counter
from collections.abc import Callable
from copy import deepcopy

import pytest

from sglang.srt.messages.io_struct import FinishReason
from sglang.test.lab.arithmetic import Layout, ModelShape
from sglang.test.lab.drafts import LabDraft
from sglang.test.lab.messages import ModelReport, RankReport, RequestReport
from sglang.test.lab.round_arithmetic import (
    draft_kv_bytes_per_token,
    draft_parameter_bytes,
    expected_draft_forwards,
    expected_round_calls,
    expected_scope_entries,
)
from sglang.test.lab.round_comparison import (
    accept_length,
    acceptance_problems,
    placement_problems,
    round_problems,
)

SHAPE = ModelShape(
    hidden=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    inner=129,
    vocab=301,
    tied=False,
    head_norms=False,
)
EAGLE, EAGLE3, REDUCED = LabDraft("EAGLE"), LabDraft("EAGLE3"), LabDraft("EAGLE3", is_reduced=True)
ORACLE, NGRAM = LabDraft("STANDALONE"), LabDraft("NGRAM")
DRAFTS = [EAGLE, LabDraft("EAGLE", is_tree=True), EAGLE3, REDUCED, ORACLE, NGRAM]
TP2, TP2_DP2, TP4_DP2 = Layout(2), Layout(2, 2), Layout(4, 2)
TP4_DP2_HEAD = Layout(4, 2, dp_lm_head=True)
LAYOUTS = [TP2, TP2_DP2, TP4_DP2, TP4_DP2_HEAD]
RANK = 1


def target_forwards(draft: LabDraft, layout: Layout) -> dict[str, int]:
    """Three prompts, ten rounds with room and two without, and with replicas one and four idle forwards."""
    nodes = draft.shape[2]
    busy = {"extend": 3, f"target_verify x{nodes}": 10, "target_verify x1": 2}
    return busy if layout.attn_dp_size == 1 else busy | {"idle extend": 1, f"idle x{nodes}": 4}


def rank_report(draft: LabDraft, layout: Layout) -> RankReport:
    """What rank 1 reports if everything about its draft is right."""
    work = draft.work(SHAPE)
    target = ModelReport(
        parameter_bytes=0, kv_bytes_per_token=0, forwards=target_forwards(draft, layout), head_calls=15
    )
    if layout.attn_dp_size > 1:
        target.paddings = {"max_len": target.num_forwards - 4, "sum_len": 4}
    report = RankReport(
        requests={},
        draws={},
        vocab_size=SHAPE.vocab,
        target=target,
        calls={},
        unfinished_prompts=0,
        steps=30,
        scope_entries=expected_scope_entries(work, layout, target),
    )
    if work.model is not None:
        forwards = dict(expected_draft_forwards(work, layout, target))
        mine = work.layout(layout)
        place = RANK % mine.tp_size
        replica, seat = divmod(place, mine.attn_tp_size)
        placement = [mine.tp_size, place, mine.attn_tp_size, seat, mine.attn_dp_size, replica]
        report.draft = ModelReport(
            parameter_bytes=draft_parameter_bytes(work, SHAPE, layout),
            kv_bytes_per_token=draft_kv_bytes_per_token(work, layout),
            forwards=forwards,
            paddings={"max_len": sum(forwards.values())} if mine.attn_dp_size > 1 else {},
            head_calls=sum(forwards.values()),
            placements=dict.fromkeys(forwards, placement),
        )
    return report


def problems(draft: LabDraft, layout: Layout, report: RankReport) -> list[str]:
    return list(round_problems(draft.work(SHAPE), SHAPE, layout, RANK, report))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("draft", DRAFTS, ids=lambda draft: draft.name)
def test_right_reports_pass(draft: LabDraft, layout: Layout) -> None:
    assert problems(draft, layout, rank_report(draft, layout)) == []


def of_draft(report: RankReport) -> ModelReport:
    assert report.draft is not None
    return report.draft


WRONG: list[tuple[str, LabDraft, Callable[[RankReport], object]]] = [
    ("the target ran", EAGLE, lambda report: report.target.forwards.update({"decode x1": 1})),
    ("no round verified 4 nodes", EAGLE, lambda report: report.target.forwards.pop("target_verify x4")),
    ("its scope was entered {'following': 32}", EAGLE, lambda r: r.scope_entries.update(following=32)),
    (
        "its scope was entered {'owning': 25, 'following'",
        EAGLE3,
        lambda r: r.scope_entries.update(following=1),
    ),
    ("a model of a draft is missing", EAGLE, lambda report: setattr(report, "draft", None)),
    ("a model of a draft is there", NGRAM, lambda report: setattr(report, "draft", report.target)),
    ("forwards {", EAGLE, lambda report: of_draft(report).forwards.update({"idle x1": 7})),
    ("forwards {", EAGLE3, lambda report: of_draft(report).forwards.update({"idle x1": 8})),
    ("forwards {", ORACLE, lambda report: of_draft(report).forwards.pop("decode x1")),
    ("bytes of weights", EAGLE, lambda report: setattr(of_draft(report), "parameter_bytes", 4)),
    ("bytes a token", ORACLE, lambda report: setattr(of_draft(report), "kv_bytes_per_token", 4)),
    (
        "forward 'extend' read {'tp_size': 2",
        EAGLE3,
        lambda r: of_draft(r).placements["extend"].__setitem__(0, 2),
    ),
    (
        "forward 'idle x4' read {'tp_size': 1",
        EAGLE,
        lambda r: of_draft(r).placements["idle x4"].__setitem__(0, 1),
    ),
]


@pytest.mark.parametrize(("sign", "draft", "spoil"), WRONG, ids=[sign for sign, *_ in WRONG])
def test_each_wrong_report_is_named(
    sign: str, draft: LabDraft, spoil: Callable[[RankReport], object]
) -> None:
    report = deepcopy(rank_report(draft, TP2_DP2))
    spoil(report)
    found = problems(draft, TP2_DP2, report)
    assert any(sign in problem for problem in found), found


def test_forwards_of_drafts_are_those_worked_out_by_hand() -> None:
    """A chain of three: EAGLE has its first token before the round, a model of its own reads the root.

    Without replicas the rows of two rounds of one node are put off.
    """
    eagle = {"extend": 3, "decode x1": 20, "draft_extend x4": 10, "draft_extend x1": 2}
    idle = {"idle extend": 1, "idle x1": 8, "idle x4": 4}
    oracle = eagle | {"decode x1": 30}

    def forwards(draft: LabDraft, layout: Layout) -> Counter[str]:
        return expected_draft_forwards(draft.work(SHAPE), layout, rank_report(draft, layout).target)

    assert forwards(EAGLE3, TP2_DP2) == eagle
    later = {name: count for name, count in eagle.items() if name != "draft_extend x1"}
    assert forwards(EAGLE, TP2) == forwards(EAGLE3, TP2) == later
    assert forwards(EAGLE, TP2_DP2) == eagle | idle
    assert forwards(ORACLE, TP2_DP2) == oracle | idle | {"idle x1": 12}
    assert forwards(NGRAM, TP2_DP2) == {}
    tree = {"extend": 3, "decode x2": 20, "draft_extend x6": 10}
    assert forwards(LabDraft("EAGLE", is_tree=True), TP2) == tree


def test_entries_into_scopes_are_those_worked_out_by_hand() -> None:
    """Three prompts, two in each of ten rounds; with replicas one in each of two narrow rounds.

    Idle: one, and two in each of four.
    """

    def entries(draft: LabDraft, layout: Layout) -> dict[str, int]:
        return expected_scope_entries(draft.work(SHAPE), layout, rank_report(draft, layout).target)

    assert entries(EAGLE, TP2) == entries(ORACLE, TP2) == entries(EAGLE3, TP2) == {"following": 23}
    assert entries(EAGLE, TP2_DP2) == {"following": 34}
    assert entries(EAGLE3, TP2_DP2) == {"owning": 25}
    assert entries(NGRAM, TP2_DP2) == {}


def test_calls_of_rounds_are_those_worked_out_by_hand() -> None:
    """15 forwards of the target (two layers) and 33 of an EAGLE draft (one layer), each with a head call."""

    def calls(draft: LabDraft, layout: Layout) -> dict[str, Counter[str]]:
        return expected_round_calls(draft.work(SHAPE), SHAPE, layout, rank_report(draft, layout))

    #: 30 inboxes, 15 results, 12 proposals; sums of embedding and attention.
    heard = {"broadcast_object": 30 + 15, "broadcast": 12}
    assert calls(EAGLE, TP2) == {
        "tp": {"all_reduce": 15 * 2 + 33, "all_gather": 15 + 33},
        "attn_tp": {"all_reduce": 15 * 3 + 33 * 2, **heard},
    }
    assert calls(NGRAM, TP2) == {
        "tp": {"all_reduce": 15 * 2, "all_gather": 15},
        "attn_tp": {"all_reduce": 15 * 3, **heard},
    }
    # Two replicas: 16 padded and 4 exact forwards of the target; the draft stays in its replica.
    replicas = {
        "all_gather": 16 * 2 + 15 + 2 * 30,
        "reduce_scatter": 16 * 2,
        "all_reduce": 2 * 4 * 2 + 15,
    }
    assert calls(EAGLE3, TP4_DP2) == {
        "tp": replicas,
        "attn_tp": {"all_reduce": 15 * 3 + 35 * 3, "all_gather": 16 * 2 + 35, **heard},
    }
    assert calls(EAGLE3, TP2_DP2)["attn_tp"] == {}
    # 48 forwards of a draft that follows its target, idle ones included; they sum nothing of their own.
    follows = calls(EAGLE, TP4_DP2)
    assert follows["tp"]["reduce_scatter"] == 16 * 2 + 48
    assert follows["attn_tp"] == {"all_reduce": 15 * 3 + 35 * 2, "all_gather": 16 * 2 + 48, **heard}


def test_bytes_of_drafts_are_those_worked_out_by_hand() -> None:
    """Heads 4 and 2 of 16, hidden 64; the feed-forward of 129 in two is 65."""

    def weights(draft: LabDraft, layout: Layout) -> int:
        return draft_parameter_bytes(draft.work(SHAPE), SHAPE, layout)

    halves = (2 + 1 + 1) * 16 * 64 + 64 * 2 * 16 + 3 * 64 * 65
    assert weights(EAGLE, TP2) == 4 * (halves + 2 * 64 * 64 + 64 + 64)
    third = (2 + 1 + 1) * 16 * 128 + 64 * 2 * 16 + 3 * 64 * 65 + 3 * 64 * 64 + 4 * 64
    assert weights(EAGLE3, TP2) == weights(EAGLE3, TP4_DP2_HEAD) == 4 * third
    assert weights(REDUCED, TP2) == 4 * (third + 51 * 64) + 8 * 101
    # On its own in a replica it is whole, or cut in two, and brings the head that it cannot borrow.
    assert weights(EAGLE3, TP4_DP2) == 4 * (third + 151 * 64)
    whole = (4 + 2 + 2) * 16 * 128 + 64 * 4 * 16 + 3 * 64 * 129 + 3 * 64 * 64 + 4 * 64
    assert weights(EAGLE3, TP2_DP2) == 4 * (whole + 301 * 64)
    assert draft_kv_bytes_per_token(EAGLE.work(SHAPE), TP2_DP2) == 2 * 1 * 2 * 16 * 4
    assert draft_kv_bytes_per_token(ORACLE.work(SHAPE), TP2) == 2 * 2 * 1 * 16 * 4


def leader_report(*tokens: int, nodes: int = 4, reported: int | None = None) -> RankReport:
    """A leader whose only request, of seed 11, got so many tokens in its rounds."""
    report = rank_report(ORACLE, TP2)
    report.rounds = {11: [(nodes, count) for count in tokens]}
    num_rounds = len(tokens) if reported is None else reported
    report.requests = {
        "one": RequestReport(
            ids=[],
            finish_reason=FinishReason(type="length", length=5),
            cached_tokens=0,
            num_retractions=0,
            output_logprobs=[],
            input_logprobs=None,
            num_rounds=num_rounds,
        )
    }
    return report


@pytest.mark.parametrize(
    ("draft", "report", "greedy", "signs"),
    [
        (ORACLE, leader_report(4, 4), {11}, []),
        (ORACLE, leader_report(4, 3), {11}, ["one: rounds gave [3] tokens, and 4 were right"]),
        (ORACLE, leader_report(4, 3), set(), []),
        (ORACLE, leader_report(1, nodes=1), {11}, []),
        (EAGLE, leader_report(1, 1), {11}, []),
        (EAGLE, leader_report(1, 2), {11}, ["a random draft gave 3 tokens in 2 rounds"]),
        (NGRAM, leader_report(1, 2), {11}, []),
        (NGRAM, leader_report(1, 2, reported=3), {11}, ["one: 3 rounds reported, 2 ran"]),
    ],
)
def test_what_requests_got_out_of_rounds_is_judged(
    draft: LabDraft, report: RankReport, greedy: set[int], signs: list[str]
) -> None:
    found = list(acceptance_problems(draft, {"one": 11}, greedy, report))
    assert len(found) == len(signs) and all(
        sign in problem for sign, problem in zip(signs, found, strict=True)
    ), found


def test_the_accept_length_counts_rounds_with_room_only() -> None:
    assert accept_length([[leader_report(4, 1)], [leader_report(1, nodes=1)]]) == 2.5
    assert accept_length([[rank_report(ORACLE, TP2)]]) == 0.0


@pytest.mark.parametrize(
    ("layout", "rank", "placement"),
    [
        (TP2, 1, [2, 1, 2, 1, 1, 0]),
        (TP4_DP2, 2, [4, 2, 2, 0, 2, 1]),
        (TP4_DP2.of_a_draft(), 3, [2, 1, 2, 1, 1, 0]),
        (TP2_DP2.of_a_draft(), 1, [1, 0, 1, 0, 1, 0]),
    ],
)
def test_the_place_of_a_rank_is_that_worked_out_by_hand(
    layout: Layout, rank: int, placement: list[int]
) -> None:
    report = ModelReport(parameter_bytes=0, kv_bytes_per_token=0, placements={"extend": placement})
    assert list(placement_problems(layout, rank, report)) == []
    assert len(list(placement_problems(layout, rank + 1, report))) == (layout.tp_size > 1)
