"""A real server of a file whose metadata name the wrong end token and whose template takes message parts."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="server-cpu")

import json

import pytest

from sglang.test.fakes.fake_model import END, write_fake_model
from sglang.test.server.openai_http import CHAT, COMPLETIONS, answer, joined, refused, stream
from sglang.test.server.server_fixture import running_server
from sglang.test.tiny_models import write_tiny_gguf

IM_END = 2
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] != 'system' %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GREEDY = {"temperature": 0, "max_tokens": 12}
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("m") / "strange"
    # After "ok" the model ends its turn, and left alone it begins the next one.
    write_fake_model(folder, [b"\n", b"o", b"k", END, b"\n"], chat_template=TEMPLATE)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": 0}))
    with running_server(write_tiny_gguf(folder), "--dtype", "float32") as running:
        yield running


def test_a_chat_ends_where_its_turn_does(http):
    """The model wrote the next turns itself, up to its limit."""
    whole = answer(http, CHAT, messages=HI, **GREEDY)
    choice = whole["choices"][0]
    assert choice["message"]["content"] == "ok"
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", IM_END)
    assert whole["usage"]["completion_tokens"] == 3
    assert joined(stream(http, CHAT, messages=HI, **GREEDY)) == "ok"


def test_a_plain_completion_and_a_chat_that_ignores_ends_go_on(http):
    """Both show what the chat would do without that end."""
    for body in (
        answer(http, COMPLETIONS, prompt="\n", **GREEDY),
        answer(http, CHAT, messages=HI, ignore_eos=True, **GREEDY),
    ):
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == GREEDY["max_tokens"]


PARTS = [{"type": "text", "text": "hi"}, {"type": "text", "text": " you"}]


@pytest.mark.parametrize("content", ["hi you", PARTS])
def test_either_form_of_content_reaches_a_template_that_walks_parts(http, content):
    prompt = "<|im_start|>user\nhi you<|im_end|>\n<|im_start|>assistant\n"
    want = http.post("/generate", json={"text": prompt, "return_prompt_token_ids": True}).json()
    chat = [{"role": "user", "content": content}]
    body = answer(http, CHAT, messages=chat, return_token_ids=True, **GREEDY)
    assert body["choices"][0]["prompt_token_ids"] == want["prompt_token_ids"]


def test_a_system_message_that_the_template_drops_is_refused(http):
    error = refused(http, CHAT, messages=[{"role": "system", "content": "be brief"}, *HI])
    assert "role 'system'" in error["message"] and error["param"] == "messages"


def test_the_start_says_what_was_decided(server, http):
    log = server.log()
    assert "Chat template 'default': content is handed over as lists of parts" in log
    assert "it writes no text of role system, and a chat that brings some is refused" in log
    assert "Answers end at 0 '<|endoftext|>' (strange.gguf; the tokenizer's eos_token)" in log
    assert "in a chat also at 2 '<|im_end|>' (written by the chat template)" in log
    information = http.get("/tokenizer_info").json()
    assert information["content_forms"] == dict.fromkeys(("user", "assistant", "tool"), "parts")
    assert (information["end_token_ids"], information["chat_end_token_ids"]) == ([0], [IM_END])
    assert information["chat_template_names"] == ["default"]
