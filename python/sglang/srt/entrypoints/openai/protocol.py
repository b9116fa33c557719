"""Owns the fields of the OpenAI request bodies: which act, which are refused, which are without effect.

Read by the chat and completions routes, and by `field_docs`, which makes the tables of docs/openai_api.md
from them. It must not act: no tokenizer, no engine. Ranges of sampling values are checked once, by
`SamplingParams`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from sglang.srt.messages.errors import RequestRejected

Route = Literal["chat", "completions"]
BOTH: tuple[Route, ...] = ("chat", "completions")

MAX_TOP_LOGPROBS = 20
DEFAULT_COMPLETION_TOKENS = 16


def reject(field: str, rule: str, **kwargs: Any) -> RequestRejected:
    """The refusal of one field: `field: rule`, with `param` set for clients that read it."""
    return RequestRejected(f"{field}: {rule}", param=field, **kwargs)


def shown(value: Any, limit: int = 80) -> str:
    """A client's value inside an error text, cut so that a megabyte of prompt does not come back."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


# --- checks: name, value -> value ---


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise reject(name, f"must be a string, got {shown(value)}")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise reject(name, f"must be true or false, got {shown(value)}")
    return value


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise reject(name, f"must be an integer, got {shown(value)}")
    return value


def _alternatives(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_TOP_LOGPROBS:
        raise reject(name, f"must be an integer with 0 <= {name} <= {MAX_TOP_LOGPROBS}, got {shown(value)}")
    return value


def _sample_count(name: str, value: Any) -> int:
    # The upper limit is SamplingParams'; here only what the choice arithmetic needs.
    if _whole(name, value) < 1:
        raise reject(name, f"must be at least 1, got {value}")
    return typing.cast(int, value)


def _object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise reject(name, f"must be an object, got {shown(value)}")
    return value


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise reject(name, f"must be a list, got {shown(value)}")
    return value


def _token_ids(name: str, value: Any) -> list[int]:
    if not _list(name, value):
        raise reject(name, "must not be empty")
    for token_id in value:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise reject(name, f"must hold token ids (integers), got {shown(token_id)}")
    return typing.cast("list[int]", value)


def _rid(name: str, value: Any) -> str | list[str]:
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(rid, str) and rid for rid in values):
        raise reject(name, f"must be a non-empty string, or a list of them, got {shown(value)}")
    return typing.cast("str | list[str]", value)


def _text_or_texts(name: str, value: Any) -> str | list[str]:
    if not isinstance(value, str) and not (
        isinstance(value, list) and all(isinstance(text, str) for text in value)
    ):
        raise reject(name, f"must be a string, or a list of strings, got {shown(value)}")
    return typing.cast("str | list[str]", value)


def _effort(name: str, value: Any) -> str:
    known = ("none", "minimal", "low", "medium", "high", "xhigh")
    if value not in known:
        raise reject(name, f"must be one of {', '.join(known)}, got {shown(value)}")
    return typing.cast(str, value)


@dataclasses.dataclass(frozen=True)
class StreamOptions:
    """What a stream says about usage. `include_usage` None means: as the server's flag says."""

    include_usage: bool | None = None
    continuous_usage_stats: bool = False


def _stream_options(name: str, value: Any) -> StreamOptions:
    given = {key: part for key, part in _object(name, value).items() if part is not None}
    known = {field.name for field in dataclasses.fields(StreamOptions)}
    return StreamOptions(**{key: _flag(f"{name}.{key}", part) for key, part in given.items() if key in known})


# --- declarations ---


@dataclasses.dataclass(frozen=True)
class Acts:
    """A field that does what `doc` says.

    `check` judges the value; with `sampling` the value goes under that name to `SamplingParams`, which judges
    it.
    """

    doc: str
    check: Callable[[str, Any], Any] | None = None
    sampling: str | None = None


def _sampled(doc: str, native: str) -> Acts:
    return Acts(doc, sampling=native)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedRequest:
    """The fields that both routes know. `None` is "not given": null and a missing key are the same."""

    route: ClassVar[Route]

    model: Annotated[str | None, Acts("Echoed in the answer, not checked.", _text)] = None
    stream: Annotated[bool | None, Acts("Answer as server-sent events, closed by `[DONE]`.", _flag)] = None
    stream_options: Annotated[
        StreamOptions | None,
        Acts(
            "`include_usage`: one last chunk with usage; `continuous_usage_stats`: usage in every chunk.",
            _stream_options,
        ),
    ] = None
    n: Annotated[
        int | None, Acts("Choices for each prompt; choice index = prompt index * n + sample.", _sample_count)
    ] = None
    max_tokens: Annotated[Any, _sampled("Most tokens to produce.", "max_new_tokens")] = None
    max_completion_tokens: Annotated[
        Any, _sampled("The newer name of `max_tokens`; wins when both are given.", "max_new_tokens")
    ] = None
    min_tokens: Annotated[
        Any, _sampled("End tokens and stop ids are not sampled before this many tokens.", "min_new_tokens")
    ] = None
    temperature: Annotated[Any, _sampled("0 is greedy.", "temperature")] = None
    top_p: Annotated[Any, _sampled("Nucleus sampling, 0 < top_p <= 1.", "top_p")] = None
    top_k: Annotated[Any, _sampled("Sample among the k best; -1 is off.", "top_k")] = None
    min_p: Annotated[Any, _sampled("Drop tokens below min_p times the best probability.", "min_p")] = None
    frequency_penalty: Annotated[
        Any, _sampled("Subtracted once per earlier occurrence in the output, -2 to 2.", "frequency_penalty")
    ] = None
    presence_penalty: Annotated[
        Any, _sampled("Subtracted when the token occurs in the output, -2 to 2.", "presence_penalty")
    ] = None
    repetition_penalty: Annotated[
        Any, _sampled("Divides or multiplies logits of tokens of the output, above 0.", "repetition_penalty")
    ] = None
    logit_bias: Annotated[
        Any,
        _sampled(
            "Token id (as text) to a bias of -100 to 100; ids outside the vocabulary are 400.", "logit_bias"
        ),
    ] = None
    seed: Annotated[Any, _sampled("The same seed gives the same answer.", "sampling_seed")] = None
    stop: Annotated[Any, _sampled("A stop string or up to 32 of them.", "stop")] = None
    stop_token_ids: Annotated[Any, _sampled("Token ids that end the answer.", "stop_token_ids")] = None
    no_stop_trim: Annotated[Any, _sampled("Keep the stop text in the answer.", "no_stop_trim")] = None
    ignore_eos: Annotated[
        Any, _sampled("Do not end at end tokens or stop ids: exactly `max_tokens` tokens.", "ignore_eos")
    ] = None
    skip_special_tokens: Annotated[
        Any, _sampled("false shows special tokens in the text.", "skip_special_tokens")
    ] = None
    rid: Annotated[
        str | list[str] | None,
        Acts("The request's own id: `id` of the answer, and what /abort_request takes.", _rid),
    ] = None
    extra_key: Annotated[str | list[str] | None, Acts("Name space of the prefix cache.", _text_or_texts)] = (
        None
    )
    cache_salt: Annotated[str | list[str] | None, Acts("Name space of the prefix cache.", _text_or_texts)] = (
        None
    )
    routed_dp_rank: Annotated[
        int | None, Acts("Replica to run on; the header `X-Data-Parallel-Rank` wins.", _whole)
    ] = None
    data_parallel_rank: Annotated[int | None, Acts("The old name of `routed_dp_rank`.", _whole)] = None
    return_token_ids: Annotated[
        bool | None, Acts("Adds `token_ids` and `prompt_token_ids` to every choice.", _flag)
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionRequest(SharedRequest):
    """Body of `POST /v1/completions`."""

    route: ClassVar[Route] = "completions"

    prompt: Annotated[
        Any, Acts("A string, a list of strings, token ids, or a list of lists of token ids; not empty.")
    ] = None
    echo: Annotated[
        bool | None, Acts("The prompt's text, and with `logprobs` its log-probabilities, come first.", _flag)
    ] = None
    logprobs: Annotated[
        int | None, Acts(f"Alternatives for each token, 0 to {MAX_TOP_LOGPROBS}.", _alternatives)
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatRequest(SharedRequest):
    """Body of `POST /v1/chat/completions`."""

    route: ClassVar[Route] = "chat"

    messages: Annotated[
        list[Any] | None,
        Acts(
            "Roles system, user, assistant, tool, function, developer in any case; "
            "content a string, null or text parts.",
            _list,
        ),
    ] = None
    input_ids: Annotated[
        list[int] | None, Acts("A ready prompt as token ids, instead of `messages`.", _token_ids)
    ] = None
    logprobs: Annotated[bool | None, Acts("Log-probability of every token of the answer.", _flag)] = None
    top_logprobs: Annotated[
        int | None,
        Acts(f"Alternatives for each token, 0 to {MAX_TOP_LOGPROBS}; needs `logprobs`.", _alternatives),
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        Acts("Variables of the chat template, over those of --default-chat-template-kwargs.", _object),
    ] = None
    continue_final_message: Annotated[
        bool | None, Acts("Go on with the last message, which must be the assistant's.", _flag)
    ] = None
    reasoning_effort: Annotated[
        str | None, Acts("Handed to the chat template, where the template reads it.", _effort)
    ] = None


@dataclasses.dataclass(frozen=True)
class Refused:
    """A field that would change the answer and is not served: 400, unless it is null, empty, false or
    `harmless`.
    """

    reason: str
    routes: tuple[Route, ...] = BOTH
    harmless: tuple[Any, ...] = ()
    harmless_doc: str = ""

    def allows(self, value: Any) -> bool:
        """Whether the value asks for nothing: the field's default, in whatever spelling."""
        return value is None or value is False or value in ("", [], {}) or value in self.harmless


_STRUCTURED = "structured output is not supported yet; leave it out and check the answer yourself"
_TOOLS = "tool calls are not supported yet; describe the tools in a message and parse the answer yourself"
_LORA = "adapters are not supported yet; serve a model with the adapter merged into its weights"
_SESSIONS = "sessions are not supported; send the whole conversation, the prefix cache keeps it cheap"
_DISAGGREGATION = "prefill/decode disaggregation is not supported yet; leave it out"
_THINKING = "thinking budgets are not supported yet; limit the whole answer with max_tokens"

REFUSED: dict[str, Refused] = {
    "response_format": Refused(_STRUCTURED, harmless=({"type": "text"},), harmless_doc='`{"type": "text"}`'),
    "json_schema": Refused(_STRUCTURED),
    "regex": Refused(_STRUCTURED),
    "ebnf": Refused(_STRUCTURED),
    "structural_tag": Refused(_STRUCTURED),
    "guided_json": Refused(_STRUCTURED),
    "guided_regex": Refused(_STRUCTURED),
    "guided_choice": Refused(_STRUCTURED),
    "guided_grammar": Refused(_STRUCTURED),
    "stop_regex": Refused("stopping by regular expression is not supported yet; use stop or stop_token_ids"),
    "use_beam_search": Refused("beam search is not supported; use n for several samples"),
    "lora_path": Refused(_LORA),
    "session_id": Refused(_SESSIONS),
    "session_params": Refused(_SESSIONS),
    "custom_logit_processor": Refused("custom logit processors are not supported yet; use logit_bias"),
    "custom_params": Refused("custom logit processors are not supported yet; use logit_bias"),
    "return_hidden_states": Refused("hidden states are not returned yet; leave it out"),
    "return_routed_experts": Refused("routed experts are not returned yet; leave it out"),
    "max_thinking_tokens": Refused(_THINKING),
    "thinking_budget": Refused(_THINKING),
    "priority": Refused(
        "request priorities are not supported yet; leave it out", harmless=(0,), harmless_doc="`0`"
    ),
    "bootstrap_host": Refused(_DISAGGREGATION),
    "bootstrap_port": Refused(_DISAGGREGATION),
    "bootstrap_room": Refused(_DISAGGREGATION),
    "suffix": Refused(
        "this server has no completion template; put the whole fill-in-the-middle prompt in `prompt`",
        ("completions",),
    ),
    "tools": Refused(_TOOLS, ("chat",)),
    "tool_choice": Refused(_TOOLS, ("chat",), ("none", "auto"), '`"none"`, `"auto"`'),
    "functions": Refused(_TOOLS, ("chat",)),
    "function_call": Refused(_TOOLS, ("chat",), ("none", "auto"), '`"none"`, `"auto"`'),
    "chat_template": Refused(
        "a request does not bring its own template; start the server with --chat-template FILE", ("chat",)
    ),
    "modalities": Refused("this server writes text only", ("chat",), (["text"],), '`["text"]`'),
    "audio": Refused("this server writes text only", ("chat",)),
    "web_search_options": Refused("there is no web search; put what was found in a message", ("chat",)),
    "verbosity": Refused(
        "answers have no set length; say in a message how long the answer should be",
        ("chat",),
        ("medium",),
        '`"medium"`',
    ),
}


@dataclasses.dataclass(frozen=True)
class WithoutEffect:
    """A known field that is read over, because the answer is right without it; `reason` says why."""

    reason: str
    routes: tuple[Route, ...] = BOTH


WITHOUT_EFFECT: dict[str, WithoutEffect] = {
    "spaces_between_special_tokens": WithoutEffect("the tokenizers served here never add such spaces"),
    "user": WithoutEffect("names the caller for the operator; nothing is kept about callers"),
    "safety_identifier": WithoutEffect(
        "names the caller for the operator; nothing is kept about callers", ("chat",)
    ),
    "metadata": WithoutEffect("labels of stored answers; nothing is stored", ("chat",)),
    "store": WithoutEffect("answers are never stored", ("chat",)),
    "service_tier": WithoutEffect("there is one tier", ("chat",)),
    "prompt_cache_key": WithoutEffect("the prefix cache finds common prefixes by itself", ("chat",)),
    "prompt_cache_retention": WithoutEffect("the prefix cache keeps what fits", ("chat",)),
    "prediction": WithoutEffect("a hint about speed; the answer is the same without it", ("chat",)),
    "parallel_tool_calls": WithoutEffect("concerns tools, and a request with tools is refused", ("chat",)),
    "separate_reasoning": WithoutEffect(
        "no reasoning parser is served: thinking stays in the content", ("chat",)
    ),
    "stream_reasoning": WithoutEffect(
        "no reasoning parser is served: thinking stays in the content", ("chat",)
    ),
    "best_of": WithoutEffect(
        "candidates are not ranked: `n` choices are drawn and all are returned", ("completions",)
    ),
}

REQUEST_TYPES: dict[Route, type[SharedRequest]] = {"chat": ChatRequest, "completions": CompletionRequest}


@functools.cache
def acting_fields(route: Route) -> dict[str, Acts]:
    """Field name -> declaration, the route's own fields first."""
    request_type = REQUEST_TYPES[route]
    hints = typing.get_type_hints(request_type, include_extras=True)
    names = [field.name for field in dataclasses.fields(request_type)]
    own = [name for name in names if name in request_type.__annotations__]
    return {name: hints[name].__metadata__[0] for name in [*own, *(n for n in names if n not in own)]}


RequestT = TypeVar("RequestT", bound=SharedRequest)


def parse_request(request_type: type[RequestT], body: Any) -> RequestT:
    """A decoded JSON body -> the route's request. Raises `RequestRejected` that names field, rule and value.

    Null is the default; keys that nobody declared are ignored; refused fields are 400 unless they ask for
    nothing.
    """
    if not isinstance(body, dict):
        raise RequestRejected(f"the body must be a JSON object, got {shown(body)}")
    route = request_type.route
    fields = acting_fields(route)
    values: dict[str, Any] = {}
    for name, value in body.items():
        refused = REFUSED.get(name)
        if refused is not None and route in refused.routes and not refused.allows(value):
            raise reject(name, f"{refused.reason} (got {shown(value)})")
        field = fields.get(name)
        if field is not None and value is not None:
            values[name] = field.check(name, value) if field.check is not None else value
    return request_type(**values)


def sampling_mapping(request: SharedRequest) -> dict[str, Any]:
    """What the client gave of the sampling parameters, under `SamplingParams`' names.

    What was left out stays out, so that the model's generation defaults can fill it.
    """
    mapping: dict[str, Any] = {}
    for name, field in acting_fields(request.route).items():
        value = getattr(request, name)
        if field.sampling is not None and value is not None and name != "max_tokens":
            mapping[field.sampling] = value
    if request.n is not None:
        mapping["n"] = request.n
    if request.max_completion_tokens is None and request.max_tokens is not None:
        mapping["max_new_tokens"] = request.max_tokens
    return mapping


def in_client_words(error: RequestRejected | ValueError, request: SharedRequest) -> RequestRejected:
    """The same refusal with the field names that the client used (`max_tokens`, not `max_new_tokens`)."""
    names = {
        "max_new_tokens": "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens",
        "min_new_tokens": "min_tokens",
        "sampling_seed": "seed",
        "top_logprobs_num": "top_logprobs" if request.route == "chat" else "logprobs",
    }
    own = error if isinstance(error, RequestRejected) else RequestRejected(str(error))
    message = re.sub(r"\b(" + "|".join(names) + r")\b", lambda found: names[found[0]], own.message)
    if request.route == "completions" and own.param in ("text", "input_ids"):
        names[own.param] = "prompt"
        message = re.sub(rf"^{own.param}: ", "prompt: ", message)
    param = names.get(own.param, own.param) if own.param is not None else None
    if param is None:
        leading = re.match(r"([a-z_]+)(?:\[[^\]]*\])?: ", message)
        if leading and leading[1] in acting_fields(request.route):
            param = leading[1]
    return RequestRejected(message, own.status_code, param, own.err_type)


def field_groups(route: Route) -> tuple[dict[str, Acts], dict[str, Refused], dict[str, WithoutEffect]]:
    """The three groups of one route's fields, for the docs page and the tests."""
    refused: Mapping[str, Refused] = {k: v for k, v in REFUSED.items() if route in v.routes}
    idle: Mapping[str, WithoutEffect] = {k: v for k, v in WITHOUT_EFFECT.items() if route in v.routes}
    return acting_fields(route), dict(refused), dict(idle)
