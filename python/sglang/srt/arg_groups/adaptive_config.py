"""The file behind `--speculative-adaptive-config`: how draft depths are chosen, per batch size.

Read by publish (the draft bound), by resolution and by the adaptive controller. Must not cache: every publish
reads the file again.
"""

import json
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

_FLAG = "--speculative-adaptive-config"


class AdaptiveSlot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the draft depth is chosen for batches of one size.

    The controller keeps a moving average of the correct drafts of a round and compares it with the depth in
    use.
    """

    #: Depths that may be chosen, ascending, each once. Depth 0 is plain decoding.
    candidate_steps: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1)]
    #: Weight of the newest round in the average.
    ema_alpha: Annotated[float, Meta(gt=0, le=1)] = 0.2
    #: Rounds between two decisions.
    update_interval: Annotated[int, Meta(ge=1)] = 5
    #: Rounds before the first decision.
    warmup_batches: Annotated[int, Meta(ge=0)] = 10
    #: Added to the average that going deeper asks for.
    up_hysteresis: float = 0.0
    #: Added to the average at which the draft gets shallower: below 0, later.
    down_hysteresis: float = -0.25
    #: Above 0: a draft is at most this many times as deep as the average. 0: no such ceiling.
    ceiling_coeff: Annotated[float, Meta(ge=0)] = 0.0


#: Smallest batch size of a slot -> how depths are chosen there when no file is given.
DEFAULT_SLOTS: dict[int, AdaptiveSlot] = {
    1: AdaptiveSlot(candidate_steps=(1, 3, 5, 7)),
    8: AdaptiveSlot(candidate_steps=(0, 1, 3)),
    32: AdaptiveSlot(candidate_steps=(0, 1)),
    64: AdaptiveSlot(candidate_steps=(0,)),
}


def adaptive_slots(path: str | None) -> dict[int, AdaptiveSlot]:
    """Smallest batch size of a slot -> how depths are chosen there, in ascending order of the batch size.

    Keys of the file that are not numbers give defaults for every slot. ValueError names the flag, the file,
    the slot and the rule.
    """
    if path is None:
        return dict(DEFAULT_SLOTS)
    try:
        text = Path(path).read_text(encoding="utf-8")
        msgspec.json.decode(
            text
        )  # stricter than the standard library, which alone shows a key that stands twice
        parsed = json.loads(text, object_pairs_hook=_without_doubles)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{_FLAG} {path} cannot be read: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{_FLAG} {path} must hold a JSON object, found {parsed!r}")
    shared = {key: value for key, value in parsed.items() if not key.isdecimal()}
    slots = {key: value for key, value in parsed.items() if key.isdecimal()}
    if not slots or not all(isinstance(entry, dict) for entry in slots.values()):
        raise ValueError(
            f"{_FLAG} {path} needs batch sizes as keys and objects as values, "
            'such as {"1": {"candidate_steps": [3]}}'
        )
    return {int(size): _slot(path, size, {**shared, **slots[size]}) for size in sorted(slots, key=int)}


def _without_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object; a key that stands twice, also as `1` and `01`, would lose what the first one says."""
    keys = [int(key) if key.isdecimal() else key for key, _ in pairs]
    doubles = sorted({str(key) for key in keys if keys.count(key) > 1})
    if doubles:
        raise ValueError(f"{', '.join(doubles)} stands twice in one object; keep one of them")
    return dict(pairs)


def all_candidate_steps(enabled: bool, path: str | None) -> tuple[int, ...]:
    """Every depth that may be chosen; empty while adaptive drafting is off."""
    if not enabled:
        return ()
    return tuple(sorted({step for slot in adaptive_slots(path).values() for step in slot.candidate_steps}))


def _slot(path: str, size: str, entry: dict[str, object]) -> AdaptiveSlot:
    try:
        slot = msgspec.convert(entry, AdaptiveSlot)
    except msgspec.ValidationError as error:
        raise ValueError(
            f"{_FLAG} {path}: batch size {size} is not as it must be: {error}; found {entry!r}"
        ) from error
    steps = tuple(sorted(set(slot.candidate_steps)))
    return msgspec.structs.replace(slot, candidate_steps=steps)
