"""Chat messages to one prompt text, by the template that the model brings.

Owns the sandboxed template environment and its extras (raise_exception, strftime_now, tojson, generation
blocks). Read by the tokenizer facade. It must not tokenize, and it must not let a template reach anything but
its arguments.
"""

from __future__ import annotations

import copy
import datetime
import functools
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

# Marks where the last message ends; private-use characters, so no template trims or escapes them.
_END_MARK = "\uf8fe\uf8ff\uf8fe"
# What a template can raise for messages that it was not written for; the caller must change those.
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
# Python compiles what jinja makes of a template, and limits nesting and depth.
_COMPILE_FAULTS = (jinja2.TemplateError, MemoryError, RecursionError, SyntaxError)


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, object]],
    *,
    tools: Sequence[Mapping[str, object]] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    variables: Mapping[str, object],
) -> str:
    """The prompt for `messages`. With `continue_final_message` it ends where the last message's text ends."""
    if continue_final_message:
        if add_generation_prompt:
            raise ValueError(
                "continue_final_message goes on with the last message and add_generation_prompt opens a new "
                "one; set add_generation_prompt to false"
            )
        messages = _with_end_mark(messages)
    compiled = _compiled(template)
    try:
        text = compiled.render(
            **{
                **variables,
                "messages": messages,
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
            }
        )
    except _TEMPLATE_FAULTS as error:
        raise ValueError(f"the chat template does not accept these messages: {_cause(error)}") from error
    if not continue_final_message:
        return text
    end = text.rfind(_END_MARK)
    if end < 0:
        raise ValueError(
            "continue_final_message: the chat template does not show the text of the last message"
        )
    return text[:end]


def read_chat_template(value: str, named: Mapping[str, str]) -> str:
    """The template that `--chat-template` means.

    It is the text itself, the name of one that the model brings, or a file (jinja, or JSON with the key
    chat_template).
    """
    if "{%" in value or "{{" in value:
        text = value
    elif value in named:
        text = named[value]
    else:
        text = _template_in_file(value, named)
    try:
        _compiled(text)
    except ValueError as error:
        raise ValueError(f"--chat-template: {error}") from error
    return text


def literals(template: str) -> str:
    """The texts that stand in a template, between its blocks and as strings inside them; no comments."""
    try:
        tree = _environment().parse(template)
    except _COMPILE_FAULTS as error:
        raise _not_compiled(error) from error
    data = [node.data for node in tree.find_all(jinja2.nodes.TemplateData)]
    words = [node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)]
    return "\n".join([*data, *words])


def _template_in_file(value: str, named: Mapping[str, str]) -> str:
    if not os.path.isfile(value):  # unlike pathlib's, it takes a text that is too long for a path
        brought = ", ".join(map(repr, sorted(named))) if named else "none by name"
        raise ValueError(
            f"--chat-template {value!r} is no file; give a jinja file, a JSON file with the key "
            f"'chat_template', or the name of a template that the model brings (it brings {brought})"
        )
    path = pathlib.Path(value)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--chat-template {path} cannot be read: {error}") from error
    return _template_in_json(path, text) if path.suffix == ".json" else text


def _template_in_json(path: pathlib.Path, text: str) -> str:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--chat-template {path} is not JSON: {error}") from error
    template = content.get("chat_template") if isinstance(content, dict) else None
    if not isinstance(template, str):
        raise ValueError(
            f"--chat-template {path} must be a JSON object whose key 'chat_template' holds the template"
        )
    return template


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    try:
        return _environment().from_string(template)
    except _COMPILE_FAULTS as error:
        raise _not_compiled(error) from error


def _not_compiled(error: Exception) -> ValueError:
    return ValueError(f"the chat template cannot be compiled: {_cause(error)}")


def _cause(error: BaseException) -> str:
    """What an error says; Python raises some without a word."""
    if isinstance(error, MemoryError):
        return f"it asks for more memory than there is ({type(error).__name__})"
    return str(error) or type(error).__name__


@functools.lru_cache(maxsize=1)
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(jinja2.ext.Extension):
    """Lets `{% generation %}...{% endgeneration %}`, a mark for training, stand for its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes <, > and & for HTML, which a model was never trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _with_end_mark(messages: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """A copy of the messages in which the last one's text ends with the mark."""
    if not messages:
        raise ValueError("continue_final_message needs at least one message")
    last = copy.deepcopy(dict(messages[-1]))
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + _END_MARK
        return [*messages[:-1], last]
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            part["text"] += _END_MARK
            return [*messages[:-1], last]
    raise ValueError("continue_final_message needs a last message with text")
