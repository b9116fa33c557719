"""The chat templates of one model: which one renders a chat, and in which form it gets the messages.

Owns the choice among named templates and the reason why there is none. Read by the tokenizer facade and,
through it, by the chat route. It must not tokenize; the rendering itself is `chat_template`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from sglang.srt.tokenizer.chat_template import literals, render_chat
from sglang.srt.tokenizer.content_form import ContentForms, find_content_forms, in_form
from sglang.srt.tokenizer.vocabulary import DEFAULT_TEMPLATE

TOOL_TEMPLATE = "tool_use"
_CURE = "or write the prompt yourself and post it to /v1/completions"


class ModelTemplates:
    """Templates by name. `variables` stand under those of each call: special tokens, the server's own."""

    def __init__(self, named: Mapping[str, str], variables: Mapping[str, object]) -> None:
        self._named = dict(named)
        self._variables = dict(variables)
        self._forms: dict[str, ContentForms] = {}

    @property
    def names(self) -> list[str]:
        """The names of all templates."""
        return sorted(self._named)

    @property
    def default_name(self) -> str | None:
        """The one called default; else the only one there is, because nothing else can be meant."""
        if DEFAULT_TEMPLATE in self._named:
            return DEFAULT_TEMPLATE
        return next(iter(self._named)) if len(self._named) == 1 else None

    @property
    def default(self) -> str | None:
        """The template that a chat without tools is rendered by."""
        name = self.default_name
        return None if name is None else self._named[name]

    def why_none(self) -> str:
        """Why there is no default, and the cure."""
        if not self._named:
            return f"this model has no chat template; start the server with --chat-template FILE, {_CURE}"
        names = ", ".join(map(repr, self.names))
        return (
            f"this model brings the chat templates {names} and none called {DEFAULT_TEMPLATE!r}; start the "
            f"server with --chat-template and one of these names, or a file, {_CURE}"
        )

    def forms(self, template: str) -> ContentForms:
        """In which form a template reads each role's content. Found by rendering, once."""
        found = self._forms.get(template)
        if found is None:
            found = self._forms[template] = find_content_forms(
                lambda messages: render_chat(
                    template, messages, add_generation_prompt=True, variables=self._variables
                )
            )
        return found

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt of a chat, by `template` or by the model's own; content may come in either form."""
        if template is None and tools:
            template = self._named.get(TOOL_TEMPLATE)
        if template is None:
            template = self.default
        if template is None:
            raise ValueError(self.why_none())
        forms = self.forms(template)
        ready = [
            {**message, "content": in_form(message["content"], forms.of(str(message.get("role", "user"))))}
            if "content" in message
            else message
            for message in messages
        ]
        return render_chat(
            template,
            ready,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self._variables, **(variables or {})},
        )

    def written(self) -> str:
        """Everything that the default template is known to write: its texts, and a small chat."""
        template = self.default
        if template is None:
            return ""
        texts = ""
        chat = [{"role": role, "content": "hi"} for role in ("user", "assistant")]
        # One that does not compile, or refuses this chat, says so where it is used.
        with contextlib.suppress(ValueError):
            texts += literals(template)
            texts += self.render(chat, template=template)
        return texts
