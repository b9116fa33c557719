"""How an error reads on the wire."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="unit-cpu")

import json

import pytest

from sglang.srt.entrypoints.http.errors import error_body, error_response, rejected_response, stream_error
from sglang.srt.messages.errors import RequestRejected


def test_a_body_has_the_flat_and_the_nested_form() -> None:
    body = error_body("too long", "BadRequestError", 400, "text")
    flat = {"message": "too long", "type": "BadRequestError", "param": "text", "code": 400}
    assert body == {"object": "error", **flat, "error": flat}


@pytest.mark.parametrize(
    ("status", "name"), [(400, "BadRequestError"), (404, "NotFoundError"), (500, "InternalServerError")]
)
def test_the_type_follows_the_status(status: int, name: str) -> None:
    assert json.loads(error_response("x", status).body)["type"] == name


def test_only_a_503_says_when_to_come_back() -> None:
    assert error_response("full", 503).headers["retry-after"] == "1"
    assert "retry-after" not in error_response("broken", 500).headers


def test_a_refusal_keeps_its_status_and_its_parameter() -> None:
    answer = rejected_response(RequestRejected("full", status_code=503, param="n"))
    body = json.loads(answer.body)
    assert (answer.status_code, body["type"], body["param"]) == (503, "ServiceUnavailableError", "n")
    assert rejected_response(ValueError("wrong")).status_code == 400


def test_a_stream_ends_with_an_error_event_that_clients_raise_at() -> None:
    late = stream_error(RequestRejected("the queue is full", status_code=503))["error"]
    assert (late["code"], late["type"], late["retryable"]) == (503, "ServiceUnavailableError", False)
    assert stream_error(RequestRejected("bad"))["error"]["type"] == "invalid_request_error"
