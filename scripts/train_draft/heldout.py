"""Owns the prompts that a draft is judged on: the committed file and its hash.

Read by the evaluation, which judges on nothing else, and by the drawing of training prompts, which leaves
them out. It must not write the file: it was fixed before the first training run.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from train_draft.prompts import KINDS, Prompt

HELD_OUT_FILE = Path(__file__).with_name("heldout.jsonl")


def committed_hash(path: Path = HELD_OUT_FILE) -> str:
    """The sha256 that stands beside the file."""
    return path.with_name(path.name + ".sha256").read_text(encoding="utf-8").split()[0]


def read_held_out(path: Path = HELD_OUT_FILE) -> list[Prompt]:
    """The held-out prompts, after the file has been held against the hash beside it (`heldout.jsonl.sha256`).

    Raises ValueError when the two differ: figures of another file are not comparable.
    """
    content = path.read_bytes()
    wanted, found = committed_hash(path), hashlib.sha256(content).hexdigest()
    if found != wanted:
        raise ValueError(
            f"{path.name} has the sha256 {found}, and {path.name}.sha256 says {wanted}; restore the "
            f"committed file, since accept lengths of another one cannot be compared"
        )
    prompts = []
    for number, line in enumerate(content.decode("utf-8").splitlines(), start=1):
        row = json.loads(line)
        if row["kind"] not in KINDS:
            raise ValueError(
                f"{path.name}:{number}: kind {row['kind']!r} is not one of {', '.join(KINDS)}; correct it"
            )
        prompts.append(Prompt(row["kind"], row["prompt"]))
    return prompts
