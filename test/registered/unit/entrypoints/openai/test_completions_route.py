"""Whole answers and streams of `/v1/completions`, with echo and scoring."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import re

import pytest

from sglang.srt.entrypoints.openai.serving_completions import checked_prompts
from sglang.srt.messages.errors import RequestRejected
from sglang.test.fakes.fake_manager import (
    BOS,
    EOS,
    ByteTokenizer,
    FakeAnswer,
    FakeManager,
    logprob_of,
)
from sglang.test.server.openai_calls import COMPLETIONS, choices_of, events, post


def test_a_whole_answer_has_every_part():
    manager = FakeManager(FakeAnswer.of("yo"))
    body = post(manager, COMPLETIONS, prompt="hi").json()
    assert re.fullmatch("[0-9a-f]{32}", body["id"]) and body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": "yo", "logprobs": None, "finish_reason": "stop", "matched_stop": EOS}
    ]
    assert body["usage"]["prompt_tokens"] == 3 and body["usage"]["total_tokens"] == 6  # BOS, h, i
    assert body["metadata"] == {"weight_version": "default"}
    assert manager.params[0].max_new_tokens == 16
    assert manager.requests[0].text == "hi", "the engine tokenizes, with the tokenizer's own BOS"


@pytest.mark.parametrize(
    "prompt, ready",
    [
        ("a", ["a"]),
        (["a"], ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2]], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([0], [[0]]),
    ],
)
def test_the_four_forms_of_a_prompt(prompt, ready):
    assert checked_prompts(prompt) == ready


@pytest.mark.parametrize(
    "prompt",
    [
        *(None, "", [], [""], [[]], ["a", ""], [[1], []], ["a", 1], [1, "a"], [["a"]], [True], [[True]]),
        *([1.5], 5, {}, [[[1]]], [None], ["a", [1]]),
    ],
)
def test_any_other_prompt_is_400(prompt):
    with pytest.raises(RequestRejected) as caught:
        checked_prompts(prompt)
    assert caught.value.param == "prompt" and caught.value.status_code == 400
    response = post(FakeManager(), COMPLETIONS, prompt=prompt)
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize("stream", [False, True])
def test_choice_index_is_prompt_index_times_n_plus_sample(stream):
    texts = ["a", "b", "c", "d"]
    manager = FakeManager(*(FakeAnswer.of(t) for t in texts))
    response = post(
        manager, COMPLETIONS, prompt=["p", "qq"], n=2, stream=stream, stream_options={"include_usage": True}
    )
    if stream:
        chunks = events(response)
        found = ["".join(c["text"] for c in choices_of(chunks, i)) for i in range(4)]
        usage = chunks[-1]["usage"]
    else:
        body = response.json()
        assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
        found, usage = [c["text"] for c in body["choices"]], body["usage"]
    assert found == texts
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2 + 3, 8), "each prompt counts once"


def test_an_answer_that_cannot_be_written_is_the_servers_failure():
    """A ValueError of the tokenizer, once the engine has answered, is no mistake of the client's."""

    class Torn(ByteTokenizer):
        def first_bytes(self, token_id):
            raise ValueError("torn")

    def manager():
        manager = FakeManager(FakeAnswer.of("yo"))
        manager.tokenizer = Torn()
        return manager

    for stream in (False, True):
        response = post(manager(), COMPLETIONS, prompt="hi", logprobs=1, stream=stream)
        assert response.status_code == 500 and "torn" not in response.text
        assert response.json()["error"]["type"] == "InternalServerError"


def test_one_prompt_in_a_list_is_one_prompt():
    manager = FakeManager()
    assert len(post(manager, COMPLETIONS, prompt=["a"]).json()["choices"]) == 1
    assert manager.requests[0].text == "a"


def test_a_field_for_each_prompt_needs_one_for_each():
    manager = FakeManager()
    body = post(manager, COMPLETIONS, prompt=["a", "b"], rid=["r1", "r2"], cache_salt=["s", "t"]).json()
    assert body["id"] == "r1" and manager.requests[0].cache_salt == ["s", "t"]
    for name in ("rid", "extra_key", "cache_salt"):
        response = post(FakeManager(), COMPLETIONS, prompt=["a", "b"], **{name: ["x"]})
        assert response.status_code == 400 and response.json()["error"]["param"] == name
    assert post(manager, COMPLETIONS, prompt="a", rid=["only"]).json()["id"] == "only"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_zero_tokens_need_echo(name):
    response = post(FakeManager(), COMPLETIONS, **{name: 0})
    assert response.status_code == 400 and "echo" in response.json()["error"]["message"]
    assert post(FakeManager(), COMPLETIONS, echo=False, **{name: 0}).status_code == 400
    manager = FakeManager()
    assert post(manager, COMPLETIONS, echo=True, **{name: 0}).status_code == 200
    assert manager.params[0].max_new_tokens == 0


@pytest.mark.parametrize("length, limit", [(400, 16), (496, 16), (500, 12), (511, 1), (512, 16), (600, 16)])
def test_the_limit_that_nobody_named_is_cut_to_what_is_left(length, limit):
    """Case O28: a prompt just under the context is one token, not no refusal of a number nobody sent."""
    manager = FakeManager()
    for prompt in ([104] * length, "h" * (length - 1)):  # the text gets a BOS
        post(manager, COMPLETIONS, prompt=prompt)
        post(manager, COMPLETIONS, prompt=prompt, max_tokens=16)
    assert [p.max_new_tokens for p in manager.params] == [limit, 16, limit, 16]


def test_the_limit_that_nobody_named_is_cut_to_what_is_left_of_the_pool():
    """A pool of 64 tokens refused a prompt of 50 over a max_tokens that its sender never gave."""
    manager = FakeManager(pool=64)
    post(manager, COMPLETIONS, prompt=[104] * 60)
    post(manager, COMPLETIONS, prompt="h" * 59)
    assert [p.max_new_tokens for p in manager.params] == [4, 4]


def test_a_lower_limit_above_the_limit_that_nobody_named_is_said_with_both_numbers():
    error = post(FakeManager(), COMPLETIONS, min_tokens=20).json()["error"]
    assert error["param"] == "min_tokens" and "got 20" in error["message"] and "16" in error["message"]
    assert post(FakeManager(), COMPLETIONS, min_tokens=16).status_code == 200


def test_a_field_that_nobody_knows_is_answered_and_logged(caplog):
    """A misspelt field changes nothing, and without the line nobody would find out why."""
    manager = FakeManager()
    assert post(manager, COMPLETIONS, tempratur=0.3).status_code == 200
    lines = [r.getMessage() for r in caplog.records if "tempratur" in r.getMessage()]
    assert lines == [
        "/v1/completions: the unknown field 'tempratur' is ignored; did its sender mean temperature?"
    ]


def test_each_prompt_of_a_batch_has_its_own_room():
    manager = FakeManager()
    body = post(manager, COMPLETIONS, prompt=["h" * 504, "h"], echo=True).json()
    assert [p.max_new_tokens for p in manager.params] == [7, 16]
    assert [len(c["text"]) for c in body["choices"]] == [504 + 5, 1 + 5], "echo is the client's own text"


# --- streams ---


def test_a_stream_tells_its_text_and_finishes_once():
    chunks = events(post(FakeManager(FakeAnswer.of("hey")), COMPLETIONS, stream=True))
    choices = choices_of(chunks, 0)
    assert "".join(c["text"] for c in choices) == "hey"
    assert [c["finish_reason"] for c in choices] == [None] * 3 + ["stop"]
    assert choices[-1]["matched_stop"] == EOS
    assert {c["object"] for c in chunks} == {"text_completion"}
    assert not any("usage" in c for c in chunks)


def test_usage_is_the_last_chunk_when_asked_for():
    options = {"include_usage": True}
    chunks = events(post(FakeManager(), COMPLETIONS, stream=True, stream_options=options))
    whole = post(FakeManager(), COMPLETIONS).json()
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert all(c["usage"] is None for c in chunks[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_echo_begins_with_the_prompt(stream):
    response = post(FakeManager(FakeAnswer.of("yo")), COMPLETIONS, prompt="hi ", echo=True, stream=stream)
    choices = choices_of(events(response), 0) if stream else response.json()["choices"]
    assert "".join(c["text"] for c in choices) == "hi yo"


def test_echo_of_ids_shows_their_text_special_tokens_too():
    response = post(FakeManager(FakeAnswer.of("!")), COMPLETIONS, prompt=[BOS, 104, 105], echo=True)
    assert response.json()["choices"][0]["text"] == "<s>hi!"


# --- scoring ---


def scored(stream=False, **fields):
    fields = {"prompt": "hi", "echo": True, "logprobs": 1, "max_tokens": 1, **fields}
    manager = FakeManager(FakeAnswer(groups=[[EOS]]))
    response = post(manager, COMPLETIONS, stream=stream, **fields)
    assert response.status_code == 200, response.text
    if not stream:
        return manager, response.json()["choices"][0]["logprobs"]
    joined = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for choice in choices_of(events(response), 0):
        for key, values in (choice["logprobs"] or {}).items():
            joined[key] += values
    return manager, joined


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["hi", [BOS, 104, 105], ["hi"], [[BOS, 104, 105]]])
def test_scoring_gives_an_entry_for_each_prompt_token_and_one_more(prompt, stream):
    """Trap 3: what evaluation harnesses read, and compare by equality of floats."""
    manager, logprobs = scored(prompt=prompt, stream=stream)
    assert manager.requests[0].logprob_start_len == 0
    assert logprobs["tokens"] == ["<s>", "h", "i", "</s>"]
    assert logprobs["token_logprobs"] == [None, logprob_of(104), logprob_of(105), logprob_of(EOS)]
    assert logprobs["top_logprobs"][0] is None
    for token, value, tops in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"]):
        if value is not None:
            assert tops[token] == value == max(tops.values())


def test_the_harness_call_with_several_prompts_of_ids():
    prompts = [[BOS, 104, 105], [BOS, 97]]
    manager = FakeManager(FakeAnswer(groups=[[EOS]]))
    body = post(
        manager, COMPLETIONS, prompt=prompts, max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1234
    ).json()
    lengths = [len(c["logprobs"]["token_logprobs"]) for c in body["choices"]]
    assert lengths == [4, 3] and [c["index"] for c in body["choices"]] == [0, 1]


def test_no_prompt_logprobs_without_echo():
    manager, logprobs = scored(echo=False)
    assert manager.requests[0].logprob_start_len == -1
    assert logprobs["token_logprobs"] == [logprob_of(EOS)]


def test_zero_alternatives_still_list_the_chosen_token():
    _, logprobs = scored(logprobs=0)
    assert logprobs["top_logprobs"][1:] == [
        {t: v} for t, v in zip(logprobs["tokens"][1:], logprobs["token_logprobs"][1:])
    ]


def test_offsets_are_character_positions_in_the_text():
    answer = FakeAnswer.of("ü!")
    body = post(FakeManager(answer), COMPLETIONS, prompt="né", echo=True, logprobs=0).json()
    choice = body["choices"][0]
    # BOS (not shown) n é (two bytes) | ü (two bytes) ! EOS
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 2, 2, 3, 4]
    alone = post(FakeManager(answer), COMPLETIONS, prompt="né", logprobs=0).json()["choices"][0]
    assert alone["logprobs"]["text_offset"] == [0, 0, 1, 2]


@pytest.mark.parametrize("value", [21, -1, 1000000, True, "5", 2.5])
def test_alternatives_out_of_range_are_400_with_the_range(value):
    """Case O25."""
    response = post(FakeManager(), COMPLETIONS, logprobs=value)
    message = response.json()["error"]["message"]
    assert response.status_code == 400 and "0 <= logprobs <= 20" in message


def test_ids_are_returned_when_asked_for():
    choice = post(FakeManager(FakeAnswer.of("x")), COMPLETIONS, return_token_ids=True).json()["choices"][0]
    assert choice["token_ids"] == [120, EOS] and choice["prompt_token_ids"] == [BOS, 104, 105]


def test_a_server_without_a_tokenizer_points_to_the_native_route():
    manager = FakeManager(tokenizer=ByteTokenizer())
    manager.tokenizer = None
    response = post(manager, COMPLETIONS, prompt=[1])
    assert response.status_code == 400 and "/generate" in response.json()["error"]["message"]
