"""One native request becomes single prompts: which value belongs to which, and what is refused."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="unit-cpu")

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.managers.tokenizer_components.splitting import cache_namespace, split_request
from sglang.srt.messages.errors import RequestRejected
from sglang.srt.messages.generate_input import GenerateReqInput


def split(**fields: Any) -> list[Any]:
    return list(split_request(GenerateReqInput(**fields)))


def test_a_single_prompt_keeps_its_rid_and_values() -> None:
    (prompt,) = split(text="a", rid="r", return_logprob=True, top_logprobs_num=3, token_ids_logprob=[1, 2])
    assert (prompt.rid, prompt.text, prompt.top_logprobs_num, prompt.token_ids_logprob) == (
        "r",
        "a",
        3,
        [1, 2],
    )


def test_a_request_without_rid_gets_one_that_the_caller_can_read() -> None:
    obj = GenerateReqInput(text="a")
    (prompt,) = split_request(obj)
    assert prompt.rid == obj.rid
    assert obj.rid


def test_one_rid_of_a_batch_is_numbered() -> None:
    assert [p.rid for p in split(text=["a", "b"], rid="r")] == ["r_0", "r_1"]


def test_values_of_a_batch_are_one_for_all_or_one_for_each() -> None:
    first, second = split(
        input_ids=[[1], [2]],
        sampling_params=[{"temperature": 0.5}, {"temperature": 0.7}],
        return_logprob=True,
        logprob_start_len=[0, 1],
        token_ids_logprob=[[4], [5]],
        extra_key=["x", "y"],
        routed_dp_rank=[1, None],
    )
    assert (first.params.temperature, second.params.temperature) == (0.5, 0.7)
    assert (first.logprob_start_len, second.logprob_start_len) == (0, 1)
    assert (first.token_ids_logprob, second.token_ids_logprob) == ([4], [5])
    assert first.namespace != second.namespace
    assert (first.routed_dp_rank, second.routed_dp_rank) == (1, None)
    assert [p.routed_dp_rank for p in split(text=["a", "b"], routed_dp_rank=1)] == [1, 1]
    assert first.return_logprob and second.return_logprob


REFUSED = [
    ({}, "exactly one of text and input_ids"),
    ({"text": "a", "input_ids": [1]}, "exactly one of text and input_ids"),
    ({"text": []}, "empty"),
    ({"input_ids": []}, "empty"),
    ({"input_ids": [[1], []]}, "empty"),
    ({"text": 5}, "text: must be a string"),
    ({"text": ["a", 5]}, "text: must be a string"),
    ({"input_ids": "abc"}, "input_ids: must be a list"),
    ({"input_ids": [1, "2"]}, "input_ids: must be a list of token ids"),
    ({"input_ids": [1, True]}, "input_ids: must be a list of token ids"),
    ({"input_ids": [1, 2.0]}, "input_ids: must be a list of token ids"),
    ({"input_ids": [[1], 2]}, "input_ids: must be a list of token ids"),
    ({"text": "a", "rid": 5}, "rid: must be a string"),
    ({"text": "a", "rid": ""}, "rid: must not be empty"),
    ({"text": "a", "rid": ["x"]}, "rid: a list of ids needs a batch"),
    ({"text": ["a", "b"], "rid": ["x"]}, "rid: must have one entry for each of the 2 prompts, got 1"),
    ({"text": ["a", "b"], "rid": ["x", 5]}, "rid: must be a string"),
    ({"text": "a", "return_logprob": "yes"}, "return_logprob: must be true or false"),
    ({"text": "a", "top_logprobs_num": 1.5}, "top_logprobs_num: must be an integer"),
    ({"text": "a", "top_logprobs_num": True}, "top_logprobs_num: must be an integer"),
    ({"text": "a", "logprob_start_len": "0"}, "logprob_start_len: must be an integer"),
    ({"text": "a", "token_ids_logprob": [1, "x"]}, "token_ids_logprob: must be a list of token ids"),
    ({"text": "a", "sampling_params": "greedy"}, "sampling_params: must be an object"),
    ({"text": "a", "sampling_params": [{}]}, "sampling_params: a list of values needs a batch"),
    ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params: must have one entry"),
    ({"text": "a", "extra_key": 5}, "extra_key: must be a string"),
    ({"text": "a", "cache_salt": 5}, "cache_salt: must be a string"),
    ({"text": "a", "routed_dp_rank": 1.0}, "routed_dp_rank: must be an integer"),
    ({"text": "a", "routed_dp_rank": [1]}, "routed_dp_rank: a list of values needs a batch"),
    ({"text": ["a", "b"], "routed_dp_rank": [1]}, "routed_dp_rank: must have one entry"),
    ({"text": ["a", "b"], "routed_dp_rank": [1, "0"]}, "routed_dp_rank: must be an integer"),
    ({"text": "a", "rid": "half \ud800"}, "rid: is not valid Unicode"),
    ({"text": ["a"], "rid": ["half \ud800"]}, "rid: is not valid Unicode"),
    ({"text": "a", "extra_key": "half \ud800"}, "extra_key: is not valid Unicode"),
    ({"text": "a", "cache_salt": "half \ud800"}, "cache_salt: is not valid Unicode"),
    ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "n: must be the same"),
    (
        {"text": ["a"], "sampling_params": {"n": 2}, "top_logprobs_num": [1]},
        "cannot be combined with n above 1",
    ),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[str(fields)[:40] for fields, _ in REFUSED])
def test_what_cannot_be_split_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestRejected, match=message) as caught:
        split(**fields)
    assert caught.value.status_code == 400
    assert caught.value.param


KEY = st.none() | st.text(max_size=6)


@given(a=st.tuples(KEY, KEY), b=st.tuples(KEY, KEY))
def test_two_pairs_of_key_and_salt_never_share_a_namespace(
    a: tuple[str | None, str | None], b: tuple[str | None, str | None]
) -> None:
    """Joined without care, ("a", "b") and ("ab", "") would read each other's cache."""
    assert (cache_namespace(*a) == cache_namespace(*b)) == (a == b)
