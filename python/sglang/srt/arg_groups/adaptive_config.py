"""The file behind ``--speculative-adaptive-config``: which draft depths may be chosen, per batch size.

Read by publish (the draft bound) and by the adaptive worker. Must not cache: every publish reads it again.
"""

import json
from pathlib import Path
from typing import Any

#: Depths tried when adaptive drafting is on and no file is given.
DEFAULT_CANDIDATE_STEPS = (1, 3, 7)


def _steps_of(path: str, batch_size: str, entry: Any) -> tuple[int, ...]:
    steps = entry.get("candidate_steps") if isinstance(entry, dict) else None
    good = isinstance(steps, list) and steps and all(isinstance(s, int) and s > 0 for s in steps)
    if not good:
        raise ValueError(
            f"--speculative-adaptive-config {path}: entry {batch_size!r} needs candidate_steps, "
            f"a list of positive integers; found {entry!r}"
        )
    return tuple(steps)


def candidate_steps_by_batch_size(path: str | None) -> dict[int, tuple[int, ...]]:
    """Smallest batch size -> candidate depths, ascending by batch size."""
    if path is None:
        return {1: DEFAULT_CANDIDATE_STEPS}
    try:
        parsed = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--speculative-adaptive-config {path} cannot be read: {error}") from error
    if not isinstance(parsed, dict) or not parsed or not all(key.isdecimal() for key in parsed):
        raise ValueError(
            f"--speculative-adaptive-config {path} must be an object whose keys are batch sizes, "
            'such as {"1": {"candidate_steps": [3]}}'
        )
    return {int(size): _steps_of(path, size, parsed[size]) for size in sorted(parsed, key=int)}


def all_candidate_steps(enabled: bool, path: str | None) -> tuple[int, ...]:
    """Every depth that may be chosen; empty while adaptive drafting is off."""
    if not enabled:
        return ()
    return tuple(sorted({step for steps in candidate_steps_by_batch_size(path).values() for step in steps}))
