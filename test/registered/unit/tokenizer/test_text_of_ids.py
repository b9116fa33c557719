"""Text made of ids, for every kind of tokenizer: what an answer adds to its prompt, by token and whole."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="unit-cpu")

import codecs
import json
import pathlib
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from sglang.srt.entrypoints.openai.logprobs import TextOffsets
from sglang.srt.managers.tokenizer_components.incremental_detokenizer import IncrementalDetokenizer
from sglang.srt.tokenizer.id_reader import REPLACEMENT
from sglang.srt.tokenizer.tokenizer import Tokenizer, load_tokenizer
from sglang.test.text_tokenizers import KINDS, sentencepiece_vocabulary, write_text_tokenizer

ALL_KINDS = ["byte-level", *KINDS, "gguf-llama"]
WITH_CONTEXT = [kind for kind in ALL_KINDS if kind != "byte-level"]
#: Enough for any word of the tests; real ids are drawn below it.
BOS, IM_START, IM_END = 0, 1, 2


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("kinds")
    known: dict[str, Tokenizer] = {}

    def load(kind: str) -> Tokenizer:
        if kind not in known:
            path = folder / kind
            known[kind] = load_tokenizer(
                write_llama_gguf(folder / "llama.gguf")
                if kind == "gguf-llama"
                else write_text_tokenizer(path, kind)
            )
        return known[kind]

    return load


def write_llama_gguf(path: pathlib.Path) -> pathlib.Path:
    """The byte-fallback vocabulary as a GGUF file writes it: scores in place of merges."""
    tokens, merges = sentencepiece_vocabulary()
    ranks = {left + right: -float(rank) for rank, (left, right) in reversed([*enumerate(merges)])}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([ranks.get(token, -1e3) for token in tokens])
    writer.add_token_types([3, 3, 3, 2, *[6] * 256, *[1] * (len(tokens) - 260)])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(IM_END)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def ids_of(tokenizer: Tokenizer, *pieces: bytes) -> list[int]:
    """The tokens that add these bytes in the middle of a text."""
    by_bytes = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.num_ids))}
    return [by_bytes[piece] for piece in pieces]


def closed(tokenizer: Tokenizer, prompt: list[int], skip: bool) -> list[int]:
    """The prompt without a character that it begins and does not end: nothing can be added to half of one."""
    hidden = tokenizer.all_special_ids if skip else []
    ids = [token_id for token_id in prompt if token_id not in hidden]
    utf8, end = codecs.getincrementaldecoder("utf-8")("replace"), 0
    for place, token_id in enumerate(ids, 1):
        utf8.decode(tokenizer.token_bytes(token_id))
        end = end if utf8.getstate()[0] else place
    return ids[:end]


def streamed(state: IncrementalDetokenizer, groups: list[list[int]]) -> list[str]:
    shown = []
    for group in groups[:-1]:
        state.append(group)
        shown.append(state.text)
    state.finish(groups[-1])
    return [*shown, state.text]


def added(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool) -> str:
    """What the output adds to the text of the prompt: the rule, word for word."""
    before = tokenizer.decode(prompt, skip)
    together = tokenizer.decode(prompt + output, skip)
    assert together.startswith(before)
    return together[len(before) :]


@st.composite
def prompts_and_outputs(draw: st.DrawFn, num_ids: int) -> tuple[list[int], list[list[int]]]:
    ids = st.integers(0, num_ids - 1)
    # Ids that read differently at a border come often: special tokens, a lone space, bytes.
    prompt = draw(st.lists(ids | st.sampled_from([0, 1, 2]), min_size=1, max_size=40))
    groups = draw(
        st.lists(st.lists(ids | st.sampled_from([1, 2]), min_size=1, max_size=5), min_size=1, max_size=25)
    )
    return prompt, groups


@pytest.mark.parametrize("kind", ALL_KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_stream_ends_as_the_text_of_prompt_and_output_behind_that_of_the_prompt(
    tokenizer_of: Any, kind: str, data: st.DataObject
) -> None:
    """Whatever the ids are and however they come: spaces at the border are neither lost nor made up."""
    tokenizer = tokenizer_of(kind)
    prompt, groups = data.draw(prompts_and_outputs(tokenizer.num_ids))
    skip = data.draw(st.booleans())
    shown = streamed(IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip), groups)
    for before, after in zip(["", *shown], shown):
        assert after.startswith(before), "shown text was taken back"
    output = [token_id for group in groups for token_id in group]
    assert shown[-1] == added(tokenizer, closed(tokenizer, prompt, skip), output, skip)


@pytest.mark.parametrize("kind", ALL_KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_sound_text_reads_as_the_library_reads_it(
    tokenizer_of: Any, kind: str, data: st.DataObject
) -> None:
    """Our decode differs from the library's in one thing only: broken bytes."""
    tokenizer = tokenizer_of(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.num_ids - 1), max_size=40))
    for skip in (True, False):
        theirs = tokenizer._backend.decode(ids, skip_special_tokens=skip)
        if REPLACEMENT not in theirs or kind == "byte-level":
            assert tokenizer.decode(ids, skip) == theirs


@pytest.mark.parametrize("kind", WITH_CONTEXT)
def test_an_answer_that_begins_with_a_word_keeps_the_space_before_it(tokenizer_of: Any, kind: str) -> None:
    """`Hello` and `world again!` must not read `Helloworld again!`: echo and clients join the two."""
    assert answer_to_hello(tokenizer_of(kind)) == [" world", " world again"]


def answer_to_hello(tokenizer: Tokenizer, *more: int) -> list[str]:
    """The texts that a stream of ` world again` shows behind `Hello` and `more` tokens."""
    prompt = tokenizer.encode("Hello")
    output = [[token_id] for token_id in tokenizer.encode("Hello world again")[len(prompt) :]]
    return streamed(IncrementalDetokenizer(tokenizer, [*prompt, *more]), output)


@pytest.mark.parametrize("kind", WITH_CONTEXT)
def test_a_crowd_of_hidden_tokens_does_not_hide_the_text_before_it(tokenizer_of: Any, kind: str) -> None:
    """A look at the last few tokens only would find nothing, and take the answer for the begin of a text."""
    for count in (1, 7, 8, 9, 200):
        assert answer_to_hello(tokenizer_of(kind), *[IM_END] * count) == [" world", " world again"]


@pytest.mark.parametrize("kind", WITH_CONTEXT)
def test_a_detokenizer_that_does_not_see_the_prompt_would_be_noticed(
    tokenizer_of: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin of the test above: the fault that it is for."""
    tokenizer = tokenizer_of(kind)
    monkeypatch.setattr(tokenizer, "context_of", lambda ids, skip_special_tokens=True: [])
    assert answer_to_hello(tokenizer) == ["world", "world again"]


@pytest.mark.parametrize("kind", WITH_CONTEXT)
def test_an_answer_to_a_prompt_that_shows_nothing_begins_the_text(tokenizer_of: Any, kind: str) -> None:
    """The first word of a text has no space before it, also where only a hidden BOS stands there."""
    tokenizer = tokenizer_of(kind)
    output = [[i] for i in tokenizer.encode("Hello world", add_special_tokens=False)]
    assert streamed(IncrementalDetokenizer(tokenizer, [BOS]), output)[-1] == "Hello world"
    kept = IncrementalDetokenizer(tokenizer, [BOS], skip_special_tokens=False)
    assert streamed(kept, output)[-1] == " Hello world"


def test_a_byte_level_answer_does_not_depend_on_its_prompt(tokenizer_of: Any) -> None:
    tokenizer = tokenizer_of("byte-level")
    assert tokenizer.context_of(list(range(400))) == []
    ids = ids_of(tokenizer, b"\x98", b"\x80", b" ", b"w")  # bytes that could end a character of the prompt
    half = ids_of(tokenizer, b"\xf0", b"\x9f")
    assert streamed(IncrementalDetokenizer(tokenizer, half), [ids])[-1] == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["byte-fallback", "gguf-llama"])
def test_characters_of_byte_tokens_are_shown_whole_and_stay(tokenizer_of: Any, kind: str) -> None:
    """The library gives up a run of byte tokens for one byte that is missing yet: 漢字 streamed as marks."""
    tokenizer = tokenizer_of(kind)
    text = "漢字🙂ñ"
    ids = ids_of(tokenizer, *(bytes([byte]) for byte in text.encode()))
    shown = streamed(IncrementalDetokenizer(tokenizer, tokenizer.encode("A")), [[i] for i in ids])
    assert shown[-1] == text and not any(REPLACEMENT in event for event in shown)
    assert tokenizer._backend.decode(ids[:4]) == REPLACEMENT * 4, "the library has learnt it: drop ours"
    # Cut in the last character: the whole ones before it stay, and each byte of it reads as one mark.
    cut = streamed(IncrementalDetokenizer(tokenizer, tokenizer.encode("A")), [[i] for i in ids[:8]])
    assert cut[-1] == "漢字" + REPLACEMENT * 2 == tokenizer.decode(ids[:8])


@pytest.mark.parametrize("kind", WITH_CONTEXT)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_offsets_are_where_the_text_of_each_token_begins(
    tokenizer_of: Any, kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizer_of(kind)
    prompt, groups = data.draw(prompts_and_outputs(tokenizer.num_ids))
    skip = data.draw(st.booleans())
    output = [token_id for group in groups for token_id in group]
    prompt = closed(tokenizer, prompt, skip)
    counter = TextOffsets(tokenizer, before=prompt, skip_special_tokens=skip)
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    for place, token_id in enumerate(output):
        offset = counter.next(token_id)
        if skip and token_id in tokenizer.all_special_ids:
            continue
        raw = tokenizer.token_bytes(token_id)
        begins_inside = utf8.getstate()[0] and 0x80 <= raw[0] < 0xC0
        if not begins_inside:
            assert offset == len(added(tokenizer, prompt, output[:place], skip))
        utf8.decode(raw)


@pytest.mark.parametrize("kind", WITH_CONTEXT)
def test_texts_of_tokens_join_to_what_an_answer_adds(tokenizer_of: Any, kind: str) -> None:
    """Clients join the tokens of log-probabilities and expect the answer."""
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode("Hello world again", add_special_tokens=False)
    assert "".join(map(tokenizer.token_text, ids[1:])) == " world again"
    assert b"".join(map(tokenizer.token_bytes, ids[1:])) == b" world again"
    assert tokenizer.token_bytes(tokenizer.num_ids) == b"" and tokenizer.token_bytes(-1) == b""


# --- tokenizers that cannot be served


def write_backend(folder: pathlib.Path, decoder: Any, vocab: dict[str, int]) -> pathlib.Path:
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="x"))
    if decoder is not None:
        backend.decoder = decoder
    backend.save(str(folder / "tokenizer.json"))
    return folder


def test_a_tokenizer_of_speech_is_refused_with_the_cure(tmp_path: pathlib.Path) -> None:
    """Its decoder drops a repeated token, so text that was sent would have to be taken back."""
    with pytest.raises(ValueError, match=r"of kind CTC.*--tokenizer-path") as caught:
        load_tokenizer(write_backend(tmp_path, decoders.CTC(), {"x": 0}))
    assert str(tmp_path) in str(caught.value)


def test_a_vocabulary_of_nothing_is_refused_with_the_cure(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"the vocabulary of the tokenizer is empty.*--tokenizer-path"):
        load_tokenizer(write_backend(tmp_path, None, {}))


def test_a_decoder_that_fails_on_one_token_is_refused_at_the_load(tmp_path: pathlib.Path) -> None:
    """It panics inside the library, which `except Exception` lets through: the receiving task would end."""
    folder = write_backend(tmp_path, decoders.Strip(" ", 0, 3), {"long enough": 0, "x": 1, " ": 2})
    with pytest.raises(
        ValueError, match=r"cannot make text of its tokens.*mend the decoder in tokenizer.json"
    ):
        load_tokenizer(folder)


def test_a_word_that_no_token_stands_for_is_the_callers_mistake(tmp_path: pathlib.Path) -> None:
    """Without a token for unknown words the library raises a bare Exception, which would be a 500."""
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="none"))
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "a"}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("a") == [0]
    with pytest.raises(ValueError, match="cannot be written in the tokens of this model"):
        tokenizer.encode("b")
