"""Every accepted name of a setting, and how stated settings become field values.

Used by the command line, the YAML file and keyword construction, so that all three accept the same names.
Must not decide a value that nobody stated: that is resolution.
"""

import difflib
import json
import os
from collections.abc import Mapping

import msgspec

from sglang.srt.arg_groups.arg_utils import Input, Leaf, strip_optional
from sglang.srt.arg_groups.fields import INPUTS, LEAVES
from sglang.srt.arg_groups.parsing.human_int import parse_human_int


def _index() -> dict[str, Leaf | Input]:
    """Option string -> what it sets; TypeError where two declarations claim the same one."""
    table: dict[str, Leaf | Input] = {}
    targets: list[Leaf | Input] = [*LEAVES.values(), *INPUTS.values()]
    for target in targets:
        for flag in target.flags:
            if flag in table:
                raise TypeError(f"{flag} is declared by {table[flag].name} and by {target.name}")
            table[flag] = target
    return table


#: `--tp-size`, `--tensor-parallel-size` and `--tp` -> the leaf `tp_size`, and so on.
SPELLINGS: dict[str, Leaf | Input] = _index()


def nearest(name: str, known: list[str]) -> list[str]:
    """The three known names that look most like this one."""
    return difflib.get_close_matches(name, known, n=3, cutoff=0.0)


def flag_of(key: str) -> str:
    return "--" + key.removeprefix("--").replace("_", "-")


def target_of(key: str, where: str) -> Leaf | Input:
    """The setting that `tp_size`, `tp-size` or `tp` names; ValueError with the nearest names otherwise."""
    if key in LEAVES:
        return LEAVES[key]
    found = SPELLINGS.get(flag_of(key))
    if found is None:
        close = ", ".join(name.removeprefix("--") for name in nearest(flag_of(key), list(SPELLINGS)))
        raise ValueError(f"{where}: no setting is called {key!r}; the nearest are {close}")
    return found


def parse_json(text: str, tp: object) -> object:
    try:
        return msgspec.json.decode(text, type=tp)
    except (msgspec.MsgspecError, UnicodeEncodeError) as error:
        raise ValueError(f"{text!r} is not the JSON expected here: {error}") from error


def convert(target: Leaf | Input, value: object, where: str) -> object:
    """A value from YAML or a keyword as the declared type; ValueError names the setting and the rule."""
    tp = target.type
    if isinstance(target, Leaf):
        inner, _ = strip_optional(tp)
        try:
            if isinstance(value, str) and target.arg.human_int:
                return parse_human_int(value)
            if target.kind == "json" and isinstance(value, str):
                return parse_json(value, inner)
        except ValueError as error:
            raise ValueError(f"{where}: {target.label}: {error}") from error
        if inner is str and isinstance(value, os.PathLike):
            value = os.fspath(value)
        # A field that holds JSON as text (json_model_override_args) may also be given as the object itself.
        if inner is str and target.default == "{}" and isinstance(value, Mapping):
            return json.dumps(value)
    try:
        return msgspec.convert(value, tp)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise ValueError(f"{where}: {target.label} got {value!r}: {error}") from error


def stated_from(mapping: Mapping[str, object], where: str) -> dict[str, object]:
    """Settings by any spelling -> settings by declared name (fields and inputs), values converted."""
    stated: dict[str, object] = {}
    written: dict[str, str] = {}
    for key, value in mapping.items():
        target = target_of(str(key), where)
        if target.name in stated:
            raise ValueError(f"{where}: {written[target.name]!r} and {key!r} are the same setting; keep one")
        stated[target.name] = convert(target, value, where)
        written[target.name] = str(key)
    return stated


def deprecations(stated: Mapping[str, object]) -> list[str]:
    """A sentence for each stated setting that has a newer spelling, to be printed or warned of."""
    sentences: list[str] = []
    for name, value in stated.items():
        target = INPUTS.get(name) or LEAVES[name]
        if target.deprecated and value not in (False, None):
            sentences.append(f"{target.label} is deprecated: {target.deprecated}")
    return sentences


def fields_from(stated: Mapping[str, object]) -> dict[str, object]:
    """Settings by declared name -> fields of the record, inputs expanded into the fields they set."""
    fields = {name: value for name, value in stated.items() if name in LEAVES}
    for name, value in stated.items():
        if name in INPUTS:
            fields.update(INPUTS[name].expand(value, stated))
    return fields
