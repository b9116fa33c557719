"""Checks each value against the type and the limits in its declaration.

Runs first, so that every later hook may rely on them. Decides nothing.
"""

import math

import msgspec

from sglang.srt.arg_groups.arg_utils import Leaf
from sglang.srt.arg_groups.fields import LEAVES
from sglang.srt.arg_groups.model_override_base import ResolvingView
from sglang.srt.configs.utf8 import escaped

#: The largest number that msgpack carries to a child process.
_LARGEST = 2**63 - 1


def limits_in_words(leaf: Leaf) -> str:
    """The declared range of a number, for errors and for the docs; empty without one."""
    arg = leaf.arg
    words = [f"at least {arg.at_least}"] if arg.at_least is not None else []
    words += [f"at most {arg.at_most}"] if arg.at_most is not None else []
    text = " and ".join(words)
    return f"{text}, or {arg.or_exactly}" if arg.or_exactly is not None else text


def _not_utf8(leaf: Leaf, value: object) -> str | None:
    """A sentence when the value holds text that cannot be sent to a child process, else None."""
    try:
        msgspec.msgpack.encode(value)
    except UnicodeEncodeError as error:
        shown = "" if leaf.arg.secret else f" '{escaped(error.object)}'"
        return (
            f"{leaf.label}{shown} is not UTF-8; write it in UTF-8 (a file or folder: rename it, "
            "or give a link to it)"
        )
    except (TypeError, OverflowError):  # the checks in `violation` say what is wrong
        return None
    return None


def violation(leaf: Leaf, value: object) -> str | None:
    """A sentence when the value breaks a limit of its declaration, else None."""
    arg = leaf.arg
    if value == leaf.default and value is not None:
        return None
    if sentence := _not_utf8(leaf, value):
        return sentence
    try:
        # Command line, file and keywords are converted; a record that a program built is checked only here.
        msgspec.convert(value, leaf.type)
    except msgspec.ValidationError as error:
        return f"{leaf.label} got {value!r}: {error}"
    if value is None:
        return None
    if arg.choices is not None and value not in arg.choices:
        return f"{leaf.label} {value!r} is not one of {', '.join(map(str, arg.choices))}"
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value == arg.or_exactly:
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return f"{leaf.label} must be a number that is finite, got {value}"
    if isinstance(value, int) and not -_LARGEST <= value <= _LARGEST:
        return f"{leaf.label} must fit into 64 bits, got a number of {len(f'{value:x}') * 4} bits"
    low = arg.at_least is not None and value < arg.at_least
    high = arg.at_most is not None and value > arg.at_most
    return f"{leaf.label} must be {limits_in_words(leaf)}, got {value}" if low or high else None


def check_values(view: ResolvingView) -> None:
    found = [violation(leaf, getattr(view, name)) for name, leaf in LEAVES.items()]
    sentences = [sentence for sentence in found if sentence]
    if sentences:
        raise ValueError("\n".join(sentences))
