"""Which of a model's templates renders a chat."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import json

import gguf
import pytest

from sglang.srt.tokenizer.model_templates import ModelTemplates
from sglang.srt.tokenizer.tokenizer import load_tokenizer
from sglang.test.tiny_models import write_tiny_gguf, write_tiny_model, write_tiny_tokenizer

CHAT = [{"role": "user", "content": "hi"}]
RAG, SHORT = "rag {{ messages[0].content }}", "short {{ messages[0].content }}"


def folder_with(path, *named):
    """A tokenizer folder that lists these templates by name."""
    write_tiny_tokenizer(path, vocab_size=300, chat_template=None)
    file = path / "tokenizer_config.json"
    rows = [{"name": name, "template": template} for name, template in named]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": rows}))
    return path


def test_several_named_templates_without_a_default_are_named_with_the_cure(tmp_path):
    """Told "it has no chat template", the operator looks for a fault in the model."""
    tokenizer = load_tokenizer(folder_with(tmp_path, ("rag", RAG), ("short", SHORT)))
    assert tokenizer.chat_template is None
    with pytest.raises(
        ValueError, match=r"templates 'rag', 'short' and none called 'default'.*--chat-templa"
    ):
        tokenizer.apply_chat_template(CHAT)


def test_the_only_template_is_the_default_whatever_its_name(tmp_path):
    tokenizer = load_tokenizer(folder_with(tmp_path, ("rag", RAG)))
    assert tokenizer.apply_chat_template(CHAT) == "rag hi"
    assert tokenizer.templates.default_name == "rag"


@pytest.mark.parametrize("name", ["rag", "short"])
def test_a_template_is_chosen_by_its_name(tmp_path, name):
    folder = folder_with(tmp_path, ("default", "{{ 1 }}"), ("rag", RAG), ("short", SHORT))
    assert load_tokenizer(folder, chat_template=name).apply_chat_template(CHAT) == f"{name} hi"


def test_named_templates_of_a_gguf_file_are_chosen_the_same_way(tmp_path, monkeypatch):
    named = [{"name": "rag", "template": RAG}, {"name": "short", "template": SHORT}]
    put = gguf.GGUFWriter.add_chat_template
    monkeypatch.setattr(gguf.GGUFWriter, "add_chat_template", lambda self, text: put(self, named))
    file = write_tiny_gguf(write_tiny_model(tmp_path / "m", num_layers=1, vocab_size=300))
    assert load_tokenizer(file, chat_template="short").apply_chat_template(CHAT) == "short hi"
    with pytest.raises(ValueError, match="'rag', 'short'"):
        load_tokenizer(file).apply_chat_template(CHAT)


def test_two_templates_of_one_name_are_refused_with_the_file(tmp_path):
    """The last one won without a word, and whoever wrote the first looks for it in the prompts."""
    folder = folder_with(tmp_path, ("default", RAG), ("default", SHORT))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: two rows .* the name 'default'.* remove"):
        load_tokenizer(folder)
    file = folder / "tokenizer_config.json"
    rows = json.loads(file.read_text()).pop("chat_template")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": rows}))
    file.write_text("{}")
    with pytest.raises(ValueError, match=r"chat_template\.json: two rows of chat_template have the name"):
        load_tokenizer(folder)


def test_two_files_of_the_default_template_are_refused_and_one_is_served(tmp_path):
    folder = folder_with(tmp_path, ("rag", RAG))
    (folder / "additional_chat_templates").mkdir()
    for name in ("default", "rag"):
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(SHORT)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.apply_chat_template(CHAT) == "short hi", "files win over the rows of the config"
    (folder / "chat_template.jinja").write_text(RAG)
    with pytest.raises(
        ValueError, match=r"chat_template\.jinja and additional_chat_templates/default\.jinja"
    ):
        load_tokenizer(folder)


def test_two_default_templates_of_a_gguf_file_are_refused(tmp_path, monkeypatch):
    put = gguf.GGUFWriter.add_string
    second = {"tokenizer.chat_template": "tokenizer.chat_template.default"}

    def put_twice(self, key, value):
        put(self, key, value)
        if key in second:
            put(self, second[key], SHORT)

    monkeypatch.setattr(gguf.GGUFWriter, "add_string", put_twice)
    file = write_tiny_gguf(write_tiny_model(tmp_path / "m", num_layers=1, vocab_size=300))
    with pytest.raises(ValueError, match=r"\.gguf: tokenizer\.chat_template and .*\.default are both"):
        load_tokenizer(file)


def test_a_name_that_the_model_does_not_bring_is_refused_with_those_it_does(tmp_path):
    with pytest.raises(ValueError, match=r"'rga' is no file; .*\(it brings 'rag', 'short'\)"):
        load_tokenizer(folder_with(tmp_path, ("rag", RAG), ("short", SHORT)), chat_template="rga")
    bare = tmp_path / "bare"
    bare.mkdir()
    write_tiny_tokenizer(bare, vocab_size=300, chat_template=None)
    with pytest.raises(ValueError, match=r"brings none by name"):
        load_tokenizer(bare, chat_template="chatml")


def test_a_template_given_as_text_is_compiled_at_the_start(tmp_path):
    with pytest.raises(ValueError, match="cannot be compiled"):
        load_tokenizer(folder_with(tmp_path), chat_template="{% for m in messages %}")


def test_no_template_at_all_is_another_sentence():
    assert ModelTemplates({}, {}).why_none().startswith("this model has no chat template; start the server")


def test_variables_of_the_server_stand_under_those_of_the_chat(tmp_path):
    text = "{{ tone }}{{ bos_token }}"
    tokenizer = load_tokenizer(folder_with(tmp_path), chat_template=text, template_variables={"tone": "dry"})
    assert tokenizer.apply_chat_template(CHAT) == "dry<|endoftext|>"
    assert tokenizer.apply_chat_template(CHAT, tone="warm") == "warm<|endoftext|>"
