"""All declared fields in one table, built from the namespace classes.

Read by the record, the parser, the bags and the docs: `LEAVES` by name, `DERIVED` by namespace and name,
`INPUTS` by name; `Fields` is the type of whatever answers for all of them. Must not hold a field of its own.
"""

from typing import Any

from sglang.srt.arg_groups.arg_utils import Derived, Input, Leaf, Namespace, derived_of, leaves_of
from sglang.srt.arg_groups.fields import exec_, parallel
from sglang.srt.arg_groups.fields.device import Device
from sglang.srt.arg_groups.fields.disagg import Disagg
from sglang.srt.arg_groups.fields.lora import Lora
from sglang.srt.arg_groups.fields.memory import Memory
from sglang.srt.arg_groups.fields.mm import Mm
from sglang.srt.arg_groups.fields.model import Model
from sglang.srt.arg_groups.fields.observability import Observability
from sglang.srt.arg_groups.fields.parallel import Parallel
from sglang.srt.arg_groups.fields.schedule import Schedule
from sglang.srt.arg_groups.fields.serving import Serving
from sglang.srt.arg_groups.fields.spec import Spec

__all__ = ["DERIVED", "Fields", "INPUTS", "LEAVES", "NAMESPACES", "leaves_in"]


class Fields(
    Model,
    Serving,
    Schedule,
    Memory,
    Parallel,
    Device,
    exec_.Kernel,
    exec_.Graph,
    exec_.Features,
    exec_.Deterministic,
    exec_.Comm,
    exec_.Mamba,
    exec_.Moe,
    exec_.Overlap,
    exec_.Offload,
    Spec,
    Lora,
    Disagg,
    Mm,
    Observability,
):
    """Every declared field under its own name: the type of the record and of the views of it."""


_CLASSES = [cls for cls in Fields.__bases__ if issubclass(cls, Namespace)]

#: Dotted namespace -> the class that declares it.
NAMESPACES: dict[str, type[Namespace]] = {cls.NAMESPACE: cls for cls in _CLASSES}


def _collect() -> tuple[dict[str, Leaf], dict[str, dict[str, Derived[Any]]]]:
    """Leaf names are unique over all namespaces, since overrides and flags take bare names."""
    leaves: dict[str, Leaf] = {}
    derived: dict[str, dict[str, Derived[Any]]] = {}
    for cls in _CLASSES:
        for name, leaf in leaves_of(cls).items():
            if name in leaves:
                raise TypeError(
                    f"field {name!r} is declared in {leaves[name].namespace!r} and in {leaf.namespace!r}"
                )
            leaves[name] = leaf
        if items := derived_of(cls):
            derived[cls.NAMESPACE] = items
    return leaves, derived


LEAVES, DERIVED = _collect()

INPUTS: dict[str, Input] = {item.name: item for item in (*parallel.INPUTS, *exec_.INPUTS)}


def leaves_in(namespace: str) -> dict[str, Leaf]:
    """The leaves of one dotted namespace, in declaration order."""
    return {name: leaf for name, leaf in LEAVES.items() if leaf.namespace == namespace}
