"""The command line, generated from the declared fields.

Used by the entry points through `server_args.prepare_server_args`. Must not know a field by name, except that
the model may also be given without a flag.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, get_args

from sglang.srt.arg_groups.arg_utils import Input, Leaf, strip_optional
from sglang.srt.arg_groups.fields import INPUTS, LEAVES, NAMESPACES
from sglang.srt.arg_groups.parsing.config_file import read_config_file
from sglang.srt.arg_groups.parsing.human_int import parse_human_int
from sglang.srt.arg_groups.parsing.spellings import SPELLINGS, deprecations, fields_from, nearest, parse_json

_CONFIG_FLAG = "--config"


def _typed(parse: Callable[[str], object]) -> Callable[[str], object]:
    """`parse` for argparse, which shows the text of an ArgumentTypeError but not that of a ValueError."""

    def read(text: str) -> object:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


class _Once(argparse.Action):
    """Refuses a second `--config`: nothing would say which of the two files counts."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest, None) is not None:
            parser.error(f"{option_string} was given twice; put everything into one file")
        setattr(namespace, self.dest, values)


def _help(leaf: Leaf) -> str:
    text = leaf.arg.help
    if not leaf.required and leaf.default is not None and leaf.kind != "switch":
        text += f" Default: {leaf.default}."
    if leaf.deprecated:
        text += f" Deprecated: {leaf.deprecated}."
    if leaf.arg.served is False:
        text += " Not served yet."
    elif isinstance(leaf.arg.served, tuple) and leaf.arg.choices is not None:
        text += f" Served now: {', '.join(map(str, leaf.arg.served))}."
    return text.replace("%", "%%")


def _add_leaf(group: argparse._ArgumentGroup, leaf: Leaf) -> None:
    arg = leaf.arg
    inner, _ = strip_optional(leaf.type)
    common: dict[str, Any] = {"dest": leaf.name, "help": _help(leaf), "default": argparse.SUPPRESS}
    if leaf.kind == "switch":
        group.add_argument(*leaf.flags, action="store_true", **common)
        return
    if leaf.kind == "toggle":
        group.add_argument(*leaf.flags, action=argparse.BooleanOptionalAction, **common)
        return
    metavar = leaf.name.strip("_").rpartition("_")[2].upper()
    if arg.choices is not None:
        common["choices"] = arg.choices
    else:
        common["metavar"] = metavar
    if leaf.kind == "list":
        common["nargs"] = "+"
        common["type"] = get_args(inner)[0]
    elif leaf.kind == "json":
        common["metavar"] = "JSON"
        common["type"] = _typed(lambda text: parse_json(text, inner))
    elif arg.human_int:
        common["type"] = _typed(parse_human_int)
    else:
        common["type"] = inner
    group.add_argument(*leaf.flags, **common)


def _add_input(group: argparse._ArgumentGroup, item: Input) -> None:
    text = item.help + (f" Deprecated: {item.deprecated}." if item.deprecated else "")
    common: dict[str, Any] = {"dest": item.name, "help": text, "default": argparse.SUPPRESS}
    if item.type is bool:
        group.add_argument(*item.flags, action="store_true", **common)
    else:
        group.add_argument(*item.flags, type=item.type, metavar="N", **common)


class _Parser(argparse.ArgumentParser):
    """Names the nearest flags when one is unknown, and leaves the usage of all flags out of errors."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n{self.prog} --help lists every flag\n")

    def refuse_unknown(self, extras: Sequence[str]) -> NoReturn:
        flags = [text.partition("=")[0] for text in extras if text.startswith("-")]
        if not flags:
            self.error(f"unexpected argument: {' '.join(extras)}")
        known = [*SPELLINGS, _CONFIG_FLAG]
        sentences = [
            f"unknown flag {flag}; the nearest are {', '.join(nearest(flag, known))}" for flag in flags
        ]
        self.error("\n".join(sentences))


def build_parser(prog: str | None = None) -> _Parser:
    """All declared fields, one group per namespace. Any unique prefix of a flag is accepted too."""
    parser = _Parser(
        prog=prog,
        description="Serve a language model. Strength of a setting: command line, --config file, default.",
        allow_abbrev=True,
    )
    parser.add_argument(
        _CONFIG_FLAG, dest="config", action=_Once, metavar="FILE", help="YAML file with the same settings."
    )
    groups = {namespace: parser.add_argument_group(namespace) for namespace in NAMESPACES}
    for leaf in LEAVES.values():
        if leaf.flags:
            _add_leaf(groups[leaf.namespace], leaf)
    spellings = parser.add_argument_group("other spellings")
    for item in INPUTS.values():
        _add_input(spellings, item)
    return parser


def parse_command_line(
    argv: Sequence[str], *, positional_model: bool = False, prog: str | None = None, complete: bool = True
) -> dict[str, Any]:
    """The fields that a command line and its --config file state; exits with code 2 on a mistake.

    `complete=False` is for tools that start no server: required settings may be left out.
    """
    parser = build_parser(prog)
    namespace, extras = parser.parse_known_args(list(argv))
    stated = vars(namespace)
    config = stated.pop("config")
    if positional_model and extras and not extras[0].startswith("-") and "model_path" not in stated:
        stated["model_path"] = extras.pop(0)
    if extras:
        parser.refuse_unknown(extras)
    try:
        if config is not None:
            stated = {**read_config_file(config), **stated}
        fields = fields_from(stated)
    except ValueError as error:
        parser.error(str(error))
    missing = [leaf.label for leaf in LEAVES.values() if leaf.required and leaf.name not in fields]
    if missing and complete:
        hint = " (or name the model right after the command)" if positional_model else ""
        parser.error(f"{', '.join(missing)} must be given{hint}")
    for sentence in deprecations(stated):
        print(f"{parser.prog}: warning: {sentence}", file=sys.stderr)
    return fields
