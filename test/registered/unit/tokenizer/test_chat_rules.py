"""What the start says of chats."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import json
import logging

import pytest

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.tokenizer.chat_rules import report_chat
from sglang.srt.tokenizer.tokenizer import load_tokenizer
from sglang.test.tiny_models import CHAT_TEMPLATE, write_tiny_model

RAG, SHORT = {"name": "rag", "template": "{{ 1 }}"}, {"name": "short", "template": "{{ 2 }}"}


@pytest.mark.parametrize(
    ("template", "level", "words"),
    [
        (CHAT_TEMPLATE, "INFO", "Chat template 'default': content is handed over as strings"),
        (
            [RAG | {"template": CHAT_TEMPLATE}],
            "INFO",
            "Chat template 'rag': content is handed over as strings",
        ),
        ("{{ 1 }}", "WARNING", "it writes no text of role user, system, assistant, tool"),
        ("{% for m in messages %}", "WARNING", "cannot be compiled: "),
        ("{{ 'a' * 1000000000000000000 }}", "WARNING", "asks for more memory than there is (MemoryError)"),
        ([RAG, SHORT], "WARNING", "No chats: this model brings the chat templates 'rag', 'short' and none"),
        (None, "WARNING", "No chats: this model has no chat template; start the server with --chat-template"),
    ],
)
def test_the_start_says_how_chats_go_and_warns_where_they_do_not(tmp_path, caplog, template, level, words):
    """Who reads of it only in the 400 of a client looks for the fault there."""
    folder = write_tiny_model(tmp_path, num_layers=1, vocab_size=300, chat_template=None)
    if template is not None:
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    with caplog.at_level(logging.INFO):
        report_chat(load_tokenizer(folder), ModelConfig.from_path(folder))
    (first, second) = caplog.records
    assert (first.levelname, second.levelname) == (level, "INFO")
    assert words in first.message and second.message.startswith("Answers end at 2 '<|im_end|>'")
