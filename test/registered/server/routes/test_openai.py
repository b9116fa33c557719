"""The OpenAI routes of a real server with a tiny model, by the openai client and by hand."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=60, suite="server-cpu")

import asyncio
import concurrent.futures
import json

import openai
import pytest

from sglang.srt.entrypoints.openai.protocol import acting_fields
from sglang.srt.messages.unserved_fields import REFUSED, WITHOUT_EFFECT
from sglang.test.server.openai_http import (
    CHAT,
    COMPLETIONS,
    GREEDY,
    HELLO,
    PROMPT,
    answer,
    ask,
    choices_of,
    joined,
    refused,
    stream,
    text_of,
)
from sglang.test.server.server_fixture import running_server
from sglang.test.tiny_models import write_tiny_model
from sglang.test.waiting import wait_until

NAME, CONTEXT, VOCAB = "org/tiny:test", 32_768, 512
#: Not over before a test has done what it wants to do meanwhile.
ENDLESS = 15_000
BOS, IM_START, IM_END = 0, 1, 2


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = write_tiny_model(
        tmp_path_factory.mktemp("model"), vocab_size=VOCAB, add_bos=True, max_position_embeddings=CONTEXT
    )
    flags = ["--dtype", "float32", "--served-model-name", NAME, "--enable-cache-report"]
    flags += ["--max-total-tokens", "40000", "--chunked-prefill-size", "32", "--max-running-requests", "16"]
    with running_server(folder, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


# the openai client


def test_sync_async_and_stream_say_the_same(client, server):
    fields = {"model": NAME, "messages": HELLO, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**fields)
    pieces = list(
        client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)

    async def ask_async():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as asynchronous:
            one = await asynchronous.chat.completions.create(**fields)
            parts = [p async for p in await asynchronous.chat.completions.create(**fields, stream=True)]
            return one, "".join(p.choices[0].delta.content or "" for p in parts)

    one, parts = asyncio.run(ask_async())
    assert whole.choices[0].message.content == text == one.choices[0].message.content == parts
    assert text and pieces[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert whole.choices[0].message.role == "assistant" and whole.model == NAME


def test_completions_by_the_client(client):
    fields = {"model": NAME, "prompt": PROMPT, "temperature": 0, "max_tokens": 12}
    whole = client.completions.create(**fields)
    parts = client.completions.create(**fields, stream=True)
    assert "".join(p.choices[0].text for p in parts) == whole.choices[0].text
    assert whole.object == "text_completion" and whole.usage.total_tokens > 12


def test_errors_of_the_client_are_its_own_classes(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=NAME, messages=HELLO, temperature=-1)
    assert caught.value.param == "temperature" and "temperature" in str(caught.value)
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("gpt-4")
    assert missing.value.code == "model_not_found"


def test_models_by_list_and_by_a_name_with_slash_and_colon(client, http):
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == (NAME, "sglang")
    assert client.models.retrieve(NAME).id == NAME
    assert http.get("/v1/models/org%2Ftiny%3Atest").json()["max_model_len"] == CONTEXT


# answers


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_engine_is_asked_what_the_client_asked(http, path):
    """The native route, given the same ids, is the reference."""
    body = answer(http, path, max_tokens=16, return_token_ids=True, **GREEDY)
    choice = body["choices"][0]
    params = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
    native = http.post("/generate", json={"input_ids": choice["prompt_token_ids"], "sampling_params": params})
    assert choice["token_ids"] == native.json()["output_ids"] and text_of(choice) == native.json()["text"]
    assert body["usage"]["prompt_tokens"] == len(choice["prompt_token_ids"])
    assert body["usage"]["completion_tokens"] == 16 and choice["finish_reason"] == "length"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_sampled_stream_adds_up_to_the_whole_answer(http, path):
    """Trap 1, its second half: whatever bytes come, the stream is the text."""
    for seed in range(6):
        body = {"seed": seed, "max_tokens": 40, "temperature": 1.0, "logprobs": True if path == CHAT else 2}
        whole, chunks = answer(http, path, **body), stream(http, path, **body)
        choice = whole["choices"][0]
        assert joined(chunks) == text_of(choice)
        parts = choices_of(chunks)
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        key = "content" if path == CHAT else "token_logprobs"
        told = [v for p in parts for v in (p["logprobs"] or {}).get(key, ())]
        assert len(told) == len(choice["logprobs"][key]) == whole["usage"]["completion_tokens"]


def test_many_prompts_keep_their_order(http):
    prompts = ["hello", "the world", "paris is", "one two three"]
    together = answer(http, COMPLETIONS, prompt=prompts, max_tokens=6, n=2, **GREEDY)
    assert [c["index"] for c in together["choices"]] == list(range(8))
    for i, prompt in enumerate(prompts):
        alone = answer(http, COMPLETIONS, prompt=prompt, max_tokens=6, **GREEDY)
        for sample in range(2):
            assert together["choices"][2 * i + sample]["text"] == alone["choices"][0]["text"]
    assert together["usage"]["completion_tokens"] == 48


def test_samples_of_one_seed_differ_and_repeat(http):
    body = {"n": 4, "seed": 5, "temperature": 1.0, "max_tokens": 12}
    first = [text_of(c) for c in answer(http, CHAT, **body)["choices"]]
    again = [text_of(c) for c in answer(http, CHAT, **body)["choices"]]
    assert first == again and len(set(first)) == 4


def test_every_optional_field_may_be_null(http):
    for path, route in ((CHAT, "chat"), (COMPLETIONS, "completions")):
        names = {*acting_fields(route), *REFUSED, *WITHOUT_EFFECT} - {"messages", "prompt"}
        body = dict.fromkeys(names) | {"max_tokens": 3}
        assert answer(http, path, **body)["usage"]["completion_tokens"] <= 3


def test_the_connection_serves_on_after_a_refusal(http):
    for _ in range(3):
        refused(http, CHAT, temperature=-1)
        answer(http, CHAT, max_tokens=1)


def test_content_types_with_charset_and_without_json(http):
    body = json.dumps({"prompt": "hé", "max_tokens": 1})
    kinds = {"application/json; charset=utf-8": 200, "text/plain": 400, "application/xml": 400}
    for kind, status in kinds.items():
        assert http.post(COMPLETIONS, content=body, headers={"content-type": kind}).status_code == status
    for bad in (
        '{"prompt": "x", "temperature": NaN}',
        '{"prompt": "x", "seed": 18446744073709551616}',
        "{",
        "[]",
    ):
        response = http.post(COMPLETIONS, content=bad, headers={"content-type": "application/json"})
        assert response.status_code == 400, bad


# stop strings


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stop_string_is_cut_in_both_modes_and_kept_when_asked(http, path):
    free = text_of(answer(http, path, max_tokens=40, **GREEDY)["choices"][0])
    clean = next((i for i in range(4, len(free) - 7) if "\ufffd" not in free[i : i + 5]), None)
    assert clean is not None, "the model's text has no run of five clean characters"
    stop = free[clean : clean + 5]
    cut = free[: free.index(stop)]
    body = {"max_tokens": 40, "stop": ["\x00never", stop], **GREEDY}
    choice = answer(http, path, **body)["choices"][0]
    assert (text_of(choice), choice["finish_reason"], choice["matched_stop"]) == (cut, "stop", stop)
    parts = choices_of(stream(http, path, **body))
    assert "".join(text_of(p) for p in parts) == cut
    assert parts[-1]["matched_stop"] == stop
    kept = answer(http, path, no_stop_trim=True, **body)["choices"][0]
    # Nothing is trimmed: the token that completes the stop may bring a little more.
    assert text_of(kept).startswith(cut + stop) and len(text_of(kept)) < len(cut + stop) + 20


# scoring


def scored(http, prompt, **fields):
    body = {"max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234, "prompt": prompt}
    return answer(http, COMPLETIONS, **(body | fields))["choices"]


def check_scores(choice, prompt_tokens, new_tokens):
    """What an evaluation harness relies on."""
    logprobs = choice["logprobs"]
    lengths = {len(values) for values in logprobs.values()}
    assert lengths == {prompt_tokens + new_tokens}
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    for token, value, tops in list(zip(*(logprobs[k] for k in ("tokens", "token_logprobs", "top_logprobs"))))[
        1:
    ]:
        assert tops and tops[token] == value and all(v <= 0 for v in tops.values())
    if new_tokens:
        assert logprobs["token_logprobs"][-1] == max(logprobs["top_logprobs"][-1].values())


def test_scoring_as_the_harness_does_it(http):
    """Prompts as ids, the continuation's log-probabilities and whether it was the greedy one."""
    prompts = [[BOS, *range(10, 20 + 7 * i)] for i in range(4)]
    choices = scored(http, prompts)
    assert [c["index"] for c in choices] == [0, 1, 2, 3]
    for choice, ids in zip(choices, prompts):
        check_scores(choice, len(ids), 1)
    native = http.post(
        "/generate",
        json={
            "input_ids": prompts[3],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        },
    ).json()["meta_info"]["input_token_logprobs"]
    ours = choices[3]["logprobs"]["token_logprobs"]
    assert [e[1] for e in native] == prompts[3]
    assert ours[1:-1] == pytest.approx([e[0] for e in native][1:], abs=1e-3)


def test_scores_are_complete_when_the_prompt_is_cached_chunked_or_batched(http):
    long = [BOS, *(20 + i % 400 for i in range(150))]
    first = scored(http, long)[0]
    check_scores(first, 151, 1)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        neighbours = [pool.submit(answer, http, COMPLETIONS, prompt=long, max_tokens=20) for _ in range(2)]
        again = [pool.submit(scored, http, long) for _ in range(2)]
        plain = [f.result() for f in neighbours]
    for found in [scored(http, long), *(f.result() for f in again)]:
        check_scores(found[0], 151, 1)
        values = found[0]["logprobs"]["token_logprobs"][1:]
        assert values == pytest.approx(first["logprobs"]["token_logprobs"][1:], abs=1e-3)
    assert all(p["choices"][0]["logprobs"] is None for p in plain)


@pytest.mark.parametrize("form", ["text", "texts", "ids"])
def test_scoring_without_a_new_token(http, form):
    """Case O27."""
    ids = answer(http, COMPLETIONS, max_tokens=1, return_token_ids=True)["choices"][0]["prompt_token_ids"]
    prompt = {"text": PROMPT, "texts": [PROMPT], "ids": ids}[form]
    body = answer(http, COMPLETIONS, prompt=prompt, echo=True, max_tokens=0, logprobs=1)
    check_scores(body["choices"][0], len(ids), 0)
    assert body["usage"]["completion_tokens"] == 0 and body["usage"]["prompt_tokens"] == len(ids)
    assert body["choices"][0]["text"] == ("<|endoftext|>" if form == "ids" else "") + PROMPT
    chunks = stream(http, COMPLETIONS, prompt=prompt, echo=True, max_tokens=0, logprobs=1)
    assert joined(chunks) == body["choices"][0]["text"]
    assert answer(http, COMPLETIONS, echo=True, max_tokens=0)["choices"][0]["text"] == PROMPT


def test_alternatives_cut_away_are_finite(http):
    """Case O30: with top_k 1 all other tokens have no probability left."""
    for path in (CHAT, COMPLETIONS):
        asked = {"logprobs": True, "top_logprobs": 5} if path == CHAT else {"logprobs": 5}
        body = {"top_k": 1, "max_tokens": 4, "temperature": 1.0, **asked}
        for text in (ask(http, path, **body).text, ask(http, path, stream=True, **body).text):
            assert "Infinity" not in text and "NaN" not in text
    choice = scored(http, PROMPT, top_k=1, logprobs=5)[0]
    assert all(len(tops) >= 5 for tops in choice["logprobs"]["top_logprobs"][1:])


# ends and usage


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_answer_that_is_only_the_end_token(http, path):
    """Trap 4."""
    logprobs = {"logprobs": True} if path == CHAT else {"logprobs": 0}
    body = {"logit_bias": {str(IM_END): 100}, "temperature": 0, "max_tokens": 8, **logprobs}
    whole = answer(http, path, **body)
    choice = whole["choices"][0]
    assert (text_of(choice), choice["finish_reason"], choice["matched_stop"]) == ("", "stop", IM_END)
    assert whole["usage"]["completion_tokens"] == 1
    assert len(choice["logprobs"]["content" if path == CHAT else "tokens"]) == 1
    parts = choices_of(stream(http, path, **body))
    assert [p["finish_reason"] for p in parts].count("stop") == 1 and parts[-1]["finish_reason"] == "stop"
    if path == CHAT:
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_usage_adds_up_with_samples(http, path):
    """Trap 5."""
    one = answer(http, path, max_tokens=7, **GREEDY)["usage"]
    four = answer(http, path, max_tokens=7, n=4, **GREEDY)["usage"]
    assert four["prompt_tokens"] == one["prompt_tokens"] and four["completion_tokens"] == 28
    assert four["total_tokens"] == four["prompt_tokens"] + 28
    assert 0 <= four["prompt_tokens_details"]["cached_tokens"] <= four["prompt_tokens"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("end", [{}, {"stop": ["e", "a", "o", " "]}])
def test_usage_of_a_stream_comes_when_asked_and_is_the_whole_answers(http, path, n, end):
    """Case O34, traps 6 and 7."""
    body = {"n": n, "max_tokens": 12, "seed": 3, "temperature": 1.0, **end}
    whole = answer(http, path, **body)["usage"]
    for options in (None, {}, {"include_usage": False}, {"include_usage": True}):
        extra = {} if options is None else {"stream_options": options}
        chunks = stream(http, path, **body, **extra)
        told = [c["usage"] for c in chunks if c.get("usage")]
        if options != {"include_usage": True}:
            assert told == []
        else:
            cached = "prompt_tokens_details"  # what was cached differs from call to call
            assert [{k: v for k, v in u.items() if k != cached} for u in told] == [
                {k: v for k, v in whole.items() if k != cached}
            ]
            assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]
        for index in range(n):
            reasons = [c["finish_reason"] for c in choices_of(chunks, index)]
            assert reasons[-1] in ("stop", "length") and set(reasons[:-1]) <= {None}


def test_continuous_usage_counts_up(http):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(http, CHAT, max_tokens=6, stream_options=options, **GREEDY)
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts) and counts[-1] == 6


def test_an_abort_by_the_user_ends_the_stream_with_what_there_was(http):
    """Trap 11 on this route."""
    body = {"messages": HELLO, "max_tokens": ENDLESS, "stream": True, "rid": "to-be-aborted", **GREEDY}
    body["stream_options"] = {"include_usage": True}
    lines = []
    with http.stream("POST", CHAT, json=body) as response:
        for line in response.iter_lines():
            lines.append(line)
            if len(lines) == 12:
                assert http.post("/abort_request", json={"rid": "to-be-aborted"}).is_success
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert choices_of(chunks)[-1]["finish_reason"] == "abort" and lines[-2] == "data: [DONE]"
    assert 0 < chunks[-1]["usage"]["completion_tokens"] < ENDLESS


def test_a_closed_connection_ends_the_request(http):
    """Trap 10 on this route."""

    def counters():
        return http.get("/server_info").json()["internal_states"][0]

    before = counters()["num_generated_tokens"]
    body = {"messages": HELLO, "max_tokens": ENDLESS, "n": 2, "stream": True, **GREEDY}
    with http.stream("POST", CHAT, json=body) as response:
        next(response.iter_lines())
    wait_until(lambda: counters()["num_running_reqs"] == counters()["num_queue_reqs"] == 0)
    assert counters()["num_generated_tokens"] - before < ENDLESS, "it ran to its end"
