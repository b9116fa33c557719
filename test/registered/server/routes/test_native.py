"""`/generate` and the control routes of a real server with a tiny random model."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=45, suite="server-cpu")

import concurrent.futures
import json
import random
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sglang.test.server.openai_http import events
from sglang.test.server.server_fixture import RunningServer, running_server
from sglang.test.tiny_models import write_tiny_model
from sglang.test.waiting import HANG_GUARD_S, wait_until

CONTEXT, POOL = 65_536, 50_000
GREEDY = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
#: Not over before a test has done what it wants to do meanwhile; three of them fit into the pool.
LONG = {"temperature": 0.0, "max_new_tokens": 15_000, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = write_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=CONTEXT)
    flags = ["--dtype", "float32", "--max-total-tokens", str(POOL), "--max-running-requests", "8"]
    with running_server(model, *flags) as server:
        yield server


def stream(server: RunningServer, **body: Any) -> list[dict[str, Any]]:
    """The events of a streamed answer that must succeed."""
    response = server.generate(**body, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response)


def state(server: RunningServer) -> dict[str, Any]:
    counters: dict[str, Any] = server.client.get("/server_info").json()["internal_states"][0]
    return counters


def is_idle(server: RunningServer) -> bool:
    counters = state(server)
    return counters["num_running_reqs"] == counters["num_queue_reqs"] == counters["num_used_tokens"] == 0


def test_a_stream_is_the_whole_answer_in_pieces(server: RunningServer) -> None:
    whole = server.generate(text="hello world", sampling_params=GREEDY).json()
    pieces = stream(server, text="hello world", sampling_params=GREEDY)
    assert pieces[-1]["text"] == whole["text"]
    assert pieces[-1]["output_ids"] == whole["output_ids"]
    assert [p["meta_info"]["finish_reason"] for p in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 16}
    assert not any("\ufffd" in p["text"][len(whole["text"].rstrip("\ufffd")) :] for p in pieces[:-1])


def test_questions_at_once_get_the_answers_of_questions_one_by_one(server: RunningServer) -> None:
    texts = [f"question number {i} is here" for i in range(12)]
    alone = [server.generate(text=text, sampling_params=GREEDY).json()["output_ids"] for text in texts]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = pool.map(lambda text: server.generate(text=text, sampling_params=GREEDY), texts)
        assert [answer.json()["output_ids"] for answer in answers] == alone


def test_a_batch_answers_in_order_and_counts_each_prompt(server: RunningServer) -> None:
    answer = server.generate(text=["one", "two two two"], sampling_params=GREEDY, rid="batch").json()
    assert [item["meta_info"]["id"] for item in answer] == ["batch_0", "batch_1"]
    assert answer[0]["meta_info"]["prompt_tokens"] < answer[1]["meta_info"]["prompt_tokens"]
    indexed = stream(server, text=["one", "two two two"], sampling_params=GREEDY)
    last = {item["index"]: item["output_ids"] for item in indexed}
    assert last == {i: item["output_ids"] for i, item in enumerate(answer)}


def test_put_is_as_good_as_post(server: RunningServer) -> None:
    answer = server.client.put("/generate", json={"text": "hi", "sampling_params": GREEDY})
    assert (
        answer.json()["output_ids"] == server.generate(text="hi", sampling_params=GREEDY).json()["output_ids"]
    )


def test_a_seed_repeats_and_no_seed_does_not(server: RunningServer) -> None:
    def draw(**more: Any) -> list[int]:
        params = {"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True, **more}
        ids: list[int] = server.generate(text="draw", sampling_params=params).json()["output_ids"]
        return ids

    assert draw(sampling_seed=3) == draw(sampling_seed=3)
    assert draw(sampling_seed=3) != draw(sampling_seed=4)
    assert draw() != draw()


def test_no_piece_of_a_stop_string_is_sent_and_a_near_miss_is(server: RunningServer) -> None:
    whole = server.generate(text="abc", sampling_params={**GREEDY, "max_new_tokens": 48}).json()["text"]
    middle = len(whole) // 2
    stop = whole[middle : middle + 4]
    cut = whole[: whole.find(stop)]
    params = {**GREEDY, "max_new_tokens": 48, "stop": [stop, "never-" + stop]}
    pieces = stream(server, text="abc", sampling_params=params)
    assert pieces[-1]["text"] == cut == server.generate(text="abc", sampling_params=params).json()["text"]
    assert all(cut.startswith(piece["text"]) for piece in pieces)
    assert pieces[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    kept = server.generate(text="abc", sampling_params={**params, "no_stop_trim": True}).json()["text"]
    assert kept.startswith(cut + stop)
    near_miss = {**GREEDY, "max_new_tokens": 48, "stop": [stop + "\x00never"]}
    assert stream(server, text="abc", sampling_params=near_miss)[-1]["text"] == whole


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"text": "a", "sampling_params": {"temperature": -1}}, "temperature"),
        ({"text": "a", "sampling_params": {"top_p": 0}}, "top_p"),
        ({"text": "a", "sampling_params": {"top_k": 0}}, "top_k"),
        ({"text": "a", "sampling_params": {"n": 0}}, "n: must satisfy"),
        ({"text": "a", "sampling_params": {"repetition_penalty": 0}}, "repetition_penalty"),
        ({"text": "a", "sampling_params": {"logit_bias": {"99999": 1}}}, "outside the vocabulary"),
        ({"text": "a", "sampling_params": {"regex": "a+"}}, "not supported yet"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 1_000_000}, "top_logprobs_num"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": 50}, "logprob_start_len"),
        ({"input_ids": [1, 99999]}, "outside the vocabulary"),
        ({"input_ids": [1] * (CONTEXT + 1)}, "longer than the model's context length"),
        ({"input_ids": [1] * (POOL + 1)}, f"KV cache pool ({POOL} tokens)"),
        (
            {"text": "a", "sampling_params": {"max_new_tokens": CONTEXT}},
            "longer than the model's context length",
        ),
        ({"input_ids": [1] * 2000, "sampling_params": {"max_new_tokens": POOL}}, f"pool ({POOL} tokens)"),
        ({"text": ""}, "empty"),
        ({}, "exactly one of text and input_ids"),
        ({"text": "a", "rid": 5}, "rid"),
        ({"text": "a", "lora_path": "x"}, "lora_path: adapters are not supported yet"),
        ({"text": "a", "sampling_parms": {}}, "did you mean sampling_params"),
        ([1, 2], "JSON object"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_is_400_also_as_a_stream_and_harms_nobody(
    server: RunningServer, body: Any, message: str, stream: bool
) -> None:
    if stream and isinstance(body, dict):
        body = {**body, "stream": True}
    answer = server.client.post("/generate", json=body)
    assert answer.status_code == 400
    both = answer.json()
    assert message in both["message"]
    assert both["error"] == {name: both[name] for name in ("message", "type", "param", "code")}
    assert both["object"] == "error"
    assert server.generate(text="next", sampling_params=GREEDY).status_code == 200


@pytest.mark.parametrize(
    ("content", "content_type"),
    [
        (b'{"text": "a"}', "text/plain"),
        (b'{"text": "a"}', "application/x-www-form-urlencoded"),
        (b'{"text": "a", "sampling_params": {"temperature": NaN}}', "application/json"),
        (b'{"text": "a", "sampling_params": {"temperature": Infinity}}', "application/json"),
        (b'{"text": "a", "sampling_params": {"sampling_seed": 18446744073709551616}}', "application/json"),
        (b'{"text": "a"', "application/json"),
        (b"", "application/json"),
        (b'{"text": "\xff"}', "application/json"),
        (b"[" * 100_000, "application/json"),
    ],
)
def test_a_body_that_is_no_plain_json_is_400(
    server: RunningServer, content: bytes, content_type: str
) -> None:
    answer = server.client.post("/generate", content=content, headers={"Content-Type": content_type})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_a_charset_is_fine_and_large_bodies_are_read(server: RunningServer) -> None:
    answer = server.client.post(
        "/generate",
        content=json.dumps({"text": "hi", "sampling_params": GREEDY}),
        headers={"Content-Type": "application/json; charset=utf-8"},
    )
    assert answer.status_code == 200
    large = server.generate(text="word " * 400_000, sampling_params=GREEDY)
    assert large.status_code == 400
    assert "longer than the model's context length" in large.json()["message"]


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/abort_request"])
def test_a_client_that_hangs_up_in_its_body_is_no_error_in_the_log(server: RunningServer, path: str) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall((head + 'Content-Length: 50\r\n\r\n{"text"').encode())
    for _ in range(5):
        assert server.generate(text="next", sampling_params=GREEDY).status_code == 200
    assert "Traceback" not in server.log()


def test_more_than_the_body_limit_is_413(server: RunningServer) -> None:
    """Announced only: the answer comes before the body is sent."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += "Content-Length: 99999999999\r\n\r\n"
        connection.sendall(head.encode())
        assert b"413" in connection.recv(100)


def test_an_unknown_path_and_a_wrong_method_are_errors_of_the_same_shape(server: RunningServer) -> None:
    for answer, status in (
        (server.client.get("/nothing"), 404),
        (server.client.get("/generate"), 405),
        (server.client.delete("/health"), 405),
    ):
        assert answer.status_code == status
        assert answer.json()["error"]["code"] == answer.json()["code"] == status
    assert server.client.head("/").status_code == 200
    assert server.client.head("/health").status_code == 200


def test_logprobs_cover_the_prompt_and_the_answer(server: RunningServer) -> None:
    answer = server.generate(
        input_ids=[5, 6, 7, 8],
        sampling_params={**GREEDY, "max_new_tokens": 3},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        token_ids_logprob=[9],
        return_text_in_logprobs=True,
    ).json()
    meta = answer["meta_info"]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == [5, 6, 7, 8]
    assert meta["input_token_logprobs"][0][0] is None
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(isinstance(entry[2], str) for entry in meta["output_token_logprobs"])
    for chosen, top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"]):
        assert len(top) == 2
        assert top[0][:2] == chosen[:2], "greedy means the best alternative is the token itself"
    assert all(entry[0][1] == 9 for entry in meta["output_token_ids_logprobs"])


@pytest.mark.parametrize("how", ["stream", "plain", "samples"])
def test_a_client_that_hangs_up_frees_its_slot_and_its_memory(server: RunningServer, how: str) -> None:
    wait_until(lambda: is_idle(server), lambda: str(state(server)))
    before = state(server)
    body: dict[str, Any] = {"text": "hello", "sampling_params": {**LONG, "n": 3 if how == "samples" else 1}}
    raw = json.dumps({**body, "stream": how == "stream"}).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n"
    head += "Content-Type: application/json\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode() + raw)
        if how == "stream":
            connection.recv(100)
        else:
            wait_until(lambda: state(server)["num_requests_received"] > before["num_requests_received"])
    wait_until(lambda: is_idle(server), lambda: str(state(server)))
    made = state(server)["num_generated_tokens"] - before["num_generated_tokens"]
    assert made < LONG["max_new_tokens"], "nobody read it, and it went on to its end"


def test_abort_matches_by_prefix_and_answers_with_what_there_is(server: RunningServer) -> None:
    wait_until(lambda: is_idle(server))
    before = state(server)["num_requests_received"]
    lengths = {"ab1": LONG, "ab10": LONG, "other": {**LONG, "max_new_tokens": 900}}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        running = {
            rid: pool.submit(server.generate, text="hello", sampling_params=params, rid=rid)
            for rid, params in lengths.items()
        }
        wait_until(lambda: state(server)["num_requests_received"] == before + 3)
        assert server.client.post("/abort_request", json={"rid": ""}).status_code == 200
        assert server.client.post("/abort_request", json={"rid": "unknown"}).status_code == 200
        assert server.client.post("/abort_request", json={"rid": "ab1"}).status_code == 200
        reasons = {rid: f.result().json()["meta_info"]["finish_reason"] for rid, f in running.items()}
    assert reasons["other"]["type"] == "length"
    assert reasons["ab1"]["type"] == reasons["ab10"]["type"] == "abort"
    assert reasons["ab1"]["status_code"] is None
    assert server.client.post("/abort_request", json={"rid": 5}).status_code == 400


def test_a_rid_in_flight_is_refused_a_second_time(server: RunningServer) -> None:
    with server.client.stream(
        "POST",
        "/generate",
        json={"text": "a", "rid": "dup", "stream": True, "sampling_params": LONG},
    ) as first:
        next(first.iter_lines())
        refused = server.generate(text="a", rid="dup", sampling_params=GREEDY)
        assert refused.status_code == 400
        assert "dup" in refused.json()["message"]
    wait_until(lambda: is_idle(server))


def test_the_cache_is_flushed_only_when_nothing_runs(server: RunningServer) -> None:
    wait_until(lambda: is_idle(server))
    first = server.generate(text="shared words here", sampling_params=GREEDY)
    again = server.generate(text="shared words here", sampling_params=GREEDY)
    assert again.json()["meta_info"]["cached_tokens"] > 0
    assert again.json()["output_ids"] == first.json()["output_ids"]
    # Nearly the whole pool: a reader who is kept waiting for long still asks before the end.
    longest = {**LONG, "max_new_tokens": 45_000}
    with server.client.stream(
        "POST", "/generate", json={"text": "a", "stream": True, "sampling_params": longest}
    ) as running:
        next(running.iter_lines())
        assert server.client.post("/flush_cache").status_code == 400
    wait_until(lambda: is_idle(server))
    assert server.client.get("/flush_cache?timeout=60").status_code == 200
    after = server.generate(text="shared words here", sampling_params=GREEDY)
    assert after.json()["meta_info"]["cached_tokens"] == 0
    assert server.client.post("/flush_cache?timeout=x").status_code == 400


def test_namespaces_do_not_share_a_prefix(server: RunningServer) -> None:
    text = "the very same words in each of them"

    def cached(**fields: Any) -> int:
        answer = server.generate(text=text, sampling_params=GREEDY, **fields).json()
        count: int = answer["meta_info"]["cached_tokens"]
        return count

    for fields in ({"extra_key": "a"}, {"cache_salt": "a"}, {"extra_key": "a", "cache_salt": "a"}):
        assert cached(**fields) == 0, fields
        assert cached(**fields) > 0, fields


def test_information_routes_tell_resolved_values(server: RunningServer) -> None:
    info = server.client.get("/server_info").json()
    assert info["max_total_num_tokens"] == POOL
    assert info["chunked_prefill_size"] is not None
    assert info["dtype"] == "float32"
    assert "--max-total-tokens" in info["launch_command"]
    assert info == {**server.client.get("/get_server_info").json(), "uptime": info["uptime"]} | {
        "internal_states": info["internal_states"]
    }
    model = server.client.get("/model_info").json()
    assert (model["is_generation"], model["architectures"]) == (True, ["LlamaForCausalLM"])
    assert model == server.client.get("/get_model_info").json()
    assert server.client.get("/tokenizer_info").json()["eos_token"] == "<|im_end|>"


def test_a_connection_survives_an_error(server: RunningServer) -> None:
    with httpx.Client(base_url=server.url, timeout=HANG_GUARD_S) as client:
        assert client.post("/generate", json={"text": ""}).status_code == 400
        assert client.post("/generate", json={"text": "a", "sampling_params": GREEDY}).status_code == 200


def test_a_header_chooses_the_replica_and_must_be_a_number(server: RunningServer) -> None:
    body = {"text": "a", "sampling_params": GREEDY, "routed_dp_rank": 7}
    for header, status in (("0", 200), ("1", 400), ("x", 400)):
        answer = server.client.post("/generate", json=body, headers={"X-Data-Parallel-Rank": header})
        assert answer.status_code == status


def test_clients_that_hang_up_while_others_wait_let_the_waiting_ones_run(server: RunningServer) -> None:
    """Ghosts of gone clients must not hold the pool: whoever is queued behind them is served at once."""
    body = {"text": "hello", "stream": True, "sampling_params": LONG}
    with httpx.Client(base_url=server.url, timeout=HANG_GUARD_S) as client:
        streams = [
            client.send(client.build_request("POST", "/generate", json=body), stream=True) for _ in range(4)
        ]
        next(streams[0].iter_lines())
        for stream in streams:
            stream.close()
    assert server.generate(text="third", sampling_params=GREEDY).status_code == 200
    wait_until(lambda: is_idle(server), lambda: str(state(server)))


def test_many_short_requests_with_random_aborts_lose_nothing_and_leave_nothing(server: RunningServer) -> None:
    """500 requests, 16 at once; a third hang up, are aborted by name, or ask for several samples."""
    wait_until(lambda: is_idle(server))
    choices = random.Random(5)
    plan = [(number, choices.random(), choices.randint(1, 24)) for number in range(500)]

    def one(number: int, luck: float, length: int) -> str:
        params = {
            "temperature": 1.0,
            "max_new_tokens": length,
            "ignore_eos": True,
            "n": 2 if luck > 0.9 else 1,
        }
        body = {"text": f"request {number} of many", "rid": f"soak{number}", "sampling_params": params}
        if luck < 0.15:
            with server.client.stream("POST", "/generate", json={**body, "stream": True}) as response:
                next(response.iter_lines())
            return "left"
        if luck < 0.3:
            aborted = pool.submit(server.client.post, "/abort_request", json={"rid": f"soak{number}"})
            answer = server.generate(**body)
            aborted.result()
        else:
            answer = server.generate(**body)
        assert answer.status_code == 200, answer.text
        answers = answer.json() if isinstance(answer.json(), list) else [answer.json()]
        for item in answers:
            reason = item["meta_info"]["finish_reason"]["type"]
            assert len(item["output_ids"]) == item["meta_info"]["completion_tokens"]
            assert reason == "abort" or len(item["output_ids"]) == length
        return "answered"

    with (
        concurrent.futures.ThreadPoolExecutor(32) as pool,
        concurrent.futures.ThreadPoolExecutor(16) as clients,
    ):
        outcomes = list(clients.map(lambda item: one(*item), plan))
    assert len(outcomes) == 500
    assert outcomes.count("answered") > 400
    wait_until(lambda: is_idle(server), lambda: str(state(server)))
    assert server.client.post("/flush_cache").status_code == 200
    assert state(server)["num_cached_tokens"] == 0
