"""Owns the identities of a layout, such as `tp_size == attn_tp_size * attn_dp_size * attn_cp_size`.

Checked by publish, scopes, stamps and the group build. Must not write anything and must not assume a missing
value: an identity is skipped when one of its terms cannot be read as a plain integer.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Collection, Iterator
from typing import Any, Protocol

from sglang.srt.arg_groups.arg_utils import derived_of, leaves_of
from sglang.srt.arg_groups.fields.parallel import Parallel

__all__ = ["GROUP_WIDTHS", "as_integer", "groups_in_the_way", "plain_integer", "validate_parallel"]


class PlacementReader(Protocol):
    """What the checks need of the context: two cheap tests, then plain attribute reads."""

    def readable_now(self, name: str) -> bool: ...

    def answered_by(self, name: str) -> str: ...


_FACTORS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("tp_size", ("attn_tp_size", "attn_dp_size", "attn_cp_size")),
    ("tp_size", ("moe_ep_size", "moe_dp_size", "moe_tp_size")),
)

#: Widths: none may be below one.
_WIDTHS = (
    *(name for name in (*leaves_of(Parallel), *derived_of(Parallel)) if name.endswith("_size")),
    "launch_world_size",
    "max_world_size",
)

#: Kinds with a rank below a width.
_RANGED = (
    "tp", "pp", "dcp", "moe_ep", "moe_dp", "moe_tp", "attn_tp", "attn_cp", "attn_dp", "attn_dcp",
    "launch_world", "dp",
)  # fmt: skip

#: Group -> (configured width, rank of this process in it).
GROUP_WIDTHS: dict[str, tuple[str, str]] = {
    f"{kind}_group": (f"{kind}_size", f"{kind}_rank")
    for kind in ("tp", "pp", "dcp", "moe_ep", "moe_dp", "moe_tp", "attn_tp", "attn_cp")
}


def validate_parallel(
    parallel: PlacementReader,
    who: str,
    groups: Collection[str] | None = None,
    stated: Collection[str] = (),
) -> None:
    """Raise one ValueError that lists every identity the context now violates.

    `groups` names the groups to compare with their widths; None means all that are built, and then also
    each group's `rank_in_group` with the rank the context answers. `stated` are the names that a scope or
    a stamp is about to state: some must agree with what they are stated beside.
    """
    build = groups is None
    wanted = list(GROUP_WIDTHS) if groups is None else [name for name in groups if name in GROUP_WIDTHS]
    violated = [
        *_broken_widths(parallel),
        *_broken_factors(parallel),
        *_broken_stripes(parallel),
        *_broken_ceiling(parallel),
        *_broken_ranges(parallel),
        *_broken_position(parallel),
        *_broken_beside(parallel, stated),
        *_broken_groups(parallel, wanted, check_rank=build),
    ]
    if violated:
        rules = "\n".join(f"  - {line}" for line in violated)
        raise ValueError(
            f"set by {who}: the parallel layout contradicts itself\n{rules}\n"
            "State every width and rank that follows from the one you change; nothing was changed."
        )


def groups_in_the_way(parallel: PlacementReader) -> list[str]:
    """Groups of this process whose width or rank differs from what the context is about to answer."""
    return list(_broken_groups(parallel, list(GROUP_WIDTHS), check_rank=True))


def as_integer(value: Any) -> int | None:
    """A plain int for whatever has `__index__`; None for anything else, and for a bool.

    Integers of numpy and torch have it, and arrays and tensors of a single one.
    """
    if type(value) is int:
        return value
    if isinstance(value, bool):
        return None
    try:
        number = operator.index(value)
    except (RuntimeError, TypeError, ValueError):  # torch and numpy have their own for a tensor of many
        return None
    torch = sys.modules.get("torch")  # not imported here: whoever made a tensor has imported it
    if torch is not None and isinstance(value, torch.Tensor) and value.dtype is torch.bool:
        return None
    return number


def plain_integer(value: Any) -> Any:
    """The value, as a plain int where it counts as one and is not of Python already."""
    if isinstance(value, int):
        return value
    number = as_integer(value)
    return value if number is None else number


def _number(parallel: PlacementReader, name: str) -> int | None:
    """The value of one term, or None where it cannot be read or is no integer."""
    if not parallel.readable_now(name):
        return None
    try:
        value = getattr(parallel, name)
    except Exception:  # noqa: BLE001 - a half-initialised process must be checkable; whatever fails is unreadable
        return None
    return as_integer(value)


def _numbers(parallel: PlacementReader, names: Collection[str]) -> dict[str, int] | None:
    values = {name: _number(parallel, name) for name in names}
    known = {name: value for name, value in values.items() if value is not None}
    return known if len(known) == len(values) else None


def _broken_widths(parallel: PlacementReader) -> Iterator[str]:
    for name in _WIDTHS:
        width = None if parallel.answered_by(name) == "computed" else _number(parallel, name)
        if width is not None and width < 1:
            yield f"{name} >= 1: got {width}"


def _broken_factors(parallel: PlacementReader) -> Iterator[str]:
    for whole, parts in _FACTORS:
        values = _numbers(parallel, (whole, *parts))
        if values is None:
            continue
        product = 1
        for part in parts:
            product *= values[part]
        if values[whole] != product:
            right = " * ".join(str(values[part]) for part in parts)
            yield f"{whole} == {' * '.join(parts)}: {values[whole]} != {right}"


def _broken_stripes(parallel: PlacementReader) -> Iterator[str]:
    """The ranks of a decode-context group are a contiguous block of an attention-TP group."""
    values = _numbers(parallel, ("attn_tp_size", "dcp_size"))
    if values is None or values["dcp_size"] < 1:
        return
    width, stripes = values["attn_tp_size"], values["dcp_size"]
    if width % stripes:
        yield f"attn_tp_size % dcp_size == 0: {width} % {stripes} == {width % stripes}"


def _broken_ceiling(parallel: PlacementReader) -> Iterator[str]:
    values = _numbers(parallel, ("max_ep_size", "ep_join_rank_offset", "tp_size", "pp_size"))
    if values is None:
        return
    ceiling, offset, tp_size, pp_size = values.values()
    if ceiling < offset + tp_size * pp_size:
        yield (
            "max_ep_size >= ep_join_rank_offset + tp_size * pp_size: "
            f"{ceiling} < {offset} + {tp_size} * {pp_size}"
        )


def _broken_ranges(parallel: PlacementReader) -> Iterator[str]:
    for kind in _RANGED:
        rank_name, size_name = f"{kind}_rank", f"{kind}_size"
        rank = None if parallel.answered_by(rank_name) == "computed" else _number(parallel, rank_name)
        if rank is None:
            continue
        size = _number(parallel, size_name)
        if size is None or (kind == "dp" and size == 1):  # a width of one says nothing about replicas
            if rank < 0:
                yield f"{rank_name} >= 0: got {rank}"
        elif not 0 <= rank < size:
            yield f"0 <= {rank_name} < {size_name}: rank {rank}, width {size}"
    device = _number(parallel, "gpu_id")
    if device is not None and device < 0:
        yield f"gpu_id >= 0: got {device}"


def _broken_position(parallel: PlacementReader) -> Iterator[str]:
    names = ("tp_rank", "attn_dp_rank", "attn_cp_size", "attn_cp_rank", "attn_tp_size", "attn_tp_rank")
    values = _numbers(parallel, names)
    if values is None:
        return
    tp_rank, dp_rank, cp_size, cp_rank, tp_size, attn_rank = (values[name] for name in names)
    if tp_rank != (dp_rank * cp_size + cp_rank) * tp_size + attn_rank:
        yield (
            "tp_rank == (attn_dp_rank * attn_cp_size + attn_cp_rank) * attn_tp_size + attn_tp_rank: "
            f"{tp_rank} != ({dp_rank} * {cp_size} + {cp_rank}) * {tp_size} + {attn_rank}"
        )


def _broken_beside(parallel: PlacementReader, stated: Collection[str]) -> Iterator[str]:
    """What a scope or a stamp states must agree with the settings beside it.

    A published record is not asked: its widths are derived from its settings. A draft that states
    `moe_ep_size` without `ep_size` has experts of its own.
    """
    experts = _numbers(parallel, ("ep_size", "moe_ep_size")) if "ep_size" in stated else None
    if experts is not None and experts["ep_size"] != experts["moe_ep_size"]:
        yield f"ep_size == moe_ep_size: {experts['ep_size']} != {experts['moe_ep_size']}"
    stripes = _number(parallel, "dcp_size") if {"dcp_size", "dcp_enabled"} & set(stated) else None
    if stripes is not None and parallel.readable_now("dcp_enabled"):
        enabled = getattr(parallel, "dcp_enabled")  # noqa: B009 - the protocol declares no names
        switched_off = enabled is False and parallel.answered_by("dcp_enabled") == "scope"
        if isinstance(enabled, bool) and enabled != (stripes > 1) and not switched_off:
            yield f"dcp_enabled == (dcp_size > 1): {enabled} with dcp_size {stripes}"
    if {"launch_world_rank", "world_group"} & set(stated) and parallel.readable_now("world_group"):
        rank = _number(parallel, "launch_world_rank")
        try:
            seat = as_integer(getattr(getattr(parallel, "world_group"), "rank_in_group", None))  # noqa: B009
        except Exception:  # noqa: BLE001 - no world was built in this process
            return
        if seat is not None and rank is not None and rank != seat:
            yield f"world_group.rank_in_group == launch_world_rank: built {seat}, stated {rank}"


def _broken_groups(parallel: PlacementReader, groups: Collection[str], *, check_rank: bool) -> Iterator[str]:
    for group_name in groups:
        size_name, rank_name = GROUP_WIDTHS[group_name]
        if not parallel.readable_now(group_name):
            continue
        try:
            group = getattr(parallel, group_name)
        except Exception:  # noqa: BLE001 - no such group in this process
            continue
        built = as_integer(getattr(group, "world_size", None))
        configured = _number(parallel, size_name)
        if built is not None and configured is not None and built != configured:
            yield f"{group_name}.world_size == {size_name}: built {built}, configured {configured}"
        if not check_rank:
            continue
        seat = as_integer(getattr(group, "rank_in_group", None))
        rank = _number(parallel, rank_name)
        if seat is not None and rank is not None and rank != seat:
            yield f"{group_name}.rank_in_group == {rank_name}: built {seat}, configured {rank}"
