"""Owns the settings of a training run: what decides its result, and what a resumed run must not change.

Read by the command and the stages. It must not start anything.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from train_draft.generation import Plan
from train_draft.training import Recipe

SETTINGS_FILE = "settings.json"


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that the trained tensors hang on.

    `prompts_sha256` stands for the prompts file's content, `start_sha256` for the tensors of the draft that
    training starts from; None: no such file.
    """

    model_path: str
    prompts_sha256: str | None
    chat_prompts: int
    file_prompts: int
    training_tokens: int
    new_tokens: int
    draft_vocab_size: int
    epochs: int
    rows_per_step: int
    learning_rate: float
    train_head: bool
    seed: int
    dtype: str
    start_sha256: str | None = None

    def training_plan(self, tokens_there: int = 0) -> Plan:
        """How training texts are drawn, a fifth of them at a temperature; some may be there already."""
        enough = max(0, self.training_tokens - tokens_there)
        return Plan(new_tokens=self.new_tokens, sampled_share=0.2, seed=self.seed, enough=enough)

    def recipe(self) -> Recipe:
        return Recipe(
            epochs=self.epochs,
            rows_per_step=self.rows_per_step,
            learning_rate=self.learning_rate,
            train_head=self.train_head,
            seed=self.seed,
        )


def fitting_dtype(asked: str) -> str:
    """The type of matrix products: for "auto" bf16 where the processor multiplies it itself, else fp32."""
    if asked != "auto":
        return asked
    able = torch.cpu.get_capabilities()
    return "bfloat16" if able.get("avx512_bf16") or able.get("amx_bf16") else "float32"


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of a name that `fitting_dtype` returns."""
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def file_hash(path: Path | None) -> str | None:
    """Sha256 of a file's content; None for no file."""
    return None if path is None else hashlib.sha256(path.read_bytes()).hexdigest()


def enter_work_folder(folder: Path, settings: Settings, *, resume: bool) -> None:
    """Begin a run in a folder, or go on with the one in it.

    Raises ValueError when the folder holds a run and `resume` was not asked for, and when the settings of
    that run are others: half of it would come from each.
    """
    file = folder / SETTINGS_FILE
    given = dataclasses.asdict(settings)
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(given, indent=2) + "\n", encoding="utf-8")
        return
    if not resume:
        raise ValueError(
            f"--work-folder {folder} holds a run; add --resume to go on with it, or take another"
        )
    found = json.loads(file.read_text(encoding="utf-8"))
    changed = [name for name in given if found.get(name) != given[name]]
    if changed:
        name = changed[0]
        raise ValueError(
            f"--resume: the run in {folder} has {name} {found.get(name)!r}, and now it is {given[name]!r}; "
            f"resume with the same settings, or take another --work-folder"
        )
