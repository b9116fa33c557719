"""The fields of the OpenAI bodies: what acts, what is refused, what is without effect."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit-cpu")

import dataclasses

import pytest

from sglang.srt.entrypoints.openai import protocol
from sglang.srt.entrypoints.openai.native_request import sampling_mapping
from sglang.srt.entrypoints.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    acting_fields,
    in_client_words,
    parse_request,
    refused_fields,
)
from sglang.srt.messages.errors import RequestRejected
from sglang.srt.messages.generate_input import GenerateReqInput
from sglang.srt.messages.unserved_fields import REFUSED, WITHOUT_EFFECT, WithoutEffect
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.fakes.fake_manager import FakeManager
from sglang.test.server.openai_calls import CHAT, COMPLETIONS, post

ROUTES = {"chat": CHAT, "completions": COMPLETIONS}
TYPES = protocol.REQUEST_TYPES.values()
#: A value for each field that asks for something the server must not do.
ASKS = {
    "response_format": {"type": "json_object"},
    "tool_choice": "required",
    "function_call": {"name": "f"},
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "functions": [{"name": "f"}],
    "modalities": ["text", "audio"],
    "verbosity": "low",
    "bootstrap_port": 8998,
    "priority": 3,
    "detokenize": False,
    "do_sample": False,
    "include_reasoning": False,
}


def test_null_for_every_field_is_as_if_it_were_missing():
    """Open WebUI and others send nulls for everything they do not set."""
    for request_type in TYPES:
        names = [*acting_fields(request_type.route), *REFUSED, *WITHOUT_EFFECT]
        assert parse_request(request_type, dict.fromkeys(names)) == request_type()


@pytest.mark.parametrize("route", ROUTES)
def test_a_request_full_of_nulls_is_answered(route):
    names = [*acting_fields(route), *REFUSED, *WITHOUT_EFFECT]
    needed = {"messages", "prompt", "input_ids"}
    manager = FakeManager()
    response = post(manager, ROUTES[route], **{n: None for n in names if n not in needed})
    assert response.status_code == 200, response.text
    plain = FakeManager()
    post(plain, ROUTES[route])
    assert manager.params == plain.params


def test_keys_that_nobody_declared_are_ignored_and_told():
    told = []
    body = {"params": {"a": 1}, "no_such_key": 3, "stream_options": {"includ_usage": True}}
    assert parse_request(ChatRequest, body, told.append).stream_options == protocol.StreamOptions()
    assert told == ["params", "no_such_key", "stream_options.includ_usage"]


def test_no_declared_name_is_told_as_unknown():
    for request_type in TYPES:
        told = []
        route = request_type.route
        names = [*acting_fields(route), *refused_fields(route), *protocol.unserved(route)[1]]
        parse_request(request_type, dict.fromkeys(names), told.append)
        assert told == []


@pytest.mark.parametrize(
    "route, name", [(route, name) for route in ROUTES for name in REFUSED if route in REFUSED[name].routes]
)
def test_a_refused_field_is_400_with_its_name_and_a_cure(route, name):
    """Read over in silence it would give an answer to another question."""
    declared = REFUSED[name]
    value = ASKS.get(name, "x")
    response = post(FakeManager(), ROUTES[route], **{name: value})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == name
    assert error["message"].startswith(f"{name}: ") and declared.reason in error["message"]


@pytest.mark.parametrize("name", [name for name in REFUSED if set(REFUSED[name].routes) & set(ROUTES)])
def test_a_refused_field_that_asks_for_nothing_is_accepted(name):
    declared = REFUSED[name]
    route = declared.routes[0]
    empty = () if declared.strict else ("", [], {}, False)
    for value in (None, *empty, *declared.harmless):
        assert parse_request(protocol.REQUEST_TYPES[route], {name: value}) is not None
    assert declared.allows(0) == (0 in declared.harmless), "a number asks for something"


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_a_field_without_effect_takes_anything_and_says_why(name):
    declared = WITHOUT_EFFECT[name]
    for route in set(declared.routes) & set(ROUTES):
        manager, plain = FakeManager(), FakeManager()
        assert post(manager, ROUTES[route], **{name: {"any": "thing"}}).status_code == 200
        post(plain, ROUTES[route])
        assert manager.params == plain.params
    assert declared.reason


def test_no_field_is_declared_twice():
    """A name in two lists would be refused or not depending on the order of the code."""
    for route in ROUTES:
        acting, refused, idle = protocol.field_groups(route)
        names = [*acting, *refused, *idle]
        assert len(names) == len(set(names))


def test_the_twin_of_the_declared_twice_check_finds_an_offender(monkeypatch):
    monkeypatch.setitem(WITHOUT_EFFECT, "temperature", WithoutEffect("planted"))
    with pytest.raises(AssertionError):
        test_no_field_is_declared_twice()


def test_every_sampling_field_reaches_a_parameter_that_exists():
    known = set(SamplingParams.__struct_fields__)
    for route in ROUTES:
        for name, field in acting_fields(route).items():
            assert field.sampling is None or field.sampling in known, name


SAMPLES = {
    "min_tokens": ("min_new_tokens", 2),
    "temperature": ("temperature", 0.25),
    "top_p": ("top_p", 0.5),
    "top_k": ("top_k", 3),
    "min_p": ("min_p", 0.1),
    "frequency_penalty": ("frequency_penalty", -1.5),
    "presence_penalty": ("presence_penalty", 1.5),
    "repetition_penalty": ("repetition_penalty", 1.2),
    "logit_bias": ("logit_bias", {"5": -100}),
    "seed": ("sampling_seed", 7),
    "stop": ("stop", ["a", "b"]),
    "stop_token_ids": ("stop_token_ids", [3]),
    "no_stop_trim": ("no_stop_trim", True),
    "ignore_eos": ("ignore_eos", True),
    "skip_special_tokens": ("skip_special_tokens", False),
    "n": ("n", 2),
    "max_tokens": ("max_new_tokens", 9),
    "max_completion_tokens": ("max_new_tokens", 9),
    "n_predict": ("max_new_tokens", 9),
    "repeat_penalty": ("repetition_penalty", 1.2),
    "include_stop_str_in_output": ("no_stop_trim", True),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", SAMPLES)
def test_a_sampling_field_acts_and_only_it(route, name):
    native, value = SAMPLES[name]
    manager, plain = FakeManager(), FakeManager()
    assert post(manager, ROUTES[route], **{name: value}).status_code == 200
    post(plain, ROUTES[route])
    changed = {
        f
        for f in SamplingParams.__struct_fields__
        if getattr(manager.params[0], f) != getattr(plain.params[0], f)
    }
    assert changed == {native}
    expected = {5: -100.0} if native == "logit_bias" else value
    assert getattr(manager.params[0], native) == expected


def test_the_samples_cover_every_sampling_field():
    declared = {"n"}
    for fields in map(acting_fields, ROUTES):
        declared |= {n for n, f in fields.items() if f.sampling or (f.same_as and fields[f.same_as].sampling)}
    assert declared == set(SAMPLES)


def test_what_the_client_left_out_is_left_out():
    """The model's generation defaults fill what is absent; a value sent here would hide them."""
    assert sampling_mapping(ChatRequest()) == {}
    assert sampling_mapping(ChatRequest(temperature=0)) == {"temperature": 0}
    manager = FakeManager(defaults={"temperature": 0.6, "top_k": 20})
    post(manager, CHAT, top_k=5)
    assert (manager.params[0].temperature, manager.params[0].top_k) == (0.6, 5)


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("max_tokens", -5, ["max_tokens", "-5"]),
        ("max_tokens", 2.5, ["max_tokens", "2.5"]),
        ("max_tokens", 2**63, ["max_tokens"]),
        ("max_tokens", "5", ["max_tokens", "integer"]),
        ("max_completion_tokens", -1, ["max_completion_tokens"]),
        ("temperature", -1, ["temperature", "-1"]),
        ("temperature", "hot", ["temperature", "number"]),
        ("temperature", True, ["temperature", "number"]),
        ("top_p", 0, ["top_p"]),
        ("top_p", 7, ["top_p"]),
        ("top_k", 0, ["top_k"]),
        ("top_k", -2, ["top_k"]),
        ("min_p", 1.5, ["min_p"]),
        ("repetition_penalty", 0, ["repetition_penalty"]),
        ("frequency_penalty", 2.1, ["frequency_penalty"]),
        ("n", 0, ["n: ", "0"]),
        ("n", -1, ["n: "]),
        ("n", True, ["n: "]),
        ("n", 10**6, ["n: "]),
        ("logit_bias", {"999999": 5}, ["logit_bias", "999999"]),
        ("logit_bias", {"-1": 5}, ["logit_bias", "-1"]),
        ("logit_bias", {"--5": 5}, ["logit_bias: keys must be token ids", "--5"]),
        ("logit_bias", {"5": 5, "05": 6}, ["logit_bias", "twice"]),
        ("logit_bias", {"AI": -100}, ["logit_bias", "AI"]),
        ("logit_bias", {"5": 1e9}, ["logit_bias"]),
        ("logit_bias", [5], ["logit_bias"]),
        ("stop", ["x"] * 33, ["stop", "32"]),
        ("stop", [5], ["stop"]),
        ("stop", "", ["stop"]),
        ("stop_token_ids", [10**6], ["stop_token_ids"]),
        ("min_tokens", -1, ["min_tokens"]),
        ("seed", "x", ["seed"]),
        ("stream", "yes", ["stream"]),
        ("stream_options", [], ["stream_options"]),
        ("stream_options", {"include_usage": 1}, ["stream_options.include_usage"]),
        ("model", 5, ["model"]),
        ("rid", "", ["rid"]),
        ("rid", [], ["rid"]),
        ("priority", 5, ["priority"]),
        ("routed_dp_rank", "0", ["routed_dp_rank"]),
        ("return_token_ids", 1, ["return_token_ids"]),
        ("n_predict", -2, ["n_predict", "-2"]),
        ("repeat_penalty", 0, ["repeat_penalty"]),
        ("include_stop_str_in_output", "yes", ["include_stop_str_in_output", "true or false"]),
        ("request_id", 5, ["request_id", "string"]),
        ("data_parallel_rank", "0", ["data_parallel_rank", "integer"]),
    ],
)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_an_illegal_value_is_400_and_named(route, name, value, words, stream):
    """Cases O24 to O26: an illegal value must not come near the engine, and never is a 422 or a 500."""
    body = {name: value} if name == "stream" else {name: value, "stream": stream}
    manager = FakeManager()
    response = post(manager, ROUTES[route], **body)
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert all(word in message for word in words), message
    assert response.json()["error"]["param"].split(".")[0] == name
    assert not manager.requests


def test_the_refusal_of_two_fields_speaks_the_clients_names():
    response = post(FakeManager(), CHAT, min_tokens=9, max_tokens=3)
    message = response.json()["error"]["message"]
    assert "min_tokens" in message and "max_tokens" in message and "new_tokens" not in message


def test_a_refusal_of_the_engine_keeps_its_status_and_type():
    refused = RequestRejected("max_new_tokens: too many", 503, None, "ServiceUnavailableError")
    told = in_client_words(refused, CompletionRequest(max_completion_tokens=5))
    assert (told.status_code, told.err_type) == (503, "ServiceUnavailableError")
    assert (told.message, told.param) == ("max_completion_tokens: too many", "max_completion_tokens")


@pytest.mark.parametrize("own", ["text", "input_ids"])
def test_a_refused_prompt_goes_by_the_name_the_route_gives_it(own):
    refused = RequestRejected(f"{own}: token id 999 of the text is wrong", 400, own)
    told = in_client_words(refused, CompletionRequest())
    assert (told.message, told.param) == ("prompt: token id 999 of the text is wrong", "prompt")


def test_a_long_value_is_cut_in_the_refusal():
    response = post(FakeManager(), CHAT, model=["x" * 10000])
    assert len(response.json()["error"]["message"]) < 200


def test_requests_do_not_change_once_parsed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ChatRequest().n = 3  # type: ignore[misc]


@pytest.mark.parametrize("route", ROUTES)
def test_two_names_of_one_field_must_agree(route):
    """Whichever of the two the server took, the other one would be dropped in silence."""
    pairs = {n: f.same_as for n, f in acting_fields(route).items() if f.same_as}
    assert set(pairs) >= {"n_predict", "repeat_penalty", "include_stop_str_in_output", "request_id"}
    for name, own in pairs.items():
        one, other = ("a", "b") if own == "rid" else (0, 1)
        parsed = parse_request(protocol.REQUEST_TYPES[route], {name: one, own: one})
        assert getattr(parsed, own) == one
        with pytest.raises(RequestRejected, match=f"{name}: another name of {own}, and both are given"):
            parse_request(protocol.REQUEST_TYPES[route], {name: one, own: other})


def test_the_id_of_a_request_may_go_by_its_other_name():
    manager = FakeManager()
    assert post(manager, CHAT, request_id="mine").json()["id"] == "mine"
    assert manager.requests[0].rid == "mine"


@pytest.mark.parametrize(
    "route, name, value, words",
    [
        ("chat", "max_new_tokens", 5, "is a name of /generate; here it is max_tokens"),
        ("completions", "sampling_seed", 5, "is a name of /generate; here it is seed"),
        ("chat", "sampling_params", {"temperature": 0}, "is a field of /generate; post it there"),
        ("completions", "return_logprob", True, "is a field of /generate; post it there"),
        ("completions", "top_logprobs", 3, "is a field of /v1/chat/completions; post it there"),
        ("chat", "prompt", "hi", "is a field of /v1/completions; post it there"),
        (
            "completions",
            "tool_choice",
            "required",
            "is a field of /v1/chat/completions, and refused there too: tool calls are not supported yet",
        ),
        ("chat", "suffix", "x", "is a field of /v1/completions, and refused there too: this server has no"),
        ("chat", "input_extra", [{"text": "x"}], "is a field of /v1/completions, and refused there too"),
    ],
)
def test_a_field_of_another_route_is_refused_with_its_place(route, name, value, words):
    """Each of them changes the answer there, and here it would be dropped under 200."""
    response = post(FakeManager(), ROUTES[route], **{name: value})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == name
    assert error["message"].startswith(f"{name}: {words}")


ELSEWHERE = [(route, name) for route in ROUTES for name in protocol.refused_elsewhere(route)]


@pytest.mark.parametrize("route, name", ELSEWHERE)
def test_a_field_that_another_route_refuses_is_refused_here_with_its_place(route, name):
    """`tool_choice: "required"` got a plain completion under 200, and a log line called the name unknown."""
    declared = REFUSED[name]
    response = post(FakeManager(), ROUTES[route], **{name: ASKS.get(name, "x")})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == name
    place = "/v1/completions" if route == "chat" else "/v1/chat/completions"
    assert (
        error["message"].startswith(f"{name}: is a field of {place}") and declared.reason in error["message"]
    )
    told = []
    for value in (None, *(() if declared.strict else ("", [], {}, False)), *declared.harmless):
        assert parse_request(protocol.REQUEST_TYPES[route], {name: value}, told.append) is not None
    assert told == []


def test_what_asks_for_nothing_on_its_own_route_asks_for_nothing_on_another():
    body = {"top_logprobs": 0, "add_generation_prompt": True, "continue_final_message": False, "messages": []}
    assert parse_request(CompletionRequest, body) == CompletionRequest()
    for name in ("top_logprobs", "documents"):
        with pytest.raises(RequestRejected, match=f"^{name}: is a field of /v1/chat/completions"):
            parse_request(CompletionRequest, {name: 1})


def known_names():
    """Every name that some route declares, whatever it does with it."""
    return {*REFUSED, *WITHOUT_EFFECT, *(name for route in ROUTES for name in acting_fields(route))}


def untold_names(request_type):
    """The known names that this route would call unknown in its log."""
    told = []
    parse_request(request_type, dict.fromkeys(sorted(known_names())), told.append)
    return told


def test_no_name_of_one_route_is_unknown_to_the_other():
    assert [untold_names(request_type) for request_type in TYPES] == [[], []]


def test_the_twin_of_that_check_finds_what_was_dropped(monkeypatch):
    """The tables as they were: each route knew its own refusals only."""
    monkeypatch.setattr(protocol, "refused_elsewhere", lambda route: {})
    refused_fields.cache_clear()
    chat, completions = (untold_names(request_type) for request_type in (ChatRequest, CompletionRequest))
    refused_fields.cache_clear()
    assert "suffix" in chat and {"tools", "tool_choice", "enable_thinking", "audio"} <= set(completions)


@pytest.mark.parametrize(
    "name, asks, nothing",
    [
        ("thinking_forced_open", True, [False]),
        ("chat_format", 3, [0]),
        ("parse_tool_calls", True, [False]),
        ("input_prefix", "a", [""]),
        ("input_suffix", "b", [""]),
        ("input_extra", [{"text": "x"}], [[]]),
        ("grammar_lazy", True, [False]),
        ("grammar_triggers", ["x"], [[]]),
        ("preserved_tokens", ["<x>"], [[]]),
        ("penalize_nl", False, [True]),
    ],
)
def test_fields_of_the_llama_cpp_server_that_change_the_answer_are_refused(name, asks, nothing):
    for request_type in TYPES:
        with pytest.raises(RequestRejected, match=f"^{name}: "):
            parse_request(request_type, {name: asks})
        for value in (None, *nothing):
            assert parse_request(request_type, {name: value}) == request_type()


def test_every_native_name_is_known_to_the_openai_routes():
    """A name of /generate that a route neither acts on nor refuses would be dropped as an unknown one."""
    native = {*GenerateReqInput.__struct_fields__, *SamplingParams.__struct_fields__}
    for route in ROUTES:
        known = {*acting_fields(route), *refused_fields(route), *protocol.unserved(route)[1]}
        assert sorted(native - known) == []


def test_the_twin_of_that_check_finds_an_offender(monkeypatch):
    monkeypatch.setattr(protocol.msgspec.structs, "fields", lambda struct: ())
    refused_fields.cache_clear()
    with pytest.raises(AssertionError):
        test_every_native_name_is_known_to_the_openai_routes()
    refused_fields.cache_clear()


def test_a_native_field_at_its_default_asks_for_nothing():
    for route in ROUTES:
        for name, value in {"logprob_start_len": -1, "top_logprobs_num": 0, "no_logs": False}.items():
            assert parse_request(protocol.REQUEST_TYPES[route], {name: value}) is not None


def test_candidates_are_as_many_as_choices():
    """More candidates than choices are ranked by other servers, and the best are returned."""
    assert post(FakeManager(), COMPLETIONS, best_of=1).status_code == 200
    assert post(FakeManager(), COMPLETIONS, best_of=2, n=2).status_code == 200
    for body in ({"best_of": 2}, {"best_of": 3, "n": 2}):
        error = post(FakeManager(), COMPLETIONS, **body).json()["error"]
        assert error["param"] == "best_of" and "candidates are not ranked" in error["message"]


def test_a_prompt_without_special_tokens_has_none():
    manager = FakeManager()
    post(manager, COMPLETIONS, prompt="hi", add_special_tokens=False)
    bare = manager.tokenizer.encode("hi", add_special_tokens=False)
    assert manager.requests[0].input_ids == bare != manager.tokenizer.encode("hi")
    post(manager, COMPLETIONS, prompt="hi", add_special_tokens=True)
    assert manager.requests[1].text == "hi"
