"""Owns the training loop: batches, optimiser, learning rate, and a state that a killed run goes on from.

Run by the training command and by the overfit helper of tests. It must not generate or judge texts.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from train_draft.loss import Lesson, draft_loss
from train_draft.network import DraftNetwork, DraftShape
from train_draft.vocabulary import DraftVocabulary

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a draft is trained.

    `rows_per_step` counts rows of the first unroll. Without `train_head` the draft keeps the target's own
    head rows: as good after one epoch, and a quarter cheaper.
    """

    epochs: int = 4
    rows_per_step: int = 512
    depth: int = 3
    learning_rate: float = 3e-3
    last_rate: float = 0.01  # of the peak, at the end
    warm_up: float = 0.04  # of all steps
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    clip: float = 1.0
    train_head: bool = True
    seed: int = 0

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step: a linear start, then half a cosine."""
        warm = max(1, round(self.warm_up * steps))
        if step < warm:
            return self.learning_rate * (step + 1) / warm
        done = (step - warm) / max(1, steps - warm)
        return self.learning_rate * (
            self.last_rate + (1 - self.last_rate) * 0.5 * (1 + math.cos(math.pi * done))
        )


class Frozen:
    """What training reads and never changes, in the dtype of the matrix products."""

    def __init__(
        self, embedding: Tensor, head: Tensor, vocabulary: DraftVocabulary, dtype: torch.dtype
    ) -> None:
        self.dtype = dtype
        self.embedding = embedding.to(dtype)
        self.teacher_head = head[vocabulary.tokens].to(dtype)


class Trainer:
    """Steps through all epochs. Master weights and the optimiser are fp32; a step computes in a cast copy."""

    def __init__(
        self,
        shape: DraftShape,
        weights: dict[str, Tensor],
        frozen: Frozen,
        lessons: Sequence[Lesson],
        recipe: Recipe,
    ) -> None:
        self.shape = shape
        self.frozen = frozen
        self.lessons = [lesson for lesson in lessons if len(lesson.best)]
        self.recipe = recipe
        self.weights = {name: weights[name].clone() for name in shape.tensors()}
        self.trained = [name for name in self.weights if recipe.train_head or name != "lm_head.weight"]
        matrices = [self.weights[name] for name in self.trained if self.weights[name].dim() > 1]
        vectors = [self.weights[name] for name in self.trained if self.weights[name].dim() == 1]
        groups = [
            {"params": matrices, "weight_decay": recipe.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=recipe.betas, fused=True)
        self.schedule = [batch for epoch in range(recipe.epochs) for batch in self._epoch(epoch)]
        self.step = 0
        self.log: list[dict[str, float]] = []

    def _epoch(self, epoch: int) -> list[list[int]]:
        """Batches of lessons: shuffled by seed and epoch, each just long enough."""
        order = list(range(len(self.lessons)))
        random.Random(f"{self.recipe.seed}/{epoch}").shuffle(order)
        batches: list[list[int]] = [[]]
        rows = 0
        for index in order:
            if rows >= self.recipe.rows_per_step:
                batches.append([])
                rows = 0
            batches[-1].append(index)
            rows += len(self.lessons[index].best)
        return batches

    def run(
        self,
        progress: Progress,
        *,
        until: int | None = None,
        state: Path | None = None,
        save_every: int = 100,
        report_every: int = 25,
    ) -> None:
        """Train to the end or to step `until`; with `state` the run can go on from there after a kill."""
        last = len(self.schedule) if until is None else until
        sums = {"loss": 0.0, "accuracy": 0.0, "rows": 0.0, "seconds": 0.0}
        while self.step < last:
            for name, value in self._take_step().items():
                sums[name] += value
            if self.step % report_every == 0 or self.step == len(self.schedule):
                self._report(sums, progress)
                sums = dict.fromkeys(sums, 0.0)
            if state is not None and (self.step % save_every == 0 or self.step == len(self.schedule)):
                self.save(state)

    def _take_step(self) -> dict[str, float]:
        started = time.perf_counter()
        copies = {
            name: tensor.to(self.frozen.dtype, copy=True).requires_grad_(name in self.trained)
            for name, tensor in self.weights.items()
        }
        network = DraftNetwork(self.shape, copies, self.frozen.embedding)
        lessons = [self.lessons[index] for index in self.schedule[self.step]]
        loss = draft_loss(network, lessons, self.frozen.teacher_head, self.recipe.depth)
        if loss.total.requires_grad:
            loss.total.backward()
        for name in self.trained:
            grad, tensor = copies[name].grad, self.weights[name]
            tensor.grad = torch.zeros_like(tensor) if grad is None else grad.float()
        torch.nn.utils.clip_grad_norm_([self.weights[name] for name in self.trained], self.recipe.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate(self.step, len(self.schedule))
        self.optimizer.step()
        self.step += 1
        return {
            "loss": float(loss.total.detach()) * loss.rows,
            "accuracy": loss.accuracy * loss.rows,
            "rows": loss.rows,
            "seconds": time.perf_counter() - started,
        }

    def _report(self, sums: dict[str, float], progress: Progress) -> None:
        rows = max(1.0, sums["rows"])
        epoch = self.step * self.recipe.epochs / len(self.schedule)
        entry = {"epoch": epoch, "loss": sums["loss"] / rows, "accuracy": sums["accuracy"] / rows}
        self.log.append(entry)
        progress(
            f"training: step {self.step} of {len(self.schedule)}, epoch {epoch:.2f}, "
            f"loss {entry['loss']:.3f}, accuracy at depth 1 {entry['accuracy']:.3f}, "
            f"{rows / max(sums['seconds'], 1e-9):.0f} rows/s"
        )

    def save(self, path: Path) -> None:
        """Everything that the next step depends on, written whole or not at all."""
        content: dict[str, Any] = {
            "step": self.step,
            "steps": len(self.schedule),
            "log": self.log,
            "weights": self.weights,
            "optimizer": self.optimizer.state_dict(),
        }
        unfinished = path.with_suffix(".part")
        torch.save(content, unfinished)
        os.replace(unfinished, path)

    def load(self, path: Path) -> None:
        """Go on from a saved state.

        Raises ValueError when it belongs to a run of another length: its schedule would not fit.
        """
        content = torch.load(path, weights_only=True)
        if content["steps"] != len(self.schedule):
            raise ValueError(
                f"{path} was saved in a run of {content['steps']} steps, and this one has "
                f"{len(self.schedule)}; resume with the same texts and recipe, or take a new --work-folder"
            )
        for name, tensor in self.weights.items():
            tensor.copy_(content["weights"][name])
        self.optimizer.load_state_dict(content["optimizer"])
        self.step, self.log = content["step"], content["log"]
