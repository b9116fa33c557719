"""The record: what the operator said, field by field, never written after it is built.

Read by resolution, publish and the entry points; everything else asks the published context. Must not open
the model path, ask the platform or refuse a value: that is resolution's part.
"""

import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self

import msgspec

from sglang.srt.arg_groups.fields import LEAVES, Fields
from sglang.srt.arg_groups.overrides import remote_instance_transfer_engine_of
from sglang.srt.arg_groups.parsing.cli import parse_command_line
from sglang.srt.arg_groups.parsing.spellings import deprecations, fields_from, stated_from
from sglang.srt.arg_groups.public_values import short_description
from sglang.srt.arg_groups.transport import pack_configuration, unpack_configuration

__all__ = [
    "ServerArgs",
    "get_global_server_args",
    "pack_server_args",
    "prepare_server_args",
    "set_global_server_args_for_scheduler",
    "set_global_server_args_for_tokenizer",
    "unpack_server_args",
]


class _Record(msgspec.Struct, kw_only=True, frozen=True, eq=False, dict=True, weakref=True):
    """What the record can do.

    eq=False: declared results are kept by identity, and equal records are still two records. dict=True: a
    test may seed a raw, undeclared attribute, which is not packed.
    """

    @classmethod
    def from_cli_args(
        cls, argv: Sequence[str], *, positional_model: bool = False, prog: str | None = None
    ) -> Self:
        """The record that a command line (without the program's name) states; exits with 2 on a mistake."""
        return cls(**parse_command_line(argv, positional_model=positional_model, prog=prog))

    @classmethod
    def from_kwargs(cls, /, **settings: Any) -> Self:
        """The record that keywords state: fields, aliases and inputs, as `Engine(**settings)` takes them."""
        stated = stated_from(settings, "keyword settings")
        fields = fields_from(stated)
        missing = [leaf.name for leaf in LEAVES.values() if leaf.required and leaf.name not in fields]
        if missing:
            raise ValueError(f"{', '.join(missing)} must be given")
        for sentence in deprecations(stated):
            warnings.warn(sentence, FutureWarning, stacklevel=_first_level_outside())
        return cls(**fields)

    def __repr__(self) -> str:
        """The built-in one would print every key into every log."""
        return short_description(self)

    def remote_instance_weight_loader_use_transfer_engine(self: object, override: str | None = None) -> bool:
        """Also called unbound, on anything that has the fields it reads."""
        return remote_instance_transfer_engine_of(self, override)


def _first_level_outside() -> int:
    """The `stacklevel` at which our caller's warning shows the line of whoever uses this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "sglang":
        level, frame = level + 1, frame.f_back
    return level


if TYPE_CHECKING:

    class ServerArgs(Fields, _Record, frozen=True):
        """Every field an operator can set; see docs/configuration.md."""

else:
    ServerArgs = msgspec.defstruct(
        "ServerArgs",
        [(leaf.name, leaf.type, leaf.default) for leaf in LEAVES.values()],
        bases=(_Record,),
        namespace={"__doc__": "Every field an operator can set; see docs/configuration.md."},
        module=__name__,
        kw_only=True,
        frozen=True,
        eq=False,
        dict=True,
        weakref=True,
    )


def prepare_server_args(
    argv: Sequence[str], *, positional_model: bool = False, prog: str | None = None
) -> ServerArgs:
    """The record of a command line; with `positional_model` the model may come without its flag."""
    return ServerArgs.from_cli_args(argv, positional_model=positional_model, prog=prog)


def pack_server_args(record: ServerArgs) -> bytes:
    """Record and declared results, for a child process."""
    return pack_configuration(record)


def unpack_server_args(data: bytes) -> ServerArgs:
    """What `pack_server_args` packed, resolved as it was."""
    return unpack_configuration(data, ServerArgs)


def set_global_server_args_for_scheduler(server_args: ServerArgs) -> None:
    """Older spelling of `publish(server_args, role="scheduler")`."""
    from sglang.srt.runtime_context import publish

    publish(server_args, role="scheduler")


def set_global_server_args_for_tokenizer(server_args: ServerArgs) -> None:
    """Older spelling of `publish(server_args, role="tokenizer")`."""
    from sglang.srt.runtime_context import publish

    publish(server_args, role="tokenizer")


def get_global_server_args() -> NoReturn:
    """Gone: a field read off the record is what the operator said, not what resolution decided."""
    raise RuntimeError(
        "get_global_server_args() is gone. Read resolved values through sglang.srt.runtime_context "
        "(get_parallel(), get_schedule(), get_exec() ...); the record itself is get_server_args() there."
    )
