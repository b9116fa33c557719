"""The record: what the operator said, field by field, never written after it is built.

Read by resolution, publish and the doors; everything else asks the published context. Must not open the model
path, ask the platform or refuse a value: that is resolution's part.
"""

from typing import Any, NoReturn

import msgspec

from sglang.srt.arg_groups.fields import LEAVES
from sglang.srt.arg_groups.overrides import remote_instance_transfer_engine_of

__all__ = [
    "ServerArgs",
    "get_global_server_args",
    "set_global_server_args_for_scheduler",
    "set_global_server_args_for_tokenizer",
]


def _remote_instance_weight_loader_use_transfer_engine(config: Any, override: str | None = None) -> bool:
    """Also called unbound, on anything that carries the fields it reads."""
    return remote_instance_transfer_engine_of(config, override)


def _build_record() -> type[msgspec.Struct]:
    """One struct of every declared field.

    eq=False: declared results are keyed by identity, and equal records are still two records.
    dict=True: a test may seed a raw, undeclared attribute; msgpack does not carry those.
    """
    fields = [(leaf.name, leaf.type, leaf.default) for leaf in LEAVES.values()]
    return msgspec.defstruct(
        "ServerArgs",
        fields,
        namespace={
            "__doc__": "Every field an operator can set; see docs/configuration.md.",
            "remote_instance_weight_loader_use_transfer_engine": _remote_instance_weight_loader_use_transfer_engine,
        },
        module=__name__,
        kw_only=True,
        frozen=True,
        dict=True,
        weakref=True,
        eq=False,
    )


ServerArgs = _build_record()


def set_global_server_args_for_scheduler(server_args: ServerArgs) -> None:  # type: ignore[valid-type]
    """Older spelling of ``publish(server_args, role="scheduler")``."""
    from sglang.srt.runtime_context import publish

    publish(server_args, role="scheduler")


def set_global_server_args_for_tokenizer(server_args: ServerArgs) -> None:  # type: ignore[valid-type]
    """Older spelling of ``publish(server_args, role="tokenizer")``."""
    from sglang.srt.runtime_context import publish

    publish(server_args, role="tokenizer")


def get_global_server_args() -> NoReturn:
    """Gone: a field read off the record is what the operator said, not what resolution decided."""
    raise RuntimeError(
        "get_global_server_args() is gone. Read resolved values through sglang.srt.runtime_context "
        "(get_parallel(), get_schedule(), get_exec() ...); the record itself is get_server_args() there."
    )
