"""Who may call which route: every route of the application, every kind of key, foreign origins."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit-cpu")

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI

from sglang.srt.entrypoints.http.auth import AccessPolicy, Level, is_loopback, level_of
from sglang.srt.entrypoints.http_server import add_openai_routes, add_routes, build_app
from sglang.test.test_utils import published_topology

API, ADMIN = "the-api-key", "the-admin-key"


class StatusOfNothing:
    """A server that is up and whose engine answers nothing; only the layers before the routes are asked."""

    def __init__(self) -> None:
        config = SimpleNamespace(context_len=10, model_type="llama", architecture="X")
        self.manager: Any = SimpleNamespace(
            model_config=config, tokenizer=None, served_model_name="m", abort_request=lambda *_: None
        )
        self.core: Any = SimpleNamespace()
        self.closed: str | None = None

    def why_closed(self) -> str | None:
        return self.closed

    def why_unhealthy(self) -> str | None:
        return None


def make_app(policy: AccessPolicy) -> FastAPI:
    with published_topology(served_model_name="m"):
        app = build_app(StatusOfNothing(), policy)  # type: ignore[arg-type]
        add_openai_routes(app, StatusOfNothing())  # type: ignore[arg-type]
    return app


def policy(**fields: Any) -> AccessPolicy:
    return AccessPolicy(**{"host": "127.0.0.1", "port": 30000, **fields})


def ask(app: FastAPI, method: str, path: str, *, root_path: str = "", **headers: str) -> httpx.Response:
    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False, root_path=root_path)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:30000") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(main())


def bearer(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def every_route() -> list[tuple[str, str]]:
    """(method, path) of all that the application serves; what the framework adds by itself is named here."""
    app = make_app(policy())
    ours = {(method, path.replace("{model_id:path}", "x")) for method, path in app.state.route_table}
    described = {
        (method.upper(), path) for path, methods in app.openapi()["paths"].items() for method in methods
    }
    assert {path for _, path in described} <= {path.replace("/x", "/{model_id}") for _, path in ours}
    return sorted(ours | {("GET", "/openapi.json"), ("GET", "/docs"), ("GET", "/redoc")})


ROUTES = every_route()


def test_the_walk_sees_the_whole_table() -> None:
    paths = {path for _, path in ROUTES}
    assert {
        "/health",
        "/generate",
        "/v1/chat/completions",
        "/v1/models/x",
        "/flush_cache",
        "/server_info",
    } <= paths
    assert len(ROUTES) > 20


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_without_the_key_only_health_answers(method: str, path: str) -> None:
    app = make_app(policy(api_key=API))
    for key in (None, "wrong", API + "x", API[:-1]):
        status = ask(app, method, path, **bearer(key)).status_code
        assert status == 200 if path == "/health" else status == 401, (method, path, key)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_the_key_opens_what_the_admin_key_does_not_guard(method: str, path: str) -> None:
    app = make_app(policy(api_key=API, admin_api_key=ADMIN))
    status = ask(app, method, path, **bearer(API)).status_code
    assert (status == 403) == (level_of(path) is Level.CONTROL)
    assert status != 401
    assert ask(app, method, path, **bearer(ADMIN)).status_code not in (401, 403)


def test_with_only_an_admin_key_generation_is_open_and_the_rest_is_not() -> None:
    app = make_app(policy(admin_api_key=ADMIN))
    assert ask(app, "GET", "/v1/models").status_code == 200
    assert ask(app, "GET", "/server_info").status_code == 401
    assert ask(app, "POST", "/abort_request").status_code == 401
    assert ask(app, "POST", "/abort_request", **bearer(ADMIN)).status_code == 200


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Basic " + API, API, "bearer" + API])
def test_only_a_bearer_token_counts(header: str) -> None:
    answer = ask(make_app(policy(api_key=API)), "GET", "/v1/models", Authorization=header)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert API not in answer.text


def test_the_scheme_is_not_case_sensitive_and_a_key_may_be_beyond_ascii() -> None:
    app = make_app(policy(api_key="clé"))
    assert ask(app, "GET", "/v1/models", Authorization="bearer wrong").status_code == 401
    assert policy(api_key="clé").refusal(Level.NORMAL, headers("bearer clé".encode("latin-1"))) is not None
    assert policy(api_key="clé").refusal(Level.NORMAL, headers("bearer clé".encode())) is None


def headers(authorization: bytes) -> Any:
    from starlette.datastructures import Headers

    return Headers(raw=[(b"authorization", authorization)])


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://127.0.0.1:30000", True),
        ("http://localhost:30000", True),
        ("http://127.0.0.1:3000", False),
        ("http://evil.example:30000", False),
        ("http://localhost.evil.example:30000", False),
        ("null", False),
        ("file://", False),
        ("http://127.0.0.1:notaport", False),
    ],
)
def test_control_routes_refuse_a_foreign_origin_and_others_do_not(origin: str, allowed: bool) -> None:
    app = make_app(policy())
    assert (ask(app, "POST", "/abort_request", Origin=origin).status_code == 200) is allowed
    assert ask(app, "GET", "/v1/models", Origin=origin).status_code == 200


def test_a_foreign_page_cannot_use_a_get_without_origin_either() -> None:
    app = make_app(policy())
    assert ask(app, "GET", "/flush_cache", **{"Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert ask(app, "POST", "/abort_request", **{"Sec-Fetch-Site": "same-origin"}).status_code == 200


def test_a_rebound_name_does_not_become_an_own_origin() -> None:
    app = make_app(policy())
    answer = ask(app, "POST", "/abort_request", Origin="http://evil.example:30000", Host="evil.example:30000")
    assert answer.status_code == 403


@pytest.mark.parametrize(
    ("host", "status"), [("0.0.0.0", 403), ("192.168.1.4", 403), ("::", 403), ("::1", 200)]
)
def test_control_routes_are_closed_on_a_network_bind_without_a_key(host: str, status: int) -> None:
    assert ask(make_app(policy(host=host)), "POST", "/abort_request").status_code == status
    assert (
        ask(make_app(policy(host=host, api_key=API)), "POST", "/abort_request", **bearer(API)).status_code
        == 200
    )


@pytest.mark.parametrize(
    ("host", "answer"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("localhost", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("box", False),
    ],
)
def test_loopback_is_told_from_the_network(host: str, answer: bool) -> None:
    assert is_loopback(host) is answer


def test_a_route_without_a_level_is_refused_when_it_is_added() -> None:
    """The planted offender: a route that somebody forgets to classify must not be served to everybody."""
    router = APIRouter()
    router.add_api_route("/forgotten", lambda: None)
    with pytest.raises(RuntimeError, match="/forgotten has no level"):
        add_routes(FastAPI(), router)


def test_preflights_need_no_key_and_answers_carry_no_credentials() -> None:
    app = make_app(policy(api_key=API))
    asked = {
        "Origin": "http://site",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "x-y",
    }
    answer = ask(app, "OPTIONS", "/v1/chat/completions", **asked)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in answer.headers
    refused = ask(app, "GET", "/v1/models", Origin="http://site")
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "*")


def test_the_prefix_of_a_proxy_does_not_hide_a_control_route() -> None:
    app = make_app(policy(api_key=API, admin_api_key=ADMIN))
    for path in ("/abort_request", "/llm/abort_request"):
        assert ask(app, "POST", path, root_path="/llm", **bearer(API)).status_code == 403, path
        assert ask(app, "POST", path, root_path="/llm", **bearer(ADMIN)).status_code == 200, path
    assert ask(app, "GET", "/llm/health", root_path="/llm").status_code == 200


def test_a_server_that_is_starting_answers_503_behind_the_key() -> None:
    status = StatusOfNothing()
    status.closed = "the server is starting"
    with published_topology(served_model_name="m"):
        app = build_app(status, policy(api_key=API))  # type: ignore[arg-type]
    assert ask(app, "POST", "/generate").status_code == 401
    refused = ask(app, "POST", "/generate", **bearer(API))
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert ask(app, "GET", "/ping", **bearer(API)).status_code == 200


def test_a_body_that_grows_over_the_limit_without_saying_so_is_413() -> None:
    """A chunked body has no announced length; both families of routes must answer it the same way."""

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(70):
            yield b" " * (1 << 20)

    app = make_app(policy())

    async def main(path: str) -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:30000") as client:
            return await client.post(path, content=chunks(), headers={"Content-Type": "application/json"})

    for path in ("/generate", "/v1/chat/completions", "/abort_request"):
        answer = asyncio.run(main(path))
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, 413), path
