"""The small parts of the doors: fields of a request, incremental events, secrets, the command line."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import asyncio
import logging
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.datastructures import Headers

import sglang
from sglang import cli
from sglang.srt.entrypoints.http.dp_rank_header import dp_rank_of_header
from sglang.srt.entrypoints.http.information import launch_command
from sglang.srt.entrypoints.http.listen_socket import listen, url_of
from sglang.srt.entrypoints.http.sse import DONE, EventSource, EventStream, event
from sglang.srt.entrypoints.http.unknown_fields import MAX_NAMES, UnknownFields
from sglang.srt.entrypoints.native.generate_fields import parse_generate
from sglang.srt.messages.errors import RequestRejected
from sglang.srt.messages.generate_input import GenerateReqInput
from sglang.srt.messages.unserved_fields import REFUSED, Refused, unserved
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.test.waiting import HANG_GUARD_S


def test_nulls_mean_the_default_and_old_names_still_work() -> None:
    obj = parse_generate(
        {"text": "a", "stream": None, "lora_path": None, "image_data": [], "data_parallel_rank": 0}
    )
    assert (obj.text, obj.stream, obj.routed_dp_rank) == ("a", False, 0)


def test_both_names_of_the_replica_must_agree() -> None:
    assert parse_generate({"data_parallel_rank": 1, "routed_dp_rank": 1}).routed_dp_rank == 1
    with pytest.raises(RequestRejected, match="another name of routed_dp_rank, and both are given"):
        parse_generate({"data_parallel_rank": 1, "routed_dp_rank": 0})


def test_the_header_states_a_replica_as_an_integer() -> None:
    def stated(value: str) -> int | None:
        return dp_rank_of_header({"x-data-parallel-rank": value})

    assert dp_rank_of_header({}) is None
    assert (stated("1"), stated("007"), stated("-1")) == (1, 7, -1)
    for wrong in ("", "one", "1.0", " 1", "\u0661", "+1"):
        with pytest.raises(RequestRejected, match="the header X-Data-Parallel-Rank must be an integer"):
            stated(wrong)
    with pytest.raises(RequestRejected, match="the header X-Data-Parallel-Rank must fit 64 bits"):
        stated("9" * 30)


def test_a_header_that_is_repeated_is_refused_and_not_cut_to_its_first_value() -> None:
    name = b"x-data-parallel-rank"
    with pytest.raises(RequestRejected, match="must be an integer, got '0, 1'"):
        dp_rank_of_header(Headers(raw=[(name, b"0"), (b"accept", b"*/*"), (name, b"1")]))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "JSON object"),
        ({"text": "a", "image_data": "x"}, "^image_data: this model reads text only"),
        ({"text": "a", "session_params": {"id": 1}}, "^session_params: sessions are not supported"),
        ({"bad_words": ["a"]}, "^bad_words: words are not banned"),
        ({"text": "a", "tools": ["x"]}, "^tools: is a field of /v1/chat/completions, and refused there too"),
        ({"sampling_params": {"suffix": "x"}}, "^suffix: is a field of /v1/completions, and refused there"),
        ({"txet": "a"}, r"^txet: unknown key; did you mean text\?"),
        ({"zzz": 1}, "^zzz: unknown key; known keys are text, "),
        ({"temperature": 0}, "^temperature: unknown key; temperature belongs into sampling_params"),
        ({"max_tokens": 5}, "^max_tokens: unknown key; here it is max_new_tokens, in sampling_params"),
        ({"messages": []}, "^messages: unknown key; it is a field of /v1/chat/completions"),
        ({"request_id": "a"}, "^request_id: unknown key; here it is rid$"),
        ({"sampling_params": {"bad_words": ["a"]}}, "^bad_words: words are not banned"),
        ({"sampling_params": [{}, {"regex": "a+"}]}, "^regex: structured output is not supported yet"),
        (
            {"sampling_params": {"tempratur": 1}},
            "^sampling_params: tempratur: unknown key; did you mean temp",
        ),
        ({"sampling_params": {"seed": 1}}, "^sampling_params: seed: unknown key; here it is sampling_seed"),
        ({"sampling_params": {"n_predict": 1}}, "n_predict: unknown key; here it is max_new_tokens"),
        ({"sampling_params": {"include_stop_str_in_output": True}}, "here it is no_stop_trim"),
        ({"sampling_params": {5: 1}}, "^sampling_params: 5: unknown key"),
        ({"sampling_params": {"stream": True}}, "stream: unknown key; stream belongs beside it"),
    ],
)
def test_a_key_that_would_be_ignored_is_refused(body: Any, message: str) -> None:
    with pytest.raises(RequestRejected, match=message):
        parse_generate(body)


@pytest.mark.parametrize("name", [n for n, field in REFUSED.items() if "generate" in field.routes])
def test_a_field_of_another_server_is_400_by_name_or_asks_for_nothing(name: str) -> None:
    """At the top and among the sampling parameters, over HTTP and from `Engine.generate`."""
    field = REFUSED[name]
    for value in (None, *(() if field.strict else ("", [], False)), *field.harmless):
        obj = parse_generate({"text": "a", name: value, "sampling_params": {name: value, "n": 1}})
        assert obj == GenerateReqInput(text="a", sampling_params={"n": 1})
    for body in ({name: {"x": 1}}, {"sampling_params": {name: {"x": 1}}}):
        with pytest.raises(RequestRejected, match=f"^{name}: ") as caught:
            parse_generate(body)
        assert field.reason in str(caught.value) and caught.value.param == name


def test_a_field_of_the_openai_routes_that_asks_for_nothing_is_read_over() -> None:
    nothing = {"tools": [], "tool_choice": "auto", "suffix": "", "parallel_tool_calls": True}
    obj = parse_generate({"text": "a", **nothing, "sampling_params": {**nothing, "n": 1}})
    assert obj == GenerateReqInput(text="a", sampling_params={"n": 1})


def test_no_field_of_a_native_request_is_listed_as_not_served() -> None:
    """Listed, it would be shown as refused or without effect although it acts."""
    refused, idle = unserved("generate")
    native = {*GenerateReqInput.__struct_fields__, *SamplingParams.__struct_fields__}
    assert native & {*refused, *idle} == set()


def test_the_twin_of_that_check_finds_an_offender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REFUSED, "no_stop_trim", Refused("planted"))
    with pytest.raises(AssertionError):
        test_no_field_of_a_native_request_is_listed_as_not_served()


def test_sampling_parameters_that_are_no_object_are_left_to_their_check() -> None:
    assert parse_generate({"sampling_params": 5}).sampling_params == 5
    assert parse_generate({"sampling_params": [None, {"n": 1}]}).sampling_params == [None, {"n": 1}]


def logged_by(names: list[str], caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    log = UnknownFields("/v1/x", ["temperature", "top_p"])
    with caplog.at_level(logging.WARNING):
        for name in names:
            log.note(name)
    return [record.getMessage() for record in caplog.records]


def test_an_unknown_field_is_said_once_with_the_nearest_name(caplog: pytest.LogCaptureFixture) -> None:
    assert logged_by(["tempratur", "zzz", "tempratur", "zzz"], caplog) == [
        "/v1/x: the unknown field 'tempratur' is ignored; did its sender mean temperature?",
        "/v1/x: the unknown field 'zzz' is ignored",
    ]


def test_unknown_fields_do_not_fill_the_log_or_fake_its_lines(caplog: pytest.LogCaptureFixture) -> None:
    """A client chooses the names: a flood, a megabyte and a line break are all within its power."""
    lines = logged_by(["a\n[2026] fake \x1b[31m", "x" * 10**6, "x" * 10**6 + "y"], caplog)
    assert len(lines) == 2 and all(len(line) < 120 and line.isprintable() for line in lines)
    lines = logged_by([f"{number}" for number in range(10 * MAX_NAMES)], caplog)
    assert len(lines) == MAX_NAMES + 1 and "more unknown fields" in lines[-1]


def test_no_secret_is_part_of_the_launch_command_however_it_was_spelled() -> None:
    record = ServerArgs(model_path="m", api_key="abc-key", admin_api_key="abc-key-admin")
    argv = ["serve", "m", "--api-key", "abc-key", "--admin=abc-key-admin", "--port", "1"]
    assert launch_command(argv, record) == "serve m --api-key *** --admin=*** --port 1"


class _Source:
    """Events that end as told; remembers whether it was closed."""

    def __init__(self, *items: Any) -> None:
        self.items = list(items)
        self.closed = False

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if not self.items:
            raise StopAsyncIteration
        item = self.items.pop(0)
        if isinstance(item, Exception):
            raise item
        return item

    async def aclose(self) -> None:
        self.closed = True


def sent_by(source: _Source, fail_after: int | None = None) -> bytes:
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        if fail_after is not None and len(sent) >= fail_after:
            raise OSError("gone")
        sent.append(message.get("body", b""))

    async def main() -> None:
        stream = EventStream(source, on_error=lambda error: {"error": str(error)})  # type: ignore[arg-type]
        await stream({}, None, send)  # type: ignore[arg-type]

    try:
        asyncio.run(main())
    except OSError:
        assert fail_after is not None
    return b"".join(sent)


def test_a_stream_ends_with_done_and_closes_its_source() -> None:
    source = _Source({"a": 1}, {"b": 2})
    assert sent_by(source) == event({"a": 1}) + event({"b": 2}) + DONE
    assert source.closed


def test_an_error_in_a_stream_is_one_event_and_done() -> None:
    source = _Source({"a": 1}, RequestRejected("late"), {"never": 1})
    assert sent_by(source) == event({"a": 1}) + event({"error": "late"}) + DONE
    assert source.closed


def test_a_client_that_breaks_off_closes_the_source() -> None:
    source = _Source({"a": 1}, {"b": 2})
    sent_by(source, fail_after=2)
    assert source.closed


def test_what_fails_before_the_first_item_fails_before_the_answer_begins() -> None:
    async def begun(*items: Any) -> EventSource:
        source = EventSource(_Source(*items), finish=lambda: ["last"])  # type: ignore[arg-type]
        await source.begin()
        return source

    async def main() -> None:
        with pytest.raises(RequestRejected):
            await begun(RequestRejected("early"))
        assert [value async for value in await begun(1, 2)] == [1, 2, "last"]
        assert [value async for value in await begun()] == ["last"]

    asyncio.run(main())


def test_a_source_that_is_closed_before_it_is_read_closes_what_it_reads() -> None:
    """A client may hang up between the first output and the first read: the request must not go on."""
    items = _Source(1, 2)
    asyncio.run(EventSource(items).aclose())  # type: ignore[arg-type]
    assert items.closed


def test_a_port_is_taken_from_the_moment_it_is_listened_on() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1:{port}"):
            listen("127.0.0.1", port)


def test_a_host_that_is_none_is_refused_by_its_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cure was another port, whatever was wrong."""
    with pytest.raises(ValueError, match=r"^--host 'a{99}' is neither an address nor a name"):
        listen("a" * 99, 0)

    def unknown(*args: Any, **kwargs: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ValueError, match=r"^--host 'nowhere' is neither .* \(Name or service not known\)"):
        listen("nowhere", 0)


def test_an_address_of_another_machine_is_refused_with_the_cure() -> None:
    with pytest.raises(ValueError, match=r"^cannot listen on 192.0.2.1:0 .*; --host must be an address of"):
        listen("192.0.2.1", 0)


@pytest.mark.parametrize(
    "host, url",
    [
        ("127.0.0.1", "http://127.0.0.1:5"),
        ("localhost", "http://localhost:5"),
        ("0.0.0.0", "http://127.0.0.1:5"),
        ("", "http://127.0.0.1:5"),
        ("::1", "http://[::1]:5"),
        ("[::1]", "http://[::1]:5"),
        ("::", "http://[::1]:5"),
        ("0:0:0:0:0:0:0:0", "http://[::1]:5"),
        ("fe80::1%eth0", "http://[fe80::1%25eth0]:5"),
    ],
)
def test_a_url_names_a_place_that_a_client_can_reach(host: str, url: str) -> None:
    assert url_of(host, 5) == url
    assert url_of(host, 5, tls=True) == url.replace("http:", "https:")


def test_the_command_line_names_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out.strip() == sglang.__version__
    assert cli.main(["help"]) == 0
    assert "serve" in capsys.readouterr().out
    assert cli.main(["fly"]) == 2
    assert "no command 'fly'" in capsys.readouterr().err
    assert cli.main([]) == 2


def test_the_package_offers_its_names_and_loads_no_torch() -> None:
    code = (
        "import sys, sglang; assert set(sglang.__all__) <= set(dir(sglang))\n"
        "sglang.Engine; sglang.ServerArgs\n"
        "import sglang.srt.entrypoints.http_server; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_GUARD_S)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = sglang.Nothing
