"""Owns how the live placement of one rank is shown: each name with its value and the layer that answered.

Called by the ranks for /placement and `Engine.placement`. It gives plain values, ready for JSON, and must not
import torch, build a group or change anything.
"""

from __future__ import annotations

import math
from typing import Any

from sglang.srt.arg_groups.fields import LEAVES
from sglang.srt.runtime_context.context import RuntimeContext
from sglang.srt.runtime_context.parallel import ParallelContext, parallel_fields
from sglang.srt.runtime_context.parallel_names import COMPUTED

__all__ = ["override_log_of", "placement_of"]


def placement_of(context: RuntimeContext) -> dict[str, list[object]]:
    """Name -> [value, layer] for every parallel name that can be answered now.

    The layer is scope, stamp, published or live. A group is shown as the world ranks of its members, and as
    None where a scope states that there is none.
    """
    parallel = context.parallel
    placement: dict[str, list[object]] = {}
    for name in sorted(parallel_fields()):
        if not parallel.readable_now(name):
            continue
        try:
            value = getattr(parallel, name)
            layer = _layer_of(parallel, name)
        except (AssertionError, RuntimeError, ValueError):
            continue  # not published, or its group is not built
        placement[name] = [_shown(name, value), layer]
    return placement


def override_log_of(context: RuntimeContext) -> list[dict[str, object]]:
    """Every leaf that was replaced since publish, in order; secret values are hidden."""
    return [
        {
            "source": entry.source,
            "namespace": entry.namespace,
            "name": entry.name,
            "before": _logged(entry.name, entry.before),
            "after": _logged(entry.name, entry.after),
        }
        for entry in context.overrides_log()
    ]


def _layer_of(parallel: ParallelContext, name: str) -> str:
    """The layer that answered; of a computed name, the layer of the last name that its rule asked for."""
    layer = parallel.answered_by(name)
    if layer != "computed":
        return layer
    asked: list[str] = []
    COMPUTED[name](_RecordingReader(parallel, asked))
    return _layer_of(parallel, asked[-1])


class _RecordingReader:
    """Answers like the context and writes down which names were asked for."""

    def __init__(self, parallel: ParallelContext, asked: list[str]) -> None:
        self._parallel = parallel
        self._asked = asked

    def __getattr__(self, name: str) -> Any:
        self._asked.append(name)
        return getattr(self._parallel, name)


def _shown(name: str, value: Any) -> object:
    if name.endswith("_group") and value is not None:
        return [int(rank) for rank in value.ranks]
    return _plain(value)


def _logged(name: str, value: object) -> object:
    leaf = LEAVES.get(name)
    return "***" if leaf is not None and leaf.arg.secret and value is not None else _plain(value)


def _plain(value: object) -> object:
    """The value as it is where msgpack and JSON can hold it, else as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return repr(value)
