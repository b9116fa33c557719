"""Which form of content each kind of template is found to read."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit-cpu")

import pytest

from sglang.srt.tokenizer import content_form
from sglang.srt.tokenizer.content_form import in_form
from sglang.srt.tokenizer.model_templates import ModelTemplates

ALL_STRINGS = dict.fromkeys(("user", "system", "assistant", "tool"), "string")
ALL_PARTS = dict.fromkeys(ALL_STRINGS, "parts")
WALK = (
    "{% for m in messages %}{{ m['role'] }}:{% for p in m['content'] %}{% if p['type'] == 'text' %}"
    "{{ p['text'] | trim }}{% endif %}{% endfor %}\n{% endfor %}"
)
WALK_OR_STRING = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<image>{% elif 'text' in p %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
# As it is in the wild: roles must alternate, and the system's text goes into the first user's message.
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system = '<<SYS>>' + messages[0]['content'] + '<</SYS>>' %}"
    "{% else %}{% set loop_messages = messages %}{% set system = '' %}{% endif %}"
    "{% for m in loop_messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m['role'] == 'user' %}[INST] {{ system if loop.first else '' }}{{ m['content'].strip() }} [/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'].strip() }} </s>{% endif %}{% endfor %}"
)
GEMMA = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<start_of_turn>{{ m['role'] }}\n"
    "{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
)
# The system's text is read as parts only, the others' in both forms.
GEMMA_3 = (
    "{% if messages[0]['role'] == 'system' %}{% set prefix = messages[0]['content'][0]['text'] %}"
    "{% set rest = messages[1:] %}{% else %}{% set prefix = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{{ prefix if loop.first else '' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% elif m['content'] is iterable %}"
    "{% for item in m['content'] %}{{ item['text'] | trim }}{% endfor %}{% endif %}{% endfor %}"
)
# The system's text is shown in the last user's message, and tools' answers as JSON under their ids.
MISTRAL = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set loop_messages = messages[1:] %}{% else %}{% set loop_messages = messages %}{% endif %}"
    "{% for m in loop_messages %}{% if m.role == 'user' %}[INST] "
    "{% if loop.last and system is defined %}{{ system }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% elif m.tool_calls is defined %}[TOOL_CALLS]{{ m.tool_calls | tojson }}"
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('9 characters') }}"
    "{% endif %}[TOOL_RESULTS]{{ {'content': m.content, 'call_id': m.tool_call_id} | tojson }}{% endif %}"
    "{% endfor %}"
)
LLAMA_3 = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}{{ date_string }}"
    "{% if tools is not none %}{{ tools | tojson }}{% endif %}{{ system }}<|eot_id|>"
    "{% for m in messages %}{% if 'tool_calls' in m %}{{ m.tool_calls[0].function.arguments | tojson }}"
    "{% elif m.role == 'tool' %}{% if m.content is mapping or m.content is iterable %}"
    "{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}"
    "{% else %}{{ m['content'] | trim }}{% endif %}<|eot_id|>{% endfor %}"
)
SMOL_VLM = (
    "<|im_start|>{% for m in messages %}{{ m['role'] | capitalize }}"
    "{% if m['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for line in m['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}<image>{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
)
DEEPSEEK = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is not none %}"
    "{% set content = m['content'] %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}{{ content }}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
FIRST_PART = "{% for m in messages %}{{ m['content'][0]['text'] }}{% endfor %}"
SYSTEM_FIRST = (
    "{% if messages[0].role != 'system' %}{{ raise_exception('begin with the system') }}{% endif %}"
    "{% for m in messages %}{{ m.content | join(',', attribute='text') }}{% endfor %}"
)
STRING_SYSTEM = "{{ messages[0]['content'] + '\n' if messages[0]['role'] == 'system' }}" + (
    "{% for m in messages %}{% if m['role'] != 'system' %}{% for p in m['content'] %}{{ p['text'] }}"
    "{% endfor %}{% endif %}{% endfor %}"
)
SHOUT = "{% for m in messages %}{{ m.content | map(attribute='text') | join | upper | e }}{% endfor %}"

CASES = {
    "chatml": ("{% for m in messages %}{{ m.role + m.content + '<|im_end|>' }}{% endfor %}", ALL_STRINGS),
    "walks parts": (WALK, ALL_PARTS),
    "both, strings first": (WALK_OR_STRING, ALL_STRINGS),
    "llama 2": (LLAMA_2, {"user": "string", "system": "string", "assistant": "string"}),
    "gemma": (GEMMA, {"user": "string", "assistant": "string", "tool": "string"}),
    "gemma 3": (GEMMA_3, ALL_STRINGS | {"system": "one part"}),
    "mistral": (MISTRAL, ALL_STRINGS),
    "llama 3": (LLAMA_3, ALL_STRINGS),
    "looks at the first part": (SMOL_VLM, ALL_PARTS),
    "cuts thoughts": (DEEPSEEK, ALL_STRINGS),
    "reads the first part only": (FIRST_PART, dict.fromkeys(ALL_STRINGS, "one part")),
    "begins with the system": (SYSTEM_FIRST, ALL_PARTS | {"tool": "parts"}),
    "strings of the system, parts of the rest": (STRING_SYSTEM, ALL_PARTS | {"system": "string"}),
    "filters": (SHOUT, ALL_PARTS),
}


def forms_of(template, **variables):
    return ModelTemplates({"default": template}, variables).forms(template)


@pytest.mark.parametrize("name", CASES)
def test_each_kind_of_template_is_found_to_read_its_own_form(name):
    """A form that the template does not read is a prompt without the user's words, answered with 200."""
    template, expected = CASES[name]
    found = forms_of(template)
    assert dict(found.by_role) == expected
    assert found.dropped == ({"tool"} if name == "llama 2" else set()) and found.trouble is None


@pytest.mark.parametrize("content", ["three words here", [{"type": "text", "text": "three words here"}]])
@pytest.mark.parametrize("name", CASES)
def test_a_text_comes_out_whichever_form_it_came_in(name, content):
    templates = ModelTemplates({"default": CASES[name][0]}, {})
    chat = [{"role": "user", "content": content}]
    if name == "begins with the system":
        chat.insert(0, {"role": "system", "content": "s"})
    given = [dict(message) for message in chat]
    text = templates.render(chat, tools=None, template=None, add_generation_prompt=True)
    assert "three words here" in text.lower()
    assert chat == given, "the caller's messages are not changed"


def test_handing_strings_to_all_would_lose_the_text(monkeypatch):
    """The fault that this guards against, planted: without the other forms the trial says so."""
    monkeypatch.setattr(content_form, "FORMS", ("string",))
    found = forms_of(WALK)
    assert found.dropped == {"user", "system", "assistant", "tool"} and not found.by_role


def test_one_part_that_is_read_of_several_would_lose_the_rest(monkeypatch):
    """Without a second mark a template that reads the first part only looks like one that walks them."""
    monkeypatch.setattr(content_form, "_MARKS", ("7316904",))
    assert forms_of(FIRST_PART).of("user") == "parts"


# The last message as parts, the ones before as they come: in no one form are both read.
MIXED = (
    "{% for m in messages %}{% if loop.last %}{% for p in m.content %}{{ p.text }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
FIRST_IS_A_STRING = (
    "{% for m in messages %}{% if loop.first %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}"
    "{% endfor %}"
)
NEITHER = {
    "last as parts": MIXED,
    "first as a string": FIRST_IS_A_STRING,
    "cuts to five": "{% for m in messages %}{{ m.content[:5] }}{% endfor %}",
    "cuts to thousands": "{% for m in messages %}{{ m.content[:8000] }}{% endfor %}",
    "cuts what came before": (
        "{% for m in messages %}{{ m.content if loop.last else m.content | truncate(300) }}{% endfor %}"
    ),
    "parts as repr": (
        "{% for m in messages %}{% for p in m.content if p is mapping %}{{ p }}{% endfor %}{% endfor %}"
    ),
    "parts as json": (
        "{% for m in messages %}{% if m.content is not string %}{{ m.content | tojson(indent=1) }}{% endif %}"
        "{% endfor %}"
    ),
}


@pytest.mark.parametrize("name", NEITHER)
def test_a_template_that_reads_neither_form_is_found(name):
    """Its prompts held `[{'type': 'text', 'text': 'x'}]`, or the beginning of what was said."""
    found = forms_of(NEITHER[name])
    assert found.of("user") == "string" and found.drops("user") and "user" in found.partly
    assert "writes the text of role user" in found.summary()
    assert "only in part or not in one form, and a chat that brings some is refused" in found.summary()


def test_without_parts_that_show_themselves_their_repr_would_count_as_their_text(monkeypatch):
    """The trial as it was, planted."""
    real = content_form._trial_message
    monkeypatch.setattr(
        content_form, "_trial_message", lambda role, texts, form, in_part=None: real(role, texts, form)
    )
    assert forms_of(NEITHER["parts as json"]).of("user") == "parts"
    assert forms_of(NEITHER["cuts to five"]).of("user") == "parts"


def test_with_one_message_a_chat_or_short_texts_they_would_pass(monkeypatch):
    monkeypatch.setattr(content_form, "_REPEATED", 1)
    assert forms_of(NEITHER["cuts to thousands"]).of("user") == "string"
    assert not forms_of(NEITHER["cuts to thousands"]).drops("user")
    monkeypatch.setitem(content_form._CHATS, "user", (("user",),))
    assert forms_of(MIXED).of("user") == "parts"


def test_a_filter_that_breaks_lines_keeps_the_text():
    assert not forms_of("{% for m in messages %}{{ m.content | wordwrap(40) }}{% endfor %}").dropped


def test_a_template_that_shows_one_message_of_several_is_served_as_before():
    """Which message it shows is its own affair; the form is the same for all of them."""
    for place in (0, -1):
        assert forms_of("{{ messages[" + str(place) + "].content }}").of("user") == "string"
        assert not forms_of("{{ messages[" + str(place) + "].content }}").drops("user")


def test_whether_a_developer_is_heard_is_found_by_rendering():
    """A template that has the word in a sentence was taken for one that writes such messages."""
    body = "{% for m in messages %}{% if m.role in ROLES %}{{ m.content }}{% endif %}{% endfor %}"
    silent = forms_of("You serve a developer." + body.replace("ROLES", "['user', 'system']"))
    assert silent.developer is None and not silent.drops("system")
    heard = forms_of(body.replace("ROLES", "['user', 'developer']"))
    assert heard.developer == "string" and heard.drops("system") and not heard.drops("developer")
    assert forms_of(WALK).of("developer") == "parts"


def test_a_role_whose_text_is_written_nowhere_is_found():
    heard = "{% if m.role in ('user', 'assistant') %}{{ m.content }}{% endif %}"
    found = forms_of("{% for m in messages %}" + heard + "{% endfor %}")
    assert found.dropped == {"system", "tool"}
    assert found.drops("developer") and found.drops("function") and not found.drops("user")
    assert "no text of role system, tool" in found.summary()
    refuses = forms_of(GEMMA)
    assert not refuses.dropped, "what raises is refused with the template's own words"


def test_a_template_that_renders_no_trial_chat_is_handed_strings_and_watched():
    """It may want a variable that only a request brings."""
    found = forms_of("{{ raise_exception('give me a persona') if not persona }}{{ messages[0].content }}")
    assert found.of("user") == "string" and found.drops("user")
    assert "without proof" in found.summary() and "give me a persona" in found.summary()
    open_ = forms_of("{{ raise_exception('no') if not persona }}{{ messages[0].content }}", persona="x")
    assert not open_.drops("user") and open_.trouble is None


def test_the_summary_names_the_roles_that_differ():
    assert forms_of(WALK).summary() == "content is handed over as lists of parts"
    assert forms_of(GEMMA_3).summary() == (
        "content is handed over as strings; of role system as lists of one part"
    )


@pytest.mark.parametrize(
    ("content", "string", "parts", "one"),
    [
        ("a", "a", ["a"], ["a"]),
        ("", "", [""], [""]),
        ([], "", [""], [""]),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a b", ["a", "b"], ["a b"]),
    ],
)
def test_content_is_brought_into_each_form(content, string, parts, one):
    def as_parts(texts):
        return [{"type": "text", "text": text} for text in texts]

    assert in_form(content, "string") == string
    assert in_form(content, "parts") == as_parts(parts)
    assert in_form(content, "one part") == as_parts(one)


@pytest.mark.parametrize("content", [None, 5, [{"type": "image"}], [{"type": "text", "text": 1}], ["a"]])
def test_what_is_no_text_stays_as_it_is(content):
    assert in_form(content, "parts") is content
