"""Refuses what is declared but not served by this build, before the first process starts.

Called by the entry points, after resolution. What is served stands in the declarations (`Arg(served=...)`);
must not keep a list of its own.
"""

from sglang.srt.arg_groups.arg_utils import Leaf
from sglang.srt.arg_groups.fields import LEAVES
from sglang.srt.arg_groups.overrides import record_of, resolution_result


def is_served(leaf: Leaf, value: object) -> bool:
    """Whether this build runs the value; it always runs the default."""
    served = leaf.arg.served
    if served is True or (not leaf.required and value == leaf.default):
        return True
    if served is False:
        return False
    items = value if isinstance(value, list) else [value]
    return all(item in served for item in items)


def refusal(leaf: Leaf, value: object) -> str | None:
    """A sentence with the flag, the value and what to do instead; None when the value is served."""
    if is_served(leaf, value):
        return None
    shown = "" if value is True or leaf.arg.secret else f" {value}"
    instead = leaf.arg.instead or f"leave it out (default: {leaf.default})"
    return f"{leaf.label}{shown} is not served yet; {instead}"


def refuse_unserved(record: object) -> None:
    """ValueError that names every setting of the resolved record which this build does not serve."""
    record = record_of(record)
    found = [refusal(leaf, resolution_result(record, name)) for name, leaf in LEAVES.items()]
    sentences = [sentence for sentence in found if sentence]
    if sentences:
        raise ValueError("\n".join(sentences))
