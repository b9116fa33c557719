"""Characters over several tokens, stop strings over several tokens: exact tokens through every route."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=30, suite="server-cpu")

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from sglang.srt.tokenizer.tokenizer import Tokenizer, load_tokenizer
from sglang.test.fakes.fake_model import END, byte_pieces, write_fake_model
from sglang.test.server.openai_http import events
from sglang.test.server.server_fixture import RunningServer, running_server

#: Over 4, 2 and 3 tokens: an emoji, a Czech and a Thai letter; no byte stands in it twice.
CIRCLE = "!😀řก"
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
#: Bytes that are no text, in the middle of text and at its end.
BROKEN = b"#\xf1\x8f$\xfe\xf2"
#: Tokens of several letters: a stop string can begin and end inside them.
WORDS = (b"@", b" quick", b" brown", b" the", b" dog", END)
ROUTES = ["native", "chat", "completions"]
MARK = "\ufffd"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_fake_model(
        tmp_path_factory.mktemp("chain"),
        [*byte_pieces(CIRCLE), b"!"],
        [*byte_pieces(ALPHABET), END],
        [*byte_pieces(BROKEN), END],
        WORDS,
        chat_template="{{ messages[0]['content'] }}",
    )


@pytest.fixture(scope="module")
def tokenizer(folder: pathlib.Path) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def server(folder: pathlib.Path) -> Iterator[RunningServer]:
    with running_server(folder, "--dtype", "float32", "--max-total-tokens", "2000") as server:
        yield server


class Answer:
    """What a client has received: the text, the pieces it came in, the ids, the logprob tokens."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.ids: list[int] = []
        self.finish: Any = None
        self.matched: Any = None
        self.logprobs: list[Any] = []
        self.completion_tokens = 0

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def comparable(self) -> tuple[Any, ...]:
        """All but the numbers: their last bits depend on what was in the cache."""
        entries = [entry["token"] if isinstance(entry, dict) else entry for entry in self.logprobs]
        tokens = [
            entry[1] if isinstance(entry, list) else entry
            for entry in entries
            if not (isinstance(entry, tuple) and entry[0] == "token_logprobs")
        ]
        return self.text, self.ids, self.finish, self.matched, tokens, self.completion_tokens


def ask(server: RunningServer, route: str, prompt: str, *, stream: bool, **params: Any) -> Answer:
    """The same question through any route; `params` in OpenAI's words."""
    if route == "native":
        return ask_native(server, prompt, stream=stream, **params)
    body: dict[str, Any] = {"temperature": 0, "stream": stream, "return_token_ids": True, **params}
    if route == "chat":
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": prompt}]
        body["logprobs"] = True
    else:
        path, body["prompt"] = "/v1/completions", prompt
        body["logprobs"] = 0
    if stream:
        body["stream_options"] = {"include_usage": True}
    response = server.client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer = Answer()
    for chunk in events(response) if stream else [response.json()]:
        if chunk.get("usage"):
            answer.completion_tokens = chunk["usage"]["completion_tokens"]
        for choice in chunk["choices"]:
            assert answer.finish is None, "something follows the finish"
            if route == "chat":
                part = choice["delta"] if stream else choice["message"]
                answer.pieces.append(part.get("content") or "")
                answer.logprobs += (choice["logprobs"] or {}).get("content") or []
            else:
                answer.pieces.append(choice["text"])
                for name in ("tokens", "token_logprobs", "text_offset") if choice["logprobs"] else ():
                    answer.logprobs += [(name, value) for value in choice["logprobs"][name]]
            answer.ids += choice.get("token_ids") or []
            answer.finish, answer.matched = choice["finish_reason"], choice["matched_stop"]
    answer.logprobs.sort(key=lambda entry: isinstance(entry, tuple) and entry[0])
    return answer


def ask_native(server: RunningServer, prompt: str, *, stream: bool, **params: Any) -> Answer:
    names = {"max_tokens": "max_new_tokens"}
    sampling = {"temperature": 0.0} | {names.get(name, name): value for name, value in params.items()}
    response = server.generate(text=prompt, sampling_params=sampling, stream=stream, return_logprob=True)
    assert response.status_code == 200, response.text
    answer = Answer()
    for item in events(response) if stream else [response.json()]:
        assert item["text"].startswith(answer.text), "a cumulative text took something back"
        answer.pieces.append(item["text"][len(answer.text) :])
        answer.ids = item["output_ids"]
        reason = item["meta_info"]["finish_reason"] or {}
        answer.finish, answer.matched = reason.get("type"), reason.get("matched")
        answer.logprobs = item["meta_info"]["output_token_logprobs"]
        answer.completion_tokens = item["meta_info"]["completion_tokens"]
    return answer


@pytest.mark.parametrize("route", ROUTES)
def test_no_event_shows_half_a_character_wherever_the_answer_is_cut(
    server: RunningServer, tokenizer: Tokenizer, route: str
) -> None:
    forced = CIRCLE[1:] + CIRCLE
    for limit in range(1, 13):
        streamed = ask(server, route, "!", stream=True, max_tokens=limit)
        whole = ask(server, route, "!", stream=False, max_tokens=limit)
        assert streamed.comparable() == whole.comparable()
        assert tokenizer.token_bytes(streamed.ids[0]) == "😀".encode()[:1]
        assert (
            streamed.text
            == tokenizer.decode(streamed.ids)
            == forced.encode()[:limit].decode("utf-8", "replace")
        )
        # Only the last piece may show that the limit fell into a character.
        shown = [piece for piece in streamed.pieces if piece]
        assert not any(MARK in piece for piece in shown[:-1])
        assert streamed.finish == "length"
        assert len(streamed.ids) == streamed.completion_tokens == limit


@pytest.mark.parametrize("route", ROUTES)
def test_bytes_that_are_no_text_read_the_same_in_both_modes(
    server: RunningServer, tokenizer: Tokenizer, route: str
) -> None:
    streamed = ask(server, route, "#", stream=True, max_tokens=20)
    whole = ask(server, route, "#", stream=False, max_tokens=20)
    assert streamed.comparable() == whole.comparable()
    assert streamed.text == BROKEN[1:].decode("utf-8", "replace")
    assert streamed.finish == "stop"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("stop", "text", "matched"),
    [
        (["DEFGHIJ"], "", "DEFGHIJ"),
        (["GHIJ"], "DEF", "GHIJ"),
        (["GHIX", "GHIJ"], "DEF", "GHIJ"),
        (["GHIJKLM", "GHIJ", "IJKLMNOP"], "DEF", "GHIJ"),
        (["DEFGX"], ALPHABET[3:], None),
        (["Z!"], ALPHABET[3:], None),
        (["Z"], ALPHABET[3:-1], "Z"),
        ([".*", "D|E", "[D-F]+", "(", "\\w"], ALPHABET[3:], None),
        (["D"], "", "D"),
    ],
)
def test_no_character_of_a_stop_string_is_sent_and_a_near_miss_is(
    server: RunningServer, route: str, stop: list[str], text: str, matched: str | None
) -> None:
    streamed = ask(server, route, "ABC", stream=True, max_tokens=40, stop=stop)
    whole = ask(server, route, "ABC", stream=False, max_tokens=40, stop=stop)
    assert streamed.comparable() == whole.comparable()
    assert streamed.text == text
    assert streamed.finish == "stop"
    if matched is not None:
        assert streamed.matched == matched
    assert len(streamed.ids) == streamed.completion_tokens
    assert len(streamed.logprobs) == len(streamed.ids) * (3 if route == "completions" else 1)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("stop", "text"), [("ck br", " qui"), ("own the d", " quick br"), ("the dot", None)])
def test_a_stop_string_begins_and_ends_inside_tokens(
    server: RunningServer, route: str, stop: str, text: str | None
) -> None:
    streamed = ask(server, route, "@", stream=True, max_tokens=10, stop=[stop])
    assert (
        streamed.comparable()
        == ask(server, route, "@", stream=False, max_tokens=10, stop=[stop]).comparable()
    )
    assert streamed.text == (" quick brown the dog" if text is None else text)
    kept = ask(server, route, "@", stream=True, max_tokens=10, stop=[stop], no_stop_trim=True)
    # With the stop text kept, the token that completed it is there whole.
    assert text is None or (kept.text.startswith(text + stop) and kept.ids == streamed.ids)


@pytest.mark.parametrize("route", ROUTES)
def test_a_stop_string_of_characters_over_several_tokens(server: RunningServer, route: str) -> None:
    for stop, text in (("ř", "😀"), ("😀ř", ""), ("řก!😀", "😀"), ("กx", None)):
        streamed = ask(server, route, "!", stream=True, max_tokens=20, stop=[stop])
        whole = ask(server, route, "!", stream=False, max_tokens=20, stop=[stop])
        assert streamed.comparable() == whole.comparable()
        assert streamed.text == text if text is not None else streamed.text.startswith("😀řก!😀řก!")


def test_incremental_events_join_to_the_whole_answer(folder: pathlib.Path, server: RunningServer) -> None:
    flags = ["--dtype", "float32", "--max-total-tokens", "2000", "--incremental-streaming-output"]
    body: dict[str, Any] = {
        "text": ["!", "ABC"],
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 9, "stop": ["GHI"]},
        "return_logprob": True,
        "top_logprobs_num": 2,
        "logprob_start_len": 0,
    }
    whole = server.generate(**body).json()
    with running_server(folder, *flags) as incremental:
        response = incremental.generate(**body, stream=True)
        items = events(response)
        assert {"text", "output_ids"} <= set(items[0])
        for index, answer in enumerate(whole):
            mine = [event for event in items if event["index"] == index]
            assert mine  # their number is the pace of the server: a late one joins tokens
            assert "".join(event["text"] for event in mine) == answer["text"]
            assert [i for event in mine for i in event["output_ids"]] == answer["output_ids"]
            # The last bits depend on who shared the batch, so numbers are compared by their count.
            for name in ("output_token_logprobs", "output_top_logprobs"):
                joined = [entry for event in mine for entry in event["meta_info"][name]]
                assert len(joined) == len(answer["meta_info"][name]) == len(answer["output_ids"])
            told = [entry[1] for event in mine for entry in event["meta_info"]["output_token_logprobs"]]
            assert told == answer["output_ids"]
            prompt = [entry[1] for entry in answer["meta_info"]["input_token_logprobs"]]
            assert [entry[1] for entry in mine[0]["meta_info"]["input_token_logprobs"]] == prompt
