"""Owns the field tables of docs/openai_api.md, written from the declarations.

Run as `python -m sglang.srt.entrypoints.openai.field_docs docs/openai_api.md` after a change of `protocol`; a
test compares. It must not add anything to the declarations.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Mapping
from typing import TypeVar

from sglang.srt.entrypoints.openai.protocol import PATHS, field_groups
from sglang.srt.messages.unserved_fields import Refused, WithoutEffect

BEGIN = "<!-- fields: begin (written by sglang.srt.entrypoints.openai.field_docs) -->"
END = "<!-- fields: end -->"
FieldT = TypeVar("FieldT", Refused, WithoutEffect)


def field_tables() -> str:
    """Three tables for each route: what acts, what is refused, what is without effect."""
    parts: list[str] = []
    for route, path in PATHS.items():
        acting, refused, idle = field_groups(route)
        parts += [f"### Fields of `{path}`", "", "Acting:", "", "| field | effect |", "|---|---|"]
        parts += [f"| `{name}` | {field.doc} |" for name, field in acting.items()]
        parts += ["", "Refused with 400, unless null, empty, false, or the value in the last column:", ""]
        parts += ["| field | what the refusal says | accepted |", "|---|---|---|"]
        parts += [f"| {names} | {field.reason} | {_accepted(field)} |" for field, names in _together(refused)]
        parts += ["", "Ignored, because the answer is right without them:", ""]
        parts += ["| field | why |", "|---|---|"]
        parts += [f"| {names} | {field.reason} |" for field, names in _together(idle)]
        parts.append("")
    return "\n".join(parts)


def _together(fields: Mapping[str, FieldT]) -> list[tuple[FieldT, str]]:
    """Equal declarations share a row: `[(declaration, names)]`."""
    rows: list[tuple[FieldT, list[str]]] = []
    for name, field in fields.items():
        for known, names in rows:
            if known == field:
                names.append(name)
                break
        else:
            rows.append((field, [name]))
    return [(field, ", ".join(f"`{name}`" for name in names)) for field, names in rows]


def _accepted(field: Refused) -> str:
    return field.accepted if not field.strict else f"only null, {field.accepted}".rstrip(" ,")


def with_tables(page: str) -> str:
    """The page with its tables written anew; `ValueError` when the markers are not there, once each."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page must hold {BEGIN!r} and {END!r} once each")
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n\n{field_tables()}\n{END}{rest.split(END)[1]}"


def main() -> None:
    """Rewrite the page that the command line names."""
    page = pathlib.Path(sys.argv[1])
    page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
