"""Sampled requests through a scheduler with a draft: the same tokens, seeds that repeat, no leaks."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=30, suite="unit-cpu")

import random
from collections.abc import Sequence
from typing import Any

import pytest

from sglang.srt.messages.io_struct import AbortReq, TokenizedGenerateReqInput
from sglang.test.fakes.fake_channel import Answer
from sglang.test.fakes.scheduler_driver import checked_step
from sglang.test.spec.cells import ALGORITHMS, PROMPTS, SHAPES, ask, differences
from sglang.test.spec.lab import SpecLab
from sglang.test.spec.stage import Stage

LENGTH = 14
#: How further requests of the same prompts are drawn, by the name behind the slash of their rid.
PARAMS: dict[str, dict[str, Any]] = {
    "warm": {"temperature": 0.8, "sampling_seed": 11},
    "hot": {"temperature": 1.3, "top_p": 0.9, "sampling_seed": 12},
    "top": {"temperature": 1.0, "top_k": 12, "min_p": 0.02, "sampling_seed": 13},
    "counted": {
        "temperature": 0.9,
        "frequency_penalty": 0.8,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.3,
        "sampling_seed": 14,
    },
    "greedy": {"temperature": 0.0, "frequency_penalty": 1.5, "repetition_penalty": 1.4},
    "biased": {"temperature": 0.7, "logit_bias": {17: 6.0, 300: -100.0, 45: 4.0}, "sampling_seed": 15},
    "late": {
        "temperature": 1.1,
        "min_new_tokens": 9,
        "stop_token_ids": list(range(200, 400)),
        "ignore_eos": False,
        "sampling_seed": 16,
    },
}
RULES: dict[str, dict[str, Any]] = {
    "rejection": {"speculative_use_rejection_sampling": True},
    "block": {"speculative_use_block_verification": True},
    "thresholds": {"speculative_accept_threshold_single": 0.6, "speculative_accept_threshold_acc": 0.8},
}


def sampled_requests() -> list[TokenizedGenerateReqInput]:
    """One for each set of parameters, over the prompts in turn; some ask for their prompt's logprobs too."""
    names = sorted(PROMPTS)
    return [
        ask(f"{names[i % len(names)]}/{how}", LENGTH, logprob_start_len=0 if i % 3 == 0 else -1, **params)
        for i, (how, params) in enumerate(PARAMS.items())
    ]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> SpecLab:
    return SpecLab(tmp_path_factory.mktemp("sampling"))


@pytest.fixture(scope="module")
def plain(lab: SpecLab) -> dict[str, Answer]:
    """Without a draft."""
    return lab.without_draft(sampled_requests())


@pytest.mark.parametrize("draft", ["oracle", "random"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sampled_requests_give_what_they_give_without_a_draft(
    lab: SpecLab, plain: dict[str, Answer], algorithm: str, shape: str, draft: str
) -> None:
    """Token for token and number by number; an oracle knows the sampled texts, so runs are accepted whole."""
    texts = {rid: answer.ids for rid, answer in plain.items()}
    assert 9 <= min(map(len, texts.values())) < LENGTH, "no stop id has ended a text"
    with lab.drafted(algorithm, draft, shape, texts=texts) as stage:
        drafted = stage.finish(*sampled_requests())
        stage.check_empty()
    assert list(differences(plain, drafted)) == []
    if draft == "oracle" and algorithm != "STANDALONE":  # whose own weights cannot know what is drawn
        assert sum(answer.spec.num_rounds for answer in drafted.values() if answer.spec) < 45


@pytest.mark.parametrize(
    ("algorithm", "shape", "rule"),
    [
        ("EAGLE", "chain", "rejection"),
        ("EAGLE", "chain", "block"),
        ("EAGLE", "tree", "thresholds"),
        ("EAGLE3", "tree", None),
        ("STANDALONE", "chain", None),
        ("NGRAM", "tree", None),
    ],
)
def test_seeds_repeat_in_another_order_and_beside_other_neighbours(
    lab: SpecLab, algorithm: str, shape: str, rule: str | None
) -> None:
    """Under every rule of acceptance: all at once, and one by one behind others."""
    flags = {} if rule is None else RULES[rule]
    requests = sampled_requests()

    def play(order: Sequence[TokenizedGenerateReqInput], *, crowded: bool) -> dict[str, list[int]]:
        fields = {"page_size": 16, "max_total_tokens": 1024, **flags}
        with lab.drafted(algorithm, "trained", shape, **fields) as stage:
            if crowded:
                stage.send(ask("h/neighbour", 25, temperature=1.0, sampling_seed=99), ask("e/neighbour", 3))
                stage.step(2)
            for request in order:
                stage.send(request)
                if crowded:
                    stage.step()
            answers = stage.finish()
            stage.check_empty()
        assert stage.scheduler.load.num_retractions == 0
        return {request.rid: answers[request.rid].ids for request in order}

    assert play(requests, crowded=False) == play(requests[::-1], crowded=True)


@pytest.mark.parametrize("rule", RULES)
def test_greedy_requests_are_exact_under_every_rule_of_acceptance(lab: SpecLab, rule: str) -> None:
    """Beside sampled ones in the same batch, and with penalties too."""
    shape = "tree" if rule == "thresholds" else "chain"
    greedy = [ask("d", 16, logprob_start_len=0), ask("h", 16), ask("f/greedy", 16, **PARAMS["greedy"])]
    sampled = [ask("e/warm", 16, **PARAMS["warm"]), ask("g/late", 16, **PARAMS["late"])]
    plain = lab.without_draft(greedy)
    for draft in ("trained", "random"):
        with lab.drafted("EAGLE", draft, shape, **RULES[rule]) as stage:
            answers = stage.finish(*sampled, *greedy)
            stage.check_empty()
        drafted = {rid: answers[rid] for rid in plain}
        assert list(differences(plain, drafted)) == []
        late = answers["g/late"]
        assert len(late.ids) >= 9 and not set(late.ids[:9]) & set(PARAMS["late"]["stop_token_ids"])


def _mixed(i: int, rng: random.Random) -> TokenizedGenerateReqInput:
    """Request i of many: any prompt, any parameters, up to eight tokens; every third is greedy."""
    rid = f"{rng.choice(sorted(PROMPTS))}/{i}"
    params = {} if i % 3 == 0 else {**rng.choice(list(PARAMS.values())), "sampling_seed": i}
    return ask(rid, rng.randrange(0, 9), return_logprob=False, **params) if i % 5 else ask(rid, 5, **params)


@pytest.mark.parametrize(
    ("algorithm", "shape", "page_size", "pool"), [("EAGLE", "tree", 16, 320), ("STANDALONE", "chain", 1, 200)]
)
def test_nothing_leaks_over_500_mixed_requests_with_aborts(
    lab: SpecLab, algorithm: str, shape: str, page_size: int, pool: int
) -> None:
    """Waiting, half computed and running requests are aborted, others retracted; greedy ones stay right."""
    rng = random.Random(4)
    fields = {"max_total_tokens": pool, "chunked_prefill_size": 48, "schedule_conservativeness": 0.0}
    with lab.drafted(algorithm, "trained", shape, page_size=page_size, **fields) as stage:
        sent = 0
        while sent < 500:
            for _ in range(rng.randrange(0, 7)):
                stage.send(_mixed(sent, rng))
                sent += 1
            if rng.random() < 0.4:
                stage.send(AbortReq(rid=_any_rid(stage, rng), exact=True))
            checked_step(stage.scheduler)
        answers = stage.finish()
        stage.check_empty()
        assert stage.scheduler.load.num_retractions > 0
    ends = [answer.finish_reason.type for answer in answers.values() if answer.finish_reason is not None]
    assert len(ends) == len(answers) >= 500 and 20 < ends.count("abort") < 250
    for rid, answer in answers.items():
        name, _, number = rid.partition("/")
        if number.isdecimal() and int(number) % 3 == 0:
            assert answer.ids == lab.texts[name][: len(answer.ids)]


def _any_rid(stage: Stage, rng: random.Random) -> str:
    """A request that the scheduler has, at whatever stage; one that it does not have, if it has none."""
    queues = stage.scheduler.queues
    rids = [req.rid for req in (*queues.waiting, *queues.started())]
    return rng.choice(rids) if rids else "nobody"
