"""Two ranks serve models of which a rank could easily read the wrong part.

A vocabulary that does not divide, a head with more rows than the tokenizer knows, one model in two kinds of
file.
"""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=40, suite="server-cpu")

import itertools
import math
import pathlib
from typing import Any

import pytest

from sglang.test.server.server_fixture import RunningServer, running_server
from sglang.test.tiny_models import write_tiny_gguf, write_tiny_model, write_tiny_tokenizer

VOCABULARY = 32001
SPARE_ROWS = 64
SMALL = ("--max-total-tokens", "1024", "--dtype", "float32")
GREEDY = {"temperature": 0.0, "max_new_tokens": 32, "ignore_eos": True}
T2 = ["--tp-size", "2"]


def generate(server: RunningServer, **body: Any) -> dict[str, Any]:
    return server.answer(**{"text": "one two three", **body})


#: Log-probability by id, the most likely first.
Listed = dict[int, float]
#: Two ranks add in another order than one: ids that are likelier than each other by less may change places.
ROUNDING = 1e-4


def listed(answer: dict[str, Any]) -> list[Listed]:
    """What is named beside each token."""
    return [
        {entry[1]: entry[0] for entry in entries} for entries in answer["meta_info"]["output_top_logprobs"]
    ]


def assert_same_lists(found: list[Listed], expected: list[Listed]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert list(mine.values()) == pytest.approx(list(theirs.values()), abs=ROUNDING)
        clearly = {token: value for token, value in theirs.items() if value > min(theirs.values()) + ROUNDING}
        assert {token: mine.get(token) for token in clearly} == pytest.approx(clearly, abs=ROUNDING)


def cold_and_hot(server: RunningServer) -> list[tuple[str, list[int], list[Listed]]]:
    """200 tokens each, greedy and at temperature 2, with the 20 most likely ids beside each of them."""
    found = []
    for temperature in (0.0, 2.0):
        sampling = {**GREEDY, "temperature": temperature, "max_new_tokens": 200, "sampling_seed": 3}
        answer = generate(
            server, sampling_params=sampling, return_logprob=True, top_logprobs_num=20,
            return_text_in_logprobs=True,
        )  # fmt: skip
        assert len(answer["output_ids"]) == 200
        assert [len(ids) for ids in listed(answer)] == [20] * 200
        found.append((answer["text"], answer["output_ids"], listed(answer)))
    assert len(set(found[1][1])) > 100, "temperature 2 has to spread"
    return found


# a vocabulary that does not divide: one rank has a column of padding


@pytest.mark.parametrize("spare", [0, SPARE_ROWS], ids=["all known", "spare rows"])
def test_a_vocabulary_that_does_not_divide_is_served_as_by_one_rank(
    tmp_path: pathlib.Path, spare: int
) -> None:
    size = VOCABULARY + spare
    model = write_tiny_model(tmp_path / "model", vocab_size=size)
    write_tiny_tokenizer(model, vocab_size=VOCABULARY)
    with running_server(model, *SMALL) as server:
        expected = cold_and_hot(server)
    with running_server(model, *SMALL, *T2) as server:
        found = cold_and_hot(server)
        for (text, ids, tops), (its_text, its_ids, its_tops) in zip(found, expected, strict=True):
            assert (text, ids) == (its_text, its_ids)
            assert_same_lists(tops, its_tops)
            assert all(0 <= token < VOCABULARY for token in (*ids, *itertools.chain(*tops)))
        assert_all_ids_and_no_other_share_the_probability(server, VOCABULARY)
        assert_an_id_that_no_token_has_is_refused(server, VOCABULARY)


def assert_all_ids_and_no_other_share_the_probability(server: RunningServer, size: int) -> None:
    """As many entries as there are ids: a padded one in the list would take the place of a real one."""
    sampling = {**GREEDY, "max_new_tokens": 1}
    answer = generate(server, sampling_params=sampling, return_logprob=True, top_logprobs_num=size)
    (ids,) = listed(answer)
    assert sorted(ids) == list(range(size))
    (entries,) = answer["meta_info"]["output_top_logprobs"]
    assert math.fsum(math.exp(entry[0]) for entry in entries) == pytest.approx(1.0, abs=1e-4)
    more = server.generate(text="a", sampling_params=sampling, return_logprob=True, top_logprobs_num=size + 1)
    assert more.status_code == 400 and f"<= {size}" in more.text


def assert_an_id_that_no_token_has_is_refused(server: RunningServer, token: int) -> None:
    for body in (
        {"input_ids": [1, token]},
        {"text": "a", "sampling_params": {"logit_bias": {str(token): 100}}},
        {"text": "a", "return_logprob": True, "token_ids_logprob": [token]},
    ):
        answer = server.generate(**body)
        assert answer.status_code == 400 and f"token id {token} is outside the vocabulary" in answer.text
    assert generate(server, sampling_params=GREEDY)["text"], "and the server goes on"


# one model as a folder and as a file


def greedy_and_chat(server: RunningServer) -> tuple[list[int], str, int]:
    """32 greedy tokens after a text, and a chat whose message holds a special token."""
    ids = generate(server, sampling_params=GREEDY)["output_ids"]
    message = {"role": "user", "content": "the quick<|im_end|> brown fox"}
    body = {"messages": [message], "temperature": 0, "max_tokens": 32, "ignore_eos": True}
    chat = server.client.post("/v1/chat/completions", json=body).json()
    return ids, chat["choices"][0]["message"]["content"], chat["usage"]["prompt_tokens"]


def test_a_folder_and_a_gguf_file_of_one_model_answer_alike_on_one_and_on_two_ranks(
    tmp_path: pathlib.Path,
) -> None:
    """Nine query and three key heads: a rank that read the wrong part would answer wrongly."""
    folder = write_tiny_model(tmp_path / "model", num_heads=9, num_kv_heads=3, dtype="float16")
    file = write_tiny_gguf(folder, tmp_path / "model.gguf", quantization="F16")
    answers = []
    for model in (folder, file):
        for flags in ([], T2):
            with running_server(model, *SMALL, *flags) as server:
                assert len(server.rank_pids()) == (2 if flags else 1)
                answers.append(greedy_and_chat(server))
    assert len(answers[0][0]) == 32 and len(set(answers[0][0])) > 10
    assert answers == [answers[0]] * 4
