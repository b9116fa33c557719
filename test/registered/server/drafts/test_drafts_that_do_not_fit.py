"""A draft that does not fit is refused before a process starts, in one sentence; its neighbour is served."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=40, suite="server-cpu")

import json
import pathlib

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.test.server.server_fixture import running_server, serve_to_the_end
from sglang.test.tiny_drafts import write_random_draft
from sglang.test.tiny_models import tiny_vocabulary, write_tiny_model

VOCABULARY = 1512
#: Two tokens that the draft of `swapped` has the other way round.
FIRST, SECOND = 400, 410
TOKENS = list(tiny_vocabulary(VOCABULARY)[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The model, and drafts of which each is wrong for it in one thing."""
    root = tmp_path_factory.mktemp("models")
    model = write_tiny_model(root / "model", num_layers=6, vocab_size=VOCABULARY)
    write_tiny_model(root / "smaller", vocab_size=VOCABULARY - 1000)
    write_tiny_model(root / "shorter", vocab_size=VOCABULARY, max_position_embeddings=64)
    write_tiny_model(root / "swapped", vocab_size=VOCABULARY)
    swap_tokens(root / "swapped" / "tokenizer.json")
    write_random_draft(root / "eagle", model, "eagle")
    write_random_draft(root / "reduced", model, "eagle3", draft_vocab_size=200)
    wide = write_tiny_model(root / "wide", num_layers=6, vocab_size=VOCABULARY, hidden_size=128)
    write_random_draft(root / "wider", wide, "eagle3")
    return root


def swap_tokens(file: pathlib.Path) -> None:
    """Give two tokens of a tokenizer each other's ids."""
    content = json.loads(file.read_text(encoding="utf-8"))
    content["model"]["vocab"] |= {TOKENS[FIRST]: SECOND, TOKENS[SECOND]: FIRST}
    file.write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize(
    ("algorithm", "draft", "words"),
    [
        ("EAGLE3", None, ["--speculative-algorithm EAGLE3 needs a draft", "--speculative-draft-model-path"]),
        ("NGRAM", "eagle", ["--speculative-draft-model-path has no effect with NGRAM"]),
        (
            "EAGLE3",
            "absent",
            ["--speculative-draft-model-path", "absent", "give the folder of an EAGLE3 draft"],
        ),
        ("EAGLE3", "eagle", ["LlamaForCausalLMEagle,", "use --speculative-algorithm EAGLE,"]),
        ("STANDALONE", "reduced", ["LlamaForCausalLMEagle3,", "--speculative-algorithm EAGLE3"]),
        ("EAGLE3", "wider", ["hidden_size is 128", "has 64", "--speculative-draft-model-path"]),
        ("STANDALONE", "shorter", ["reads 64 tokens, and the model 512", "--context-length"]),
        ("STANDALONE", "smaller", ["knows 512 tokens", "knows 1512", "--speculative-draft-model-path"]),
        (
            "STANDALONE",
            "swapped",
            [
                f"--speculative-draft-model-path: token {FIRST} is {TOKENS[SECOND]!r} for the draft",
                f"{TOKENS[FIRST]!r} for the model",
            ],
        ),
    ],
)
def test_the_command_line_ends_with_one_sentence_that_names_the_cure(
    folder: pathlib.Path, algorithm: str, draft: str | None, words: list[str]
) -> None:
    """Served all the same, each of them would draft nonsense for ever, or fail with the first request."""
    flags = [] if draft is None else ["--speculative-draft-model-path", str(folder / draft)]
    done = serve_to_the_end(
        *("--model-path", str(folder / "model"), "--port", "0"), "--speculative-algorithm", algorithm, *flags
    )
    assert done.returncode == 1, done.stderr
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("error: ")
    for word in words:
        assert word in sentence


def test_a_draft_with_a_padded_head_and_a_shorter_reach_serves_the_answers_of_the_model(
    folder: pathlib.Path,
) -> None:
    """Rows behind the last token are no other vocabulary. Beyond its reach the draft guesses, and only that.

    The same weights as the model's, so within its reach every proposal is right.
    """
    draft = write_tiny_model(folder / "padded", num_layers=6, vocab_size=VOCABULARY)
    config = json.loads((draft / "config.json").read_text())
    config |= {"vocab_size": VOCABULARY + 64, "max_position_embeddings": 64}
    (draft / "config.json").write_text(json.dumps(config))
    weights = load_file(draft / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        # The padding is larger than any token's row: it would be proposed first.
        weights[name] = torch.cat([weights[name], torch.full((64, 64), 9.0)])
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
    greedy = {"temperature": 0.0, "ignore_eos": True}
    bodies = [
        {"input_ids": list(range(3, 23)), "sampling_params": {**greedy, "max_new_tokens": 25}},
        {"input_ids": list(range(3, 43)), "sampling_params": {**greedy, "max_new_tokens": 100}},
        {"input_ids": list(range(3, 73)), "sampling_params": {**greedy, "max_new_tokens": 30}},
        # Up to the last position of the model, where no round has room behind it.
        {"input_ids": list(range(3, 503)), "sampling_params": {**greedy, "max_new_tokens": 12}},
    ]
    small = ("--dtype", "float32", "--max-total-tokens", "2048")
    with running_server(folder / "model", *small) as server:
        expected = [server.answer(**body)["output_ids"] for body in bodies]
    flags = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(draft))
    with running_server(
        folder / "model", *small, *flags, SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN="1"
    ) as server:
        found = [server.answer(**body) for body in bodies]
        assert [item["output_ids"] for item in found] == expected
        assert found[0]["meta_info"]["spec_correct_drafts_histogram"] == [0, 0, 0, 6]
        assert "Traceback" not in server.log()
