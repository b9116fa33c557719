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
# Makes the marks longer than what a template may cut a text to. Only for the form that was found: a template
# that walks the characters of such a string takes a second.
_REPEATED = 2000
# A key of the trial's parts that no template asks for: who shows it has written a part itself, not its text.
_PART_MARK = "9046113"
_CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {}}}
# Chats in which a role's text is looked for, simplest first: some templates refuse a chat that does not begin
# with the system or the user, that does not alternate, or a tool's answer without a call.
_TALK = ("system", "user", "assistant", "user")
_CHATS: dict[str, tuple[tuple[str, ...], ...]] = {
    "user": (("user",), ("system", "user"), ("user", "assistant", "user"), _TALK),
    "system": (("system", "user"), _TALK),
    "assistant": (("user", "assistant"), ("user", "assistant", "user"), _TALK),
    "tool": (
        ("user", "call", "tool"),
        ("system", "user", "call", "tool"),
        ("user", "tool"),
        ("user", "call", "tool", "assistant", "user"),
    ),
    "developer": (("developer", "user"), ("developer", "user", "assistant", "user")),
}
# Roles that the chat route may rename for a template.
_LIKE = {"developer": "system", "function": "tool"}


@dataclasses.dataclass(frozen=True)
class ContentForms:
    """What the trial found.

    `dropped` are roles whose whole text the template writes in no form, `partly` those among them of which it
    writes something, `developer` is the form of developers' messages where it writes them, `trouble` is why
    not even a user's message could be rendered.
    """

    by_role: Mapping[str, Form]
    dropped: frozenset[str] = frozenset()
    partly: frozenset[str] = frozenset()
    developer: Form | None = None
    trouble: str | None = None

    def of(self, role: str) -> Form:
        """The form for messages of a role; where the template refused the role, that of the user's."""
        if role == "developer" and self.developer is not None:
            return self.developer
        return self.by_role.get(_LIKE.get(role, role)) or self.by_role.get("user", "string")

    def drops(self, role: str) -> bool:
        """Whether the template wrote this role's text in no form, or not the whole of it."""
        if role == "developer" and self.developer is not None:
            return False
        return _LIKE.get(role, role) in self.dropped

    def summary(self) -> str:
        """For the line at the start of a server."""
        users = self.of("user")
        words = [f"content is handed over as {_PHRASES[users]}"]
        words += [f"of role {r} as {_PHRASES[f]}" for r, f in self.by_role.items() if f != users]
        if self.trouble is not None:
            return f"{words[0]} without proof, since it renders no trial chat: {self.trouble}"
        for roles, how in (
            (self.dropped - self.partly, "writes no text of role {}"),
            (self.partly, "writes the text of role {} only in part or not in one form"),
        ):
            if roles:
                said = how.format(", ".join(role for role in ROLES if role in roles))
                words.append(f"it {said}, and a chat that brings some is refused")
        return "; ".join(words)


_PHRASES: dict[Form, str] = {"string": "strings", "parts": "lists of parts", "one part": "lists of one part"}


def find_content_forms(render: Render) -> ContentForms:
    """Render small chats in every form, and find the one in which each role's text comes out.

    `render` raises `ValueError` for what the template refuses.
    """
    by_role: dict[str, Form] = {}
    dropped: set[str] = set()
    partly: set[str] = set()
    trouble: str | None = None
    for role in ROLES:
        found = _find_form(role, by_role, render)
        if found.form is not None:
            by_role[role] = found.form
        elif found.rendered:
            dropped.add(role)
            if found.touched:
                partly.add(role)
        elif role == "user":
            # Strings are the best guess; each chat is checked for its texts.
            dropped.add(role)
            trouble = found.refusal
    developer = _find_form("developer", by_role, render).form
    return ContentForms(by_role, frozenset(dropped), frozenset(partly), developer, trouble)


@dataclasses.dataclass
class _Finding:
    """What the chats of one role showed.

    `rendered`: the template refused not every chat; `touched`: it wrote something of the role's messages.
    """

    form: Form | None = None
    rendered: bool = False
    touched: bool = False
    refusal: str | None = None


def _find_form(role: str, known: Mapping[str, Form], render: Render) -> _Finding:
    """The first form in which the role's messages are read.

    In every chat it must show at least as many of them as any other form does: a template that reads one
    message as a string and the next as parts reads neither form.
    """
    found = _Finding()
    read: dict[Form, tuple[str, ...]] = {}
    unfit: set[Form] = set()
    for chat in _CHATS[role]:
        shown: dict[Form, set[int]] = {}
        for form in FORMS:
            try:
                text = render(_trial_chat(chat, role, form, known))
            except ValueError as error:
                found.refusal = found.refusal or str(error)
                continue
            found.rendered = True
            found.touched |= any(word in text for word in (_PART_MARK, *_MARKS))
            shown[form] = _read_whole(text, chat, role)
            if _PART_MARK in text:
                unfit.add(form)
                shown[form] = set()
        most = set[int]().union(*shown.values())
        read |= {form: chat for form, places in shown.items() if places}
        unfit |= {form for form, places in shown.items() if not places >= most}
    found.form = next((form for form in FORMS if form in read and form not in unfit), None)
    if found.form is not None and _cuts(role, read[found.form], found.form, known, render):
        found.form = None
    return found


def _cuts(role: str, chat: tuple[str, ...], form: Form, known: Mapping[str, Form], render: Render) -> bool:
    """Whether less is read of the role's messages when they are long."""
    try:
        short, long = (
            _read_whole(render(_trial_chat(chat, role, form, known, repeated)), chat, role, repeated)
            for repeated in (1, _REPEATED)
        )
    except ValueError:
        return False  # a template that refuses long texts says so itself
    return not long >= short


def _trial_chat(
    chat: tuple[str, ...], role: str, form: Form, known: Mapping[str, Form], repeated: int = 1
) -> list[dict[str, Any]]:
    return [
        _trial_message(r, _marks(place, repeated), form, {_PART_MARK: ""})
        if r == role
        else _trial_message(r, ("hi",), known.get(r, form))
        for place, r in enumerate(chat)
    ]


def _read_whole(text: str, chat: tuple[str, ...], role: str, repeated: int = 1) -> set[int]:
    """The places of the role's messages whose texts stand in a rendered chat."""
    text = "".join(text.split())  # a filter that wraps lines loses nothing
    return {
        place
        for place, r in enumerate(chat)
        if r == role and all(mark in text for mark in _marks(place, repeated))
    }


def _marks(place: int, repeated: int) -> list[str]:
    """The texts of a message in a trial chat, at no other place of it."""
    return [f"{mark}{place}" * repeated for mark in _MARKS]


def _trial_message(
    role: str, texts: Sequence[str], form: Form, in_part: Mapping[str, str] | None = None
) -> dict[str, Any]:
    if role == "call":
        return {"role": "assistant", "content": _of_texts([""], form), "tool_calls": [_CALL]}
    content = _of_texts(texts, form)
    if not isinstance(content, str):
        content = [{**(in_part or {}), **part} for part in content]
    message: dict[str, Any] = {"role": role, "content": content}
    if role == "tool":
        message |= {"tool_call_id": _CALL["id"], "name": "look"}
    return message


def in_form(content: object, form: Form) -> object:
    """Text content, a string or a list of text parts, in a form; anything else stays what it is."""
    texts = texts_of(content)
    return content if texts is None else _of_texts(texts, form)


def texts_of(content: object) -> list[str] | None:
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
