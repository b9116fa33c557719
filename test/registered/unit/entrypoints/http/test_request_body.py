"""Reading a body: content type, JSON, and numbers that do not fit."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit-cpu")

import asyncio
import json

import pytest
from starlette.requests import Request

from sglang.srt.entrypoints.http.request_body import decode_json, read_json
from sglang.srt.messages.errors import RequestRejected
from sglang.test.fakes.fake_manager import FakeManager
from sglang.test.server.openai_calls import CHAT, COMPLETIONS, request

BODY = json.dumps({"prompt": "hi"}).encode()


def send(content, content_type):
    headers = {} if content_type is None else {"content-type": content_type}
    return request(FakeManager(), "POST", COMPLETIONS, content=content, headers=headers)


@pytest.mark.parametrize(
    "content_type",
    ["application/json", "application/json; charset=utf-8", 'Application/JSON;charset="UTF-8"'],
)
def test_json_with_or_without_charset_is_read(content_type):
    assert send(BODY, content_type).status_code == 200


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", ""])
def test_another_content_type_is_400(content_type):
    """A browser sends these across origins without asking first."""
    response = send(BODY, content_type)
    assert response.status_code == 400 and "application/json" in response.json()["error"]["message"]


def test_a_charset_that_is_not_utf8_is_400():
    assert send(BODY, "application/json; charset=latin-1").status_code == 400


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b'{"prompt": "hi", "temperature": NaN}',
        b'{"prompt": "hi", "temperature": Infinity}',
        b'{"prompt": "hi", "temperature": -Infinity}',
        b'{"prompt": "hi", "temperature": 1e400}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
)
def test_a_body_that_is_no_json_object_is_400(content):
    response = send(content, "application/json")
    assert response.status_code == 400, response.text


def test_an_integer_over_64_bits_is_refused_wherever_it_stands():
    for body in ({"seed": 2**63}, {"a": [{"b": -(2**63) - 1}]}, {"x": 10**30}):
        with pytest.raises(RequestRejected) as caught:
            decode_json(json.dumps(body).encode())
        assert caught.value.param == next(iter(body))


def test_integers_of_64_bits_and_long_digits_in_text_pass():
    body = {"seed": 2**63 - 1, "low": -(2**63), "text": "9" * 50}
    assert decode_json(json.dumps(body).encode()) == body


def test_the_route_also_reads_a_body_over_one_megabyte():
    content = json.dumps({"prompt": "x" * 1_500_000}).encode()
    assert send(content, "application/json").status_code == 200


def test_a_get_on_a_post_route_is_not_an_answer():
    assert request(FakeManager(), "GET", CHAT).status_code == 405


def test_a_client_that_hangs_up_in_its_body_is_a_refusal_and_no_failure():
    async def receive():
        return {"type": "http.disconnect"}

    headers = [(b"content-type", b"application/json")]
    asked = Request({"type": "http", "method": "POST", "headers": headers}, receive)
    with pytest.raises(RequestRejected, match="closed the connection") as caught:
        asyncio.run(read_json(asked))
    assert caught.value.status_code == 499
