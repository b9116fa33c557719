"""From messages to the prompt's ids."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit-cpu")

import pytest

from sglang.srt.entrypoints.openai.chat_messages import ROLES, checked_messages, prompt_ids
from sglang.srt.entrypoints.openai.protocol import ChatRequest, parse_request
from sglang.srt.entrypoints.openai.serving_job import ServingSettings
from sglang.srt.messages.errors import RequestRejected
from sglang.srt.tokenizer.content_form import ContentForms
from sglang.srt.tokenizer.model_templates import ModelTemplates
from sglang.srt.tokenizer.tokenizer import load_tokenizer
from sglang.test.fakes.fake_manager import IM_END, ByteTokenizer, FakeManager
from sglang.test.server.openai_calls import CHAT, COMPLETIONS, post
from sglang.test.tiny_models import write_tiny_tokenizer

USER = {"role": "user", "content": "hi"}
HISTORY = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get", "arguments": '{"city": "Oslo", "days": 2}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
]


def rendered(messages, *, tokenizer=None, defaults=None, **fields):
    tokenizer = tokenizer or ByteTokenizer()
    request = parse_request(ChatRequest, {"messages": messages, **fields})
    return tokenizer.decode(prompt_ids(request, tokenizer, defaults or {}), skip_special_tokens=False)


def refusal(messages, **fields):
    response = post(FakeManager(), CHAT, messages=messages, **fields)
    assert response.status_code == 400, response.text
    return response.json()["error"]["message"]


def test_the_template_renders_the_messages():
    assert rendered([USER]) == "<s>[user]hi<|im_end|>[assistant]"


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("spelling", [str.lower, str.upper, str.title])
def test_every_role_is_known_in_any_case(role, spelling):
    text = rendered([{"role": spelling(role), "content": "x", "tool_call_id": "1"}])
    older = {"developer": "system", "function": "tool"}
    assert text.startswith(f"<s>[{older.get(role, role)}]x")


def test_roles_that_a_template_does_not_know_go_by_the_older_name():
    assert rendered([{"role": "developer", "content": "x"}]).startswith("<s>[system]x")
    assert rendered([{"role": "function", "name": "f", "content": "x"}]).startswith("<s>[tool]x")
    knows = ByteTokenizer(
        chat_template="{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}{# developer #}"
    )
    assert rendered([{"role": "developer", "content": "x"}], tokenizer=knows) == "developer x"


@pytest.mark.parametrize(
    "content, text",
    [
        ("a", "a"),
        (None, ""),
        ("", ""),
        ([], ""),
        ([{"type": "text", "text": "a"}], "a"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a b"),
        ([{"type": "thinking", "thinking": "t"}, {"type": "text", "text": "a"}], "t a"),
    ],
)
def test_content_is_a_string_null_or_text_parts(content, text):
    assert rendered([{"role": "user", "content": content}]) == f"<s>[user]{text}<|im_end|>[assistant]"


@pytest.mark.parametrize("kind", ["image_url", "video_url", "audio_url", "input_audio"])
def test_media_for_a_text_model_is_400(kind):
    """Left out in silence, the model would answer about a picture it never saw."""
    message = refusal([{"role": "user", "content": [{"type": kind, kind: {"url": "x"}}]}])
    assert kind in message and "messages[0].content[0]" in message


@pytest.mark.parametrize(
    "messages, where",
    [
        ([], "messages"),
        ("hi", "messages"),
        ({"role": "user"}, "messages"),
        (["hi"], "messages[0]"),
        ([USER, None], "messages[1]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": 5, "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "poem", "poem": "x"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
    ],
)
def test_a_malformed_message_is_400_and_says_where(messages, where):
    assert refusal(messages).startswith(where + ":")


def test_no_messages_at_all_is_400():
    response = post(FakeManager(), CHAT, messages=None)
    assert response.status_code == 400 and response.json()["error"]["param"] == "messages"


def test_earlier_tool_calls_render_with_their_arguments_as_an_object():
    """Clients send the arguments as JSON text; templates walk them with `.items()`."""
    assert "(city=Oslo)(days=2)" in rendered(HISTORY)
    assert "[tool]rain" in rendered(HISTORY)


@pytest.mark.parametrize(
    "arguments, ready", [("", {}), (None, {}), ({"a": 1}, {"a": 1}), ("{bad", "{bad"), ("[1]", "[1]")]
)
def test_arguments_that_are_no_json_object_stay_as_they_are(arguments, ready):
    call = {"function": {"name": "f", "arguments": arguments}}
    message = checked_messages([{"role": "assistant", "tool_calls": [call]}])[0]
    assert message["tool_calls"][0]["function"]["arguments"] == ready
    assert call["function"]["arguments"] == arguments, "the client's own object is not changed"


def test_an_assistant_without_content_has_an_empty_one():
    assert rendered([USER, {"role": "assistant"}, USER]).count("<|im_end|>") == 3


def test_template_kwargs_lie_over_the_servers_defaults():
    defaults = {"style": "terse"}
    assert "[style terse]" in rendered([USER], defaults=defaults)
    assert "[style long]" in rendered([USER], defaults=defaults, chat_template_kwargs={"style": "long"})
    assert "[style" not in rendered([USER], defaults=defaults, chat_template_kwargs={"style": None})
    manager = FakeManager()
    post(manager, CHAT, settings=ServingSettings(default_chat_template_kwargs=defaults))
    assert "[style terse]" in manager.tokenizer.decode(manager.requests[0].input_ids)


@pytest.mark.parametrize("name", ["messages", "tools", "chat_template", "add_generation_prompt"])
def test_a_template_kwarg_cannot_replace_what_the_route_sets(name):
    assert name in refusal([USER], chat_template_kwargs={name: "x"})


def test_reasoning_effort_reaches_the_template():
    tokenizer = ByteTokenizer(chat_template="{{ reasoning_effort }} {{ messages[0].content }}")
    assert rendered([USER], tokenizer=tokenizer, reasoning_effort="low") == "low hi"
    assert "reasoning_effort" in refusal([USER], reasoning_effort="enormous")


def test_a_template_error_is_400_with_its_words():
    tokenizer = ByteTokenizer(chat_template="{{ raise_exception('roles must alternate') }}")
    response = post(FakeManager(tokenizer=tokenizer), CHAT)
    assert response.status_code == 400 and "roles must alternate" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_without_a_template_is_400_with_the_cure(stream):
    manager = FakeManager(tokenizer=ByteTokenizer(chat_template=None))
    response = post(manager, CHAT, stream=stream)
    assert response.status_code == 400 and "--chat-template" in response.json()["error"]["message"]


WALKS_PARTS = ByteTokenizer(
    chat_template=(
        "{% for m in messages %}[{{ m['role'] }}]{% for p in m['content'] %}{% if p['type'] == 'text' %}"
        "{{ p['text'] }};{% endif %}{% endfor %}{% endfor %}"
    )
)


@pytest.mark.parametrize(
    "content, text",
    [
        ("a b", "a b;"),
        (None, ";"),
        ([], ";"),
        ([{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"], "a;b;c;"),
    ],
)
def test_a_template_that_walks_parts_gets_them(content, text):
    """It got a string before, found no parts in it, and the model answered a prompt without the question."""
    chat = [{"role": role, "content": content} for role in ("system", "user", "assistant", "tool")]
    want = "".join(f"[{message['role']}]{text}" for message in chat)
    assert rendered(chat, tokenizer=WALKS_PARTS) == want


def test_strings_for_a_template_that_walks_parts_would_lose_the_text(monkeypatch):
    """The fault planted: this is the prompt that was answered with 200."""
    monkeypatch.setattr(ContentForms, "of", lambda self, role: "string")
    assert rendered([USER], tokenizer=WALKS_PARTS) == "[user]"


def test_a_message_of_parts_can_go_on():
    messages = [USER, {"role": "assistant", "content": "I think"}]
    text = rendered(messages, tokenizer=WALKS_PARTS, continue_final_message=True)
    assert text == "[user]hi;[assistant]I think"


QUIET = "{% for m in messages %}{% if m.role == ROLE or system_too %}{{ m.content }}|{% endif %}{% endfor %}"


@pytest.mark.parametrize("heard, dropped", [("user", "system"), ("assistant", "user"), ("user", "developer")])
def test_a_text_that_the_template_writes_nowhere_is_400_with_the_cure(heard, dropped):
    """The model would answer as if it had read it."""
    tokenizer = ByteTokenizer(chat_template=QUIET.replace("ROLE", repr(heard)))
    chat = [{"role": dropped, "content": "be brief"}, {"role": heard, "content": "hi"}]
    response = post(FakeManager(tokenizer=tokenizer), CHAT, messages=chat)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == "messages"
    assert error["message"].startswith("messages[0].content: the chat template writes nothing of a message")
    assert "--chat-template" in error["message"]


@pytest.mark.parametrize("text", ["Hello", "there", "user", "H", "7316904"])
def test_a_dropped_text_that_stands_elsewhere_in_the_prompt_is_still_400(text):
    """Its words were found in another message, or in what the template itself writes."""
    template = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    user = {"role": "user", "content": "Hello there 7316904"}
    tokenizer = ByteTokenizer(chat_template=template)
    for content in (text, [{"type": "text", "text": "Hello"}, {"type": "text", "text": text}]):
        with pytest.raises(
            RequestRejected, match=r"^messages\[0\].content: the chat template writes nothing"
        ):
            rendered([{"role": "system", "content": content}, user], tokenizer=tokenizer)
    assert rendered([user], tokenizer=tokenizer) == "<user>Hello there 7316904"


def test_only_a_chat_with_a_dropped_role_is_rendered_twice():
    template = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    tokenizer = ByteTokenizer(chat_template=template)
    tokenizer.templates.forms(template)
    rendered_chats = []
    real = tokenizer.templates.render
    tokenizer.templates.render = lambda *args, **kwargs: rendered_chats.append(1) or real(*args, **kwargs)
    rendered([USER, {"role": "assistant", "content": "x"}, USER], tokenizer=tokenizer)
    rendered([{"role": "system", "content": " "}, USER], tokenizer=tokenizer)
    assert len(rendered_chats) == 2
    with pytest.raises(RequestRejected):
        rendered([{"role": "system", "content": "x"}, USER], tokenizer=tokenizer)
    assert len(rendered_chats) == 4


@pytest.mark.parametrize("content", ["hi", "hello world", [{"type": "text", "text": "hello world"}]])
def test_a_template_that_reads_neither_form_is_400_and_not_a_repr(content):
    """`[{'type': 'text', 'text': 'hi'}]` stood in the prompt, with 200."""
    cuts = ByteTokenizer(chat_template="{% for m in messages %}{{ m.content[:5] }}{% endfor %}")
    with pytest.raises(RequestRejected, match="writes not the whole text of a message of role 'user'"):
        rendered([{"role": "user", "content": content}], tokenizer=cuts)


def test_a_template_that_reads_the_last_message_in_another_form_is_400():
    walk = "{% for p in m.content %}{{ p.text }}{% endfor %}"
    template = (
        "{% for m in messages %}{% if loop.last %}"
        + walk
        + "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    chat = [USER, {"role": "assistant", "content": "x"}, USER]
    with pytest.raises(RequestRejected, match=r"^messages\[2\].content: .* not the whole text"):
        rendered(chat, tokenizer=ByteTokenizer(chat_template=template))


SERVES = (
    "You serve a developer.{% for m in messages %}{% if m.role in ROLES %}<{{ m.role }}>{{ m.content }}"
    "{% endif %}{% endfor %}"
)


def test_a_developers_message_is_handed_over_as_a_role_that_the_template_writes():
    """The word in a sentence of the template was enough to drop the message under 200."""
    chat = [{"role": "developer", "content": "be brief"}, USER]

    def prompt(roles):
        return rendered(chat, tokenizer=ByteTokenizer(chat_template=SERVES.replace("ROLES", repr(roles))))

    assert prompt(["user", "system"]) == "You serve a developer.<system>be brief<user>hi"
    assert prompt(["user", "developer"]) == "You serve a developer.<developer>be brief<user>hi"
    with pytest.raises(
        RequestRejected, match=r"^messages\[0\].content: .* nothing of a message of role 'developer'"
    ):
        prompt(["user"])


def test_a_role_that_is_heard_after_all_or_says_nothing_is_served():
    tokenizer = ByteTokenizer(chat_template=QUIET.replace("ROLE", "'user'"))
    system = {"role": "system", "content": "be brief"}
    opened = rendered([system, USER], tokenizer=tokenizer, chat_template_kwargs={"system_too": True})
    assert opened == "be brief|hi|"
    assert rendered([{"role": "system", "content": " "}, USER], tokenizer=tokenizer) == "hi|"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].role.x }}",
        "{% for m in messages %}",
        "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ cycler().next() }}",
        "{{ 'a' * 1000000000000000000 }}",
    ],
)
def test_whatever_a_template_raises_is_400(template):
    response = post(FakeManager(tokenizer=ByteTokenizer(chat_template=template)), CHAT)
    assert response.status_code == 400 and "template" in response.json()["error"]["message"]


def test_named_templates_without_a_default_are_told_by_name():
    tokenizer = ByteTokenizer()
    tokenizer.templates = ModelTemplates({"rag": "{{ 1 }}", "short": "{{ 2 }}"}, {})
    response = post(FakeManager(tokenizer=tokenizer), CHAT)
    message = response.json()["error"]["message"]
    assert response.status_code == 400 and "'rag', 'short'" in message and "--chat-template" in message


@pytest.mark.parametrize("fields", [{"messages": [USER]}, {"input_ids": [1, 2]}])
@pytest.mark.parametrize("given", [None, [5], [IM_END, 5]])
def test_ends_of_a_turn_are_stop_ids_of_a_chat_beside_the_clients(fields, given):
    manager = FakeManager()
    manager.tokenizer.chat_end_ids = (IM_END,)
    assert post(manager, CHAT, stop_token_ids=given, **fields).status_code == 200
    assert manager.params[0].stop_token_ids == [*(given or []), IM_END]


def test_a_plain_completion_and_a_wrong_stop_id_are_as_before():
    manager = FakeManager()
    manager.tokenizer.chat_end_ids = (IM_END,)
    assert post(manager, COMPLETIONS).status_code == 200
    assert manager.params[0].stop_token_ids == []
    for wrong in (5, "x", [999], ["a"]):
        response = post(manager, CHAT, stop_token_ids=wrong)
        assert response.status_code == 400 and response.json()["error"]["param"] == "stop_token_ids"


def test_the_final_message_goes_on_without_a_new_turn():
    messages = [USER, {"role": "assistant", "content": "I think"}]
    assert rendered(messages, continue_final_message=True).endswith("[assistant]I think")
    assert rendered(messages).endswith("[assistant]I think<|im_end|>[assistant]")


def test_only_the_assistants_message_can_go_on():
    assert refusal([USER], continue_final_message=True).startswith("continue_final_message:")


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize(
    "template", ["{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"]
)
def test_there_is_never_a_second_bos(tmp_path, template, adds_bos):
    """Trap 21, with a real tokenizer: whether template, tokenizer or both know the BOS, it stands once."""
    write_tiny_tokenizer(tmp_path, vocab_size=300, add_bos=adds_bos, chat_template=template)
    tokenizer = load_tokenizer(tmp_path)
    ids = prompt_ids(parse_request(ChatRequest, {"messages": [USER]}), tokenizer, {})
    assert tokenizer.bos_token_id is not None
    assert ids.count(tokenizer.bos_token_id) == (1 if adds_bos or "bos" in template else 0)
    assert tokenizer.decode(ids).endswith("hi")


def test_special_tokens_in_a_message_are_read_as_special_tokens():
    """The documented policy: the rendered text is read as one text."""
    manager = FakeManager()
    post(manager, CHAT, messages=[{"role": "user", "content": "a<|im_end|>b"}])
    assert manager.requests[0].input_ids.count(IM_END) == 2


def test_ready_ids_take_the_place_of_messages():
    manager = FakeManager()
    assert post(manager, CHAT, input_ids=[1, 2, 3]).status_code == 200
    assert manager.requests[0].input_ids == [1, 2, 3]
    for bad in ([], ["a"], [True], "abc", [[1]]):
        response = post(FakeManager(), CHAT, input_ids=bad)
        assert response.status_code == 400 and response.json()["error"]["param"] == "input_ids"
    assert post(FakeManager(), CHAT, input_ids=[1], messages=[USER]).status_code == 400


def test_a_message_is_not_changed_for_the_caller():
    message = {"role": "USER", "content": None}
    checked_messages([message])
    assert message == {"role": "USER", "content": None}


def test_a_refused_message_is_a_request_rejected():
    with pytest.raises(RequestRejected) as caught:
        checked_messages([5])
    assert caught.value.status_code == 400 and caught.value.param == "messages"


def test_a_prompt_need_not_open_an_answer():
    assert rendered([USER], add_generation_prompt=False) == "<s>[user]hi<|im_end|>"
    assert rendered([USER], add_generation_prompt=True) == rendered([USER])


def test_a_prompt_cannot_open_an_answer_and_go_on_with_one():
    answer = {"role": "assistant", "content": "well"}
    message = refusal([USER, answer], add_generation_prompt=True, continue_final_message=True)
    assert message.startswith("add_generation_prompt: ")
    parts = {"continue_final_message": True}
    assert rendered([USER, answer], add_generation_prompt=False, **parts) == rendered([USER, answer], **parts)


def test_documents_reach_a_template_that_reads_them_and_no_other():
    """Dropped in silence, the model would answer without having seen them."""
    template = "{% for d in documents %}{{ d.text }}{% endfor %}{{ messages[0].content }}"
    documents = [{"text": "a"}, {"text": "b"}]
    told = rendered([USER], tokenizer=ByteTokenizer(chat_template=template), documents=documents)
    assert told == "ab" + USER["content"]
    assert refusal([USER], documents=[{"text": "a"}]).startswith("documents: ")
    needs = ByteTokenizer(chat_template="{{ documents[0].text + messages[0].content }}")
    assert rendered([USER], tokenizer=needs, documents=documents) == "a" + USER["content"]
    named = ByteTokenizer(chat_template="You read documents. {{ messages[0].content }}")
    with pytest.raises(RequestRejected, match=r"^documents: .* of this model reads none; put them"):
        rendered([USER], tokenizer=named, documents=documents)
    assert rendered([USER], documents=[]) == rendered([USER])
