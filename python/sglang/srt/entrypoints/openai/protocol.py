"""Owns the fields of the OpenAI request bodies that act, and how a body is checked against all known ones.

Read by the chat and completions routes, and by `field_docs`, which makes the tables of docs/openai_api.md.
What does not act is listed in `unserved_fields`. It must not check the ranges of sampling values, which
`sampling_fields` does, nor use a tokenizer or the engine.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

from sglang.srt.entrypoints.http.unknown_fields import UnknownFields
from sglang.srt.messages.errors import RequestRejected, refused
from sglang.srt.messages.generate_input import GenerateReqInput
from sglang.srt.messages.request_fields import (
    Check,
    flag,
    integer,
    integer_in,
    json_list,
    json_object,
    prompt_ids,
    shown,
    text,
)
from sglang.srt.messages.sampling_fields import MAX_SAMPLES
from sglang.srt.messages.unserved_fields import (
    REFUSED,
    WITHOUT_EFFECT,
    Refused,
    Route,
    WithoutEffect,
    unserved,
)
from sglang.srt.sampling.sampling_params import SamplingParams

PATHS: dict[Route, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

MAX_TOP_LOGPROBS = 20
DEFAULT_COMPLETION_TOKENS = 16


def _rid(name: str, value: object) -> object:
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(rid, str) and rid for rid in values):
        raise refused(name, f"must be a non-empty string, or a list of them, got {shown(value)}")
    return value


def _text_or_texts(name: str, value: object) -> object:
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return value
    if not isinstance(value, str):
        raise refused(name, f"must be a string, or a list of strings, got {shown(value)}")
    return value


def _effort(name: str, value: object) -> object:
    known = ("none", "minimal", "low", "medium", "high", "xhigh")
    if value not in known:
        raise refused(name, f"must be one of {', '.join(known)}, got {shown(value)}")
    return value


@dataclasses.dataclass(frozen=True)
class StreamOptions:
    """What a stream says about usage. `include_usage` None means: as the server's flag says."""

    include_usage: bool | None = None
    continuous_usage_stats: bool = False


def _stream_options(name: str, value: object) -> StreamOptions:
    given = {key: part for key, part in json_object(name, value).items() if part is not None}
    known = {field.name for field in dataclasses.fields(StreamOptions)}
    return StreamOptions(**{key: flag(f"{name}.{key}", part) for key, part in given.items() if key in known})


_alternatives = integer_in(0, MAX_TOP_LOGPROBS)


@dataclasses.dataclass(frozen=True)
class Acts:
    """A field that does what `doc` says.

    `check` checks the value; with `sampling` it goes under that name to `sampling_fields`, to be checked
    there. `same_as` is the field that this one is another name of. `parts` are the known keys of an object.
    `harmless` are values that ask for nothing, so that a route without the field bears them.
    """

    doc: str
    check: Check[object] | None = None
    sampling: str | None = None
    same_as: str | None = None
    parts: tuple[str, ...] = ()
    harmless: tuple[Any, ...] = ()


def _sampled(doc: str, native: str) -> Acts:
    return Acts(doc, sampling=native)


def _another_name(of: str, whose: str) -> Acts:
    return Acts(f"Another name of `{of}`, which {whose} uses.", same_as=of)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedRequest:
    """The fields that both routes know. `None` is "not given": null and a missing key are the same."""

    route: ClassVar[Route]

    model: Annotated[str | None, Acts("Echoed in the answer, not checked.", text)] = None
    stream: Annotated[bool | None, Acts("Answer as server-sent events, closed by `[DONE]`.", flag)] = None
    stream_options: Annotated[
        StreamOptions | None,
        Acts(
            "`include_usage`: one last chunk with usage; `continuous_usage_stats`: usage in every chunk.",
            _stream_options,
            parts=("include_usage", "continuous_usage_stats", "include_obfuscation"),
        ),
    ] = None
    n: Annotated[
        int | None,
        Acts(
            "Choices for each prompt; choice index = prompt index * n + sample.", integer_in(1, MAX_SAMPLES)
        ),
    ] = None
    max_tokens: Annotated[object, _sampled("Most tokens to produce.", "max_new_tokens")] = None
    n_predict: Annotated[object, _another_name("max_tokens", "llama.cpp")] = None
    max_completion_tokens: Annotated[
        object, _sampled("The newer name of `max_tokens`; wins when both are given.", "max_new_tokens")
    ] = None
    min_tokens: Annotated[
        object, _sampled("End tokens and stop ids are not sampled before this many tokens.", "min_new_tokens")
    ] = None
    temperature: Annotated[object, _sampled("0 is greedy.", "temperature")] = None
    top_p: Annotated[object, _sampled("Nucleus sampling, 0 < top_p <= 1.", "top_p")] = None
    top_k: Annotated[object, _sampled("Sample among the k best; -1 is off.", "top_k")] = None
    min_p: Annotated[object, _sampled("Drop tokens below min_p times the best probability.", "min_p")] = None
    frequency_penalty: Annotated[
        object,
        _sampled("Subtracted once per earlier occurrence in the output, -2 to 2.", "frequency_penalty"),
    ] = None
    presence_penalty: Annotated[
        object, _sampled("Subtracted when the token occurs in the output, -2 to 2.", "presence_penalty")
    ] = None
    repetition_penalty: Annotated[
        object,
        _sampled("Divides or multiplies logits of tokens of the output, above 0.", "repetition_penalty"),
    ] = None
    repeat_penalty: Annotated[object, _another_name("repetition_penalty", "llama.cpp")] = None
    logit_bias: Annotated[
        object,
        _sampled(
            "Token id (as text) to a bias of -100 to 100; ids outside the vocabulary are 400.", "logit_bias"
        ),
    ] = None
    seed: Annotated[object, _sampled("The same seed gives the same answer.", "sampling_seed")] = None
    stop: Annotated[object, _sampled("A stop string or up to 32 of them; special tokens too.", "stop")] = None
    stop_token_ids: Annotated[object, _sampled("Token ids that end the answer.", "stop_token_ids")] = None
    no_stop_trim: Annotated[object, _sampled("Keep the stop text in the answer.", "no_stop_trim")] = None
    include_stop_str_in_output: Annotated[object, _another_name("no_stop_trim", "vLLM")] = None
    ignore_eos: Annotated[
        object, _sampled("Do not end at end tokens or stop ids: exactly `max_tokens` tokens.", "ignore_eos")
    ] = None
    skip_special_tokens: Annotated[
        object, _sampled("false shows special tokens in the text.", "skip_special_tokens")
    ] = None
    rid: Annotated[
        str | list[str] | None,
        Acts("The request's own id: `id` of the answer, and what /abort_request takes.", _rid),
    ] = None
    request_id: Annotated[object, _another_name("rid", "vLLM")] = None
    extra_key: Annotated[str | list[str] | None, Acts("Name space of the prefix cache.", _text_or_texts)] = (
        None
    )
    cache_salt: Annotated[str | list[str] | None, Acts("Name space of the prefix cache.", _text_or_texts)] = (
        None
    )
    routed_dp_rank: Annotated[
        int | None, Acts("Replica to run on; the header `X-Data-Parallel-Rank` wins.", integer)
    ] = None
    data_parallel_rank: Annotated[
        int | None, Acts("The old name of `routed_dp_rank`.", same_as="routed_dp_rank")
    ] = None
    return_token_ids: Annotated[
        bool | None, Acts("Adds `token_ids` and `prompt_token_ids` to every choice.", flag)
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionRequest(SharedRequest):
    """Body of `POST /v1/completions`."""

    route: ClassVar[Route] = "completions"

    prompt: Annotated[
        object, Acts("A string, a list of strings, token ids, or a list of lists of token ids; not empty.")
    ] = None
    echo: Annotated[
        bool | None, Acts("The prompt's text, and with `logprobs` its log-probabilities, come first.", flag)
    ] = None
    logprobs: Annotated[
        int | None, Acts(f"Alternatives for each token, 0 to {MAX_TOP_LOGPROBS}.", _alternatives)
    ] = None
    add_special_tokens: Annotated[
        bool | None, Acts("false: a text prompt gets no BOS (or what the tokenizer puts around it).", flag)
    ] = None
    best_of: Annotated[
        int | None,
        Acts("Must equal `n`: candidates are not ranked, all that are drawn are returned.", integer),
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatRequest(SharedRequest):
    """Body of `POST /v1/chat/completions`."""

    route: ClassVar[Route] = "chat"

    messages: Annotated[
        list[object] | None,
        Acts(
            "Roles system, user, assistant, tool, function, developer in any case; "
            "content a string, null or text parts.",
            json_list,
        ),
    ] = None
    input_ids: Annotated[
        list[int] | None, Acts("A ready prompt as token ids, instead of `messages`.", prompt_ids)
    ] = None
    logprobs: Annotated[bool | None, Acts("Log-probability of every token of the answer.", flag)] = None
    top_logprobs: Annotated[
        int | None,
        Acts(
            f"Alternatives for each token, 0 to {MAX_TOP_LOGPROBS}; needs `logprobs`.",
            _alternatives,
            harmless=(0,),
        ),
    ] = None
    chat_template_kwargs: Annotated[
        Mapping[str, object] | None,
        Acts("Variables of the chat template, over those of --default-chat-template-kwargs.", json_object),
    ] = None
    add_generation_prompt: Annotated[
        bool | None,
        Acts("false: the prompt ends with the last message and opens no answer.", flag, harmless=(True,)),
    ] = None
    continue_final_message: Annotated[
        bool | None, Acts("Go on with the last message, which must be the assistant's.", flag)
    ] = None
    documents: Annotated[
        list[object] | None, Acts("Handed to the chat template, which must read it.", json_list)
    ] = None
    reasoning_effort: Annotated[
        str | None, Acts("Handed to the chat template, where the template reads it.", _effort)
    ] = None


REQUEST_TYPES: dict[Route, type[SharedRequest]] = {"chat": ChatRequest, "completions": CompletionRequest}


@functools.cache
def acting_fields(route: Route) -> dict[str, Acts]:
    """Field name -> declaration, the route's own fields first."""
    request_type = REQUEST_TYPES[route]
    hints = typing.get_type_hints(request_type, include_extras=True)
    names = [field.name for field in dataclasses.fields(request_type)]
    own = [name for name in names if name in request_type.__annotations__]
    return {name: hints[name].__metadata__[0] for name in [*own, *(n for n in names if n not in own)]}


@functools.cache
def refused_fields(route: Route) -> dict[str, Refused]:
    """What a route answers with 400: fields that are not served, and fields of the other routes.

    The latter would otherwise be ignored as unknown names.
    """
    acting = acting_fields(route)
    declared, idle = unserved(route)
    # The first of two names counts, so the table is read from its end.
    native_names = {field.sampling: name for name, field in reversed(acting.items()) if field.sampling}
    elsewhere: dict[str, Refused] = {}
    for other, path in PATHS.items():
        for name, acts in acting_fields(other).items():
            elsewhere[name] = Refused(f"is a field of {path}; post it there", harmless=acts.harmless)
    for native in msgspec.structs.fields(GenerateReqInput) + msgspec.structs.fields(SamplingParams):
        own = native_names.get(native.name)
        if own is not None:
            elsewhere[native.name] = Refused(f"is a name of /generate; here it is {own}")
        else:
            field = Refused("is a field of /generate; post it there", harmless=(native.default,))
            elsewhere.setdefault(native.name, field)
    elsewhere |= refused_elsewhere(route)
    known = {*acting, *idle}
    return {**{name: field for name, field in elsewhere.items() if name not in known}, **declared}


def refused_elsewhere(route: Route) -> dict[str, Refused]:
    """The fields that only other routes declare as refused.

    Here they are refused with the place where they are known, and the same values ask for nothing. A name
    that acts on some route is not among them.
    """
    acting = {name for other in PATHS for name in acting_fields(other)}
    found: dict[str, Refused] = {}
    for name, field in REFUSED.items():
        if route not in field.routes and name not in acting:
            places = " and ".join(path for other, path in PATHS.items() if other in field.routes)
            reason = f"is a field of {places}, and refused there too: {field.reason}"
            found[name] = dataclasses.replace(field, reason=reason)
    return found


def unknown_fields(route: Route) -> UnknownFields:
    """The log of names that this route does not know."""
    acting, (_, idle) = acting_fields(route), unserved(route)
    return UnknownFields(PATHS[route], {**acting, **refused_fields(route), **idle})


RequestT = TypeVar("RequestT", bound=SharedRequest)


def parse_request(
    request_type: type[RequestT], body: object, on_unknown: Callable[[str], None] | None = None
) -> RequestT:
    """A decoded JSON body -> the route's request. Raises `RequestRejected` that names field, rule and value.

    Null is the default; refused fields are 400 unless they ask for nothing; a name that is declared nowhere
    is handed to `on_unknown` and ignored.
    """
    if not isinstance(body, dict):
        raise RequestRejected(f"the body must be a JSON object, got {shown(body)}")
    route = request_type.route
    fields, not_served = acting_fields(route), refused_fields(route)
    values: dict[str, Any] = {}
    unknown: list[str] = []
    for name, value in body.items():
        field = fields.get(name)
        if field is None:
            if name in not_served:
                if not not_served[name].allows(value):
                    raise refused(name, f"{not_served[name].reason} (got {shown(value)})")
            elif name not in WITHOUT_EFFECT:
                unknown.append(name)
        elif value is not None:
            values[name] = field.check(name, value) if field.check is not None else value
            if field.parts and isinstance(value, dict):
                unknown += [f"{name}.{part}" for part in value if part not in field.parts]
    for name, field in fields.items():
        if field.same_as is not None and name in values:
            values[field.same_as] = _one_of_two_names(name, field.same_as, fields, values)
    if on_unknown is not None:
        for name in unknown:
            on_unknown(name)
    return request_type(**values)


def _one_of_two_names(
    name: str, own: str, fields: Mapping[str, Acts], values: Mapping[str, object]
) -> object:
    checked, check = values[name], fields[own].check
    if check is not None:
        checked = check(name, checked)
    if values.get(own, checked) != checked:
        raise refused(name, f"another name of {own}, and both are given")
    return checked


def in_client_words(error: RequestRejected | ValueError, request: SharedRequest) -> RequestRejected:
    """The same refusal with the field names that the client used (`max_tokens`, not `max_new_tokens`)."""
    names = {"top_logprobs_num": "top_logprobs" if request.route == "chat" else "logprobs"}
    fields = acting_fields(request.route)
    for name, field in fields.items():
        given = getattr(request, name) is not None
        if field.same_as is not None and given:
            names[field.same_as] = names[fields[field.same_as].sampling or field.same_as] = name
        elif field.sampling is not None and (given or field.sampling not in names):
            names[field.sampling] = name
    own = error if isinstance(error, RequestRejected) else RequestRejected(str(error))
    message = re.sub(r"\b(" + "|".join(names) + r")\b", lambda found: names[found[0]], own.message)
    if request.route == "completions" and own.param in ("text", "input_ids"):
        names[own.param] = "prompt"
        message = re.sub(rf"^{own.param}: ", "prompt: ", message)
    param = names.get(own.param, own.param) if own.param is not None else None
    if param is None:
        leading = re.match(r"([a-z_]+)(?:\[[^\]]*\])?: ", message)
        if leading and leading[1] in fields:
            param = leading[1]
    return RequestRejected(message, own.status_code, param, own.err_type)


def field_groups(route: Route) -> tuple[dict[str, Acts], dict[str, Refused], dict[str, WithoutEffect]]:
    """The three groups of one route's fields, for the docs page and the tests."""
    return acting_fields(route), *unserved(route)
