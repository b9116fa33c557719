from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="unit-cpu")

import json
import math
from dataclasses import dataclass

import pytest
import torch

from sglang.kernels.draw_token import draw, uniforms
from sglang.srt.batch.forward_batch import NOT_FINITE, NOTHING_LEFT, GenerationBatchResult
from sglang.srt.batch.logprobs import LogprobRequest
from sglang.srt.batch.sampling_state import SamplingState
from sglang.srt.layers.penalties import adjust_logits
from sglang.srt.layers.sampler import Sampler
from sglang.srt.messages.io_struct import LOGPROB_FLOOR
from sglang.srt.sampling.sampling_params import SamplingParams

VOCAB = 300


@dataclass
class Drawn:
    """What was drawn, one entry a row; None where a row failed or asked for nothing."""

    next_token_ids: list
    failures: list
    output_logprobs: list


def sampler(logits, states, logprob_requests=None):
    """One request a row, drawn and read."""
    nothing = range(len(states))
    result = GenerationBatchResult(
        [[] for _ in nothing], [None for _ in nothing], [[] for _ in nothing], drawing=list(nothing)
    )
    result.drawn = Sampler()(logits, states, logprob_requests)
    result.read()
    return Drawn(
        [ids[0] if ids else None for ids in result.next_token_ids],
        result.failures,
        [entries[0] if entries else None for entries in result.output_logprobs],
    )


def row(seed=0, produced=(), end_ids=(), **params):
    made = SamplingState(SamplingParams(**params), seed, end_ids)
    for token in produced:
        made.append(token)
    return made


def logits_of(seed, rows=1):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


GREEDY = {"temperature": 0.0}


def test_greedy_rows_take_the_best_token_and_the_lowest_of_equals():
    logits = torch.zeros(2, VOCAB)
    logits[0, [17, 5, 200]] = 2.0
    assert sampler(logits, [row(**GREEDY), row(top_k=1)]).next_token_ids == [5, 0]


def test_plain_greedy_rows_are_drawn_without_reading_the_device(monkeypatch):
    def read(*args):
        raise AssertionError("the host waited for a value")

    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "numpy", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, read)
    drawn = Sampler()(logits_of(1, rows=3), [row(**GREEDY)] * 3, [None] * 3)
    assert drawn.token_ids.shape == drawn.failures.shape == (3,)


def test_a_tiny_temperature_and_top_k_1_are_greedy():
    logits = logits_of(1, rows=3)
    best = logits.argmax(dim=-1).tolist()
    assert sampler(logits, [row(temperature=1e-9), row(top_k=1), row(**GREEDY)]).next_token_ids == best


def test_a_seeded_row_draws_the_same_beside_any_neighbours_and_at_any_place():
    """The draw is a function of the row's own logits, seed and position: 16 tokens alone, then in batches of
    changing size, place and company."""
    mine, company = logits_of(2, rows=16), logits_of(3, rows=64)
    params = {"temperature": 0.8, "top_p": 0.95}
    alone = []
    subject = row(seed=42, **params)
    for step in range(16):
        alone += sampler(mine[step : step + 1].clone(), [subject]).next_token_ids
        subject.append(alone[-1])
    assert len(set(alone)) > 4
    others = [{**GREEDY}, {"temperature": 2.0}, {"top_k": 3}, {"frequency_penalty": 1.0}, {"min_p": 0.2}]
    together = []
    subject = row(seed=42, **params)
    for step in range(16):
        place, size = step % 4, 4 + step % 5
        rows = [row(seed=step * 9 + i, **others[i % 5]) for i in range(size)]
        rows[place] = subject
        logits = company[step : step + size].clone()
        logits[place] = mine[step]
        together.append(sampler(logits, rows).next_token_ids[place])
        subject.append(together[-1])
    assert together == alone


def test_different_seeds_draw_differently_and_each_token_has_its_own_number():
    logits = torch.zeros(1, VOCAB)
    drawn = {sampler(logits.clone(), [row(seed=s)]).next_token_ids[0] for s in range(40)}
    assert len(drawn) > 25
    place = row(seed=1, produced=[9, 9, 9])
    limits = {"temperature": [1.0], "top_k": [-1], "top_p": [1.0], "min_p": [0.0]}
    assert sampler(logits.clone(), [place]).next_token_ids == draw(logits, u=[uniforms(1, 3)], **limits)


def test_penalties_are_what_their_names_say_on_output_tokens_only():
    logits = torch.zeros(4, 6)
    logits[:, 1], logits[:, 2] = 2.0, -2.0
    produced = [1, 1, 2]
    rows = [
        row(produced=produced, frequency_penalty=0.5),
        row(produced=produced, presence_penalty=0.5),
        row(produced=produced, repetition_penalty=2.0),
        row(produced=produced, repetition_penalty=2.0, frequency_penalty=-1.0, presence_penalty=0.25),
    ]
    adjust_logits(logits, rows)
    assert logits[:, [0, 3, 4, 5]].abs().sum() == 0
    assert logits[:, 1].tolist() == [1.0, 1.5, 1.0, 1.0 + 2.0 - 0.25]
    assert logits[:, 2].tolist() == [-2.5, -2.5, -4.0, -4.0 + 1.0 - 0.25]


def test_bias_is_added_and_end_tokens_wait_for_their_turn():
    logits = torch.zeros(3, 6)
    logits[:, 2] = 5.0
    early = row(min_new_tokens=2, end_ids=[2, 4], produced=[1], logit_bias={3: 1.5, 0: -100.0}, **GREEDY)
    late = row(min_new_tokens=2, end_ids=[2], produced=[1, 1], **GREEDY)
    assert sampler(logits, [early, late, row(**GREEDY)]).next_token_ids == [3, 2, 2]
    assert logits[0].tolist() == [-100.0, 0.0, -math.inf, 1.5, -math.inf, 0.0]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [GREEDY, {"temperature": 1.0}, {"top_p": 0.5}, {"presence_penalty": 1.0}])
def test_a_poisoned_row_fails_alone(poison, params):
    logits = logits_of(4, rows=3)
    rows = [row(seed=i, produced=[3], **params) for i in range(3)]
    asks = [LogprobRequest(top_num=2)] * 3
    healthy = sampler(logits.clone(), rows, asks)
    logits[1, 77] = poison
    result = sampler(logits, rows, asks)
    assert result.failures == [None, NOT_FINITE, None]
    assert result.next_token_ids == [healthy.next_token_ids[0], None, healthy.next_token_ids[2]]
    assert result.output_logprobs == [healthy.output_logprobs[0], None, healthy.output_logprobs[2]]


def test_a_repetition_penalty_near_zero_repeats_instead_of_failing():
    logits = logits_of(5, rows=2).abs()
    rows = [row(produced=[3], repetition_penalty=1e-44), row(**GREEDY)]
    result = sampler(logits, rows, [LogprobRequest(top_num=2), None])
    assert result.failures == [None, None]
    assert result.next_token_ids[0] == 3
    assert result.output_logprobs[0].logprob == 0.0


def test_a_row_whose_whole_vocabulary_is_kept_back_fails_alone():
    logits = logits_of(5, rows=2)
    everything = row(min_new_tokens=1, max_new_tokens=2)
    everything.end_ids = frozenset(range(logits.shape[1]))
    result = sampler(logits, [everything, row(**GREEDY)])
    assert result.failures == [NOTHING_LEFT, None]
    assert result.next_token_ids[0] is None and result.next_token_ids[1] is not None


def test_logprobs_follow_penalties_bias_and_temperature():
    logits = logits_of(6, rows=2)
    rows = [row(temperature=0.5, produced=[8], presence_penalty=2.0, logit_bias={9: 3.0}), row(**GREEDY)]
    expected = logits.clone()
    expected[0, 8] -= 2.0
    expected[0, 9] += 3.0
    expected = torch.log_softmax(expected / torch.tensor([[0.5], [1.0]]), dim=-1)
    result = sampler(logits, rows, [LogprobRequest(top_num=4, token_ids=[9, 8]), LogprobRequest()])
    for b, entry in enumerate(result.output_logprobs):
        assert entry.token_id == result.next_token_ids[b]
        assert entry.logprob == pytest.approx(float(expected[b, entry.token_id]), abs=1e-6)
    best = torch.topk(expected[0], 4)
    assert [i for _, i in result.output_logprobs[0].top] == best.indices.tolist()
    assert [v for v, _ in result.output_logprobs[0].top] == pytest.approx(best.values.tolist(), abs=1e-6)
    assert [i for _, i in result.output_logprobs[0].chosen] == [9, 8]
    assert result.output_logprobs[1].top is None and result.output_logprobs[1].chosen is None


def test_the_drawn_token_has_the_same_float_among_the_alternatives():
    logits = logits_of(7, rows=8)
    rows = [row(seed=i, temperature=1.5) for i in range(8)]
    result = sampler(logits, rows, [LogprobRequest(top_num=VOCAB, token_ids=list(range(VOCAB)))] * 8)
    for entry in result.output_logprobs:
        assert {i: v for v, i in entry.top}[entry.token_id] == entry.logprob
        assert entry.chosen[entry.token_id] == (entry.logprob, entry.token_id)
        assert sorted(entry.top, key=lambda pair: (-pair[0], pair[1])) == entry.top


def test_equal_alternatives_are_listed_lowest_id_first_and_hold_the_greedy_token():
    logits = torch.zeros(1, VOCAB)
    logits[0, [250, 40, 120, 7]] = 1.0
    entry = sampler(logits, [row(**GREEDY)], [LogprobRequest(top_num=2)]).output_logprobs[0]
    assert entry.token_id == 7
    assert [i for _, i in entry.top] == [7, 40]


def test_impossible_tokens_read_the_floor_and_the_answer_is_json():
    logits = logits_of(8)
    suppressed = row(min_new_tokens=1, end_ids=[5], temperature=1e-5)
    entry = sampler(logits, [suppressed], [LogprobRequest(top_num=VOCAB, token_ids=[5])]).output_logprobs[0]
    assert entry.chosen == [(LOGPROB_FLOOR, 5)]
    json.dumps([entry.logprob, entry.top, entry.chosen], allow_nan=False)


def test_logprobs_stay_finite_where_logits_over_temperature_would_not():
    """A tiny repetition penalty makes a huge logit, which a low temperature would lift to infinity."""
    logits = torch.zeros(2, 6)
    logits[:, 2] = 10.0
    rows = [
        row(produced=[2], repetition_penalty=1e-36, temperature=0.01),
        row(produced=[1], temperature=0.5),
    ]
    logprobs = sampler(logits, rows, [LogprobRequest(top_num=3)] * 2).output_logprobs
    assert all(math.isfinite(value) for entry in logprobs for value in (entry.logprob, *dict(entry.top)))
    assert logprobs[0].logprob == 0.0
    assert logprobs[0].top[1][0] == LOGPROB_FLOOR
