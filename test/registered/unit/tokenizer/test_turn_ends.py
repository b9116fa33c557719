"""Which tokens end a chat although no metadata says so."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="unit-cpu")

import json

import gguf
import pytest

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.tokenizer import turn_ends
from sglang.srt.tokenizer.chat_rules import chat_end_ids, describe_ends
from sglang.srt.tokenizer.tokenizer import load_tokenizer
from sglang.srt.tokenizer.turn_ends import TURN_ENDS, turn_ends_in
from sglang.test import tiny_models
from sglang.test.tiny_models import CHAT_TEMPLATE, write_tiny_gguf, write_tiny_model

BOS, IM_START, IM_END = 0, 1, 2
TYPES = "tokenizer.ggml.token_type"


def with_other_eos(folder):
    """The folder's files say that token 0, `<|endoftext|>`, ends a text, and nothing of `<|im_end|>`."""
    for name in ("config.json", "generation_config.json"):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | {"eos_token_id": 0}))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": "<|endoftext|>"}))
    return folder


def opened(tmp_path, source, template=CHAT_TEMPLATE):
    """Tokenizer and config of a model whose metadata names token 0 only."""
    folder = write_tiny_model(tmp_path / "m", num_layers=1, vocab_size=300, chat_template=template)
    with_other_eos(folder)
    path = write_tiny_gguf(folder) if source == "gguf" else folder
    return load_tokenizer(path), ModelConfig.from_path(path)


def test_without_the_list_a_chat_has_no_end(tmp_path, monkeypatch):
    """The fault that the list mends, planted: the metadata alone end such a chat nowhere."""
    monkeypatch.setattr(turn_ends, "TURN_ENDS", {})
    tokenizer, config = opened(tmp_path, "gguf")
    assert chat_end_ids(tokenizer, config) == [] and IM_END not in config.eos_token_ids


@pytest.mark.parametrize("source", ["gguf", "hf"])
def test_a_turn_end_that_the_template_writes_ends_a_chat_and_nothing_else(tmp_path, source):
    """Taken at its word, the file lets a chat run to its limit and write the user's next turn itself."""
    tokenizer, config = opened(tmp_path, source)
    assert tokenizer.eos_token_ids == (0,) and config.eos_token_ids == (0,)
    assert chat_end_ids(tokenizer, config) == [IM_END]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}</p>{% endfor %}",
        "{# closes with <|im_end|> #}{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}<|eot_id|>{% endfor %}",
        None,
    ],
)
def test_what_the_template_does_not_write_or_the_vocabulary_does_not_have_ends_nothing(tmp_path, template):
    tokenizer, config = opened(tmp_path, "hf", template)
    assert chat_end_ids(tokenizer, config) == []


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content ~ '<|im_' ~ 'end|>' }}{% endfor %}",
        "{% for m in messages %}{% if m.tool_calls %}<|im_end|>{% endif %}{{ m.content }}{% endfor %}",
        "{{ raise_exception('no') if not persona }}{{ messages[0].content }}<|im_end|>",
        "{% for m in messages %}{% for p in m.content %}{{ p.text ~ '<|im_' ~ 'end|>' }}{% endfor %}"
        "{% endfor %}",
    ],
)
def test_a_turn_end_counts_wherever_the_template_writes_it(tmp_path, template):
    tokenizer, config = opened(tmp_path, "hf", template)
    assert chat_end_ids(tokenizer, config) == [IM_END]


def test_a_word_of_the_vocabulary_that_only_looks_like_a_turn_end_ends_nothing(tmp_path, monkeypatch):
    """An ordinary token can be a piece of any text: only one that stands for itself can end an answer."""
    monkeypatch.setattr(
        gguf.GGUFWriter, "add_token_types", lambda self, types: self.add_array(TYPES, [3, 3, *[1] * 298])
    )
    tokenizer, config = opened(tmp_path, "gguf")
    assert tokenizer.all_special_ids == [BOS, IM_START]
    assert chat_end_ids(tokenizer, config) == []


def test_a_token_that_is_added_and_not_special_ends_a_chat_too(tmp_path, monkeypatch):
    """Fine-tunes often add their turn end as an ordinary added token."""
    monkeypatch.setattr(
        gguf.GGUFWriter, "add_token_types", lambda self, types: self.add_array(TYPES, [3, 3, 4, *[1] * 297])
    )
    tokenizer, config = opened(tmp_path, "gguf")
    assert IM_END not in tokenizer.all_special_ids
    assert chat_end_ids(tokenizer, config) == [IM_END]


def test_a_token_beyond_the_models_rows_is_left_out(tmp_path):
    """No such token can be drawn, and a request that names it would be refused."""
    folder = write_tiny_model(tmp_path / "m", num_layers=1, vocab_size=300)
    with_other_eos(folder)
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": IM_END}
    (folder / "config.json").write_text(json.dumps(config))
    assert chat_end_ids(load_tokenizer(folder), ModelConfig.from_path(folder)) == []


def test_what_metadata_names_is_said_with_its_source_and_not_twice(tmp_path, monkeypatch):
    folder = write_tiny_model(tmp_path / "m", num_layers=1, vocab_size=300)
    tokenizer, config = load_tokenizer(folder), ModelConfig.from_path(folder)
    assert describe_ends(tokenizer, config) == (
        "Answers end at 2 '<|im_end|>' (generation_config.json; the tokenizer's eos_token), "
        "0 '<|endoftext|>' (generation_config.json)"
    )
    finish = gguf.GGUFWriter.add_chat_template
    monkeypatch.setattr(
        gguf.GGUFWriter,
        "add_chat_template",
        lambda self, text: (self.add_eot_token_id(1), finish(self, text)),
    )
    file = write_tiny_gguf(with_other_eos(folder), tmp_path / "tiny.gguf")
    assert describe_ends(load_tokenizer(file), ModelConfig.from_path(file)) == (
        "Answers end at 0 '<|endoftext|>' (tiny.gguf; the tokenizer's eos_token), "
        "1 '<|im_start|>' (tiny.gguf; tokenizer.ggml.eot_token_id); "
        "in a chat also at 2 '<|im_end|>' (written by the chat template)"
    )


def test_the_end_of_one_of_several_messages_in_an_answer_does_not_end_it():
    phi = "<|user|>hi<|end|><|assistant|>"
    harmony = "<|start|>assistant<|channel|>analysis<|message|>...<|end|><|start|>...<|return|>"
    assert turn_ends_in(phi) == ["<|end|>"]
    assert turn_ends_in(harmony) == ["<|return|>"]


@pytest.mark.parametrize("text", TURN_ENDS)
def test_every_known_end_is_found_in_a_template_and_in_a_vocabulary(tmp_path, monkeypatch, text):
    """Each row must be spelled as the models spell it, not as the editor shows it."""
    monkeypatch.setattr(tiny_models, "SPECIAL_TOKENS", ("<|bos|>", "<|im_start|>", text))
    template = "{% for m in messages %}{{ m.content }}" + text + "{% endfor %}"
    folder = write_tiny_model(tmp_path / "m", num_layers=1, vocab_size=300, chat_template=template)
    with_other_eos(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": "<|bos|>"}))
    tokenizer = load_tokenizer(folder)
    assert chat_end_ids(tokenizer, ModelConfig.from_path(folder)) == [2]
    assert tokenizer.decode([2], skip_special_tokens=False) == text
