"""What a request must satisfy before anything of it is sent."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="unit-cpu")

import dataclasses
from typing import Any

import pytest

from sglang.srt.environ import envs
from sglang.srt.managers.tokenizer_components.splitting import split_request
from sglang.srt.managers.tokenizer_components.validation import (
    RequestLimits,
    check_prompt,
    finished_message,
    sample_seed,
    samples_of,
)
from sglang.srt.messages.errors import RequestRejected
from sglang.srt.messages.generate_input import GenerateReqInput
from sglang.srt.messages.io_struct import TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

LIMITS = RequestLimits(context_len=100, vocab_size=50, pool_tokens=1000)
SMALL_POOL = dataclasses.replace(LIMITS, pool_tokens=60)


def message(
    prompt_len: int = 10,
    limits: RequestLimits = LIMITS,
    sampling: dict[str, Any] | None = None,
    **fields: Any,
) -> TokenizedGenerateReqInput:
    obj = GenerateReqInput(**{"input_ids": [1] * prompt_len, **fields}, sampling_params=sampling)
    (prompt,) = split_request(obj, defaults=limits.sampling_defaults)
    check_prompt(prompt, limits)
    assert prompt.input_ids is not None
    return finished_message(prompt, prompt.input_ids, limits)


def new_tokens(prompt_len: int, wanted: Any, limits: RequestLimits = LIMITS) -> int | None:
    return message(prompt_len, limits, {"max_new_tokens": wanted}).sampling_params.max_new_tokens


REFUSED_SAMPLING = [
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", -1),
    ("temperature", "1"),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 7),
    ("top_p", float("nan")),
    ("top_k", 0),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", -0.1),
    ("repetition_penalty", 0),
    ("frequency_penalty", 2.5),
    ("presence_penalty", float("-inf")),
    ("n", 0),
    ("max_new_tokens", -1),
    ("max_new_tokens", 2**63),
    ("min_new_tokens", -1),
    ("stop", ["a", 5]),
    ("stop", [""]),
    ("stop", ["x" * 1025]),
    ("stop", ["half \ud800"]),
    ("stop_token_ids", [50]),
    ("stop_token_ids", [1] * 4097),
    ("stop_token_ids", [-1]),
    ("logit_bias", {"50": 1.0}),
    ("logit_bias", dict.fromkeys(map(str, range(2**18 + 1)), 1.0)),
    ("logit_bias", {"x": 1.0}),
    ("logit_bias", {"1": float("nan")}),
    ("sampling_seed", 2**63),
    ("json_schema", "{}"),
    ("regex", "a+"),
    ("tempreature", 1.0),
]


@pytest.mark.parametrize(("name", "value"), REFUSED_SAMPLING)
def test_an_illegal_sampling_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestRejected, match=f"^{name}") as caught:
        message(sampling={name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("name", [*SamplingParams.__struct_fields__, "x" * 9999])
def test_a_refusal_does_not_send_the_whole_value_back(name: str) -> None:
    for value in ("v" * 10_000, {"k" * 10_000: 5}, [["v" * 10_000]]):
        if name == "stop" and isinstance(value, str):
            value = [*value, 5]
        with pytest.raises(RequestRejected) as caught:
            message(sampling={name: value})
        assert len(str(caught.value)) < 800


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1e-9},
        {"top_k": 9999999},
        {"top_k": -1},
        {"temperature": None},
        {"seed": None},
    ],
)
def test_a_legal_edge_is_accepted(sampling: dict[str, Any]) -> None:
    if "seed" in sampling:
        with pytest.raises(RequestRejected, match="unknown sampling parameter"):
            message(sampling=sampling)
        return
    message(sampling=sampling)


def test_more_chosen_ids_than_the_vocabulary_has_are_refused() -> None:
    with pytest.raises(RequestRejected, match=r"^token_ids_logprob: at most 50 ids"):
        message(return_logprob=True, token_ids_logprob=[1] * 51)


@pytest.mark.parametrize("top", [-1, 51, 1_000_000])
def test_alternatives_outside_the_vocabulary_are_refused_with_the_range(top: int) -> None:
    with pytest.raises(RequestRejected, match=r"0 <= top_logprobs_num <= 50, got"):
        message(return_logprob=True, top_logprobs_num=top)


def test_alternatives_without_logprobs_are_refused_and_not_dropped() -> None:
    with pytest.raises(RequestRejected, match="top_logprobs_num: needs return_logprob"):
        message(top_logprobs_num=3)
    with pytest.raises(RequestRejected, match="token_ids_logprob: needs return_logprob"):
        message(token_ids_logprob=[3])


@pytest.mark.parametrize("ids", [[50], [-1], [3, 99]])
def test_token_ids_outside_the_vocabulary_are_refused(ids: list[int]) -> None:
    with pytest.raises(RequestRejected, match=r"outside the vocabulary \(0 <= id < 50\)"):
        message(input_ids=ids)
    with pytest.raises(RequestRejected, match="token_ids_logprob: token id"):
        message(return_logprob=True, token_ids_logprob=ids)


@pytest.mark.parametrize("start", [-2, 11])
def test_a_logprob_start_outside_the_prompt_is_refused(start: int) -> None:
    with pytest.raises(RequestRejected, match="logprob_start_len"):
        message(10, return_logprob=True, logprob_start_len=start)


def test_a_logprob_start_at_the_end_of_the_prompt_means_none() -> None:
    assert message(10, return_logprob=True, logprob_start_len=10).logprob_start_len == -1
    assert message(10, return_logprob=True, logprob_start_len=9).logprob_start_len == 9


@pytest.mark.parametrize(
    ("prompt_len", "wanted", "expected"),
    [(10, 5, 5), (10, 90, 90), (99, 1, 1), (10, None, 90), (10, 0, 0), (100, 0, 0)],
)
def test_a_length_that_fits_exactly_is_accepted(prompt_len: int, wanted: int | None, expected: int) -> None:
    assert new_tokens(prompt_len, wanted) == expected


def test_a_default_length_is_cut_to_what_is_left() -> None:
    assert message(60).sampling_params.max_new_tokens == 40


@pytest.mark.parametrize(("prompt_len", "wanted"), [(101, 1), (101, None), (101, 0), (100, 1), (100, None)])
def test_an_over_long_prompt_is_refused_with_both_numbers(prompt_len: int, wanted: int | None) -> None:
    with pytest.raises(RequestRejected, match="longer than the model's context length") as caught:
        new_tokens(prompt_len, wanted)
    assert str(prompt_len) in caught.value.message
    assert "100" in caught.value.message


@pytest.mark.parametrize("wanted", [91, 100_000_000, 2**63 - 1])
def test_more_tokens_than_the_context_holds_are_refused_and_not_cut(wanted: int) -> None:
    with pytest.raises(
        RequestRejected, match=f"{10 + wanted}.*longer than the model's context length"
    ) as caught:
        new_tokens(10, wanted)
    assert caught.value.param == "max_new_tokens"


def test_a_prompt_that_the_pool_can_never_hold_is_refused_with_both_numbers() -> None:
    with pytest.raises(
        RequestRejected, match=r"\(70 tokens\) does not fit into the KV cache pool \(60 tokens\)"
    ):
        new_tokens(70, 1, SMALL_POOL)
    with pytest.raises(
        RequestRejected, match=r"together 80 tokens, do not fit into the KV cache pool \(60 tokens\)"
    ):
        new_tokens(40, 40, SMALL_POOL)
    assert new_tokens(40, 20, SMALL_POOL) == 20
    assert new_tokens(40, None, SMALL_POOL) == 20


def test_auto_truncate_keeps_the_end_of_the_prompt_and_cuts_the_length() -> None:
    limits = dataclasses.replace(LIMITS, allow_auto_truncate=True, vocab_size=1000)
    cut = message(limits=limits, input_ids=list(range(150)), sampling={"max_new_tokens": 50})
    assert cut.input_ids == list(range(51, 150))
    assert cut.sampling_params.max_new_tokens == 1


def test_fewer_tokens_than_the_minimum_left_is_refused() -> None:
    with pytest.raises(RequestRejected, match="min_new_tokens"):
        message(95, sampling={"max_new_tokens": None, "min_new_tokens": 10})


def test_the_operators_ceiling_cuts_every_request() -> None:
    with envs.SGLANG_MAX_NEW_TOKENS_LIMIT.override(7):
        assert new_tokens(10, 50) == 7


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(RequestRejected, match="stop: stop strings need a tokenizer"):
        message(limits=dataclasses.replace(LIMITS, has_tokenizer=False), sampling={"stop": "x"})


def test_the_models_defaults_fill_what_the_client_left_out() -> None:
    limits = dataclasses.replace(LIMITS, sampling_defaults={"temperature": 0.3, "top_p": 0.8})
    params = message(limits=limits, sampling={"top_p": 0.5, "temperature": None}).sampling_params
    assert (params.temperature, params.top_p) == (0.3, 0.5)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"stream": "yes"}, "stream"),
        ({"no_logs": 1}, "no_logs"),
        ({"return_prompt_token_ids": "x"}, "return_prompt_token_ids"),
        ({"routed_dp_rank": 1}, "routed_dp_rank"),
        ({"routed_dp_rank": "0"}, "routed_dp_rank"),
        ({"routed_dp_rank": True}, "routed_dp_rank"),
        ({"priority": 3}, "priority"),
    ],
)
def test_a_field_of_the_whole_request_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(RequestRejected, match=f"^{name}: "):
        message(**fields)


@pytest.mark.parametrize("rank", [-1, 2, 7])
def test_a_replica_out_of_range_is_refused_with_the_range_and_the_value(rank: int) -> None:
    limits = dataclasses.replace(LIMITS, replicas=2)
    with pytest.raises(RequestRejected) as caught:
        message(limits=limits, routed_dp_rank=rank)
    assert caught.value.param == "routed_dp_rank"
    assert f"0 <= routed_dp_rank < 2 (the replicas of this server), got {rank}" in caught.value.message
    assert message(limits=limits, routed_dp_rank=1).routed_dp_rank == 1
    assert message(limits=limits).routed_dp_rank is None


def test_samples_carry_the_name_of_their_prompt_and_single_sequences_none() -> None:
    def parents(n: int) -> list[str | None]:
        whole = message(sampling={"n": n}, rid="p", routed_dp_rank=0)
        samples = samples_of(whole, stream=False, fresh_seed=1)
        assert {sample.routed_dp_rank for sample in samples} == {0}
        return [sample.parent_rid for sample in samples]

    assert (parents(1), parents(3)) == ([None], ["p"] * 3)


def test_samples_of_one_seed_differ_and_the_first_has_the_seed_itself() -> None:
    seeds = [sample_seed(42, i) for i in range(16)]
    assert seeds[0] == 42
    assert len(set(seeds)) == 16
    assert seeds == [sample_seed(42, i) for i in range(16)]
    assert all(-(2**63) <= seed < 2**63 for seed in [*seeds, sample_seed(-5, 3), sample_seed(2**63 - 1, 1)])
