"""Owns the tiny draft of tests: trained in seconds to know a few prompts' answers by heart.

Called by tests of serving that need many accepted tokens. It must not be used for a draft that anyone serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from train_draft.checkpoint import Draft, make_draft
from train_draft.generation import Plan, Question, generate
from train_draft.initial import borrowed_weights, shape_for
from train_draft.loss import Lesson
from train_draft.target import PlainTarget
from train_draft.texts import Text
from train_draft.training import Frozen, Recipe, Trainer
from train_draft.vocabulary import choose_vocabulary, read_opinions

# A tiny layer bears three times the rate of a real draft, and a test has no time to lose.
_RATE = 1e-2


def overfit_tiny_draft(
    model_path: str | Path,
    prompts: Sequence[Sequence[int]],
    *,
    aux_layers: tuple[int, ...],
    draft_vocab_size: int,
    new_tokens: int = 32,
    epochs: int = 60,
    depth: int = 4,
    seed: int = 0,
) -> Draft:
    """A draft in fp32 that accepts nearly everything after these prompts, and next to nothing elsewhere.

    `prompts` are token ids; the target answers each greedily with `new_tokens` tokens. `depth` is the number
    of draft steps that it learns. `Draft.save(folder)` writes what a server reads.
    """
    target = PlainTarget.from_path(model_path, torch.float32, aux_layers)
    texts = greedy_texts(target, prompts, new_tokens)
    opinions = read_opinions(target, texts)
    vocabulary = choose_vocabulary(
        texts, opinions.chances, size=draft_vocab_size, forced=target.config.eos_token_ids
    )
    draft_ids = vocabulary.draft_ids()
    lessons = [Lesson(text, draft_ids[best]) for text, best in zip(texts, opinions.best)]
    shape = shape_for(target, draft_vocab_size)
    trainer = Trainer(
        shape,
        borrowed_weights(target, vocabulary, seed),
        Frozen(target.embedding, target.head, vocabulary, torch.float32),
        lessons,
        Recipe(epochs=epochs, rows_per_step=64, depth=depth, learning_rate=_RATE, seed=seed),
    )
    trainer.run(lambda line: None)
    return make_draft(target, shape, trainer.weights, vocabulary, torch.float32)


def greedy_texts(target: PlainTarget, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Text]:
    """The target's greedy answers to prompts in ids, loops included: a random model knows little else."""
    texts: list[Text] = []
    questions = [Question(index, "chat", list(ids)) for index, ids in enumerate(prompts)]
    plan = Plan(new_tokens=new_tokens, rows=min(32, len(questions)), keep_loops=True)
    generate(target, questions, plan, lambda some, dropped: texts.extend(some), lambda line: None)
    return sorted(texts, key=lambda text: text.index)
