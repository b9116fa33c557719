from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=20, suite="unit-cpu")

import itertools

import gguf
import numpy as np
import pytest
from tokenizers import pre_tokenizers

from sglang.srt.tokenizer.byte_level import BYTE_TO_CHAR
from sglang.srt.tokenizer.gguf_pretokenizer import PRE_TOKENIZATIONS, build_pre_tokenizer
from sglang.srt.tokenizer.gguf_tokenizer import merges_from_scores
from sglang.srt.tokenizer.tokenizer import load_tokenizer
from sglang.test.tiny_models import write_tiny_gguf, write_tiny_model

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6


def write_vocabulary(path, model, tokens, **metadata):
    """A GGUF file with a tokenizer and one small tensor."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    for key, value in metadata.items():
        getattr(writer, f"add_{key}")(value)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def theirs(smollm_file):
    """transformers' own reading of the same file (about five seconds)."""
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(smollm_file.parent, gguf_file=smollm_file.name)


@pytest.fixture(scope="module")
def ours(smollm_file):
    return load_tokenizer(smollm_file)


def split_numbers(tokenizer):
    """Give transformers' tokenizer the cut that the file names (`pre` = smollm) and transformers does not
    read.
    """
    own = tokenizer.backend_tokenizer.pre_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, own])
    return own


def space_before_a_number(text):
    return any(a.isspace() and b.isnumeric() for a, b in itertools.pairwise(text))


@pytest.mark.model
def test_500_strings_have_the_ids_of_transformers_from_the_same_file(ours, theirs, strings):
    """transformers ignores the file's pre-tokenizer and lets a number keep the space before it.

    So all strings are compared after it is given the file's cut, and every string without a space before a
    number also as it is.
    """
    plain = [text for text in strings if not space_before_a_number(text)]
    assert len(strings) == 500 and len(plain) >= 350
    for text in plain:
        assert ours.encode(text) == theirs(text)["input_ids"], repr(text)
    own = split_numbers(theirs)
    try:
        for text in strings:
            assert ours.encode(text) == theirs(text)["input_ids"], repr(text)
    finally:
        theirs.backend_tokenizer.pre_tokenizer = own


@pytest.mark.model
def test_500_strings_decode_to_the_text_of_transformers(ours, theirs, strings):
    for text in strings:
        ids = ours.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.model
def test_bytes_of_the_tokens_are_the_bytes_of_the_text(ours, strings):
    for text in strings:
        assert b"".join(map(ours.token_bytes, ours.encode(text))) == text.encode()


@pytest.mark.model
def test_decoding_a_growing_prefix_only_ever_adds_text(ours, strings):
    """What a stream relies on: apart from a torn last character, text that was sent never changes."""
    for text in strings[:60]:
        ids = ours.encode(text)
        shown = ""
        for end in range(1, len(ids) + 1):
            now = ours.decode(ids[:end], skip_special_tokens=False)
            if not now.endswith("\ufffd"):
                assert now.startswith(shown)
                shown = now
        assert shown == text


@pytest.mark.model
def test_smollm2_special_tokens_follow_the_metadata(ours):
    assert (ours.vocab_size, ours.bos_token, ours.bos_token_id) == (49152, "<|im_start|>", 1)
    assert (ours.eos_token, ours.eos_token_ids, ours.pad_token) == ("<|im_end|>", (2,), "<|im_end|>")
    assert ours.all_special_ids == list(range(17))
    assert not ours.adds_bos
    assert ours.encode("<|im_start|>user\n")[0] == 1
    prompt = ours.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    ids = ours.encode_chat(prompt)
    assert ids.count(1) == 3 and ids.count(2) == 2  # system, user, and the opened assistant turn
    assert ours.decode(ids, skip_special_tokens=False) == prompt


@pytest.mark.model
def test_smollm2_chats_are_rendered_like_transformers_does(ours, theirs):
    chats = [
        [{"role": "user", "content": "hi <|im_end|> {{ x }}"}],
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a\n b "}],
        [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": "r"},
        ],
    ]
    for chat in chats:
        for prompt in (True, False):
            want = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
            assert ours.apply_chat_template(chat, add_generation_prompt=prompt) == want


def test_a_tiny_twin_gives_the_ids_of_the_folder_it_was_made_of(tmp_path, strings):
    folder = write_tiny_model(tmp_path / "m", num_layers=1, vocab_size=400)
    hf, twin = load_tokenizer(folder), load_tokenizer(write_tiny_gguf(folder))
    assert (hf.all_special_ids, hf.eos_token_ids, hf.chat_template) == ([0, 1, 2], (2,), twin.chat_template)
    assert (twin.all_special_ids, twin.eos_token_ids, twin.vocab_size) == ([0, 1, 2], (2,), 400)
    for text in strings[:200]:
        assert hf.encode(text) == twin.encode(text)
        assert twin.decode(twin.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "I'LL don't  x12 345", ["I", "'", "LL", " don", "'t", " ", " x", "12", " 345"]),
        ("smollm", "x12 345  6", ["x", "1", "2", " ", "3", "4", "5", "  ", "6"]),
        (
            "llama-bpe",
            "I'LL pay 12345.67\n\n  ok",
            ["I", "'LL", " pay", " ", "123", "45", ".", "67", "\n\n", " ", " ok"],
        ),
        (
            "qwen2",
            "I'LL pay 123(a)\n\n  ok",
            ["I", "'LL", " pay", " ", "1", "2", "3", "(a", ")\n\n", " ", " ok"],
        ),
    ],
)
def test_each_family_cuts_a_text_in_its_own_way(pre, text, pieces):
    cut = build_pre_tokenizer(PRE_TOKENIZATIONS[pre]).pre_tokenize_str(text)
    assert [piece for piece, _ in cut] == [
        "".join(BYTE_TO_CHAR[byte] for byte in piece.encode()) for piece in pieces
    ]


def byte_level_file(path, pre="gpt-2", tokens=(), merges=(), types=None, **metadata):
    """259 entries (two control tokens, the bytes, one merged pair), then `tokens`."""
    tokens = ["<bos>", "<eos>", *BYTE_TO_CHAR, "ĊĊ", *tokens]
    merges = ["Ċ Ċ", *merges]
    metadata = {
        "token_types": types or [CONTROL, CONTROL, *[NORMAL] * (len(tokens) - 2)],
        "token_merges": merges,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **metadata,
    }
    if pre is not None:
        metadata["tokenizer_pre"] = pre
    return write_vocabulary(path, "gpt2", tokens, **metadata)


def test_llama3_vocabularies_take_a_known_piece_whole(tmp_path):
    """Their merges do not reach every token; following them would split words that the model knows."""
    tokens = ["Ġab", "ab"]
    with_merges = load_tokenizer(byte_level_file(tmp_path / "a.gguf", "llama-bpe", tokens, ["a b"]))
    assert with_merges.encode(" ab", add_special_tokens=False) == [259]
    plain = load_tokenizer(byte_level_file(tmp_path / "b.gguf", "gpt-2", tokens, ["a b"]))
    assert len(plain.encode(" ab", add_special_tokens=False)) == 2


@pytest.mark.parametrize(
    ("pre", "metadata", "expected"),
    [
        ("gpt-2", {}, []),
        ("llama-bpe", {}, [0]),
        ("llama-bpe", {"add_bos_token": False}, []),
        ("gpt-2", {"add_bos_token": True}, [0]),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, [0, 1]),
    ],
)
def test_bos_and_eos_follow_the_flags_of_the_file(tmp_path, pre, metadata, expected):
    tokenizer = load_tokenizer(byte_level_file(tmp_path / "a.gguf", pre, **metadata))
    assert tokenizer.encode("") == expected
    assert tokenizer.encode("", add_special_tokens=False) == []
    assert tokenizer.adds_bos is (0 in expected)


def test_qwen2_composes_characters_first(tmp_path):
    tokenizer = load_tokenizer(byte_level_file(tmp_path / "a.gguf", "qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")


def test_user_defined_tokens_are_whole_and_shown_control_tokens_are_whole_and_hidden(tmp_path):
    file = byte_level_file(
        tmp_path / "a.gguf",
        tokens=["<think>", "<|x|>"],
        types=[CONTROL] * 2 + [NORMAL] * 257 + [USER, CONTROL],
    )
    tokenizer = load_tokenizer(file)
    ids = tokenizer.encode("a<think>b<|x|>")
    assert ids[1] == 259 and ids[3] == 260 and len(ids) == 4
    assert tokenizer.decode(ids) == "a<think>b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<think>b<|x|>"
    assert tokenizer.token_bytes(259) == b"<think>"
    assert tokenizer.all_special_ids == [0, 1, 260]


def test_further_end_tokens_and_named_templates_are_found(tmp_path):
    templates = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    file = byte_level_file(tmp_path / "a.gguf", eot_token_id=5, chat_template=templates)
    tokenizer = load_tokenizer(file)
    assert tokenizer.eos_token_ids == (1, 5)
    assert tokenizer.chat_template == "D"
    chat = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(chat) == "D"
    assert tokenizer.apply_chat_template(chat, tools=[{"type": "function"}]) == "T"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "no-such"}, "pre-tokenizer 'no-such' is not served; known: default, gpt-2"),
        ({"token_types": [1]}, "259 tokens but 1 token types"),
        ({"eos_token_id": 999}, "eos_token_id is 999, the vocabulary has 259 tokens"),
        ({"merges": ["a nope"]}, "do not fit together"),
        ({"tokens": ["a"]}, "1 of the 260 tokens are there twice"),
    ],
)
def test_a_vocabulary_that_cannot_be_rebuilt_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_tokenizer(byte_level_file(tmp_path / "a.gguf", **changes))
    assert "a.gguf" in str(caught.value)


def test_an_unknown_kind_of_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="tokenizer model 'bert' is not served; known: gpt2, llama"):
        load_tokenizer(write_vocabulary(tmp_path / "a.gguf", "bert", ["a"]))


WORDS = [
    "▁hello",
    "▁world",
    "hello",
    "wor",
    "ld",
    "▁wor",
    "he",
    "llo",
    "ll",
    "▁h",
    "▁w",
    "or",
    "lo",
    "▁▁",
    "ell",
]


PIECES = [*WORDS, "▁", *"helowrd.é\n"]
SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), *PIECES]


def sentencepiece_file(path, **metadata):
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(PIECES))]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(PIECES)
    metadata = {
        "token_scores": scores,
        "token_types": types,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unk_token_id": 0,
        **metadata,
    }
    return write_vocabulary(path, "llama", SPM_TOKENS, **metadata)


def test_a_scored_vocabulary_gives_the_ids_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    file = sentencepiece_file(tmp_path / "spm.gguf", add_space_prefix=True, add_bos_token=True)
    ours = load_tokenizer(file)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    for text in [
        "hello world",
        "hello  world",
        "helloworld",
        "",
        "é🙂\n",
        "a b",
        "lllo...",
        "hello ",
        "x<0x41>",
    ]:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"], repr(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), repr(text)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (" hello", ["▁", "▁hello"]),
        ("</s>hello", ["</s>", "▁hello"]),
        ("a<s> hello", ["▁", "<0x61>", "<s>", "▁", "▁hello"]),
    ],
)
def test_every_stretch_of_text_gets_its_space_like_in_sentencepiece(tmp_path, text, pieces):
    """transformers drops it from GGUF files where a text begins with a space or follows a special token."""
    tokens = {token: index for index, token in enumerate(SPM_TOKENS)}
    tokenizer = load_tokenizer(sentencepiece_file(tmp_path / "spm.gguf"))
    assert tokenizer.encode(text, add_special_tokens=False) == [tokens[piece] for piece in pieces]


def test_a_scored_vocabulary_is_merged_best_score_first():
    tokens = ["a", "b", "c", "ab", "bc", "abc"]
    scores = [0.0, 0.0, 0.0, -2.0, -1.0, -3.0]
    assert merges_from_scores(tokens, [NORMAL] * 6, scores) == [
        ("b", "c"),
        ("a", "b"),
        ("a", "bc"),
        ("ab", "c"),
    ]
    # A control token is never the result or the part of a merge.
    assert merges_from_scores(tokens, [NORMAL] * 4 + [CONTROL, NORMAL], scores) == [("a", "b"), ("ab", "c")]


def test_spaces_and_unknown_characters_of_a_scored_vocabulary_round_trip(tmp_path):
    tokenizer = load_tokenizer(sentencepiece_file(tmp_path / "spm.gguf"))
    for text in ["hello world", "hello  world 🙂\nx", "日本"]:
        ids = tokenizer.encode(text)
        assert ids[0] == 1  # BOS is the default of this family
        assert tokenizer.decode(ids) == text
        assert b"".join(map(tokenizer.token_bytes, ids[1:])) == (" " + text).encode()
    assert tokenizer.encode("hello")[1:] == [259]


def test_the_space_prefix_can_be_switched_off(tmp_path):
    tokenizer = load_tokenizer(sentencepiece_file(tmp_path / "spm.gguf", add_space_prefix=False))
    assert tokenizer.encode("hello", add_special_tokens=False) == [261]
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"


def test_scores_must_match_the_tokens(tmp_path):
    with pytest.raises(ValueError, match=r"\d+ tokens but 1 scores"):
        load_tokenizer(sentencepiece_file(tmp_path / "spm.gguf", token_scores=[0.0]))
