from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit-cpu")

import datetime

import pytest

from sglang.srt.tokenizer.chat_template import read_chat_template, render_chat

CHATML = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content | trim + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER = {"role": "user", "content": "hi"}


def render(template, messages=(USER,), *, tools=None, prompt=False, go_on=False, **variables):
    return render_chat(
        template,
        list(messages),
        tools=tools,
        add_generation_prompt=prompt,
        continue_final_message=go_on,
        variables=variables,
    )


def test_the_prompt_for_an_answer_is_opened_on_demand():
    assert render(CHATML) == "<user>hi</s>"
    assert render(CHATML, prompt=True) == "<user>hi</s><assistant>"


def test_blocks_leave_no_blank_lines_behind():
    assert render("{% if true %}\n  {% if true %}\nx\n  {% endif %}\n{% endif %}\ny") == "x\ny"


def test_json_is_written_as_a_model_expects_it():
    """jinja's own filter turns < > & ' into escapes for HTML."""
    value = {"b": "<é & 'x'>", "a": [1, None, True]}
    assert render("{{ v | tojson }}", v=value) == '{"b": "<é & \'x\'>", "a": [1, null, true]}'
    assert (
        render("{{ v | tojson(indent=1, sort_keys=true) }}", v={"b": 1, "a": 2}) == '{\n "a": 2,\n "b": 1\n}'
    )
    assert render("{{ v | tojson(separators=(',', ':')) }}", v={"b": 1}) == '{"b":1}'


def test_loops_can_be_left_and_the_date_is_there():
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)


def test_generation_blocks_show_their_body():
    assert render("a{% generation %}b{{ 1 }}{% endgeneration %}c") == "ab1c"


def test_tools_and_variables_reach_the_template():
    template = "{{ bos_token }}{% if tools %}{{ tools[0].name }}{% endif %}{{ enable_thinking }}"
    assert render(template, tools=[{"name": "f"}], bos_token="<s>", enable_thinking=False) == "<s>fFalse"
    assert render(template, bos_token="<s>") == "<s>"


def test_messages_cannot_be_replaced_by_a_variable():
    text = render_chat(
        "{{ messages[0].content }}{{ tools }}",
        [USER],
        tools=None,
        add_generation_prompt=False,
        continue_final_message=False,
        variables={"messages": [], "tools": 1},
    )
    assert text == "hiNone"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ messages[5].content.x }}", "no element 5"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ nope() }}", "'nope' is undefined"),
        ("{{ 'a' * 1000000000000000000 }}", "asks for more memory than there is"),
    ],
)
def test_what_a_template_raises_is_the_callers_error(template, message):
    with pytest.raises(ValueError, match=rf"does not accept these messages: .*{message}"):
        render(template)


def test_a_template_that_does_not_parse_is_refused():
    with pytest.raises(ValueError, match=r"cannot be compiled: .*Unexpected end"):
        render("{% for m in messages %}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'content': 'x'}) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
    ],
)
def test_a_template_reaches_nothing_but_its_arguments(template):
    messages = [dict(USER)]
    with pytest.raises(ValueError, match="does not accept these messages"):
        render(template, messages)
    assert messages == [USER]


def test_the_last_message_can_be_continued():
    chat = [USER, {"role": "assistant", "content": "The answer "}]
    assert render(CHATML, chat, go_on=True) == "<user>hi</s><assistant>The answer "
    parts = [USER, {"role": "assistant", "content": [{"type": "text", "text": "so"}]}]
    template = (
        "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}|{% endfor %}"
    )
    assert render(template, parts, go_on=True) == "hi|so"
    assert parts[1]["content"][0]["text"] == "so"


def test_the_same_words_earlier_in_the_chat_do_not_end_the_prompt():
    chat = [{"role": "user", "content": "yes"}, {"role": "assistant", "content": "yes"}]
    assert render(CHATML, chat, go_on=True) == "<user>yes</s><assistant>yes"
    quiet = (
        "{% for m in messages %}{{ m.role }}:{% if m.role == 'user' %}{{ m.content }}{% endif %};{% endfor %}"
    )
    with pytest.raises(ValueError, match="does not show the text of the last message"):
        render(quiet, chat, go_on=True)


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([USER], {"prompt": True}, "add_generation_prompt opens a new one"),
        ([], {}, "at least one message"),
        ([{"role": "assistant", "content": None}], {}, "a last message with text"),
        ([{"role": "assistant", "content": [{"type": "image"}]}], {}, "a last message with text"),
    ],
)
def test_a_chat_that_cannot_be_continued_is_refused(messages, options, message):
    with pytest.raises(ValueError, match=message):
        render(CHATML, messages, go_on=True, **options)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.jinja", "{% if %}", "cannot be compiled"),
        ("t.json", "{", "is not JSON"),
        ("t.json", '{"system": "x"}', "whose key 'chat_template' holds the template"),
        ("t.json", "[1]", "whose key 'chat_template' holds the template"),
        (None, None, "is no file; give a jinja file"),
        ("x" * 5000, None, "is no file; give a jinja file"),
    ],
)
def test_a_template_file_that_is_none_is_refused_at_the_start(tmp_path, name, content, message):
    path = tmp_path / (name or "chatml")
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=f"^--chat-template.* {message}"):
        read_chat_template(str(path), {})
