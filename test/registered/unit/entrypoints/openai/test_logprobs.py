"""How tokens and their log-probabilities are written."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit-cpu")

import math

from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang.srt.entrypoints.openai.logprobs import (
    TextOffsets,
    TokenLogprobs,
    alternatives_map,
    chat_content,
    finite,
    read_native,
    token_text,
)
from sglang.srt.messages.io_struct import LOGPROB_FLOOR
from sglang.test.fakes.fake_manager import BOS, EOS, SPECIALS, TWIN_OF_A, ByteTokenizer

A = ord("a")


def test_a_part_of_a_character_is_spelled_by_its_bytes():
    """Read as U+FFFD, all such tokens would share one key of the map."""
    assert token_text(b"\xf0\x9f") == "bytes:\\xf0\\x9f" != token_text(b"\xf0\x9e")
    assert token_text("é".encode()) == "é"


def test_minus_infinity_reads_as_the_floor():
    """Case O30: JSON has no minus infinity, and a null would break arithmetic."""
    assert finite(-math.inf) == LOGPROB_FLOOR and finite(math.nan) == LOGPROB_FLOOR
    assert finite(None) is None and finite(-1.5) == -1.5
    meta = {"output_token_logprobs": [[-math.inf, 5, None]], "output_top_logprobs": [[[-math.inf, 6, None]]]}
    token = read_native(meta, "output")[0]
    assert token.logprob == LOGPROB_FLOOR and token.top == [(LOGPROB_FLOOR, 6)]


def test_two_tokens_of_one_text_are_both_kept_and_the_chosen_one_has_the_name():
    """Overwriting one with the other gives the wrong answer to "was this the greedy token?"."""
    tokenizer = ByteTokenizer()
    for chosen, other in ((A, TWIN_OF_A), (TWIN_OF_A, A)):
        for chosen_value, other_value in ((-1.0, -2.0), (-2.0, -1.0)):
            top = sorted([(chosen_value, chosen), (other_value, other)], reverse=True)
            found = alternatives_map(TokenLogprobs(token_id=chosen, logprob=chosen_value, top=top), tokenizer)
            assert found == {"a": chosen_value, f"token_id:{other}": other_value}
            assert max(found.values()) == -1.0


def test_of_two_alternatives_of_one_text_the_better_has_the_name():
    token = TokenLogprobs(token_id=98, logprob=-0.5, top=[(-0.5, 98), (-1.0, TWIN_OF_A), (-2.0, A)])
    assert alternatives_map(token, ByteTokenizer()) == {"b": -0.5, "a": -1.0, f"token_id:{A}": -2.0}


def test_the_chosen_token_is_listed_even_when_it_is_not_among_the_best():
    token = TokenLogprobs(token_id=98, logprob=-9.0, top=[(-0.5, 99)])
    found = alternatives_map(token, ByteTokenizer())
    assert found == {"c": -0.5, "b": -9.0} and next(iter(found)) == "c"


def test_the_chosen_float_is_the_same_wherever_it_stands():
    """Two computations of one number may differ in the last bit, and clients compare by equality."""
    off = math.nextafter(-0.1, 0)
    token = TokenLogprobs(token_id=98, logprob=-0.1, top=[(off, 98), (-3.0, 99)])
    assert alternatives_map(token, ByteTokenizer())["b"] == -0.1
    assert chat_content([token], ByteTokenizer())[0]["top_logprobs"][0]["logprob"] == -0.1


def test_the_native_lists_are_read_and_may_be_missing():
    meta = {
        "output_token_logprobs": [[-0.1, 1, None], [-0.2, 2, "x"]],
        "output_top_logprobs": [None, [[-0.2, 2, None]]],
    }
    read = read_native(meta, "output")
    assert [(t.token_id, t.top) for t in read] == [(1, []), (2, [(-0.2, 2)])]
    assert read_native({}, "input") == []


# A text that spells a special token becomes that token, whose place no text shows.
@settings(max_examples=150)
@given(st.text(max_size=20).filter(lambda text: not any(name in text for name in SPECIALS.values())))
def test_offsets_point_at_the_character_each_token_begins_in(text):
    tokenizer = ByteTokenizer()
    for spoken, ids in ((None, tokenizer.encode(text, False)), (text, tokenizer.encode(text))):
        counter = TextOffsets(tokenizer, text=spoken)
        offsets = [counter.next(i) for i in ids]
        assert offsets == sorted(offsets)
        at = 0
        for token_id, offset in zip(ids, offsets):
            if token_id == BOS:
                assert offset == 0
                continue
            assert text.encode()[at] == token_id
            assert len(text.encode()[:at].decode("utf-8", "ignore")) == offset
            at += 1


@settings(max_examples=150)
@example([b"\xed", b"\xa0", b"\x80"])  # a surrogate, for whose rest Python's codec waits
@given(st.lists(st.binary(min_size=1, max_size=3), max_size=8))
def test_offsets_hold_for_bytes_that_are_no_text(tokens):
    """A model may write anything; each broken byte run reads as one U+FFFD."""

    class Pieces:
        all_special_ids = ()
        utf8_errors = "replace"

        def token_bytes(self, token_id):
            return tokens[token_id]

        first_bytes = token_bytes

        def context_of(self, ids, skip_special_tokens=True):
            return []

    counter = TextOffsets(Pieces())
    before = b""
    for index, raw in enumerate(tokens):
        reached = (before + raw[:1]).decode("utf-8", "replace")
        assert counter.next(index) == len(reached) - 1
        before += raw


def test_a_space_that_only_the_tokenizer_sees_has_no_width():
    counter = TextOffsets(ByteTokenizer(), text="hi")
    assert [counter.next(i) for i in b" hi"] == [0, 0, 1]


def test_special_tokens_have_width_where_they_show():
    tokenizer = ByteTokenizer()
    shown = TextOffsets(tokenizer, skip_special_tokens=False)
    assert [shown.next(i) for i in (A, EOS, A)] == [0, 1, 5]
    skipped = TextOffsets(tokenizer, start=7)
    assert [skipped.next(i) for i in (A, EOS, A)] == [7, 8, 8]
    in_text = TextOffsets(tokenizer, text="a</s>a")
    assert [in_text.next(i) for i in (A, EOS, A)] == [0, 1, 5]
