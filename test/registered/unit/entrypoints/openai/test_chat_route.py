"""Whole answers and streams of `/v1/chat/completions`."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import re

import pytest

from sglang.srt.entrypoints.openai.serving_job import ServingSettings
from sglang.srt.messages.errors import RequestRejected
from sglang.test.fakes.fake_manager import EOS, FakeAnswer, FakeManager, logprob_of
from sglang.test.server.openai_calls import CHAT, choices_of, events, post


def test_a_whole_answer_has_every_part():
    manager = FakeManager(FakeAnswer.of("hi"))
    body = post(manager, CHAT, model="gpt-x").json()
    assert re.fullmatch("[0-9a-f]{32}", body["id"])
    assert body["object"] == "chat.completion" and body["model"] == "gpt-x"
    assert isinstance(body["created"], int)
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hi"},
            "logprobs": None,
            "finish_reason": "stop",
            "matched_stop": EOS,
        }
    ]
    prompt = len(manager.requests[0].input_ids)
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 3,
        "total_tokens": prompt + 3,
        "reasoning_tokens": 0,
    }
    assert body["metadata"] == {"weight_version": "default"}


def test_the_content_type_is_json_and_a_stream_says_its_charset():
    assert post(FakeManager(), CHAT).headers["content-type"] == "application/json"
    stream = post(FakeManager(), CHAT, stream=True)
    assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert stream.headers["cache-control"] == "no-cache"


def test_an_answer_without_text_has_empty_content_not_null():
    body = post(FakeManager(FakeAnswer.of("")), CHAT).json()
    assert body["choices"][0]["message"]["content"] == ""


def test_the_served_name_is_echoed_when_no_model_is_named():
    assert post(FakeManager(), CHAT).json()["model"] == "org/tiny-model"


@pytest.mark.parametrize("model", ["anything", "a:b", "org/tiny-model", "org/tiny-modelx:1"])
def test_the_model_is_echoed_and_not_checked(model):
    assert post(FakeManager(), CHAT, model=model).json()["model"] == model


def test_an_adapter_of_the_served_model_is_refused():
    """The base model's answer under an adapter's name would be wrong in silence."""
    response = post(FakeManager(), CHAT, model="org/tiny-model:french")
    assert response.status_code == 400 and "adapter" in response.json()["error"]["message"]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_zero_tokens_is_400_in_a_chat(name):
    response = post(FakeManager(), CHAT, **{name: 0})
    assert response.status_code == 400 and response.json()["error"]["param"] == name


def test_the_newer_name_of_the_limit_wins():
    manager = FakeManager()
    post(manager, CHAT, max_tokens=3, max_completion_tokens=7)
    assert manager.params[0].max_new_tokens == 7


def test_a_chat_without_a_limit_goes_up_to_the_context():
    manager = FakeManager()
    post(manager, CHAT)
    assert manager.params[0].max_new_tokens is None


def test_the_id_of_the_answer_is_the_id_to_abort_by():
    manager = FakeManager()
    body = post(manager, CHAT).json()
    assert manager.requests[0].rid == body["id"]
    assert post(manager, CHAT, rid="mine").json()["id"] == "mine"


def test_placement_and_cache_fields_reach_the_engine():
    manager = FakeManager()
    post(manager, CHAT, extra_key="tenant", cache_salt="salt", routed_dp_rank=1)
    sent = manager.requests[0]
    assert (sent.extra_key, sent.cache_salt, sent.routed_dp_rank) == ("tenant", "salt", 1)
    post(manager, CHAT, data_parallel_rank=2)
    assert manager.requests[1].routed_dp_rank == 2


def test_the_replica_header_wins_and_must_be_an_integer():
    from sglang.test.server.openai_calls import request

    body = {"messages": [{"role": "user", "content": "hi"}], "routed_dp_rank": 1}
    manager = FakeManager()
    request(manager, "POST", CHAT, json=body, headers={"X-Data-Parallel-Rank": "5"})
    assert manager.requests[0].routed_dp_rank == 5
    response = request(manager, "POST", CHAT, json=body, headers={"X-Data-Parallel-Rank": "one"})
    assert response.status_code == 400 and "X-Data-Parallel-Rank" in response.json()["error"]["message"]
    response = post(manager, CHAT, routed_dp_rank=1, data_parallel_rank=0)
    assert response.status_code == 400 and response.json()["error"]["param"] == "data_parallel_rank"


def test_several_samples_keep_their_order():
    manager = FakeManager(*(FakeAnswer.of(t) for t in ("a", "bb", "ccc")))
    body = post(manager, CHAT, n=3).json()
    assert [c["message"]["content"] for c in body["choices"]] == ["a", "bb", "ccc"]
    assert [c["index"] for c in body["choices"]] == [0, 1, 2]
    prompt = len(manager.requests[0].input_ids)
    assert body["usage"]["prompt_tokens"] == prompt, "the prompt is counted once"
    assert body["usage"]["completion_tokens"] == 2 + 3 + 4


def test_cached_tokens_are_reported_only_when_asked_for_at_start():
    assert "prompt_tokens_details" not in post(FakeManager(), CHAT).json()["usage"]
    manager = FakeManager()
    usage = post(manager, CHAT, n=2, settings=ServingSettings(cache_report=True)).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": len(manager.requests[0].input_ids) - 1}


# --- streams ---


def test_a_stream_has_role_deltas_and_finish_in_this_order():
    chunks = events(post(FakeManager(FakeAnswer.of("hey")), CHAT, stream=True))
    choices = choices_of(chunks, 0)
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["delta"]["content"] for c in choices[1:-1]] == ["h", "e", "y"]
    assert choices[-1]["finish_reason"] == "stop" and choices[-1]["matched_stop"] == EOS
    assert all(c["finish_reason"] is None and "finish_reason" in c for c in choices[:-1])
    assert all(c["delta"].get("role", "assistant") == "assistant" for c in choices)
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert not any("usage" in c for c in chunks)


def test_an_answer_whose_first_token_is_the_end_still_has_role_and_finish():
    """Trap 4."""
    answer = FakeAnswer.of("")
    chunks = events(post(FakeManager(answer), CHAT, stream=True, logprobs=True))
    choices = choices_of(chunks, 0)
    assert choices[0]["delta"]["role"] == "assistant" and choices[-1]["finish_reason"] == "stop"
    assert sum(len(c["logprobs"]["content"]) for c in choices if c["logprobs"]) == 1
    whole = post(FakeManager(answer), CHAT, logprobs=True).json()
    assert whole["usage"]["completion_tokens"] == 1 and len(whole["choices"][0]["logprobs"]["content"]) == 1


def test_nothing_follows_a_finish_and_every_choice_has_one():
    """Trap 7, with samples of different lengths."""
    manager = FakeManager(*(FakeAnswer.of(t) for t in ("a", "bbbb", "")))
    chunks = events(post(manager, CHAT, stream=True, n=3, stream_options={"include_usage": True}))
    for index in range(3):
        reasons = [c["finish_reason"] for c in choices_of(chunks, index)]
        assert reasons.count("stop") == 1 and reasons[-1] == "stop"
        assert choices_of(chunks, index)[0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 2 + 5 + 1


@pytest.mark.parametrize(
    "options, default, expected",
    [
        (None, False, False),
        ({}, False, False),
        ({"include_usage": False}, False, False),
        ({"include_usage": None}, False, False),
        ({"include_usage": True}, False, True),
        ({"include_usage": True, "include_obfuscation": True}, False, True),
        (None, True, True),
        ({}, True, True),
        ({"include_usage": False}, True, False),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_usage_comes_only_when_asked_for_in_one_last_chunk(options, default, expected, n):
    """Case O34 and trap 6."""
    settings = ServingSettings(include_usage_by_default=default)
    manager = FakeManager(FakeAnswer.of("hi"), FakeAnswer.of("there"))
    body = {"stream": True, "n": n, "settings": settings}
    if options is not None:
        body["stream_options"] = options
    chunks = events(post(manager, CHAT, **body))
    with_usage = [c for c in chunks if c.get("usage")]
    assert len(with_usage) == expected
    if expected:
        whole = post(FakeManager(FakeAnswer.of("hi"), FakeAnswer.of("there")), CHAT, n=n).json()
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
        assert all("usage" in c and c["usage"] is None for c in chunks[:-1])


def test_continuous_usage_stands_in_every_chunk_and_grows():
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(post(FakeManager(FakeAnswer.of("hey")), CHAT, stream=True, stream_options=options))
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == [1, 1, 2, 3, 4, 4] and chunks[-1]["choices"] == []


def test_stream_options_of_a_whole_answer_change_nothing():
    assert post(FakeManager(), CHAT, stream_options={"include_usage": True}).json()["usage"]


def test_held_back_text_makes_no_empty_chunk():
    answer = FakeAnswer(groups=[[104], [105], [33]], texts=["h", "h", "hi!"])
    choices = choices_of(events(post(FakeManager(answer), CHAT, stream=True)), 0)
    assert [c["delta"]["content"] for c in choices] == ["", "h", "i!", ""]


def test_the_ids_of_held_back_text_are_still_told():
    answer = FakeAnswer(groups=[[104], [105], [33]], texts=["h", "h", "hi!"])
    choices = choices_of(events(post(FakeManager(answer), CHAT, stream=True, return_token_ids=True)), 0)
    assert [i for c in choices for i in c.get("token_ids", [])] == [104, 105, 33]
    assert choices[0]["prompt_token_ids"]
    whole = post(FakeManager(answer), CHAT, return_token_ids=True).json()["choices"][0]
    assert whole["token_ids"] == [104, 105, 33]
    assert whole["prompt_token_ids"] == choices[0]["prompt_token_ids"]


# --- errors ---


REFUSALS = [
    (RequestRejected("The request queue is full.", 503, None, "ServiceUnavailableError"), 503),
    (RequestRejected("the input is longer than the model's context length"), 400),
    (ValueError("rid: 'a' is in use"), 400),
    (RuntimeError("secret inside"), 500),
]


@pytest.mark.parametrize("error, status", REFUSALS)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_known_before_the_first_token_is_a_status(error, status, stream):
    """Trap 9: a client that sees 200 does not look for an error."""
    manager = FakeManager(refusal=error)
    response = post(manager, CHAT, stream=stream)
    assert response.status_code == status
    body = response.json()
    assert body["object"] == "error" and body["error"]["message"] == body["message"]
    assert "secret" not in response.text
    assert response.headers.get("retry-after") == ("1" if status == 503 else None)


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_first_output_is_a_status(stream):
    reason = {"type": "abort", "message": "no room", "status_code": 503, "err_type": None}
    manager = FakeManager(FakeAnswer.of("", finish_reason=reason))
    response = post(manager, CHAT, stream=stream)
    assert response.status_code == 503 and "no room" in response.text
    assert manager.closed_when_answered == 1


def test_a_later_failure_is_one_error_event_then_done():
    for error in (
        RequestRejected("worker is gone", 500, None, "InternalServerError"),
        RuntimeError("secret"),
    ):
        answer = FakeAnswer.of("hello", fails_after=2, error=error)
        manager = FakeManager(answer)
        response = post(manager, CHAT, stream=True)
        chunks = events(response)
        assert [c for c in chunks if "error" in c] == chunks[-1:]
        assert chunks[-1]["error"]["code"] == 500 and "secret" not in response.text
        assert set(chunks[-1]["error"]) == {"object", "message", "type", "param", "code"}
        assert manager.closed_when_answered == 1


def test_a_later_abort_with_a_status_is_an_error_event():
    reason = {"type": "abort", "message": "NaN logits", "status_code": 500, "err_type": "InternalServerError"}
    chunks = events(post(FakeManager(FakeAnswer.of("ab", finish_reason=reason)), CHAT, stream=True))
    assert chunks[-1]["error"]["message"] == "NaN logits"
    assert not any(c.get("finish_reason") for c in choices_of(chunks, 0))


@pytest.mark.parametrize("outputs_before", [0, 3])
def test_a_failed_choice_ends_its_neighbours(outputs_before):
    """What still runs of the request would hold memory for an answer that nobody reads."""
    reason = {"type": "abort", "message": "NaN logits", "status_code": 500, "err_type": None}
    failed = FakeAnswer.of("x" * outputs_before, finish_reason=reason)
    manager = FakeManager(failed, FakeAnswer.of("a long answer that goes on and on"))
    response = post(manager, CHAT, stream=True, n=2)
    assert manager.closed_when_answered == 1
    if outputs_before == 0:
        assert response.status_code == 500
    else:
        assert "error" in events(response)[-1]


@pytest.mark.parametrize("stream", [False, True])
def test_an_abort_by_the_user_is_an_answer_with_what_there_was(stream):
    reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    manager = FakeManager(FakeAnswer.of("part", eos=False, finish_reason=reason))
    response = post(manager, CHAT, stream=stream, stream_options={"include_usage": True})
    if stream:
        chunks = events(response)
        assert choices_of(chunks, 0)[-1]["finish_reason"] == "abort"
        assert chunks[-1]["usage"]["completion_tokens"] == 4
    else:
        choice = response.json()["choices"][0]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("abort", "part")


def test_a_stream_that_never_finishes_is_an_error_not_a_short_answer():
    class Broken(FakeManager):
        async def generate_request(self, obj, is_disconnected=None, *, incremental=False):
            async for item in super().generate_request(obj, is_disconnected, incremental=incremental):
                if item["meta_info"]["finish_reason"] is None:
                    yield item

    assert "error" in events(post(Broken(), CHAT, stream=True))[-1]


# --- log-probabilities ---


def test_logprobs_of_every_token_with_alternatives():
    body = post(FakeManager(FakeAnswer.of("é")), CHAT, logprobs=True, top_logprobs=3).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert [c["bytes"] for c in content] == [[0xC3], [0xA9], list(b"</s>")]
    assert [c["logprob"] for c in content] == [logprob_of(0xC3), logprob_of(0xA9), logprob_of(EOS)]
    for entry in content:
        tops = entry["top_logprobs"]
        assert len(tops) == 3 and set(tops[0]) == {"token", "bytes", "logprob"}
        assert tops[0]["token"] == entry["token"] and tops[0]["logprob"] == entry["logprob"]
        assert [t["logprob"] for t in tops] == sorted((t["logprob"] for t in tops), reverse=True)


def test_logprobs_without_alternatives_have_empty_lists():
    content = post(FakeManager(), CHAT, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert content and all(c["top_logprobs"] == [] for c in content)


@pytest.mark.parametrize("value", [21, -1, 1000000, True, "5", 2.5])
def test_alternatives_out_of_range_are_400_with_the_range(value):
    """Case O25."""
    response = post(FakeManager(), CHAT, logprobs=True, top_logprobs=value)
    message = response.json()["error"]["message"]
    assert response.status_code == 400 and "0 <= top_logprobs <= 20" in message


def test_alternatives_without_logprobs_are_400():
    assert post(FakeManager(), CHAT, top_logprobs=5).status_code == 400
    assert post(FakeManager(), CHAT, top_logprobs=0).status_code == 200
    assert post(FakeManager(), CHAT, logprobs=5).status_code == 400
