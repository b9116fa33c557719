"""Tokenizers that are not byte-level: exact texts through every route, and special tokens as stop strings."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=60, suite="server-cpu")

import concurrent.futures
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models

import sglang as sgl
from sglang.srt.tokenizer.tokenizer import Tokenizer, load_tokenizer
from sglang.test.fakes.fake_model import END, write_fake_model
from sglang.test.server.openai_http import CHAT, COMPLETIONS, answer, choices_of, stream
from sglang.test.server.server_fixture import RunningServer, running_server
from sglang.test.text_tokenizers import write_text_tokenizer
from sglang.test.tiny_models import write_tiny_model

STOP_WORD = "<|im_start|>"
FLAGS = ["--dtype", "float32", "--max-total-tokens", "2000"]
#: What follows a prompt that ends in "Hello"; the special token in the middle is skipped in the text.
BEFORE, BEHIND = " world again A", " the end"


@pytest.fixture(scope="module", params=["word-level", "byte-fallback", "unigram"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    words = [b" Hello", b" world", b" again", b" A", STOP_WORD, b" the", b" end", END]
    template = "{{ messages[0]['content'] }}"
    return write_fake_model(
        tmp_path_factory.mktemp("model"),
        words,
        write_tokenizer=lambda path: write_text_tokenizer(path, request.param, chat_template=template),
    )


@pytest.fixture(scope="module")
def tokenizer(folder: pathlib.Path) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def server(folder: pathlib.Path) -> Iterator[RunningServer]:
    with running_server(folder, *FLAGS) as server:
        yield server


def asked(route: str, **params: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 20, **params}
    if route == CHAT:
        return body | {"messages": [{"role": "user", "content": "Hello"}]}
    return {"prompt": "Hello"} | body


def told(route: str, server: RunningServer, **params: Any) -> list[tuple[str, Any, Any]]:
    """Text, finish reason and matched stop of the whole answer and of the stream."""
    body = asked(route, **params)
    choice = answer(server.client, route, **body)["choices"][0]
    whole = choice["message"]["content"] if route == CHAT else choice["text"]
    pieces = choices_of(stream(server.client, route, **body))
    joined = "".join(piece["delta"]["content"] if route == CHAT else piece["text"] for piece in pieces)
    return [
        (text, end["finish_reason"], end["matched_stop"])
        for text, end in ((whole, choice), (joined, pieces[-1]))
    ]


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_a_stream_and_a_whole_answer_keep_the_space_behind_the_prompt(
    server: RunningServer, tokenizer: Tokenizer, route: str
) -> None:
    """Such a stream ended the server, and Llama 2's first word was glued to the prompt."""
    assert told(route, server) == [(BEFORE + BEHIND, "stop", tokenizer.eos_token_ids[0])] * 2


def test_the_native_route_tells_the_same(server: RunningServer) -> None:
    params = {"temperature": 0, "max_new_tokens": 20}
    fields: dict[str, Any] = {"return_logprob": True, "return_text_in_logprobs": True}
    found = server.generate(text="Hello", sampling_params=params, **fields).json()
    assert found["text"] == BEFORE + BEHIND
    shown = [entry[2] for entry in found["meta_info"]["output_token_logprobs"]]
    assert "".join(text for text in shown if "<|" not in text) == BEFORE + BEHIND


def test_echo_joins_prompt_and_answer_and_offsets_point_into_it(server: RunningServer) -> None:
    body = asked(COMPLETIONS, echo=True, logprobs=1, max_tokens=3)
    choice = answer(server.client, COMPLETIONS, **body)["choices"][0]
    text, logprobs = choice["text"], choice["logprobs"]
    assert text == "Hello" + BEFORE
    assert logprobs["text_offset"] == [0, 5, 11, 17]
    assert "".join(logprobs["tokens"][1:]) == BEFORE
    for token, offset in list(zip(logprobs["tokens"], logprobs["text_offset"]))[1:]:
        assert text.startswith(token, offset)
    pieces = choices_of(stream(server.client, COMPLETIONS, **body))
    assert "".join(piece["text"] for piece in pieces) == text
    told = [at for piece in pieces for at in (piece["logprobs"] or {"text_offset": []})["text_offset"]]
    assert told == logprobs["text_offset"]


@pytest.mark.parametrize("no_trim", [False, True])
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_a_stop_word_that_is_a_special_token_ends_the_answer_there(
    server: RunningServer, tokenizer: Tokenizer, route: str, no_trim: bool
) -> None:
    """Special tokens are skipped in the text, so no text ever held it, and the answer ran on."""
    for stop in (STOP_WORD, ["nowhere", STOP_WORD]):
        hidden = told(route, server, stop=stop, no_stop_trim=no_trim)
        assert hidden == [(BEFORE, "stop", STOP_WORD)] * 2
        shown = told(route, server, stop=stop, no_stop_trim=no_trim, skip_special_tokens=False)
        space = tokenizer.token_text(1).removesuffix(STOP_WORD)  # some decoders join all tokens by spaces
        assert shown == [(BEFORE + space + STOP_WORD * no_trim, "stop", STOP_WORD)] * 2


def test_the_token_of_a_stop_word_is_counted_and_n_samples_end_alike(server: RunningServer) -> None:
    body = asked(COMPLETIONS, stop=[STOP_WORD, END], n=2, return_token_ids=True)
    found = answer(server.client, COMPLETIONS, **body)
    assert [choice["matched_stop"] for choice in found["choices"]] == [STOP_WORD] * 2
    assert [choice["token_ids"][-1] for choice in found["choices"]] == [1, 1]
    assert found["usage"]["completion_tokens"] == 8


def test_neighbours_of_every_kind_are_answered_at_once(server: RunningServer) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        asks = [asked(COMPLETIONS, **({"stop": STOP_WORD} if number % 2 else {})) for number in range(16)]
        found = list(pool.map(lambda body: answer(server.client, COMPLETIONS, **body), asks))
    texts = [one["choices"][0]["text"] for one in found]
    assert texts == [BEFORE + BEHIND, BEFORE] * 8


def test_an_engine_answers_like_a_server(folder: pathlib.Path) -> None:
    with sgl.Engine(model_path=str(folder), dtype="float32", max_total_tokens=2000) as engine:
        params = {"temperature": 0, "max_new_tokens": 20}
        assert engine.generate("Hello", params)["text"] == BEFORE + BEHIND
        for found in (
            engine.generate("Hello", {**params, "stop": STOP_WORD}),
            list(engine.generate("Hello", {**params, "stop": [STOP_WORD]}, stream=True))[-1],
        ):
            assert found["text"] == BEFORE
            assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": STOP_WORD}


# what cannot be served


def test_a_tokenizer_that_makes_no_text_is_refused_at_the_start(tmp_path: pathlib.Path) -> None:
    """One sentence with the file and the cure, and not at the first stream."""
    model = write_tiny_model(tmp_path / "model", chat_template=None)
    backend = tokenizers.Tokenizer(models.WordLevel({"the": 0, "x": 1}, unk_token="x"))
    backend.decoder = decoders.CTC()
    backend.save(str(model / "tokenizer.json"))
    with running_server(model, *FLAGS, wait=False) as server:
        assert server.wait_exit() == 1
        log = server.log()
    assert f"{model}: the decoder of the tokenizer is of kind CTC" in log
    assert "--tokenizer-path" in log


def test_a_vocabulary_without_a_word_of_the_self_test_starts(tmp_path: pathlib.Path) -> None:
    """No token for unknown words: the self-test's own text cannot be written, and other texts can."""
    model = write_tiny_model(tmp_path / "model", chat_template=None)
    backend = tokenizers.Tokenizer(models.WordLevel({f"w{i}": i for i in range(512)}, unk_token="none"))
    backend.save(str(model / "tokenizer.json"))
    with running_server(model, *FLAGS) as server:
        found = answer(server.client, COMPLETIONS, prompt="w5", max_tokens=4)
        assert found["choices"][0]["text"].startswith(" w")
        refused = server.client.post(COMPLETIONS, json={"prompt": "unknown"})
        assert refused.status_code == 400 and "cannot be written" in refused.json()["message"]
