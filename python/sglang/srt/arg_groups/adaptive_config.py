"""The file behind `--speculative-adaptive-config`: which draft depths may be chosen, per batch size.

Read by publish (the draft bound) and by the adaptive worker. Must not cache: every publish reads the file
again.
"""

import json
from pathlib import Path

#: Smallest batch size of a slot -> depths tried when no file is given. Depth 0 is plain decoding.
DEFAULT_SLOTS: dict[int, tuple[int, ...]] = {1: (1, 3, 5, 7), 8: (0, 1, 3), 32: (0, 1), 64: (0,)}


def _steps_of(path: str, slot: str, entry: dict[str, object]) -> tuple[int, ...]:
    steps = entry.get("candidate_steps")
    if isinstance(steps, list) and steps and all(type(step) is int and step >= 0 for step in steps):
        return tuple(steps)
    raise ValueError(
        f"--speculative-adaptive-config {path}: batch size {slot} needs candidate_steps, "
        f"a list of whole numbers from 0 up; found {steps!r}"
    )


def candidate_steps_by_batch_size(path: str | None) -> dict[int, tuple[int, ...]]:
    """Smallest batch size of a slot -> candidate depths, in ascending order of the batch size.

    Keys of the file that are not numbers give defaults for every slot.
    """
    if path is None:
        return dict(DEFAULT_SLOTS)
    try:
        parsed = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--speculative-adaptive-config {path} cannot be read: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"--speculative-adaptive-config {path} must hold a JSON object, found {parsed!r}")
    shared = {key: value for key, value in parsed.items() if not key.isdecimal()}
    slots = {key: value for key, value in parsed.items() if key.isdecimal()}
    if not slots or not all(isinstance(entry, dict) for entry in slots.values()):
        raise ValueError(
            f"--speculative-adaptive-config {path} needs batch sizes as keys and objects as values, "
            'such as {"1": {"candidate_steps": [3]}}'
        )
    return {int(slot): _steps_of(path, slot, {**shared, **slots[slot]}) for slot in sorted(slots, key=int)}


def all_candidate_steps(enabled: bool, path: str | None) -> tuple[int, ...]:
    """Every depth that may be chosen; empty while adaptive drafting is off."""
    if not enabled:
        return ()
    return tuple(sorted({step for steps in candidate_steps_by_batch_size(path).values() for step in steps}))
