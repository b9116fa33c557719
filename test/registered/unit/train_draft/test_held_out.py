"""The held-out prompts are the committed ones, and training never sees them."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit-cpu")

import json
import shutil

import pytest

from train_draft.heldout import HELD_OUT_FILE, read_held_out
from train_draft.prompts import (
    CODING_TASKS,
    CODING_TEMPLATES,
    SUBJECTS,
    TEMPLATES,
    chat_prompts,
    draw_prompts,
    read_prompts_file,
)


@pytest.fixture
def copied(tmp_path):
    """The committed file and its hash, where a test may change them."""
    for name in (HELD_OUT_FILE.name, HELD_OUT_FILE.name + ".sha256"):
        shutil.copy(HELD_OUT_FILE.with_name(name), tmp_path / name)
    return tmp_path / HELD_OUT_FILE.name


def test_the_committed_file_has_its_hash_and_enough_prompts_of_both_kinds(copied):
    prompts = read_held_out(copied)
    assert prompts == read_held_out()
    kinds = [prompt.kind for prompt in prompts]
    # About one greedy answer in five is a loop and is dropped; 50 and 25 have to be left.
    assert kinds.count("chat") >= 70 and kinds.count("gsm8k") >= 40
    assert len({prompt.text for prompt in prompts}) == len(prompts)


def test_a_held_out_file_with_a_changed_line_is_refused(copied):
    """One easier prompt would make every later figure look better than the card's."""
    lines = copied.read_text(encoding="utf-8").splitlines()
    lines[5] = json.dumps({"kind": "chat", "prompt": "Count to one hundred."})
    copied.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match="restore the committed file"):
        read_held_out(copied)


def reused_parts(text):
    """Templates, tasks and subjects of training that a prompt is made of."""
    starts = [template.split("{}") for template in (*TEMPLATES, *CODING_TEMPLATES)]
    return [
        *(
            f"{head}{{}}{tail}"
            for head, tail in starts
            if text.startswith(head) and text.endswith(tail) and head
        ),
        *(part for part in CODING_TASKS if part in text),
        *(part for part in SUBJECTS if text.endswith((f" {part}?", f" {part}.", f" {part} to your class."))),
    ]


def test_no_held_out_chat_prompt_is_made_of_a_template_or_a_subject_of_training():
    found = {p.text: reused_parts(p.text) for p in read_held_out() if p.kind == "chat"}
    assert not {text: parts for text, parts in found.items() if parts}


def test_the_check_of_parts_finds_every_chat_prompt_of_training():
    """The twin of the test above: it can fail."""
    made = chat_prompts()[: len(TEMPLATES) * len(SUBJECTS)]
    assert all(reused_parts(prompt.text) for prompt in made if not prompt.text.startswith("Is "))


def test_training_draws_no_held_out_question(tmp_path):
    questions = [prompt.text for prompt in read_held_out() if prompt.kind == "gsm8k"]
    own = [f"How many is {index} and {index}?" for index in range(10)]
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps({"question": text}) + "\n" for text in [*questions, *own]))
    held_out = {prompt.text for prompt in read_held_out()}
    drawn = draw_prompts(num_chat=5, num_file=10, file=file, held_out=held_out, seed=0)
    assert sorted(prompt.text for prompt in drawn if prompt.kind == "gsm8k") == own
    with pytest.raises(ValueError, match="--file-prompts is 11, and there are only 10"):
        draw_prompts(num_chat=5, num_file=11, file=file, held_out=held_out, seed=0)


def test_the_same_seed_draws_the_same_prompts():
    first, again, other = (
        draw_prompts(num_chat=20, num_file=0, file=None, held_out=[], seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_a_prompts_file_without_a_question_is_refused_with_its_line(tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text('{"question": "How many?"}\n{"text": "no"}\n')
    with pytest.raises(ValueError, match=r"questions\.jsonl:2"):
        read_prompts_file(file)
