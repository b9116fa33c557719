"""The OpenAI routes of a real server: what is refused, where the limits are, and what steers the sampling."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=40, suite="server-cpu")

import concurrent.futures

import httpx
import pytest

from sglang.test.server.openai_http import (
    CHAT,
    COMPLETIONS,
    GREEDY,
    HELLO,
    answer,
    joined,
    refused,
    stream,
    text_of,
)
from sglang.test.server.server_fixture import running_server
from sglang.test.tiny_models import write_tiny_model
from sglang.test.waiting import HANG_GUARD_S

NAME, CONTEXT, VOCAB = "org/tiny:test", 512, 512
BOS, IM_START, IM_END = 0, 1, 2


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = write_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=VOCAB, add_bos=True)
    flags = ["--dtype", "float32", "--served-model-name", NAME, "--enable-cache-report"]
    flags += ["--max-total-tokens", "4096", "--chunked-prefill-size", "32", "--max-running-requests", "16"]
    with running_server(folder, *flags) as running:
        yield running


# bad requests

ILLEGAL = [
    {"logit_bias": {"999999": 5}},
    {"logit_bias": {"-1": 5}},
    {"logit_bias": {"AI": -100}},
    {"logit_bias": {"5": 1e9}},
    {"temperature": -1},
    {"temperature": 1e300},
    {"top_p": 0},
    {"top_p": 7},
    {"top_k": 0},
    {"top_k": -2},
    {"repetition_penalty": 0},
    {"n": 0},
    {"n": 1000000},
    {"stop_token_ids": [VOCAB]},
    {"max_tokens": -1},
    {"max_tokens": 100000000},
    {"max_tokens": 2**63 - 1},
    {"max_tokens": 2**63},
    {"routed_dp_rank": 7},
    {"tools": [{"type": "function", "function": {"name": "f"}}], "json_schema": "{}"},
]


def test_bad_requests_are_400_and_leave_a_running_neighbour_alone(http):
    """Cases O24 to O26: once such a request took the whole engine down."""
    body = {"max_tokens": 200, **GREEDY}
    alone = text_of(answer(http, CHAT, **body)["choices"][0])
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        neighbour = pool.submit(answer, http, CHAT, **body)
        for path in (CHAT, COMPLETIONS):
            alternatives = "top_logprobs" if path == CHAT else "logprobs"
            too_many = [{"logprobs": True, alternatives: v} for v in (21, 1000000, -1)]
            if path == COMPLETIONS:
                too_many = [{"logprobs": v} for v in (21, 1000000, -1)]
            for illegal in [*ILLEGAL, *too_many]:
                for streamed in (False, True):
                    error = refused(http, path, stream=streamed, **illegal)
                    assert any(name in error["message"] for name in illegal), error
            assert "0 <= " in refused(http, path, **too_many[0])["message"]
        assert text_of(neighbour.result()["choices"][0]) == alone


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_legal_edges_give_the_right_text(http, path):
    """Trap 16 and case O26: tiny temperature and top_k 1 are greedy, a huge top_k is off."""
    greedy = text_of(answer(http, path, max_tokens=12, **GREEDY)["choices"][0])
    for same in (
        {"temperature": 1e-9},
        {"temperature": 1.5, "top_k": 1},
        {"temperature": 1.0, "top_p": 1e-9},
    ):
        assert text_of(answer(http, path, max_tokens=12, ignore_eos=True, **same)["choices"][0]) == greedy, (
            same
        )
    body = {"max_tokens": 12, "seed": 9, "temperature": 1.0, "ignore_eos": True}
    off = text_of(answer(http, path, **body)["choices"][0])
    assert text_of(answer(http, path, top_k=9999999, **body)["choices"][0]) == off != greedy


# lengths


def test_limits_of_a_chat(http):
    assert answer(http, CHAT, max_tokens=1)["usage"]["completion_tokens"] == 1
    assert refused(http, CHAT, max_tokens=0)["param"] == "max_tokens"
    both = answer(http, CHAT, max_tokens=9, max_completion_tokens=4, **GREEDY)
    assert both["usage"]["completion_tokens"] == 4
    free = answer(http, CHAT, **GREEDY)
    assert free["usage"]["total_tokens"] == CONTEXT and free["choices"][0]["finish_reason"] == "length"


def test_prompt_and_limit_up_to_the_context_and_not_beyond(http):
    """Trap 17 and case O28: the same rule in streams."""
    prompt = [BOS, *([30] * (CONTEXT - 11))]
    exact = answer(http, COMPLETIONS, prompt=prompt, max_tokens=10, **GREEDY)
    assert exact["usage"]["total_tokens"] == CONTEXT and exact["usage"]["completion_tokens"] == 10
    for streamed in (False, True):
        error = refused(http, COMPLETIONS, prompt=prompt, max_tokens=11, stream=streamed)
        assert "context length" in error["message"] and "max_tokens" in error["message"]
        assert "max_new_tokens" not in error["message"]
    assert answer(http, COMPLETIONS, prompt=[30] * (CONTEXT - 1))["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("streamed", [False, True])
def test_an_over_long_prompt_is_400_in_the_words_clients_look_for(http, streamed):
    """Trap 18."""
    for path, body in (
        (COMPLETIONS, {"prompt": [30] * (CONTEXT + 5)}),
        (CHAT, {"input_ids": [30] * (CONTEXT + 5)}),
    ):
        message = refused(http, path, stream=streamed, **body)["message"]
        assert "longer than the model's context length" in message and str(CONTEXT) in message
        assert answer(http, path, max_tokens=1)["usage"]["completion_tokens"] == 1


# penalties and bias


def test_a_bias_bans_or_forces_and_min_tokens_holds_the_end_back(http):
    ids = answer(http, COMPLETIONS, max_tokens=8, return_token_ids=True, **GREEDY)["choices"][0]["token_ids"]
    banned = {str(i): -100 for i in set(ids)}
    without = answer(http, COMPLETIONS, max_tokens=8, logit_bias=banned, return_token_ids=True, **GREEDY)
    assert not set(without["choices"][0]["token_ids"]) & set(ids)
    forced = answer(http, COMPLETIONS, max_tokens=3, logit_bias={"40": 100}, return_token_ids=True, **GREEDY)
    assert forced["choices"][0]["token_ids"] == [40, 40, 40]
    held = answer(
        http,
        COMPLETIONS,
        max_tokens=9,
        temperature=0,
        logit_bias={str(IM_END): 100},
        min_tokens=3,
        return_token_ids=True,
    )["choices"][0]
    assert len(held["token_ids"]) == 4 and held["token_ids"].index(IM_END) == 3


def test_penalties_look_at_the_output_only_and_not_at_neighbours(http):
    body = {"max_tokens": 30, "return_token_ids": True, **GREEDY}
    plain = answer(http, COMPLETIONS, **body)["choices"][0]["token_ids"]
    for penalty in ({"repetition_penalty": 2.0}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}):
        prompt = [BOS, *plain]  # every token of the answer stands in the prompt
        bare = answer(http, COMPLETIONS, prompt=prompt, max_tokens=1, return_token_ids=True, **GREEDY)
        held = answer(
            http, COMPLETIONS, prompt=prompt, max_tokens=1, return_token_ids=True, **penalty, **GREEDY
        )
        assert bare["choices"][0]["token_ids"] == held["choices"][0]["token_ids"]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            together = [pool.submit(answer, http, COMPLETIONS, **body, **extra) for extra in (penalty, {})]
            assert together[1].result()["choices"][0]["token_ids"] == plain


def test_a_penalty_breaks_a_repetition(http):
    """A forced token gives way once its penalty is larger than its bias."""
    body = {"max_tokens": 6, "logit_bias": {"40": 100}, "return_token_ids": True, **GREEDY}
    ids = answer(http, COMPLETIONS, repetition_penalty=2.0, **body)["choices"][0]["token_ids"]
    assert ids[0] == 40
    assert answer(http, COMPLETIONS, **body)["choices"][0]["token_ids"] == [40] * 6


# special tokens


def test_a_chat_has_one_bos_and_reads_special_tokens_in_messages(http):
    message = [{"role": "user", "content": "a<|im_end|>b"}]
    ids = answer(http, CHAT, messages=message, max_tokens=1, return_token_ids=True)["choices"][0][
        "prompt_token_ids"
    ]
    assert ids.count(BOS) == 1 and ids[0] == BOS
    assert ids.count(IM_END) == 2, "one of the message, one of the template"
    text = answer(http, COMPLETIONS, max_tokens=1, return_token_ids=True)["choices"][0]["prompt_token_ids"]
    assert text.count(BOS) == 1


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_special_tokens_are_shown_when_asked_for(http, path):
    body = {"logit_bias": {str(IM_START): 100}, "max_tokens": 3, **GREEDY}
    assert text_of(answer(http, path, **body)["choices"][0]) == ""
    shown = answer(http, path, skip_special_tokens=False, **body)["choices"][0]
    assert text_of(shown) == "<|im_start|>" * 3
    assert joined(stream(http, path, skip_special_tokens=False, **body)) == "<|im_start|>" * 3


def test_history_with_tool_calls_and_null_content_is_answered(http):
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "42"},
    ]
    assert answer(http, CHAT, messages=messages, max_tokens=2, tools=None)["choices"]


def test_the_final_message_goes_on(http):
    messages = [*HELLO, {"role": "assistant", "content": "hello to"}]
    body = {"messages": messages, "max_tokens": 1, "continue_final_message": True, "return_token_ids": True}
    prompt = answer(http, CHAT, **body)["choices"][0]["prompt_token_ids"]
    assert prompt.count(IM_END) == 1, "the assistant's turn is not closed"


# a server whose model has no template and whose pool is smaller than its context


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = write_tiny_model(tmp_path_factory.mktemp("bare"), vocab_size=VOCAB, chat_template=None)
    flags = ["--dtype", "float32", "--max-total-tokens", "256", "--stream-response-default-include-usage"]
    with (
        running_server(folder, *flags) as running,
        httpx.Client(base_url=running.url, timeout=HANG_GUARD_S) as http,
    ):
        yield http


def test_a_chat_without_a_template_is_400_with_the_cure(small):
    assert "--chat-template" in refused(small, CHAT)["message"]


def test_a_prompt_over_the_pool_is_refused_and_the_next_one_served(small):
    """Trap 18, its last part: shorter than the context, longer than the pool."""
    error = refused(small, COMPLETIONS, prompt=[30] * 300)
    assert "300" in error["message"] and "256" in error["message"]
    assert answer(small, COMPLETIONS, max_tokens=2)["choices"][0]["text"] is not None


def test_usage_by_the_servers_flag_unless_the_client_says_no(small):
    assert stream(small, COMPLETIONS, max_tokens=2)[-1]["usage"]
    silent = stream(small, COMPLETIONS, max_tokens=2, stream_options={"include_usage": False})
    assert not any(c.get("usage") for c in silent)
    assert "prompt_tokens_details" not in answer(small, COMPLETIONS, max_tokens=2)["usage"]
