"""The text of a running sequence: no half characters, no piece of a stop string, nothing lost."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="unit-cpu")

import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.managers.tokenizer_components.incremental_detokenizer import IncrementalDetokenizer
from sglang.srt.tokenizer.id_reader import REPLACEMENT
from sglang.srt.tokenizer.tokenizer import Tokenizer, load_tokenizer
from sglang.test.tiny_models import write_tiny_tokenizer

VOCAB = 400


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: pathlib.Path = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder, vocab_size=VOCAB)
    return load_tokenizer(folder)


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token for each byte, so that every character of several bytes is split over tokens."""
    by_byte = {
        tokenizer.token_bytes(i): i for i in range(VOCAB - 1, -1, -1) if len(tokenizer.token_bytes(i)) == 1
    }
    return [by_byte[bytes([value])] for value in data]


def stream(state: IncrementalDetokenizer, ids: list[int], matched: int | str | None = None) -> list[str]:
    """What each event shows: one id an event, the last one with the end."""
    shown = []
    for token_id in ids[:-1]:
        state.append([token_id])
        shown.append(state.text)
    state.finish(ids[-1:], matched=matched)
    return [*shown, state.text]


def deltas(shown: list[str]) -> list[str]:
    return [after.removeprefix(before) for before, after in zip(["", *shown], shown)]


@pytest.mark.parametrize("text", ["🙂🙃", "příliš žluťoučký", "สวัสดี", "漢字かな", "a🙂b\u200d👩‍👩‍👧‍👦 x"])
def test_no_event_shows_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    shown = stream(IncrementalDetokenizer(tokenizer), byte_ids(tokenizer, text.encode()))
    assert not any(REPLACEMENT in event for event in shown)
    assert shown[-1] == text


def test_a_character_cut_by_the_length_limit_ends_as_one_decode_of_all_ids_does(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, "ok 🙂".encode()[:-1])
    shown = stream(IncrementalDetokenizer(tokenizer), ids)
    assert shown[-1] == tokenizer.decode(ids) == "ok " + REPLACEMENT
    assert not any(REPLACEMENT in event for event in shown[:-1])


def test_text_before_a_begun_character_is_not_held_with_it(tokenizer: Tokenizer) -> None:
    state = IncrementalDetokenizer(tokenizer)
    state.append(byte_ids(tokenizer, b"word \xf0\x9f"))
    assert state.text == "word "


def test_broken_bytes_are_shown_as_soon_as_they_are_known_to_be_broken(tokenizer: Tokenizer) -> None:
    state = IncrementalDetokenizer(tokenizer)
    state.append(byte_ids(tokenizer, b"a\x80"))
    assert state.text == "a" + REPLACEMENT


@settings(max_examples=150)
@given(data=st.data())
def test_joined_events_are_one_decode_of_all_ids(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Whatever the ids are (broken bytes, special tokens) and however they are cut into events."""
    ids = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=90))
    skip = data.draw(st.booleans())
    state = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    shown, at = [""], 0
    while at < len(ids):
        size = data.draw(st.integers(1, 7))
        piece, at = ids[at : at + size], at + size
        if at < len(ids):
            state.append(piece)
        else:
            state.finish(piece)
        assert state.text.startswith(shown[-1]), "shown text was taken back"
        shown.append(state.text)
    assert "".join(deltas(shown)) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=80)
@given(text=st.text(min_size=1, max_size=60))
def test_valid_text_never_shows_a_replacement_mark(tokenizer: Tokenizer, text: str) -> None:
    ids = byte_ids(tokenizer, text.encode())
    shown = stream(IncrementalDetokenizer(tokenizer), ids)
    assert shown[-1] == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in event for event in shown)


def test_work_for_a_token_does_not_grow_with_the_length_of_the_text(tokenizer: Tokenizer) -> None:
    """The window moves on: otherwise a long answer costs the square of its length."""
    decoded = []

    class Counting:
        all_special_ids = tokenizer.all_special_ids
        token_bytes = staticmethod(tokenizer.token_bytes)
        context_of = staticmethod(tokenizer.context_of)

        def decode(self, ids: list[int], *flags: bool) -> str:
            decoded.append(len(ids))
            return tokenizer.decode(ids, *flags)

    stream(IncrementalDetokenizer(Counting()), byte_ids(tokenizer, ("žluť a konec " * 60).encode()))
    assert max(decoded) < 60


STOP_CASES = [
    # (pieces of the answer, stop strings, what matched, text without trim)
    (["A", "BC", "DE", "FG", "HI", "J"], ["DEFGHIJ"], "DEFGHIJ", "ABC"),
    (["one E", "ND"], ["END"], "END", "one "),
    (["xST", "OP1 rest"], ["STOP1", "STOP22"], "STOP1", "x"),
    (["a", "\n", "\n"], ["\n\n"], "\n\n", "a"),
    (["aaa", "ab"], ["aab"], "aab", "aa"),
    (["žž", "č"], ["žč"], "žč", "ž"),
]


@pytest.mark.parametrize(("pieces", "stops", "matched", "expected"), STOP_CASES)
def test_no_piece_of_a_matched_stop_string_is_ever_shown(
    tokenizer: Tokenizer, pieces: list[str], stops: list[str], matched: str, expected: str
) -> None:
    state = IncrementalDetokenizer(tokenizer, stop=stops)
    shown = []
    for piece in pieces[:-1]:
        state.append(byte_ids(tokenizer, piece.encode()))
        shown.append(state.text)
    state.finish(byte_ids(tokenizer, pieces[-1].encode()), matched=matched)
    assert state.text == expected
    assert all(expected.startswith(event) for event in shown)


@pytest.mark.parametrize("text", ["ABCDEFX", "DEFDEFGX!", "DEFGHI", "DDDDDEF"])
def test_a_near_miss_of_a_stop_string_is_released_whole(tokenizer: Tokenizer, text: str) -> None:
    shown = stream(IncrementalDetokenizer(tokenizer, stop=["DEFGHIJ"]), byte_ids(tokenizer, text.encode()))
    assert shown[-1] == text


def test_held_text_comes_with_the_next_event_that_denies_the_stop(tokenizer: Tokenizer) -> None:
    state = IncrementalDetokenizer(tokenizer, stop=["END"])
    state.append(byte_ids(tokenizer, b"the E"))
    assert state.text == "the "
    state.append(byte_ids(tokenizer, b"x"))
    assert state.text == "the Ex"


def test_no_stop_trim_keeps_the_stop_text_and_holds_nothing_back(tokenizer: Tokenizer) -> None:
    state = IncrementalDetokenizer(tokenizer, stop=["END"], no_stop_trim=True)
    state.append(byte_ids(tokenizer, b"the E"))
    assert state.text == "the E"
    state.finish(byte_ids(tokenizer, b"ND"), matched="END")
    assert state.text == "the END"


@pytest.mark.parametrize(("no_trim", "expected"), [(False, "hi"), (True, "hi!")])
def test_a_stop_token_is_cut_with_its_text_unless_it_is_to_be_kept(
    tokenizer: Tokenizer, no_trim: bool, expected: str
) -> None:
    ids = byte_ids(tokenizer, b"hi!")
    assert stream(IncrementalDetokenizer(tokenizer, no_stop_trim=no_trim), ids, ids[-1])[-1] == expected


def test_the_first_token_being_the_end_leaves_an_empty_text(tokenizer: Tokenizer) -> None:
    state = IncrementalDetokenizer(tokenizer)
    state.finish([tokenizer.eos_token_ids[0]], matched=tokenizer.eos_token_ids[0])
    assert state.text == ""


def test_special_tokens_are_shown_when_asked_for(tokenizer: Tokenizer) -> None:
    ids = [1, *byte_ids(tokenizer, b"x"), 2]
    state = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    assert stream(state, ids)[-1] == "<|im_start|>x<|im_end|>"
