"""The OpenAI routes of a real server with a tiny model, by the openai client and by hand."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=60, suite="server-cpu")

import asyncio
import concurrent.futures
import json
import time

import httpx
import openai
import pytest

from sglang.srt.entrypoints.openai.protocol import REFUSED, WITHOUT_EFFECT, acting_fields
from sglang.test.server_fixture import running_server
from sglang.test.tiny_models import write_tiny_model

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NAME, CONTEXT, VOCAB = "org/tiny:test", 512, 512
BOS, IM_START, IM_END = 0, 1, 2
HELLO = [{"role": "user", "content": "Say hello to the world"}]
PROMPT = "the quick brown fox jumps over"
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = write_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=VOCAB, add_bos=True)
    flags = ["--dtype", "float32", "--served-model-name", NAME, "--enable-cache-report"]
    flags += ["--max-total-tokens", "4096", "--chunked-prefill-size", "32", "--max-running-requests", "16"]
    with running_server(folder, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(http, path, **body):
    """POST with a prompt or a message when the test gives none; 200 or an error of the test."""
    body.setdefault(*(("messages", HELLO) if path == CHAT else ("prompt", PROMPT)))
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response


def answer(http, path, **body):
    return ask(http, path, **body).json()


def refused(http, path, **body):
    """The error object of a 400."""
    body.setdefault(*(("messages", HELLO) if path == CHAT else ("prompt", PROMPT)))
    response = http.post(path, json=body)
    assert response.status_code == 400, response.text
    flat = response.json()
    assert flat["error"]["message"] == flat["message"] and flat["error"]["code"] == flat["code"] == 400
    return flat["error"]


def chunks_of(response):
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def stream(http, path, **body):
    return chunks_of(ask(http, path, stream=True, **body))


def choices_of(chunks, index=0):
    return [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]


def text_of(choice):
    """The text of a choice or of a delta, in either dialect."""
    return choice["text"] if "text" in choice else (choice.get("message") or choice["delta"])["content"]


def joined(chunks, index=0):
    return "".join(text_of(c) for c in choices_of(chunks, index))


# --- the openai client ---


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


# --- answers ---


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


# --- trap 2: stop strings ---


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


# --- traps 3 and 4.4: scoring ---


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


# --- traps 4 to 7: ends and usage ---


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
    body = {"messages": HELLO, "max_tokens": 400, "stream": True, "rid": "to-be-aborted", **GREEDY}
    body["stream_options"] = {"include_usage": True}
    lines = []
    with http.stream("POST", CHAT, json=body) as response:
        for line in response.iter_lines():
            lines.append(line)
            if len(lines) == 12:
                assert httpx.post(
                    str(http.base_url) + "/abort_request", json={"rid": "to-be-aborted"}
                ).is_success
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert choices_of(chunks)[-1]["finish_reason"] == "abort" and lines[-2] == "data: [DONE]"
    assert 0 < chunks[-1]["usage"]["completion_tokens"] < 400


def test_a_closed_connection_ends_the_request(http):
    """Trap 10 on this route."""

    def running():
        state = http.get("/server_info").json()["internal_states"][0]
        return state["num_running_reqs"] + state["num_queue_reqs"]

    body = {"messages": HELLO, "max_tokens": 450, "n": 2, "stream": True, **GREEDY}
    with http.stream("POST", CHAT, json=body) as response:
        next(response.iter_lines())
    deadline = time.monotonic() + 5
    while running() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert running() == 0


# --- trap 9 and the cases O24 to O26: bad requests ---

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


# --- traps 17 and 18: lengths ---


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
        if path == CHAT:
            response = http.post(path, json={**body, "stream": streamed})
        else:
            response = http.post(path, json={**body, "stream": streamed})
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert "longer than the model's context length" in message and str(CONTEXT) in message
        assert answer(http, path, max_tokens=1)["usage"]["completion_tokens"] == 1


# --- trap 19: penalties and bias ---


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


# --- trap 21: special tokens ---


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


# --- a server whose model has no template and whose pool is smaller than its context ---


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = write_tiny_model(tmp_path_factory.mktemp("bare"), vocab_size=VOCAB, chat_template=None)
    flags = ["--dtype", "float32", "--max-total-tokens", "256", "--stream-response-default-include-usage"]
    with running_server(folder, *flags) as running, httpx.Client(base_url=running.url, timeout=60) as http:
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
