"""The command goes through all stages, says what it does, and refuses what would waste hours."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="unit-cpu")

import json

import pytest
import torch

from sglang.test.tiny_models import write_tiny_model
from train_draft.checkpoint import Draft
from train_draft.command import main
from train_draft.prompts import KINDS, Prompt


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    """Flags of a run of seconds: a tiny target, few short texts, four held-out prompts."""
    model = write_tiny_model(tmp_path / "model", num_layers=8)
    held_out = [Prompt(kind, f"{kind} {number}") for kind in KINDS for number in (1, 2)]
    monkeypatch.setattr("train_draft.stages.read_held_out", lambda: held_out)
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"question": f"{i} + {i}"}) + "\n" for i in range(4)))
    return [
        "train",
        *("--model-path", str(model), "--prompts-file", str(questions), "--dtype", "float32"),
        *("--chat-prompts", "6", "--file-prompts", "4", "--new-tokens", "10", "--epochs", "2"),
        *("--draft-vocab-size", "64", "--rows-per-step", "32"),
        *("--work-folder", str(tmp_path / "work"), "--output-folder", str(tmp_path / "draft")),
    ]


def test_a_run_writes_a_draft_with_its_card_and_can_be_resumed(arguments, tmp_path, capsys):
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "training: step" in said and "evaluation: gsm8k: 2 texts" in said
    first = Draft.read(tmp_path / "draft")
    card = (tmp_path / "draft" / "README.md").read_text(encoding="utf-8")
    assert "| chat | 2 |" in card and "seed 1" in card and "{" not in card
    assert main(arguments) == 2
    assert "add --resume" in capsys.readouterr().err
    # A kill between training and writing: the state on disk leads to the same draft.
    assert main([*arguments, "--resume"]) == 0
    again = Draft.read(tmp_path / "draft")
    assert all(torch.equal(tensor, again.tensors[name]) for name, tensor in first.tensors.items())


def test_a_draft_is_judged_alone_with_the_same_figures(arguments, tmp_path, capsys):
    assert main(arguments) == 0
    figures = [line for line in capsys.readouterr().out.splitlines() if line.startswith("evaluation: ")]
    report = tmp_path / "report.json"
    evaluate = [
        "evaluate",
        *("--model-path", str(tmp_path / "model"), "--draft-path", str(tmp_path / "draft")),
        *("--work-folder", str(tmp_path / "other"), "--new-tokens", "10", "--dtype", "float32"),
        *("--report", str(report)),
    ]
    assert main(evaluate) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if "evaluation: " in line] == figures
    assert json.loads(report.read_text())["chat"]["texts"] == 2


def test_a_second_run_trains_a_draft_on_in_its_own_vocabulary(arguments, tmp_path):
    assert main(arguments) == 0
    first = Draft.read(tmp_path / "draft")
    further = [*arguments, "--start-from", str(tmp_path / "draft"), "--seed", "2", "--learning-rate", "1e-4"]
    further[further.index(str(tmp_path / "work"))] = str(tmp_path / "further")
    further[further.index(str(tmp_path / "draft"))] = str(tmp_path / "better")
    assert main(further) == 0
    better = Draft.read(tmp_path / "better")
    assert torch.equal(better.tensors["d2t"], first.tensors["d2t"])
    moved = (better.tensors["fc.weight"].float() - first.tensors["fc.weight"].float()).abs().max()
    assert 0 < moved < 0.01


def test_what_cannot_run_leaves_no_work_folder_behind(arguments, tmp_path, capsys):
    """A folder with the settings of a run that never began would refuse the corrected command."""
    assert main([*arguments, "--file-prompts", "5"]) == 2
    assert "--file-prompts is 5, and there are only 4" in capsys.readouterr().err
    assert not (tmp_path / "work").exists()


def test_a_touched_held_out_file_stops_the_command_before_any_work(arguments, tmp_path, monkeypatch, capsys):
    def touched():
        raise ValueError("heldout.jsonl has another hash")

    monkeypatch.setattr("train_draft.command.read_held_out", touched)
    assert main(arguments) == 2
    assert "another hash" in capsys.readouterr().err
    assert not (tmp_path / "work").exists()
