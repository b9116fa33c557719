"""A whole model drafts for another only where the same ids mean the same tokens."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import json

import pytest

from sglang.srt.tokenizer.draft_vocabulary import check_same_tokens
from sglang.srt.tokenizer.tokenizer import load_tokenizer
from sglang.test.tiny_models import write_tiny_gguf, write_tiny_model, write_tiny_tokenizer

SIZE = 400


@pytest.fixture
def tokenizer(tmp_path):
    """The tokenizer of a folder, with two ids of its file exchanged where they are given."""

    def build(name, *, size=SIZE, swapped=()):
        folder = tmp_path / name
        folder.mkdir()
        write_tiny_tokenizer(folder, vocab_size=size)
        if swapped:
            file = folder / "tokenizer.json"
            content = json.loads(file.read_text(encoding="utf-8"))
            vocabulary = content["model"]["vocab"]
            by_id = {index: token for token, index in vocabulary.items()}
            first, second = swapped
            vocabulary[by_id[first]], vocabulary[by_id[second]] = second, first
            file.write_text(json.dumps(content), encoding="utf-8")
        return load_tokenizer(folder)

    return build


def test_equal_tokenizers_pass_however_far_the_head_is_padded(tokenizer):
    target, draft = tokenizer("target"), tokenizer("draft")
    for rows in (SIZE, SIZE + 64):
        check_same_tokens(target, draft, head_rows=rows)


def test_a_smaller_vocabulary_is_refused_with_both_sizes(tokenizer):
    target, draft = tokenizer("target"), tokenizer("draft", size=SIZE - 50)
    with pytest.raises(
        ValueError, match=r"draft .*draft knows 350 tokens, and that of the model .*target knows 400;"
    ):
        check_same_tokens(target, draft, head_rows=SIZE)


def test_two_exchanged_ids_are_refused_with_the_first_of_them(tokenizer):
    target, draft = tokenizer("target"), tokenizer("draft", swapped=(310, 300))
    texts = {index: token for token, index in target.ids_of_tokens().items()}
    with pytest.raises(ValueError, match=r"token 300 is .* for the draft .*, and .* for the model") as caught:
        check_same_tokens(target, draft, head_rows=SIZE)
    assert repr(texts[310]) in str(caught.value) and repr(texts[300]) in str(caught.value)


def test_a_head_that_lacks_rows_for_its_own_tokens_is_refused(tokenizer):
    target, draft = tokenizer("target"), tokenizer("draft")
    with pytest.raises(ValueError, match=r"scores 399 ids, and its tokenizer has 400;"):
        check_same_tokens(target, draft, head_rows=SIZE - 1)


def test_a_folder_may_draft_for_its_gguf_twin(tmp_path):
    """Tokens are compared, not files."""
    folder = write_tiny_model(tmp_path / "model", vocab_size=SIZE, num_layers=1, hidden_size=32, num_heads=2)
    check_same_tokens(load_tokenizer(write_tiny_gguf(folder)), load_tokenizer(folder), head_rows=SIZE)
