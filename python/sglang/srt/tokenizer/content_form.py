"""Which form of a message's content a chat template reads: one string, or a list of parts.

Owns the trial that finds it out and the change from one form to the other. Read by `ModelTemplates`. It must
not judge a template by its source: only what it writes of a text counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

#: One message as templates read it: role, content, and whatever else the client sent.
ChatMessage = dict[str, Any]
Form = Literal["string", "parts", "one part"]
Render = Callable[[list[ChatMessage]], str]

#: Tried in this order: a template that reads several gets strings, and "one part" is for those that read the
#: first part and no other.
FORMS: tuple[Form, ...] = ("string", "parts", "one part")
ROLES = ("user", "system", "assistant", "tool")
# Two texts, so that a template that drops the second part shows it. Digits: no filter for case, quotes or
# escapes changes them.
_MARKS = ("7316904", "5820417")
_CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {}}}
# Chats in which a role's text is looked for, simplest first: some templates refuse a chat that does not begin
# with the system or the user, that does not alternate, or a tool's answer that nobody asked for.
_TALK = ("system", "user", "assistant", "user")
_CHATS: dict[str, tuple[tuple[str, ...], ...]] = {
    "user": (("user",), ("system", "user"), ("user", "assistant", "user"), _TALK),
    "system": (("system", "user"), _TALK),
    "assistant": (("user", "assistant"), ("user", "assistant", "user"), _TALK),
    "tool": (("user", "call", "tool"), ("system", "user", "call", "tool"), ("user", "tool")),
}
# Roles that the door gives to a template under another name, or that it treats alike.
_LIKE = {"developer": "system", "function": "tool"}


@dataclasses.dataclass(frozen=True)
class ContentForms:
    """What the trial found. `dropped` are roles of which the template writes nothing in any form, `trouble`
    is why not even a user's message could be rendered.
    """

    by_role: Mapping[str, Form]
    dropped: frozenset[str] = frozenset()
    trouble: str | None = None

    def of(self, role: str) -> Form:
        """The form for messages of a role; where the template refused the role, that of the user's."""
        return self.by_role.get(_LIKE.get(role, role)) or self.by_role.get("user", "string")

    def drops(self, role: str) -> bool:
        """Whether the template wrote nothing of this role's text."""
        return _LIKE.get(role, role) in self.dropped

    def summary(self) -> str:
        """For the line at the start of a server."""
        users = self.of("user")
        words = [f"content is handed over as {_PHRASES[users]}"]
        words += [f"of role {r} as {_PHRASES[f]}" for r, f in self.by_role.items() if f != users]
        if self.trouble is not None:
            return f"{words[0]} without proof, since it renders no trial chat: {self.trouble}"
        if self.dropped:
            roles = ", ".join(role for role in ROLES if role in self.dropped)
            words.append(f"it writes no text of role {roles}, and a chat that brings some is refused")
        return "; ".join(words)


_PHRASES: dict[Form, str] = {"string": "strings", "parts": "lists of parts", "one part": "lists of one part"}


def find_content_forms(render: Render) -> ContentForms:
    """Render small chats in every form and see in which each role's text comes out. `render` raises
    `ValueError` for what the template refuses.
    """
    by_role: dict[str, Form] = {}
    dropped: set[str] = set()
    trouble: str | None = None
    for role in ROLES:
        form, refusal = _find_form(role, by_role, render)
        if form is not None:
            by_role[role] = form
        elif refusal is None:
            dropped.add(role)
        elif role == "user":
            # Strings are the best guess; whether they come out is looked at in each chat.
            dropped.add(role)
            trouble = refusal
    return ContentForms(by_role, frozenset(dropped), trouble)


def _find_form(role: str, known: Mapping[str, Form], render: Render) -> tuple[Form | None, str | None]:
    """The form, else why every chat was refused; neither when a chat was rendered without the role's text."""
    refusal: str | None = None
    rendered = False
    for chat in _CHATS[role]:
        for form in FORMS:
            messages = [
                _trial_message(r, _MARKS if r == role else ("hi",), form if r == role else known.get(r, form))
                for r in chat
            ]
            try:
                text = render(messages)
            except ValueError as error:
                refusal = refusal or str(error)
                continue
            rendered = True
            if all(mark in text for mark in _MARKS):
                return form, None
    return None, None if rendered else refusal


def _trial_message(role: str, texts: Sequence[str], form: Form) -> dict[str, Any]:
    if role == "call":
        return {"role": "assistant", "content": _of_texts([""], form), "tool_calls": [_CALL]}
    message: dict[str, Any] = {"role": role, "content": _of_texts(texts, form)}
    if role == "tool":
        message |= {"tool_call_id": _CALL["id"], "name": "look"}
    return message


def in_form(content: Any, form: Form) -> Any:
    """Text content, a string or a list of text parts, in a form; parts become a string joined by spaces.
    Anything else stays what it is.
    """
    texts = texts_of(content)
    return content if texts is None else _of_texts(texts, form)


def texts_of(content: Any) -> list[str] | None:
    """The texts of a string or of a list of text parts; None for anything else."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        return None
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            return None
        texts.append(text)
    return texts


def _of_texts(texts: Sequence[str], form: Form) -> str | list[dict[str, str]]:
    if form == "parts" and texts:
        return [{"type": "text", "text": text} for text in texts]
    joined = " ".join(texts)
    # No text at all is one empty part: templates look at the first one.
    return joined if form == "string" else [{"type": "text", "text": joined}]
