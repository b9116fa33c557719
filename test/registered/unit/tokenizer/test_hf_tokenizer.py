from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="unit-cpu")

import json
import subprocess
import sys
import threading

import pytest
import tokenizers

from sglang.srt.tokenizer.byte_level import BYTE_TO_CHAR, piece_to_bytes
from sglang.srt.tokenizer.tokenizer import load_tokenizer
from sglang.test.tiny_models import write_tiny_model, write_tiny_tokenizer
from sglang.test.waiting import wait_until

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture
def folder(tmp_path):
    write_tiny_tokenizer(tmp_path, vocab_size=400)
    return tmp_path


def edit(path, **changes):
    content = json.loads(path.read_text()) if path.exists() else {}
    content.update(changes)
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


@pytest.mark.parametrize("add_bos", [False, True])
def test_ids_and_text_are_those_of_transformers(tmp_path, strings, add_bos):
    transformers = pytest.importorskip("transformers")
    folder = write_tiny_model(tmp_path / "m", num_layers=1, vocab_size=400, add_bos=add_bos)
    ours, theirs = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert (ours.bos_token_id, ours.eos_token) == (theirs.bos_token_id, theirs.eos_token)
    for text in strings:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"], repr(text)
        assert ours.encode(text, add_special_tokens=False) == ids[add_bos:]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    want = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat_template(CHAT) == want


def test_a_chat_gets_exactly_one_bos(tmp_path):
    """A template that writes the BOS and a tokenizer that adds one would give two, and the model answers
    worse.
    """
    user = CHAT[0]["content"]
    with_bos, without = "{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"
    for adds in (True, False):
        folder = tmp_path / str(adds)
        folder.mkdir()
        for template, expected in ((with_bos, 1), (without, int(adds))):
            write_tiny_tokenizer(folder, vocab_size=400, add_bos=adds, chat_template=template)
            tokenizer = load_tokenizer(folder)
            ids = tokenizer.encode_chat(tokenizer.apply_chat_template(CHAT))
            assert ids.count(tokenizer.bos_token_id) == expected, (adds, template)
            assert ids[expected:] == tokenizer.encode(user, add_special_tokens=False)


def test_special_tokens_in_a_text_are_special_and_hidden_on_demand(folder):
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("a<|im_end|>b")
    assert ids[1] == 2
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_end|>b"
    assert (
        tokenizer.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=False)
        == "a<|im_end|>b"
    )


def test_every_byte_has_its_token_and_comes_back(folder):
    tokenizer = load_tokenizer(folder)
    for value in range(256):
        piece = BYTE_TO_CHAR[value]
        assert tokenizer.token_bytes(tokenizer._backend.token_to_id(piece)) == bytes([value])
        assert piece_to_bytes(piece) == bytes([value])
    assert piece_to_bytes("日") is None


def test_a_torn_character_is_shown_as_one_mark_and_its_bytes_are_exact(folder):
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("🙂")
    assert len(ids) == 4
    assert tokenizer.decode(ids[:3]).endswith("\ufffd")
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == "🙂"


def test_ids_outside_the_vocabulary_stand_for_nothing(folder):
    """A model's embedding is often wider than its vocabulary, and a random model samples such ids."""
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocab_size == 400
    assert tokenizer.token_bytes(400) == tokenizer.token_bytes(10**6) == tokenizer.token_bytes(-1) == b""
    assert tokenizer.token_bytes(2**40) == tokenizer.token_bytes(2**70) == b""
    assert tokenizer.decode([400, *tokenizer.encode("a"), 10**6]) == "a"
    with pytest.raises(ValueError, match="token id is a whole number from 0"):
        tokenizer.decode([-1])


LINE = "the quick brown fox 12 jumps, přes 😀!\n"


def lets_another_thread_run(tokenizer):
    """Whether a thread that has all it waits for came to its end while a long text was encoded."""
    go, ran = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: go.wait() and ran.set())
    other.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(3600.0)  # the interpreter changes hands only where somebody gives it up
    try:
        go.set()
        tokenizer.encode(LINE * 20_000)
        return ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        other.join()


def test_a_long_text_lets_other_threads_run(folder, monkeypatch):
    tokenizer = load_tokenizer(folder)
    # The system may come to the other thread too late now and then, and never where it is locked out.
    wait_until(lambda: lets_another_thread_run(tokenizer))
    monkeypatch.setattr("sglang.srt.tokenizer.tokenizer.LONG_TEXT", 10**9)
    assert not lets_another_thread_run(tokenizer), "the short way locks it out, and this test would see it"


def test_a_long_text_has_the_ids_of_its_parts(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode(LINE * 20_000) == tokenizer.encode(LINE) * 20_000
    with pytest.raises(ValueError, match="surrogate"):
        tokenizer.encode("\ud800" * 10_000)


def test_half_a_surrogate_pair_is_the_callers_error(folder):
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        load_tokenizer(folder).encode("a\ud83d")


def test_text_is_never_tidied(folder):
    edit(folder / "tokenizer_config.json", clean_up_tokenization_spaces=True)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("well , do n't !")) == "well , do n't !"


def test_truncation_and_padding_of_some_training_run_are_switched_off(folder):
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(max_length=3)
    backend.enable_padding(length=50)
    backend.save(str(folder / "tokenizer.json"))
    assert len(load_tokenizer(folder).encode("zzzzzzzzzz")) == 10


def test_tokens_that_only_the_config_adds_are_known(folder):
    row = {"content": "<tool>", "special": False, "normalized": False}
    edit(
        folder / "tokenizer_config.json",
        added_tokens_decoder={"400": row, "401": {"content": "<hid>", "special": True}},
    )
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("<tool><hid>") == [400, 401]
    assert tokenizer.decode([400, 401]) == "<tool>"
    assert tokenizer.token_bytes(400) == b"<tool>" and tokenizer.vocab_size == 402


def test_an_added_token_whose_id_does_not_fit_is_refused(folder):
    edit(folder / "tokenizer_config.json", added_tokens_decoder={"777": {"content": "<tool>"}})
    with pytest.raises(ValueError, match=r"'<tool>' the id 777.*would give it 400"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "rows", [7, ["a"], {"x": {"content": "a"}}, {"1": "a"}, {"1": {}}, {"1": {"content": 5}}]
)
def test_added_tokens_of_another_form_are_refused_with_the_file(folder, rows):
    edit(folder / "tokenizer_config.json", added_tokens_decoder=rows)
    with pytest.raises(ValueError, match=r"tokenizer_config.json: added_tokens_decoder must map"):
        load_tokenizer(folder)


@pytest.mark.parametrize("template", [5, ["a"], [{"name": "default"}], [{"name": "default", "template": 5}]])
def test_a_template_of_another_form_is_refused(folder, template):
    edit(folder / "tokenizer_config.json", chat_template=template)
    with pytest.raises(
        ValueError, match=r"tokenizer_config.json: .*chat_template.*; correct it or leave it out"
    ):
        load_tokenizer(folder)


def test_a_template_file_that_is_no_text_is_named(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"chat_template.jinja cannot be read"):
        load_tokenizer(folder)


def test_roles_come_from_either_file_as_text_or_object(folder):
    edit(
        folder / "tokenizer_config.json",
        eos_token={"content": "<|im_start|>", "lstrip": False},
        pad_token=...,
    )
    edit(folder / "special_tokens_map.json", pad_token="<|im_end|>", eos_token="<|endoftext|>")
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.eos_token, tokenizer.eos_token_ids, tokenizer.pad_token) == (
        "<|im_start|>",
        (1,),
        "<|im_end|>",
    )


def test_a_token_with_a_role_is_special_even_where_the_file_forgot(folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"] = [row for row in content["added_tokens"] if row["id"] != 2]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(folder)
    assert 2 in tokenizer.all_special_ids
    assert tokenizer.decode(tokenizer.encode("a<|im_end|>")) == "a"


def test_the_template_file_wins_over_the_config_and_names_are_kept(folder):
    assert "im_start" in load_tokenizer(folder).chat_template
    (folder / "chat_template.jinja").write_text("from file")
    assert load_tokenizer(folder).chat_template == "from file"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.apply_chat_template(CHAT) == "from file"
    assert tokenizer.apply_chat_template(CHAT, tools=[{}]) == "with tools"
    assert tokenizer.apply_chat_template(CHAT, chat_template="given") == "given"


def test_a_list_of_templates_in_the_config_is_read(folder):
    edit(folder / "tokenizer_config.json", chat_template=[{"name": "default", "template": "D"}])
    assert load_tokenizer(folder).chat_template == "D"


def test_a_chat_without_a_template_is_refused_with_the_cure(folder):
    edit(folder / "tokenizer_config.json", chat_template=...)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.chat_template is None
    with pytest.raises(ValueError, match="no chat template; start the server with --chat-template FILE"):
        tokenizer.apply_chat_template(CHAT)


def test_the_flag_brings_a_template_from_a_file(folder, tmp_path):
    jinja, as_json = tmp_path / "t.jinja", tmp_path / "t.json"
    jinja.write_text("J{{ messages[0].content }}")
    as_json.write_text(json.dumps({"chat_template": "N{{ messages[0].content }}"}))
    for value, expected in (
        (str(jinja), "Jhi"),
        (str(as_json), "Nhi"),
        ("T{{ messages[0].content }}", "Thi"),
    ):
        assert load_tokenizer(folder, chat_template=value).apply_chat_template(CHAT) == expected


def test_folders_that_hold_no_tokenizer_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="tokenizer_mode 'slow' is not served"):
        load_tokenizer(folder, mode="slow")
    with pytest.raises(ValueError, match="does not exist"):
        load_tokenizer(tmp_path / "nope")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json is not a tokenizer file .*; fetch it again$"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer.json; a folder with .* with --tokenizer-path$"):
        load_tokenizer(folder)


def test_loading_a_tokenizer_loads_neither_torch_nor_transformers(folder):
    """The server process tokenizes; with torch its start would take seconds."""
    code = (
        "import sys, pathlib\n"
        "from sglang.srt.tokenizer.tokenizer import load_tokenizer\n"
        f"t = load_tokenizer(pathlib.Path({str(folder)!r}))\n"
        "t.encode_chat(t.apply_chat_template([{'role': 'user', 'content': 'x'}]))\n"
        "print(sorted({'torch', 'numpy', 'transformers', 'gguf'} & set(sys.modules)))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
