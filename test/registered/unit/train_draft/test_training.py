"""A killed training run goes on as if nothing had happened, and the hand-written gradient is the true one."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit-cpu")

import dataclasses

import pytest
import torch

from train_draft.initial import borrowed_weights, shape_for
from train_draft.loss import Lesson, draft_loss, soft_cross_entropy, teacher_chances
from train_draft.settings import Settings, enter_work_folder
from train_draft.training import Frozen, Recipe, Trainer
from train_draft.unroll import unroll
from train_draft.vocabulary import choose_vocabulary, read_opinions

RECIPE = Recipe(epochs=2, rows_per_step=64, seed=3)


def silent(line):
    pass


@pytest.fixture(scope="module")
def lessons_and_vocabulary(target, texts):
    opinions = read_opinions(target, texts)
    vocabulary = choose_vocabulary(texts, opinions.chances, size=96, forced=[2])
    ids = vocabulary.draft_ids()
    return [Lesson(text, ids[best]) for text, best in zip(texts, opinions.best)], vocabulary


@pytest.fixture
def make_trainer(target, lessons_and_vocabulary):
    lessons, vocabulary = lessons_and_vocabulary

    def make(recipe=RECIPE):
        return Trainer(
            shape_for(target, 96),
            borrowed_weights(target, vocabulary, 3),
            Frozen(target.embedding, target.head, vocabulary, torch.float32),
            lessons,
            recipe,
        )

    return make


@pytest.mark.parametrize("train_head", [True, False])
def test_a_resumed_run_ends_with_the_same_weights_as_an_undisturbed_one(make_trainer, tmp_path, train_head):
    """A lost moment of the optimiser or a reshuffled epoch would still train, but nobody could repeat it."""
    recipe = dataclasses.replace(RECIPE, train_head=train_head)
    whole = make_trainer(recipe)
    whole.run(silent)
    state = tmp_path / "state.pt"
    killed = make_trainer(recipe)
    killed.run(silent, until=3, state=state, save_every=3)
    resumed = make_trainer(recipe)
    resumed.load(state)
    assert resumed.step == 3 < len(resumed.schedule)
    resumed.run(silent)
    for name, tensor in whole.weights.items():
        assert torch.equal(tensor, resumed.weights[name]), name
    moved = not torch.equal(whole.weights["lm_head.weight"], make_trainer().weights["lm_head.weight"])
    assert moved == train_head


def test_a_state_of_another_schedule_is_refused(make_trainer, tmp_path):
    state = tmp_path / "state.pt"
    make_trainer().save(state)
    longer = make_trainer(dataclasses.replace(RECIPE, epochs=3))
    with pytest.raises(ValueError, match="was saved in a run of 8 steps"):
        longer.load(state)


def test_training_lowers_the_loss(make_trainer):
    trainer = make_trainer(dataclasses.replace(RECIPE, epochs=6))
    trainer.run(silent, report_every=5)
    assert trainer.log[-1]["loss"] < 0.8 * trainer.log[0]["loss"]


def test_the_hand_written_gradient_is_autograds(random_draft, lessons_and_vocabulary, monkeypatch):
    """The chunked loss computes its own gradients; a wrong one still falls for a while."""
    monkeypatch.setattr("train_draft.loss._CHUNK", 7)
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, 16, generator=draw, requires_grad=True)
    head = torch.randn(30, 16, generator=draw, requires_grad=True)
    chances = torch.randn(9, 30, generator=draw).softmax(-1)
    rows = torch.randint(9, (20,), generator=draw)
    best = chances[rows].argmax(-1)
    loss, hits = soft_cross_entropy(hidden, head, chances, rows, best, 0.25)
    scores = (hidden @ head.T).log_softmax(-1)
    plain = -0.25 * (chances[rows] * scores).sum()
    torch.testing.assert_close(loss, plain)
    assert int(hits) == int((scores.argmax(-1) == best).sum())
    expected = torch.autograd.grad(plain, [hidden, head])
    for found, wanted in zip(torch.autograd.grad(loss, [hidden, head]), expected):
        torch.testing.assert_close(found, wanted)


def test_a_row_is_held_against_the_targets_opinion_on_the_token_it_predicts(
    random_draft, target, lessons_and_vocabulary
):
    """Labels that are one token off train a draft of the wrong token."""
    lessons, vocabulary = lessons_and_vocabulary
    some = lessons[:3]
    head = target.head[vocabulary.tokens]
    total = 0.0
    for step, unrolled in enumerate(unroll(random_draft, [lesson.text for lesson in some], 2)):
        parts = []
        for lesson, rows in zip(some, unrolled.stream.split(unrolled.lengths)):
            text = lesson.text
            for row, stream in enumerate(rows):
                asked = text.prompt_len + row + step  # the position whose logits choose the next token
                if int(text.ids[asked + 1]) in vocabulary.tokens:
                    wanted = (head @ text.final[asked]).softmax(0)
                    parts.append(-(wanted * random_draft.logits(stream).log_softmax(0)).sum())
        total = total + 0.8**step * torch.stack(parts).mean()
    found = draft_loss(random_draft, some, head, 2)
    torch.testing.assert_close(found.total, total, atol=1e-4, rtol=1e-5)
    assert teacher_chances(some, head).shape == (sum(len(lesson.best) for lesson in some), 96)


def test_a_work_folder_is_only_resumed_with_the_settings_of_its_run(tmp_path):
    settings = Settings("model", None, 9, 0, 100, 8, 96, 1, 64, 1e-3, False, 0, "float32")
    enter_work_folder(tmp_path, settings, resume=False)
    with pytest.raises(ValueError, match="add --resume"):
        enter_work_folder(tmp_path, settings, resume=False)
    enter_work_folder(tmp_path, settings, resume=True)
    with pytest.raises(ValueError, match="has seed 0, and now it is 7"):
        enter_work_folder(tmp_path, dataclasses.replace(settings, seed=7), resume=True)
