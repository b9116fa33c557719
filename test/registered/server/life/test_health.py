"""What `/health` says before the self-test and while a loop is stuck, and which keys open which routes."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=25, suite="server-cpu")

import os
import pathlib
import signal

import httpx
import pytest

from sglang.srt.processes.hold_watch import process_state
from sglang.test.fakes.fake_rank import HANG_PROMPT
from sglang.test.fakes.fake_stopped_rank import FAKE_STOPPED_RANK
from sglang.test.server.server_fixture import READY_LINE, running_server
from sglang.test.waiting import wait_until

API, ADMIN = "normal-key-1234567", "admin-key-7654321"


def test_health_is_503_until_the_self_test_has_passed(model: pathlib.Path) -> None:
    with running_server(model, fake=True, wait=False) as server:
        seen: list[tuple[int, bool]] = []

        def asked() -> bool:
            # The log is read before the question: a 200 must not come before its line.
            ready_before = READY_LINE in server.log()
            try:
                status = server.client.get("/health").status_code
            except httpx.ConnectError:
                return False
            seen.append((status, ready_before))
            return status == 200

        wait_until(asked, server.log)
        wait_until(lambda: READY_LINE in server.log())
        assert all(status == 503 for status, _ in seen[:-1])
        assert server.client.get("/ready").status_code == 200
        assert server.client.get("/health_generate").status_code == 200


def test_a_starting_server_refuses_work_with_retry_after(model: pathlib.Path) -> None:
    """The rank is stopped before it is ready; the port answers meanwhile."""
    with running_server(model, rank_module=FAKE_STOPPED_RANK, wait=False) as server:
        wait_until(lambda: server.rank_pids())
        (rank,) = server.rank_pids()

        def listening() -> bool:
            try:
                return server.client.get("/ping").status_code == 200
            except httpx.ConnectError:
                return False

        wait_until(listening, server.log)
        refused = server.generate(text="a")
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert "starting" in refused.json()["message"]
        wait_until(lambda: process_state(rank) == "T")
        os.kill(rank, signal.SIGCONT)
        server.wait_ready()
        assert server.generate(text="a").status_code == 200


def test_a_rank_that_stands_still_is_unhealthy_and_recovers(model: pathlib.Path) -> None:
    with running_server(model, fake=True, SGLANG_HEALTH_CHECK_TIMEOUT="3") as server:
        rank = server.rank_pids()[0]
        os.kill(rank, signal.SIGSTOP)
        wait_until(lambda: server.client.get("/health").status_code == 503)
        assert "has not turned" in server.client.get("/health").json()["message"]
        os.kill(rank, signal.SIGCONT)
        wait_until(lambda: server.client.get("/health").status_code == 200)


def test_a_long_forward_is_healthy_as_long_as_the_watchdog_allows(model: pathlib.Path) -> None:
    with running_server(model, fake=True, SGLANG_HEALTH_CHECK_TIMEOUT="1") as server:
        with pytest.raises(httpx.ReadTimeout):
            server.client.post("/generate", json={"input_ids": HANG_PROMPT}, timeout=2.5)
        assert server.client.get("/health").status_code == 200
        assert server.client.get("/health_generate").status_code == 503


def test_no_secret_shows_in_any_answer_or_log_line(model: pathlib.Path) -> None:
    flags = ["--api-key", API, "--admin-api-key", ADMIN, "--log-requests", "--log-requests-level", "3"]
    with running_server(model, *flags, fake=True) as server:
        answers = []
        for key in (None, API, ADMIN, "wrong"):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            for path in (
                "/",
                "/health",
                "/server_info",
                "/get_server_info",
                "/model_info",
                "/tokenizer_info",
            ):
                answers.append(server.client.get(path, headers=headers))
            for path in ("/v1/models", "/openapi.json", "/nothing", "/health_generate"):
                answers.append(server.client.get(path, headers=headers))
            body = {"text": "hi", "sampling_params": {"max_new_tokens": 2}}
            answers.append(server.client.post("/generate", json=body, headers=headers))
            answers.append(server.client.post("/generate", json={"text": 5}, headers=headers))
        assert {a.status_code for a in answers} >= {200, 400, 401, 404}
        everything = "\n".join(a.text + str(a.headers) for a in answers) + server.log()
        assert "Receive: obj=" in everything
        assert "launch_command" in everything
        assert API not in everything
        assert ADMIN not in everything


def test_keys_open_what_they_are_for(model: pathlib.Path) -> None:
    with running_server(model, "--api-key", API, "--admin-api-key", ADMIN, fake=True) as server:

        def status(method: str, path: str, key: str | None) -> int:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            return server.client.request(method, path, headers=headers).status_code

        assert status("GET", "/health", None) == 200
        assert [status("GET", "/v1/models", key) for key in (None, "wrong", API, ADMIN)] == [
            401,
            401,
            200,
            200,
        ]
        assert [status("POST", "/flush_cache", key) for key in (None, "wrong", API, ADMIN)] == [
            401,
            401,
            403,
            200,
        ]
        assert [status("GET", "/server_info", key) for key in (None, API, ADMIN)] == [401, 200, 200]
        preflight = server.client.options(
            "/v1/chat/completions",
            headers={"Origin": "http://site", "Access-Control-Request-Method": "POST"},
        )
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in preflight.headers


def test_a_network_bind_without_a_key_closes_the_control_routes(model: pathlib.Path) -> None:
    with running_server(model, "--host", "0.0.0.0", fake=True) as server:
        refused = server.client.post("/flush_cache")
        assert refused.status_code == 403
        assert "--admin-api-key" in refused.json()["message"]
        assert server.client.get("/v1/models").status_code == 200
