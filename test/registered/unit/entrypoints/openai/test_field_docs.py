"""The docs page says what the declarations say."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="unit-cpu")

import pathlib
import re

import pytest

from sglang.srt.entrypoints.openai import protocol
from sglang.srt.entrypoints.openai.field_docs import BEGIN, END, field_tables, with_tables
from sglang.srt.messages import unserved_fields

PAGE = pathlib.Path(__file__).parents[5] / "docs" / "openai_api.md"


def test_the_page_is_as_the_declarations_write_it():
    """Otherwise: python -m sglang.srt.entrypoints.openai.field_docs docs/openai_api.md"""
    text = PAGE.read_text(encoding="utf-8")
    assert with_tables(text) == text


def test_every_declared_field_has_its_sentence_in_the_tables():
    tables = field_tables()
    for route in protocol.PATHS:
        for group in protocol.field_groups(route):
            for name, field in group.items():
                text = re.escape(getattr(field, "doc", None) or field.reason)
                assert re.search(rf"^\|[^|]* `{name}`[^|]* \| {text} \|", tables, re.MULTILINE), name


def test_the_comparison_notices_a_changed_field(monkeypatch):
    monkeypatch.setitem(unserved_fields.REFUSED, "planted", unserved_fields.Refused("planted"))
    with pytest.raises(AssertionError):
        test_the_page_is_as_the_declarations_write_it()


def test_a_page_without_markers_is_an_error():
    for page in ("", BEGIN, END, BEGIN + BEGIN + END):
        with pytest.raises(ValueError, match="once each"):
            with_tables(page)
