"""The resolved configuration as plain values, without its secrets.

Read by `/server_info`, logs and the record's own repr. Must never hold a field declared `secret=True`.
"""

import msgspec

from sglang.srt.arg_groups.fields import LEAVES
from sglang.srt.arg_groups.overrides import record_of, resolution_result


def public_values(record: object) -> dict[str, object]:
    """Every field of the record by name, resolved, JSON-ready; secret fields are left out."""
    record = record_of(record)
    return {
        name: msgspec.to_builtins(resolution_result(record, name))
        for name, leaf in LEAVES.items()
        if not leaf.arg.secret
    }


#: What may differ between the machines of one deployment; ranks do not read it, or it names their machine.
PER_MACHINE = frozenset({"node_rank", "host", "port", "random_seed", "log_level"})


def common_values(record: object) -> dict[str, object]:
    """The settings that must be the same for all ranks, whichever machine they run on."""
    return {name: value for name, value in public_values(record).items() if name not in PER_MACHINE}


def short_description(record: object) -> str:
    """What the operator said, defaults left out, secrets masked: safe to log."""
    said = []
    for name, leaf in LEAVES.items():
        value = getattr(record_of(record), name)
        if leaf.required or value != leaf.default:
            said.append(f"{name}={'***' if leaf.arg.secret else repr(value)}")
    return f"ServerArgs({', '.join(said)})"
