"""A draft whose tokens are not the model's is refused at the door, before a process starts."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit-cpu")

import pytest

from sglang.srt.entrypoints.engine_core import resolve_and_check
from sglang.srt.server_args import ServerArgs
from sglang.test.tiny_models import write_tiny_gguf, write_tiny_model, write_tiny_tokenizer

SMALL = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 64}


@pytest.fixture
def models(tmp_path):
    """A model and a draft of these vocabulary sizes."""

    def build(target=400, draft=400):
        return [
            write_tiny_model(tmp_path / name, vocab_size=size, **SMALL)
            for name, size in (("target", target), ("draft", draft))
        ]

    return build


def start_with(target, draft, **settings):
    record = ServerArgs.from_kwargs(
        model_path=target,
        speculative_algorithm="STANDALONE",
        speculative_draft_model_path=draft,
        **settings,
    )
    resolve_and_check(record)


def test_a_draft_with_the_tokens_of_the_model_passes(models):
    target, draft = models()
    start_with(target, draft)
    start_with(write_tiny_gguf(target), draft)
    start_with(target, target)


def test_a_draft_whose_head_alone_is_wider_passes(models):
    target, draft = models(draft=464)
    write_tiny_tokenizer(draft, vocab_size=400)
    start_with(target, draft)


def test_a_draft_with_fewer_tokens_is_refused_with_both_sizes(models):
    target, draft = models(draft=350)
    with pytest.raises(ValueError, match=r"draft knows 350 tokens, and that of the model .*target knows 400"):
        start_with(target, draft)


def test_a_draft_without_a_tokenizer_is_refused_by_its_folder(models):
    target, draft = models()
    (draft / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"/draft"):
        start_with(target, draft)


def test_without_tokenizers_only_the_sizes_are_compared(models):
    target, draft = models()
    (draft / "tokenizer.json").unlink()
    start_with(target, draft, skip_tokenizer_init=True)
    with pytest.raises(ValueError, match=r"vocabulary of 350 and the model one of 400"):
        start_with(target, models(draft=350)[1], skip_tokenizer_init=True)
