"""A server that drafts answers as one that does not, over every route, and says what a draft did."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=90, suite="server-cpu")

import contextlib
import json
import pathlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from sglang.test.server.openai_calls import CHAT, COMPLETIONS, Json, choices_of
from sglang.test.server.openai_http import answer, events, joined, stream
from sglang.test.server.server_fixture import RunningServer, StreamingClient, running_server
from sglang.test.tiny_drafts import write_random_draft
from sglang.test.tiny_models import write_tiny_model
from sglang.test.waiting import HANG_GUARD_S, wait_until

FLAGS = ("--dtype", "float32", "--max-total-tokens", "40000", "--max-running-requests", "4")
GREEDY = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}
#: Not over before a test has done what it wants to do meanwhile.
LONG = {"temperature": 0.0, "max_new_tokens": 15_000, "ignore_eos": True}
PROMPTS = [[5], [7, 9, 11], [3, 30, 300, 17, 4, 3, 30, 300], list(range(20, 60))]
#: What a draft adds to `meta_info`; what `/server_info` counts of it.
META = {
    "spec_verify_ct",
    "spec_num_correct_drafts",
    "spec_num_proposed_drafts",
    "spec_correct_drafts_histogram",
    "spec_accept_length",
    "spec_accept_rate",
}
COUNTERS = ("spec_verify_ct", "spec_num_correct_drafts", "spec_num_proposed_drafts")
#: What differs between two runs of the same request.
OF_ONE_RUN = {"id", "e2e_latency", "response_sent_to_client_ts", "cached_tokens"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Six layers, since an EAGLE3 draft reads three of them."""
    folder = tmp_path_factory.mktemp("model")
    return write_tiny_model(folder, num_layers=6, max_position_embeddings=16_384)


@pytest.fixture(scope="module")
def plain(model: pathlib.Path) -> Iterator[RunningServer]:
    with running_server(model, *FLAGS) as server:
        yield server


@pytest.fixture(scope="module", params=["STANDALONE", "EAGLE3", "NGRAM"])
def drafted(
    request: pytest.FixtureRequest, model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """The model drafting for itself, which is always right; a tree that hardly ever is; n-grams."""
    flags = {
        "STANDALONE": ("--speculative-draft-model-path", str(model)),
        "EAGLE3": (
            "--speculative-draft-model-path",
            str(write_random_draft(tmp_path_factory.mktemp("draft"), model, "eagle3", draft_vocab_size=200)),
            *("--speculative-num-steps", "3", "--speculative-eagle-topk", "4"),
            *("--speculative-num-draft-tokens", "8"),
        ),
        "NGRAM": (),
    }[request.param]
    with running_server(
        model, *FLAGS, "--decode-log-interval", "5", "--speculative-algorithm", request.param, *flags
    ) as server:
        yield server


def algorithm_of(server: RunningServer) -> str:
    algorithm: str = server.client.get("/server_info").json()["speculative_algorithm"]
    return algorithm


def state(server: RunningServer) -> dict[str, Any]:
    (counters,) = server.client.get("/server_info").json()["internal_states"]
    return dict(counters)


def is_idle(server: RunningServer) -> bool:
    counters = state(server)
    return counters["num_running_reqs"] == counters["num_queue_reqs"] == counters["num_used_tokens"] == 0


def assert_same(found: Any, expected: Any, where: str = "answer") -> None:
    """Two answers are equal, but for what a draft adds and what differs between two runs.

    Log-probabilities of several rows at once and of one row differ by rounding.
    """
    if isinstance(expected, dict):
        found, expected = (
            {key: value for key, value in one.items() if key not in META | OF_ONE_RUN}
            for one in (found, expected)
        )
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for index, value in enumerate(expected):
            assert_same(found[index], value, f"{where}[{index}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-3), where
    else:
        assert found == expected, where


def both(plain: RunningServer, drafted: RunningServer, **body: Any) -> Any:
    """The answer of `/generate`, which must be the same with and without the draft."""
    found = drafted.answer(**body)
    assert_same(found, plain.answer(**body))
    return found


def whole_stream(server: RunningServer, **body: Any) -> Json:
    """The last event of a streamed answer that must succeed; each carries the whole text so far."""
    pieces: list[Json] = events(server.generate(**body, stream=True))
    assert all(pieces[-1]["text"].startswith(piece["text"].rstrip("\ufffd")) for piece in pieces)
    return pieces[-1]


def test_greedy_batches_with_samples_and_logprobs_are_those_of_plain_decoding(
    plain: RunningServer, drafted: RunningServer
) -> None:
    """Ids, texts, usage, finish reasons, and every log-probability as a number.

    Under drafts a value may be that of another node, or missing for all but the first token of a round.
    """
    found = both(
        plain,
        drafted,
        input_ids=PROMPTS,
        sampling_params={**GREEDY, "n": 2},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=3,
        token_ids_logprob=[5, 6],
    )
    assert len(found) == 2 * len(PROMPTS)
    for item in found:
        meta = item["meta_info"]
        assert len(meta["output_token_logprobs"]) == len(meta["output_top_logprobs"]) == 40
        for chosen, best in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
            values = [value for value, *_ in best]
            assert chosen[0] < 0 and values == sorted(values, reverse=True)
            assert chosen[:2] == best[0][:2], "at temperature 0 nothing is above the chosen token"


def test_a_seeded_draw_is_that_of_plain_decoding(plain: RunningServer, drafted: RunningServer) -> None:
    """Filters and penalties act on what is verified, not on what was drafted."""
    sampling = {"temperature": 0.9, "max_new_tokens": 40, "ignore_eos": True, "sampling_seed": 7}
    filtered = {**sampling, "top_p": 0.8, "top_k": 30, "repetition_penalty": 1.2, "frequency_penalty": 0.3}
    for params in (sampling, filtered, {**filtered, "n": 3}):
        both(plain, drafted, text="draw a card", sampling_params=params, return_logprob=True)


def test_a_native_stream_ends_with_the_whole_answer(plain: RunningServer, drafted: RunningServer) -> None:
    body = {"text": "hello world", "sampling_params": GREEDY, "return_logprob": True}
    whole = both(plain, drafted, **body)
    assert_same(whole_stream(drafted, **body), whole)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"max_tokens": 24, "logprobs": True, "top_logprobs": 3}),
        (CHAT, {"max_tokens": 24, "n": 3, "seed": 5, "temperature": 1.0}),
        (COMPLETIONS, {"max_tokens": 24, "logprobs": 2}),
        (COMPLETIONS, {"max_tokens": 24, "n": 2, "prompt": ["one", "two two"]}),
        (COMPLETIONS, {"max_tokens": 8, "echo": True, "logprobs": 1}),
    ],
    ids=["chat", "chat-samples", "completions", "completions-batch", "completions-echo"],
)
def test_openai_answers_are_those_of_plain_decoding(
    plain: RunningServer, drafted: RunningServer, path: str, fields: Json
) -> None:
    body = {"temperature": 0, "ignore_eos": True, **fields}
    found = answer(drafted.client, path, **body)
    expected = answer(plain.client, path, **body)
    assert_same(found["choices"], expected["choices"])
    assert found["usage"] == expected["usage"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_openai_streams_are_those_of_plain_decoding(
    plain: RunningServer, drafted: RunningServer, path: str
) -> None:
    """Several tokens arrive at once: texts, log-probabilities, ends and usage are those of one by one."""
    logprobs: Json = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    body = {"temperature": 0, "ignore_eos": True, "max_tokens": 24, "n": 2, **logprobs}
    body["stream_options"] = {"include_usage": True}

    def content(server: RunningServer) -> Json:
        chunks = stream(server.client, path, **body)
        found: Json = {"usage": chunks[-1]["usage"]}
        for index in (0, 1):
            choices = choices_of(chunks, index)
            listed = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
            found[str(index)] = (
                joined(chunks, index),
                [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
                [item for one in listed for item in (one["content"] if path == CHAT else one["tokens"])],
            )
        return found

    assert_same(content(drafted), content(plain))


def test_an_end_inside_accepted_drafts_ends_the_answer_there(
    plain: RunningServer, drafted: RunningServer
) -> None:
    """Stop strings, stop ids and lengths at each place of a round: nothing of what follows is kept.

    A round of the perfect draft gives four tokens, so four ends in a row lie at every place of one; n-grams
    know this text from the requests before.
    """
    body = {"text": "abc", "return_logprob": True, "top_logprobs_num": 2}
    whole = plain.answer(**body, sampling_params=GREEDY)
    ids = whole["output_ids"]
    for place in range(8, 12):
        first = ids.index(ids[place])
        for end in ({"max_new_tokens": place}, {"stop_token_ids": [ids[place]], "ignore_eos": False}):
            params = {**GREEDY, **end}
            found = both(plain, drafted, **body, sampling_params=params)
            assert_same(whole_stream(drafted, **body, sampling_params=params), found)
            wanted = place if "max_new_tokens" in end else first + 1
            meta = found["meta_info"]
            assert meta["completion_tokens"] == len(found["output_ids"]) == wanted
            assert len(meta["output_token_logprobs"]) == len(meta["output_top_logprobs"]) == wanted
    text = whole["text"]
    for begin in range(len(text) // 2, len(text) // 2 + 4):
        params = {**GREEDY, "stop": [text[begin : begin + 3]]}
        found = both(plain, drafted, **body, sampling_params=params)
        meta = found["meta_info"]
        assert found["text"] == text[: text.find(text[begin : begin + 3])]
        assert meta["finish_reason"]["type"] == "stop"
        assert meta["completion_tokens"] == len(meta["output_token_logprobs"]) == len(found["output_ids"])
        assert_same(whole_stream(drafted, **body, sampling_params=params), found)
        # Otherwise no end would have been inside accepted drafts.
        assert meta["spec_num_correct_drafts"] > 1 or algorithm_of(drafted) == "EAGLE3"


def test_an_answer_tells_what_its_draft_did(drafted: RunningServer) -> None:
    params = {**GREEDY, "max_new_tokens": 41}
    meta = drafted.answer(input_ids=PROMPTS[3], sampling_params=params)["meta_info"]
    rounds, histogram = meta["spec_verify_ct"], meta["spec_correct_drafts_histogram"]
    assert set(meta) >= META
    assert sum(histogram) == rounds
    assert sum(correct * count for correct, count in enumerate(histogram)) == meta["spec_num_correct_drafts"]
    assert meta["spec_accept_length"] == 41 / rounds
    assert meta["spec_accept_rate"] == meta["spec_num_correct_drafts"] / meta["spec_num_proposed_drafts"]
    if algorithm_of(drafted) == "STANDALONE":  # one token with the prompt, then ten rounds of four
        assert (rounds, histogram, meta["spec_accept_rate"]) == (10, [0, 0, 0, 10], 1.0)


def test_the_server_counts_what_its_answers_counted(drafted: RunningServer) -> None:
    wait_until(lambda: is_idle(drafted), lambda: str(state(drafted)))
    before = state(drafted)
    found = drafted.answer(input_ids=PROMPTS, sampling_params=GREEDY)
    after = state(drafted)
    for name in COUNTERS:
        assert after[name] - before[name] == sum(item["meta_info"][name] for item in found), name
    rounds = after["spec_verify_ct"]
    assert after["avg_spec_accept_length"] == pytest.approx(1 + after["spec_num_correct_drafts"] / rounds)
    assert all(after[name] > before[name] for name in COUNTERS[::2])


def test_the_log_says_how_tokens_are_drafted_and_how_many_are_accepted(drafted: RunningServer) -> None:
    drafted.answer(input_ids=PROMPTS, sampling_params=GREEDY)
    log = drafted.log()
    assert "speculative decoding: " in log and "tokens verified in a round" in log
    assert "accept len: " in log and "accept rate: " in log
    assert "Traceback" not in log


def test_many_requests_for_one_token_all_end_and_the_next_one_is_served(drafted: RunningServer) -> None:
    """None of them ever sees a round: they must still leave their places to those that wait."""
    with ThreadPoolExecutor(40) as pool:
        found = list(
            pool.map(
                lambda number: answer(
                    drafted.client, COMPLETIONS, prompt=[number + 3, 7], max_tokens=1, temperature=0
                ),
                range(40),
            )
        )
    assert [item["usage"]["completion_tokens"] for item in found] == [1] * 40
    assert len(drafted.answer(input_ids=PROMPTS[1], sampling_params=GREEDY)["output_ids"]) == 40
    wait_until(lambda: is_idle(drafted), lambda: str(state(drafted)))


def test_an_abort_between_rounds_answers_with_a_beginning_of_the_answer(
    plain: RunningServer, drafted: RunningServer
) -> None:
    """The neighbour of the aborted request goes on undisturbed, and no slot of a round stays taken."""
    neighbour = {"input_ids": PROMPTS[2], "sampling_params": {**GREEDY, "max_new_tokens": 200}}
    with ThreadPoolExecutor(1) as pool:
        client = StreamingClient(drafted, text="hello", rid="to-be-aborted", sampling_params=LONG)
        client.wait_for_events(3)
        beside = pool.submit(drafted.answer, **neighbour)
        assert drafted.client.post("/abort_request", json={"rid": "to-be-aborted"}).is_success
        client.join(HANG_GUARD_S)
        assert_same(beside.result(), plain.answer(**neighbour))
    last = json.loads(client.lines[-2].removeprefix("data: "))
    made = len(last["output_ids"])
    assert last["meta_info"]["finish_reason"]["type"] == "abort" and 0 < made < LONG["max_new_tokens"]
    expected = plain.answer(text="hello", sampling_params={**LONG, "max_new_tokens": made})
    assert last["output_ids"] == expected["output_ids"]
    wait_until(lambda: is_idle(drafted), lambda: str(state(drafted)))


def test_clients_that_hang_up_between_rounds_leave_nothing_taken(drafted: RunningServer) -> None:
    body = {"text": "hello", "stream": True, "sampling_params": LONG}
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(httpx.Client(base_url=drafted.url, timeout=HANG_GUARD_S))
        streams = [
            client.send(client.build_request("POST", "/generate", json=body), stream=True) for _ in range(3)
        ]
        for one in streams:
            next(one.iter_lines())
        for one in streams:
            one.close()
    wait_until(lambda: is_idle(drafted), lambda: str(state(drafted)))
    assert len(drafted.answer(input_ids=PROMPTS[0], sampling_params=GREEDY)["output_ids"]) == 40
    assert "Traceback" not in drafted.log()


def test_a_server_without_a_draft_tells_of_none(plain: RunningServer) -> None:
    meta = plain.answer(input_ids=PROMPTS[0], sampling_params=GREEDY)["meta_info"]
    assert not [name for name in meta if name.startswith("spec_")]
    counters = state(plain)
    assert not [name for name in counters if name.startswith("spec_")]
    assert counters["avg_spec_accept_length"] is None
    assert "speculative decoding" not in plain.log() and "accept len" not in plain.log()
