"""The page of speculative decoding names every algorithm and default, call of a drafter and counter."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import re
from pathlib import Path

from sglang.srt.arg_groups.adaptive_config import DEFAULT_SLOTS
from sglang.srt.arg_groups.speculative_algorithms import ALGORITHMS, ALIASES, CHAIN, LATER
from sglang.srt.managers.tokenizer_components.answer import _add_spec
from sglang.srt.messages.io_struct import SpecCounts
from sglang.srt.speculative.base_spec_worker import Drafter

DOCS = Path(__file__).resolve().parents[4] / "docs"
PAGE = (DOCS / "speculative.md").read_text(encoding="utf-8")


def unnamed(page: str, names: set[str]) -> list[str]:
    """Which of the names stand nowhere on the page, in backticks or with other words inside them."""
    spans = " ".join(re.findall(r"`([^`\n]+)`", page))
    return sorted(names - set(re.findall(r"\w+", spans)))


def calls() -> set[str]:
    return {name for name in vars(Drafter) if not name.startswith("_")}


def test_every_algorithm_is_named_and_every_one_that_is_not_served():
    assert unnamed(PAGE, {*ALGORITHMS, *ALIASES}) == []
    assert [name for name in LATER if name not in PAGE] == []


def test_every_call_of_a_drafter_is_named():
    assert len(calls()) > 8
    assert unnamed(PAGE, calls()) == []


def test_a_call_that_the_page_leaves_out_is_noticed():
    assert unnamed(PAGE, {*calls(), "after_lunch"}) == ["after_lunch"]


def test_what_is_drafted_by_default_is_what_the_page_says():
    """A default that has moved would be looked for in the wrong place."""
    shapes = {CHAIN, *(shape for facts in ALGORITHMS.values() for shape in facts.shapes.values())}
    for shape in shapes:
        assert f"| {', '.join(map(str, shape))} |" in PAGE
    assert {size: slot.candidate_steps for size, slot in DEFAULT_SLOTS.items()} == {
        1: (1, 3, 5, 7),
        8: (0, 1, 3),
        32: (0, 1),
        64: (0,),
    }, "the page says these depths in words: change both"


def test_every_counter_of_an_answer_is_on_the_page_of_the_native_routes():
    counts, meta = SpecCounts(), {}
    counts.add_round(correct=1, proposed=3)
    _add_spec(meta, counts, 2)
    page = (DOCS / "native_api.md").read_text(encoding="utf-8")
    assert unnamed(page, {*meta, "avg_spec_accept_length"}) == []
