"""The layout lab's verdict without any rank: a right report passes, and each mistake in one is named.

A check that never fires would let every layout pass.
"""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

from collections.abc import Callable
from copy import deepcopy

import numpy as np
import pytest

from sglang.srt.messages.io_struct import FinishReason, TokenLogprob
from sglang.test.lab.arithmetic import (
    Layout,
    ModelShape,
    expected_calls,
    heads_per_rank,
    kv_bytes_per_token,
    parameter_bytes,
)
from sglang.test.lab.comparison import Reference, fitness_problems, problems_of
from sglang.test.lab.messages import GROUPS, ModelReport, RankReport, RequestReport
from sglang.test.lab.scenario import Scenario

VOCAB = 301
SHAPE = ModelShape(
    hidden=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    inner=129,
    vocab=VOCAB,
    tied=False,
    head_norms=False,
)
SCENARIO = Scenario(VOCAB)
ONE = Layout()
LAYOUTS = [Layout(2), Layout(2, 2), Layout(3), Layout(4, 2), Layout(4, 2, dp_lm_head=True), Layout(4, 4)]
Reports = list[RankReport]


def rank_report(layout: Layout, rank: int) -> RankReport:
    """What a rank of the layout reports if everything is right; the logits are drawn from nowhere."""
    replica = layout.replica_rank(0, rank)
    seat = rank % layout.attn_tp_size
    placement = [layout.tp_size, rank, layout.attn_tp_size, seat, layout.attn_dp_size, replica]
    draws = np.random.default_rng(3)
    logits = {name: draws.normal(0.0, 4.0, (5, VOCAB)).astype(np.float32) for name in SCENARIO.names}
    mine = [one for phase in SCENARIO.phases(layout.num_replicas) for one in phase if one.replica == replica]
    entry = TokenLogprob(logprob=-1.0, token_id=7, top=[(-0.5, 9)], chosen=[(-3.0, 5)])
    report = RankReport(
        requests={
            one.rid: RequestReport(
                ids=logits[one.name].argmax(axis=1).tolist(),
                finish_reason=FinishReason(type="length", length=5),
                cached_tokens=40 if one.name == "again" else 0,
                num_retractions=int(one.name == "crowd1"),
                output_logprobs=[entry],
                input_logprobs=None,
            )
            for one in mine
        },
        draws={SCENARIO.seed_of(name): rows.tobytes() for name, rows in logits.items()},
        vocab_size=VOCAB,
        target=ModelReport(
            parameter_bytes=parameter_bytes(SHAPE, layout),
            kv_bytes_per_token=kv_bytes_per_token(SHAPE, layout),
            forwards={"extend": 10, "decode x1": 20},
            head_calls=25,
            placements={"extend": placement, "decode x1": placement},
        ),
        calls={},
        unfinished_prompts=2,
        steps=40,
    )
    if not layout.is_attn_tp_leader(rank):
        report.requests, report.draws = {}, {}
    if layout.attn_dp_size > 1:
        report.target.forwards |= {"idle extend": 1, "idle x1": 3}
        report.target.paddings = {"max_len": 20, "sum_len": 14}
    expected = expected_calls(SHAPE, layout, report)
    report.calls = {name: dict(expected.get(name, {})) for name in GROUPS}
    return report


def rank_reports(layout: Layout) -> Reports:
    return [rank_report(layout, rank) for rank in range(layout.tp_size)]


REFERENCE = Reference.of(SCENARIO, rank_report(ONE, 0))


def problems(layout: Layout, ranks: Reports) -> list[str]:
    asked = [one for phase in SCENARIO.phases(layout.num_replicas) for one in phase]
    return problems_of(SCENARIO, REFERENCE, layout, SHAPE, [ranks], asked=asked)


@pytest.mark.parametrize("layout", [ONE, *LAYOUTS], ids=lambda layout: layout.name)
def test_right_reports_pass(layout: Layout) -> None:
    assert problems(layout, rank_reports(layout)) == []


def _logits(ranks: Reports, change: Callable[[np.ndarray], None]) -> None:
    seed = SCENARIO.seed_of("mixed0")
    logits = np.frombuffer(ranks[0].draws[seed], dtype=np.float32).copy()
    change(logits)
    ranks[0].draws[seed] = logits.tobytes()


def _set(logits: np.ndarray, value: float) -> None:
    logits[17] = value


def _add(logits: np.ndarray, value: float) -> None:
    logits[17] += value


def _more(report: object, name: str, more: int) -> None:
    setattr(report, name, getattr(report, name) + more)


def _never_idle(report: ModelReport) -> None:
    report.forwards = {name: n for name, n in report.forwards.items() if not name.startswith("idle")}


WRONG: list[tuple[str, Callable[[Reports], object]]] = [
    ("mixed0: ids", lambda ranks: ranks[0].requests["mixed0@0"].ids.append(4)),
    ("mixed0: logits differ", lambda ranks: _logits(ranks, lambda logits: _add(logits, 2e-4))),
    ("mixed0: logits differ", lambda ranks: _logits(ranks, lambda logits: _set(logits, float("nan")))),
    ("mixed0: logits (4, 301)", lambda ranks: ranks[0].draws.update({11: ranks[0].draws[11][4 * VOCAB :]})),
    ("mixed0: logits (0, 301)", lambda ranks: ranks[0].draws.pop(11)),
    ("asked requests differ by ['again@0']", lambda ranks: ranks[0].requests.pop("again@0")),
    ("mixed0 output: ", lambda ranks: ranks[0].requests["mixed0@0"].output_logprobs.clear()),
    ("ended by", lambda ranks: setattr(ranks[0].requests["mixed0@0"], "finish_reason", None)),
    ("again@0: 0 cached", lambda ranks: setattr(ranks[0].requests["again@0"], "cached_tokens", 0)),
    ("nothing was retracted", lambda ranks: setattr(ranks[0].requests["crowd1@0"], "num_retractions", 0)),
    ("no prompt was computed in chunks", lambda ranks: setattr(ranks[0], "unfinished_prompts", 0)),
    ("rank 3: holds", lambda ranks: _more(ranks[3].target, "parameter_bytes", 4)),
    ("rank 3: caches", lambda ranks: _more(ranks[3].target, "kv_bytes_per_token", 4)),
    ("rank 3: forward 'extend' read", lambda ranks: ranks[3].target.placements["extend"].reverse()),
    ("rank 3: tp group", lambda ranks: ranks[3].calls["tp"].update(all_reduce=1)),
    ("rank 3: attn_tp group: {}", lambda ranks: ranks[3].calls["attn_tp"].clear()),
    ("rank 3: moe_tp group", lambda ranks: ranks[3].calls["moe_tp"].update(all_reduce=1)),
    ("rank 3: world group", lambda ranks: ranks[3].calls["world"].update(barrier=1)),
    ("tp group from rank 0 on", lambda ranks: ranks[3].calls["tp"].update(all_reduce=1)),
    ("steps differ", lambda ranks: setattr(ranks[3], "steps", 41)),
    ("by max_len", lambda ranks: ranks[3].target.paddings.pop("max_len")),
    ("by sum_len", lambda ranks: ranks[3].target.paddings.pop("sum_len")),
    ("never idle", lambda ranks: _never_idle(ranks[3].target)),
    ("not sized", lambda ranks: ranks[3].target.forwards.update({"idle x1": 5})),
]


@pytest.mark.parametrize(("sign", "spoil"), WRONG, ids=[sign for sign, _ in WRONG])
def test_each_wrong_report_is_named(sign: str, spoil: Callable[[Reports], object]) -> None:
    layout = Layout(4, 2)
    ranks = deepcopy(rank_reports(layout))
    spoil(ranks)
    found = problems(layout, ranks)
    assert any(sign in problem for problem in found), found


def test_a_small_difference_of_rounding_passes() -> None:
    ranks = rank_reports(Layout(2))
    _logits(ranks, lambda logits: _add(logits, 5e-5))
    assert problems(Layout(2), ranks) == []


def test_a_reference_that_could_go_either_way_is_refused() -> None:
    draws = {name: logits.copy() for name, logits in REFERENCE.draws.items()}
    first, second = np.argsort(draws["long"][2])[-2:]
    draws["long"][2, first] = draws["long"][2, second] - 5e-5
    assert list(fitness_problems(SCENARIO, REFERENCE)) == []
    found = list(fitness_problems(SCENARIO, Reference(REFERENCE.requests, draws)))
    assert len(found) == 1 and found[0].startswith("long: 1 steps")
    flat = {name: logits / 2 for name, logits in REFERENCE.draws.items()}
    assert any(
        "standard deviation" in problem
        for problem in fitness_problems(SCENARIO, Reference(REFERENCE.requests, flat))
    )


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_the_scenario_keeps_its_promises(replicas: int) -> None:
    """Every replica has a solo, a full pool and a crowd; a phase of turns keeps but one replica busy."""
    mixed, *solos, crowd = SCENARIO.phases(replicas)
    assert len(solos) == 2 * replicas and all(len({one.replica for one in solo}) == 1 for solo in solos)
    for phase in (mixed, crowd):
        assert {one.replica for one in phase} == set(range(replicas))
    full = [phase for phase in SCENARIO.phases(replicas, fills_pool=True) if phase[0].name == "full"]
    assert [phase[0].replica for phase in full] == list(range(replicas))
    *turns, uneven = SCENARIO.turns(replicas)
    assert len(turns) == 25 * replicas and all(len(phase) == 1 for phase in turns)
    assert [phase[0].replica for phase in turns] == list(range(replicas)) * 25
    assert [one.replica for one in uneven] == [0, 0, replicas - 1]


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_names_mean_the_same_requests_everywhere(replicas: int) -> None:
    phases = [*SCENARIO.phases(replicas, fills_pool=True), *SCENARIO.turns(replicas)]
    asked = [one for phase in phases for one in phase]
    assert {one.name for one in asked} == set(SCENARIO.names)
    sent = [request for phase in phases for r in range(replicas) for request in SCENARIO.inbox(phase, r)]
    assert sorted(request.rid for request in sent) == sorted({one.rid for one in asked})
    for request in sent:
        name = request.rid.partition("@")[0]
        assert request.sampling_params.sampling_seed == SCENARIO.seed_of(name)
    assert len({SCENARIO.seed_of(name) for name in SCENARIO.names}) == len(SCENARIO.names)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "expected"),
    [
        (4, 2, 1, (4, 2)),
        (4, 2, 2, (2, 1)),
        (9, 3, 2, (6, 2)),  # padded to 12 and 4
        (4, 2, 3, (2, 1)),  # three ranks for two groups: the last is empty
        (4, 2, 4, (1, 1)),  # each key/value head twice
        (6, 2, 4, (2, 1)),  # a group of three over two copies
    ],
)
def test_heads_are_shared_as_worked_out_by_hand(
    heads: int, kv_heads: int, width: int, expected: tuple[int, int]
) -> None:
    assert heads_per_rank(heads, kv_heads, width) == expected


def test_bytes_of_a_rank_are_those_worked_out_by_hand() -> None:
    """tp 2: q 2 and kv 1 heads of 16, 65 of 129 features, 151 of 301 ids, over hidden 64 and two layers."""
    layer = (2 + 1 + 1) * 16 * 64 + 64 * 2 * 16 + 3 * 64 * 65 + 2 * 64
    assert parameter_bytes(SHAPE, Layout(2)) == 4 * (2 * layer + 64 + 2 * 151 * 64)
    # With two attention replicas attention and the table are whole, the rest is still cut in two.
    layer = (4 + 2 + 2) * 16 * 64 + 64 * 4 * 16 + 3 * 64 * 65 + 2 * 64
    assert parameter_bytes(SHAPE, Layout(2, 2)) == 4 * (2 * layer + 64 + 301 * 64 + 151 * 64)
    assert kv_bytes_per_token(SHAPE, Layout(2)) == 2 * 2 * 1 * 16 * 4
    assert kv_bytes_per_token(SHAPE, Layout(2, 2)) == 2 * 2 * 2 * 16 * 4
