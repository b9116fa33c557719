"""Replicas behind one server: requests are spread or stated, replicas are independent, and all are shown."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=65, suite="server-cpu")

import concurrent.futures
import pathlib
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

import sglang as sgl
from sglang.test.fakes.fake_rank import EXIT_PROMPT, FAKE_RANK, HANG_PROMPT
from sglang.test.server.server_fixture import RunningServer, process_is_gone, running_server
from sglang.test.tiny_models import write_tiny_model
from sglang.test.waiting import HANG_GUARD_S, wait_until

GREEDY = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}
#: Not over before a test has done what it wants to do meanwhile.
ENDLESS = {**GREEDY, "max_new_tokens": 30_000}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HEADER = "X-Data-Parallel-Rank"
MESSAGES = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
#: Two attention replicas share it, and cannot.
MAX_RUNNING = 255
REPLICAS = ["--dp-size", "2"]
ATTENTION_REPLICAS = ["--tp-size", "2", "--attn-dp-size", "2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=32_768)


@pytest.fixture(scope="module", params=[REPLICAS, ATTENTION_REPLICAS], ids=["dp-size", "attn-dp-size"])
def server(model: pathlib.Path, request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    """Real ranks, real model; two layouts, one after the other."""
    flags = [*request.param, "--dtype", "float32", "--max-total-tokens", "40000"]
    flags += ["--max-running-requests", str(MAX_RUNNING)]
    with running_server(model, *flags) as running:
        running.flags = request.param  # type: ignore[attr-defined]
        yield running


def received(server: RunningServer) -> list[int]:
    """Requests by replica, as the schedulers count them."""
    states = server.client.get("/server_info").json()["internal_states"]
    assert [state["dp_rank"] for state in states] == list(range(len(states)))
    return [state["num_requests_received"] for state in states]


def grown(server: RunningServer, work: Callable[[], Any]) -> list[int]:
    before = received(server)
    work()
    return [now - then for now, then in zip(received(server), before, strict=True)]


def together(count: int, work: Callable[[int], Any]) -> list[Any]:
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


# who runs where


def test_requests_without_a_rank_are_spread_over_the_replicas(server: RunningServer) -> None:
    def one(number: int) -> int:
        answer = server.generate(input_ids=[number + 1, 5, 6], sampling_params=GREEDY)
        rank: int = answer.json()["meta_info"]["dp_rank"]
        return rank

    ranks: Counter[int] = Counter()
    assert grown(server, lambda: ranks.update(together(16, one))) == [8, 8]
    assert ranks == {0: 8, 1: 8}, "what an answer says of itself and what the scheduler counted"


ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": ("/generate", {"text": "hi", "sampling_params": GREEDY}),
    "chat": (CHAT, MESSAGES),
    "completions": (COMPLETIONS, {"prompt": "hi", "max_tokens": 4}),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("spelling", ["routed_dp_rank", "data_parallel_rank", "header", "header wins"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_stated_rank_runs_there_on_every_route(
    server: RunningServer, route: str, spelling: str, stream: bool
) -> None:
    path, body = ROUTES[route]
    body, headers = {**body, "stream": stream}, {}
    if spelling.startswith("header"):
        headers[HEADER] = "1"
        if spelling == "header wins":
            body["routed_dp_rank"] = 0
    else:
        body[spelling] = 1

    def four(number: int) -> None:
        answer = server.client.post(path, json=body, headers=headers)
        assert answer.status_code == 200, answer.text

    assert grown(server, lambda: together(4, four)) == [0, 4]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("rank", [7, 2, -1])
def test_a_rank_that_is_not_there_is_400_with_the_range_on_every_route(
    server: RunningServer, route: str, rank: int
) -> None:
    path, body = ROUTES[route]

    def refused(answer: httpx.Response) -> None:
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == "routed_dp_rank"
        assert "0 <= routed_dp_rank < 2" in error["message"] and f"got {rank}" in error["message"]

    def both() -> None:
        refused(server.client.post(path, json={**body, "routed_dp_rank": rank}))
        refused(server.client.post(path, json=body, headers={HEADER: str(rank)}))

    assert grown(server, both) == [0, 0]


def test_each_prompt_of_a_batch_may_state_its_own_rank(server: RunningServer) -> None:
    answers = server.generate(text=["a", "b", "c"], routed_dp_rank=[1, 0, 1], sampling_params=GREEDY).json()
    assert [answer["meta_info"]["dp_rank"] for answer in answers] == [1, 0, 1]


def test_the_samples_of_a_prompt_share_a_replica_and_the_answer_is_the_same_on_both(
    server: RunningServer,
) -> None:
    def samples() -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = server.generate(
            text="one two three", sampling_params={**GREEDY, "n": 3}
        ).json()
        assert len({answer["meta_info"]["dp_rank"] for answer in answers}) == 1
        return answers

    first, second = samples(), samples()
    assert first[0]["meta_info"]["dp_rank"] != second[0]["meta_info"]["dp_rank"]
    assert len({tuple(answer["output_ids"]) for answer in first + second}) == 1


# replicas do not wait for each other


def test_requests_of_unequal_length_all_finish_again_and_again(server: RunningServer) -> None:
    lengths = [3, 60, 7, 45, 12, 30, 20]

    def one(number: int) -> tuple[int, int]:
        answer = server.generate(
            input_ids=[number + 1, 9], sampling_params={**GREEDY, "max_new_tokens": lengths[number]}
        ).json()
        return answer["meta_info"]["dp_rank"], len(answer["output_ids"])

    for _ in range(5):
        answers = together(len(lengths), one)
        assert [length for _, length in answers] == lengths
        assert {rank for rank, _ in answers} == {0, 1}
    states = server.client.get("/server_info").json()["internal_states"]
    assert [state["num_running_reqs"] + state["num_queue_reqs"] for state in states] == [0, 0]


# one works, the other idles


def test_replicas_that_work_by_turns_join_each_others_steps(server: RunningServer) -> None:
    """One request at a time: to one and the other, then all to one and all to the other."""
    attention = server.flags == ATTENTION_REPLICAS  # type: ignore[attr-defined]
    turns = [0, 1] * 50 + [0] * 50 + [1] * 50
    answers: list[set[tuple[int, ...]]] = [set(), set()]

    def idled() -> list[int]:
        states = server.client.get("/server_info").json()["internal_states"]
        return [state["forward_ct_idle"] for state in states]

    def all_turns() -> None:
        for rank in turns:
            answer = server.generate(input_ids=[7, 8, 9], routed_dp_rank=rank, sampling_params=GREEDY)
            assert answer.status_code == 200, answer.text
            answers[rank].add(tuple(answer.json()["output_ids"]))

    before = idled()
    assert grown(server, all_turns) == [100, 100]
    assert len(answers[0]) == 1 and answers[0] == answers[1]
    # A request is a prompt and three more tokens of one replica, and four forwards of nothing on the other.
    joined = [now - then for now, then in zip(idled(), before, strict=True)]
    assert joined == ([400, 400] if attention else [0, 0])
    assert server.client.get("/health").status_code == 200
    assert "Traceback" not in server.log()


# what is shown


def test_server_info_has_an_entry_for_each_replica(server: RunningServer) -> None:
    info = server.client.get("/server_info").json()
    assert info["dp_size"] == 2
    assert info["enable_dp_attention"] == (server.flags == ATTENTION_REPLICAS)  # type: ignore[attr-defined]
    states = info["internal_states"]
    assert len(states) == 2
    worlds = 1 if info["enable_dp_attention"] else 2
    assert info["max_running_requests"] * worlds == sum(state["max_running_requests"] for state in states)
    for state in states:
        assert state["num_requests_finished"] == state["num_requests_received"] > 0
    assert info["max_total_num_tokens"] == min(state["max_total_num_tokens"] for state in states)


def test_the_placement_shows_every_rank_with_the_layer_of_each_name(server: RunningServer) -> None:
    placement = server.client.get("/placement").json()
    ranks = placement["ranks"]
    attention = server.flags == ATTENTION_REPLICAS  # type: ignore[attr-defined]
    # What the ranks made of the flags: attention replicas share the number of requests, and one is left over.
    decided = [(o["world_rank"], o["source"], o["name"], o["after"]) for o in placement["overrides"]]
    shared = [(rank, "scheduler", "max_running_requests", MAX_RUNNING - 1) for rank in (0, 1)]
    assert decided == (shared if attention else [])
    assert [(r["dp_rank"], r["world_rank"]) for r in ranks] == [(0, 0), (1, 1 if attention else 0)]
    for rank in ranks:
        names = rank["names"]
        for name, (_, layer) in names.items():
            wanted = "live" if name.endswith("_group") else "stamp" if name.endswith("_rank") else None
            assert wanted is None or layer == wanted or name in ("attn_dcp_rank", "node_rank"), (name, layer)
        assert names["dp_size"] == [2, "published"]
        assert names["tp_rank"] == [rank["world_rank"], "stamp"]
        if attention:
            assert names["attn_dp_rank"] == [rank["dp_rank"], "stamp"]
            assert names["tp_group"] == [[0, 1], "live"]
            assert names["attn_tp_group"] == [[rank["world_rank"]], "live"]
            assert names["attn_tp_size"] == [1, "published"]
        else:
            assert names["dp_rank"] == [rank["dp_rank"], "stamp"]
            assert names["tp_group"] == names["world_group"] == [[0], "live"]
        assert {layer for _, layer in names.values()} <= {"scope", "stamp", "published", "live"}


def test_the_cache_of_every_replica_is_flushed_and_a_running_one_is_named(server: RunningServer) -> None:
    assert server.client.post("/flush_cache?timeout=60").status_code == 200
    body = {
        "text": "hello",
        "rid": "long-one",
        "routed_dp_rank": 1,
        "stream": True,
        "sampling_params": ENDLESS,
    }
    with server.client.stream("POST", "/generate", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        refused = server.client.post("/flush_cache")
        assert refused.status_code == 400
        assert refused.json()["message"].startswith("replica 1: "), refused.text
        assert server.client.post("/abort_request", json={"rid": "long"}).status_code == 200
        assert any('"abort"' in line for line in lines)
    assert server.client.post("/flush_cache?timeout=60").status_code == 200
    assert server.client.get("/health_generate").status_code == 200


# over fake ranks


def test_the_fewest_open_requests_decide_when_asked_to(model: pathlib.Path) -> None:
    with running_server(model, *REPLICAS, "--load-balance-method", "total_requests", fake=True) as server:
        held = {
            "input_ids": [20],
            "stream": True,
            "routed_dp_rank": 0,
            "sampling_params": ENDLESS,
        }
        with server.client.stream("POST", "/generate", json=held) as answer:
            next(answer.iter_lines())
            ranks = [
                server.generate(input_ids=[5], sampling_params=GREEDY).json()["meta_info"]["dp_rank"]
                for _ in range(4)
            ]
        assert ranks == [1] * 4

        # The stream was closed early; once its abort is confirmed both are equal again.
        def spread() -> bool:
            answers = [server.generate(input_ids=[5], sampling_params=GREEDY).json() for _ in range(2)]
            return {answer["meta_info"]["dp_rank"] for answer in answers} == {0, 1}

        wait_until(spread)


def test_a_replica_that_hangs_holds_up_only_its_own_requests(model: pathlib.Path) -> None:
    flags = [*REPLICAS, "--watchdog-timeout", "600"]
    with running_server(model, *flags, fake=True, SGLANG_HEALTH_CHECK_TIMEOUT="1") as server:
        outcomes: list[int | httpx.HTTPError] = []

        def hang() -> None:
            try:
                outcomes.append(server.generate(input_ids=HANG_PROMPT, routed_dp_rank=1).status_code)
            except httpx.HTTPError as error:
                outcomes.append(error)

        hanging = threading.Thread(target=hang)
        hanging.start()
        # Whoever asks whether the server generates hears of the replica that does not.
        wait_until(lambda: "no token within" in server.client.get("/health_generate").text)
        for _ in range(3):
            answer = server.generate(input_ids=[20], routed_dp_rank=0, sampling_params=GREEDY).json()
            assert answer["output_ids"] == [21, 22, 23, 24]
        assert not outcomes
        server.kill_all()
        hanging.join(HANG_GUARD_S)
        # The ranks die before the server does, which may find the time to say so.
        (outcome,) = outcomes
        assert isinstance(outcome, httpx.HTTPError) or outcome in (500, 503)


def test_the_death_of_one_replica_ends_the_server_with_the_cause(model: pathlib.Path) -> None:
    with running_server(model, *REPLICAS, fake=True) as server:
        ranks = server.rank_pids()

        def of_the_other_replica() -> httpx.Response:
            return server.generate(input_ids=[20], routed_dp_rank=0, sampling_params=ENDLESS)

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            neighbour = pool.submit(of_the_other_replica)
            wait_until(lambda: received(server)[0] > 1)
            answer = server.generate(input_ids=EXIT_PROMPT, routed_dp_rank=1, sampling_params=GREEDY)
            for failed in (answer, neighbour.result()):
                assert failed.status_code in (500, 503) and "replica 1" in failed.text, failed.text
        assert server.wait_exit() != 0
        wait_until(lambda: all(process_is_gone(pid) for pid in ranks))
        assert server.leftovers() == []


def test_attention_replica_0_hears_what_the_others_were_sent(model: pathlib.Path) -> None:
    with running_server(model, "--tp-size", "4", "--attn-dp-size", "2", fake=True) as server:
        server.generate(input_ids=[5], routed_dp_rank=1, sampling_params=GREEDY)
        first, second = server.client.get("/server_info").json()["internal_states"]
        # One self-test on each, its flush, and the request.
        assert (first["dispatched"], second["dispatched"]) == ([2, 3], None)
        assert len(server.rank_pids()) == 4
        server.signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert server.leftovers() == []


@pytest.mark.parametrize("layout", [{"dp_size": 2}, {"tp_size": 2, "attn_dp_size": 2}], ids=str)
def test_an_engine_routes_like_the_server(model: pathlib.Path, layout: dict[str, int]) -> None:
    with sgl.Engine(model_path=str(model), _rank_module=FAKE_RANK, **layout) as engine:
        ranks = [
            engine.generate(input_ids=[5], sampling_params=GREEDY)["meta_info"]["dp_rank"]  # type: ignore[call-overload]
            for _ in range(4)
        ]
        assert sorted(ranks) == [0, 0, 1, 1]
        for name in ("routed_dp_rank", "data_parallel_rank"):
            answer = engine.generate(input_ids=[5], sampling_params=GREEDY, **{name: 1})
            assert answer["meta_info"]["dp_rank"] == 1  # type: ignore[call-overload]
        with pytest.raises(ValueError, match=r"0 <= routed_dp_rank < 2 .*, got 7"):
            engine.generate(input_ids=[5], sampling_params=GREEDY, routed_dp_rank=7)
        states = engine.get_server_info()["internal_states"]
        assert [state["num_requests_received"] for state in states] == [2, 4]
        seats = [(rank["dp_rank"], rank["names"]["dp_size"]) for rank in engine.placement()["ranks"]]
        assert seats == [(0, [2, "published"]), (1, [2, "published"])]
        assert engine.flush_cache()


def test_a_method_that_is_not_served_is_refused_at_the_door(model: pathlib.Path) -> None:
    with running_server(
        model, *REPLICAS, "--load-balance-method", "follow_bootstrap_room", fake=True, wait=False
    ) as server:
        assert server.wait_exit() != 0
        assert (
            "--load-balance-method follow_bootstrap_room is not served yet; use round_robin" in server.log()
        )
