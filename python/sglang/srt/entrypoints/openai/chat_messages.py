"""Owns the way from chat messages to a prompt: checks, the shapes templates expect, rendering.

Read by the chat route. It must not know about sampling or answers, nor add a BOS: `encode_chat` does.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping

from sglang.srt.entrypoints.openai.protocol import ChatRequest
from sglang.srt.messages.errors import RequestRejected, refused
from sglang.srt.messages.request_fields import shown
from sglang.srt.tokenizer.content_form import ChatMessage, ContentForms, texts_of
from sglang.srt.tokenizer.tokenizer_like import TokenizerLike

ROLES = ("system", "user", "assistant", "tool", "function", "developer")
MEDIA_PARTS = (
    "image_url",
    "video_url",
    "audio_url",
    "input_audio",
    "input_image",
    "image",
    "video",
    "audio",
    "file",
)
#: Part type -> the key its text stands under.
TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "thinking": "thinking",
    "refusal": "refusal",
}
#: What a template gets from the server itself; a client's variable cannot have these names.
RESERVED_KWARGS = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
)


def checked_messages(messages: list[object] | None) -> list[ChatMessage]:
    """The client's messages, checked and in one shape.

    Roles are in lower case, content is a string or text parts, the arguments of tool calls are objects.
    """
    if messages is None:
        raise refused("messages", "is required: a list with at least one message")
    if not messages:
        raise refused("messages", "must hold at least one message, got an empty list")
    return [_message(message, f"messages[{position}]") for position, message in enumerate(messages)]


def _message(message: object, where: str) -> ChatMessage:
    if not isinstance(message, dict):
        raise refused(where, f"must be an object with role and content, got {shown(message)}")
    role = message.get("role")
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise refused(f"{where}.role", f"must be one of {', '.join(ROLES)}, got {shown(role)}")
    # Other keys (name, tool_call_id, reasoning_content, ...) go to the template, which reads what it knows.
    ready = {key: value for key, value in message.items() if value is not None}
    ready["role"] = role.lower()
    ready["content"] = _content(message.get("content"), f"{where}.content")
    if message.get("tool_calls") is not None:
        ready["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    return ready


def _content(content: object, where: str) -> str | list[dict[str, str]]:
    """A string, or parts of type text; null is the empty string, because templates add to it."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refused(where, f"must be a string, null, or a list of parts, got {shown(content)}")
    return [
        {"type": "text", "text": _part(part, f"{where}[{position}]")} for position, part in enumerate(content)
    ]


def _part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    given = part if isinstance(part, dict) else {}
    kind = given.get("type")
    if kind in MEDIA_PARTS:
        raise refused(where, f"this model reads text only, got a part of type {kind!r}; leave it out")
    key = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise refused(
            where, f"must be an object whose type is one of {', '.join(TEXT_PARTS)}, got {shown(part)}"
        )
    text = given.get(key)
    if not isinstance(text, str):
        raise refused(f"{where}.{key}", f"must be a string, got {shown(text)}")
    return text


def _tool_calls(calls: object, where: str) -> list[dict[str, object]]:
    """Earlier tool calls. Clients send `arguments` as JSON text, templates walk it as an object."""
    if not isinstance(calls, list):
        raise refused(where, f"must be a list, got {shown(calls)}")
    ready = []
    for position, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise refused(f"{where}[{position}]", f"must hold function.name, got {shown(call)}")
        ready.append({**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}})
    return ready


def _arguments(given: object) -> object:
    if given is None or given == "":
        return {}
    if not isinstance(given, str):
        return given
    try:
        decoded = json.loads(given)
    except ValueError:
        return given  # what the model wrote is history, valid or not
    return decoded if isinstance(decoded, dict) else given


def prompt_ids(
    request: ChatRequest, tokenizer: TokenizerLike, default_kwargs: Mapping[str, object]
) -> list[int]:
    """The prompt of a chat as token ids: rendered by the template, special tokens in it read as such."""
    if request.input_ids is not None:
        if request.messages:
            raise refused("input_ids", "give either messages or input_ids, not both")
        return request.input_ids
    messages = checked_messages(request.messages)
    template = tokenizer.templates.default
    if template is None:
        raise RequestRejected(tokenizer.templates.why_none())
    forms = tokenizer.templates.forms(template)
    sent_roles = [message["role"] for message in messages]
    _fit_roles(messages, template, forms)
    kwargs = {**default_kwargs, **(request.chat_template_kwargs or {})}
    for name in RESERVED_KWARGS:
        if name in kwargs:
            raise refused("chat_template_kwargs", f"{name!r} is not a variable of the template; leave it out")
    if request.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", request.reasoning_effort)
    if request.documents:
        kwargs.setdefault("documents", request.documents)
    continues = bool(request.continue_final_message)
    opens = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    if continues and messages[-1]["role"] != "assistant":
        raise refused(
            "continue_final_message",
            f"the last message must be the assistant's, got role {messages[-1]['role']!r}",
        )
    if continues and opens:
        raise refused(
            "add_generation_prompt",
            "opens a new message, and continue_final_message goes on with the last one",
        )

    def render(chat: list[ChatMessage], without: str | None = None) -> str:
        given = {name: value for name, value in kwargs.items() if name != without}
        try:
            return tokenizer.templates.render(
                chat, add_generation_prompt=opens, continue_final_message=continues, variables=given
            )
        except ValueError as error:
            raise RequestRejected(
                f"messages: the chat template refused them: {error}", param="messages"
            ) from error

    def same_without(name: str) -> bool:
        try:
            return render(messages, without=name) == text
        except RequestRejected:
            return False

    text = render(messages)
    if request.documents and ("documents" not in template or same_without("documents")):
        raise refused("documents", "the chat template of this model reads none; put them into a message")
    _refuse_dropped(messages, sent_roles, text, forms, render)
    return tokenizer.encode_chat(text)


def _refuse_dropped(
    messages: list[ChatMessage],
    sent_roles: list[str],
    prompt: str,
    forms: ContentForms,
    render: Callable[[list[ChatMessage]], str],
) -> None:
    """Refuse a message that the prompt does not show, or the model would answer without having read it.

    Only roles are looked at of which the template wrote nothing at the start; a variable may have opened the
    way to their texts since. The same words may be in the prompt for another reason, so such a chat is
    rendered once more, with marks around these texts that are nowhere else.
    """
    if not forms.dropped:
        return
    base = next(n for n in itertools.count(7316904, 1000003) if str(n) not in prompt)
    marks: dict[int, list[str]] = {}
    marked = list(messages)
    for place, message in enumerate(messages):
        texts = texts_of(message["content"]) or []
        if forms.drops(message["role"]) and any(text.strip() for text in texts):
            ends = [
                (f"{base}{place:06}{part:06}1", f"{base}{place:06}{part:06}2") for part in range(len(texts))
            ]
            parts = [{"type": "text", "text": a + text + b} for text, (a, b) in zip(texts, ends, strict=True)]
            content = parts if isinstance(message["content"], list) else parts[0]["text"]
            marked[place] = {**message, "content": content}
            marks[place] = [mark for pair in ends for mark in pair]
    text = render(marked) if marks else ""
    for place, wanted in marks.items():
        found = [mark for mark in wanted if mark in text]
        if found != wanted:
            role = sent_roles[place]
            how = "not the whole text" if found or messages[place]["role"] in forms.partly else "nothing"
            cure = "start the server with another one, --chat-template FILE"
            if role != "user":
                cure = f"put the text into a message of the user, or {cure}"
            raise refused(
                f"messages[{place}].content",
                f"the chat template writes {how} of a message of role {role!r}; {cure}",
            )


def _fit_roles(messages: list[ChatMessage], template: str, forms: ContentForms) -> None:
    """A template that does not write a role knows it under another name, which may be dropped too."""
    writes_developer = "developer" in template and forms.developer is not None
    for message in messages:
        if message["role"] == "developer" and not writes_developer:
            message["role"] = "system"
        elif message["role"] == "function":
            message["role"] = "tool"
