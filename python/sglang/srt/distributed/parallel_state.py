"""Owns the process groups of this rank: the slots, how they are filled and read, the scopes that replace one.

Read by the context's live reads and inside this folder only; everything else asks `get_parallel()`. Must
not take a width as an argument: groups are built at the published widths and checked against them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta

import torch
import torch.distributed

from sglang.srt.constants import DIST_TIMEOUT_S
from sglang.srt.distributed import communicators
from sglang.srt.distributed.errors import CollectiveError
from sglang.srt.distributed.group_coordinator import GroupCoordinator
from sglang.srt.distributed.group_layout import GroupSizes, layout
from sglang.srt.environ import envs
from sglang.srt.runtime_context import _validate_parallel, get_parallel
from sglang.srt.runtime_context.scopes import scope_function

__all__ = [
    "GroupCoordinator",
    "destroy_distributed_environment",
    "destroy_model_parallel",
    "init_distributed_environment",
    "init_model_parallel_group",
    "initialize_model_parallel",
    "patch_pipeline_parallel_group",
    "patch_tensor_parallel_group",
    "tensor_scope",
]

# One slot per kind of group. Module attributes, because tests and tools patch them one by one.
_WORLD: GroupCoordinator | None = None
_TP: GroupCoordinator | None = None
_DCP: GroupCoordinator | None = None
_ATTN_CP: GroupCoordinator | None = None
_ATTN_TP: GroupCoordinator | None = None
_MOE_DP: GroupCoordinator | None = None
_MOE_EP: GroupCoordinator | None = None
_MOE_TP: GroupCoordinator | None = None
_PP: GroupCoordinator | None = None
_SELF_PP: GroupCoordinator | None = None

#: Group of `group_layout` -> its slot, in the order in which `initialize_model_parallel` builds them.
_SLOT_OF = {
    "tp": "_TP",
    "dcp": "_DCP",
    "attn_cp": "_ATTN_CP",
    "attn_tp": "_ATTN_TP",
    "moe_dp": "_MOE_DP",
    "moe_ep": "_MOE_EP",
    "moe_tp": "_MOE_TP",
    "pp": "_PP",
    "self_pp": "_SELF_PP",
}

#: A draft's tensor scope, and its pipeline scope, is installed.
_TP_STATE_PATCHED = False
_PP_STATE_PATCHED = False


def init_distributed_environment(
    *,
    world_size: int = 1,
    rank: int = 0,
    local_rank: int = 0,
    backend: str = "gloo",
    store: torch.distributed.Store | None = None,
    timeout_s: float | None = None,
) -> None:
    """Join (or, as the only rank, make) the world and build its group.

    Ranks meet in `store`; a single rank needs none. `timeout_s` limits the meeting and every collective.
    """
    global _WORLD
    if torch.distributed.is_initialized():
        raise RuntimeError(
            "the world is built already; call destroy_distributed_environment() before another"
        )
    if not 0 <= rank < world_size:
        raise ValueError(f"0 <= rank < world_size does not hold: rank {rank}, world_size {world_size}")
    if store is None:
        if world_size > 1:
            raise ValueError(f"{world_size} ranks need a place to meet: pass store=...")
        store = torch.distributed.HashStore()
    if not envs.GLOO_SOCKET_IFNAME.is_set():
        # Ranks of several machines have set theirs in `rendezvous`. Without one gloo looks up its own host
        # name, which is slow, or fails where that name does not resolve.
        envs.GLOO_SOCKET_IFNAME.set("lo")
    limit = DIST_TIMEOUT_S if timeout_s is None else timeout_s
    try:
        torch.distributed.init_process_group(
            backend, rank=rank, world_size=world_size, store=store, timeout=timedelta(seconds=limit)
        )
    except RuntimeError as error:
        raise CollectiveError(
            "joining the world",
            group_name="world",
            ranks=range(world_size),
            rank=rank,
            timeout_s=limit,
            cause=str(error),
        ) from error
    try:
        _WORLD = GroupCoordinator(
            [list(range(world_size))], local_rank, backend, group_name="world", timeout_s=limit
        )
    except BaseException:
        torch.distributed.destroy_process_group()
        raise


def destroy_distributed_environment() -> None:
    """Destroy all groups, then leave the world; does nothing in a process that never joined one."""
    global _WORLD
    destroy_model_parallel()
    if _WORLD is not None:
        _WORLD.destroy()
        _WORLD = None
    communicators.forget_all()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def init_model_parallel_group(
    group_ranks: Sequence[Sequence[int]], local_rank: int, backend: str, *, group_name: str, timeout_s: float
) -> GroupCoordinator:
    """Build one kind of group; every rank of the world calls this in the same order."""
    return GroupCoordinator(group_ranks, local_rank, backend, group_name=group_name, timeout_s=timeout_s)


def initialize_model_parallel() -> None:
    """Build every group at the published widths and check what was built against them.

    Writes no width and no rank: what is published stays the answer. A failure leaves no group behind.
    """
    if not torch.distributed.is_initialized():
        raise RuntimeError("there is no world to build groups in; call init_distributed_environment() first")
    standing = [name for name, slot in _SLOT_OF.items() if globals()[slot] is not None]
    if standing:
        raise RuntimeError(
            f"groups stand already ({', '.join(standing)}); call destroy_model_parallel() first"
        )
    with get_parallel().no_scope_open("initialize_model_parallel()"):
        sizes = _published_sizes()
    world_size = torch.distributed.get_world_size()
    if sizes.offset + sizes.ranks != world_size:
        raise ValueError(
            "set by group build: world_size == ep_join_rank_offset + tp_size * pp_size does not hold: "
            f"{world_size} != {sizes.offset} + {sizes.tp_size} * {sizes.pp_size}"
        )
    rank = torch.distributed.get_rank()
    if rank < sizes.offset:
        raise ValueError(
            f"set by group build: world rank {rank} lies below ep_join_rank_offset {sizes.offset}, "
            "so it belongs to an earlier cohort and builds its groups at that cohort's offset"
        )
    world = get_world_group()
    backend = torch.distributed.get_backend(world.device_group)
    try:
        for name, groups in layout(sizes).items():
            built = init_model_parallel_group(
                groups, world.local_rank, backend, group_name=name, timeout_s=world.timeout_s
            )
            globals()[_SLOT_OF[name]] = built
        _validate_parallel(get_parallel(), "group build")
    except BaseException:
        destroy_model_parallel()
        raise


def _published_sizes() -> GroupSizes:
    """The widths in force."""
    parallel = get_parallel()
    return GroupSizes(
        tp_size=parallel.tp_size,
        pp_size=parallel.pp_size,
        attn_dp_size=parallel.attn_dp_size,
        attn_cp_size=parallel.attn_cp_size,
        attn_tp_size=parallel.attn_tp_size,
        moe_dp_size=parallel.moe_dp_size,
        moe_ep_size=parallel.moe_ep_size,
        moe_tp_size=parallel.moe_tp_size,
        dcp_size=parallel.dcp_size,
        offset=parallel.ep_join_rank_offset,
    )


def destroy_model_parallel() -> None:
    """Destroy every group inside the world; does nothing where none was built."""
    for slot in reversed(_SLOT_OF.values()):
        group = globals()[slot]
        globals()[slot] = None
        if group is not None:
            group.destroy()


def patch_tensor_parallel_group(
    group: GroupCoordinator, *, owns_attention: bool
) -> AbstractContextManager[None]:
    """Install `group` as the tensor group for a block.

    With `owns_attention` a draft runs on this group alone: its attention and experts are cut over it, and
    there is one replica. Without, only the tensor names change and attention keeps the deployment's layout.
    `dp_size` counts the deployment's replicas and never changes.
    """
    return tensor_scope(lambda: group, owns_attention=owns_attention)


@scope_function
def tensor_scope(find_group: Callable[[], GroupCoordinator], *, owns_attention: bool) -> Iterator[None]:
    """`patch_tensor_parallel_group` with a group that is looked up when the scope is entered."""
    global _TP_STATE_PATCHED
    if _TP_STATE_PATCHED:
        raise AssertionError("a draft tensor scope is open already; scopes of one kind do not nest")
    group = find_group()
    names: dict[str, object] = {
        "tp_group": group,
        "tp_size": group.world_size,
        "tp_rank": group.rank_in_group,
    }
    if owns_attention:
        names.update(_owned_by(group))
    with get_parallel().override(**names):
        _TP_STATE_PATCHED = True
        try:
            yield
        finally:
            _TP_STATE_PATCHED = False


def _owned_by(group: GroupCoordinator) -> dict[str, object]:
    """Attention and expert placement of a model that runs on `group` alone."""
    width, rank, alone = group.world_size, group.rank_in_group, _SELF_PP
    return {
        "attn_tp_group": group,
        "attn_tp_size": width,
        "attn_tp_rank": rank,
        "attn_dp_size": 1,
        "attn_dp_rank": 0,
        "attn_cp_group": alone,
        "attn_cp_size": 1,
        "attn_cp_rank": 0,
        "moe_ep_group": alone,
        "moe_ep_size": 1,
        "moe_ep_rank": 0,
        "moe_dp_group": alone,
        "moe_dp_size": 1,
        "moe_dp_rank": 0,
        "moe_tp_group": group,
        "moe_tp_size": width,
        "moe_tp_rank": rank,
    }


@scope_function
def patch_pipeline_parallel_group(group: GroupCoordinator) -> Iterator[None]:
    """Install `group` as the pipeline for a block; may be open together with a tensor scope."""
    global _PP_STATE_PATCHED
    if _PP_STATE_PATCHED:
        raise AssertionError("a draft pipeline scope is open already; scopes of one kind do not nest")
    names = {"pp_group": group, "pp_size": group.world_size, "pp_rank": group.rank_in_group}
    with get_parallel().override(**names):
        _PP_STATE_PATCHED = True
        try:
            yield
        finally:
            _PP_STATE_PATCHED = False


def _built(
    slot: GroupCoordinator | None, name: str, builder: str = "initialize_model_parallel"
) -> GroupCoordinator:
    if slot is None:
        raise RuntimeError(f"the {name} group is not built in this process; call {builder}() first")
    return slot


def get_world_group() -> GroupCoordinator:
    return _built(_WORLD, "world", "init_distributed_environment")


def get_tp_group() -> GroupCoordinator:
    return _built(_TP, "tp")


def get_dcp_group() -> GroupCoordinator:
    return _built(_DCP, "dcp")


def get_attn_cp_group() -> GroupCoordinator:
    return _built(_ATTN_CP, "attn_cp")


def get_attn_tp_group() -> GroupCoordinator:
    return _built(_ATTN_TP, "attn_tp")


def get_moe_dp_group() -> GroupCoordinator:
    return _built(_MOE_DP, "moe_dp")


def get_moe_ep_group() -> GroupCoordinator:
    return _built(_MOE_EP, "moe_ep")


def get_moe_tp_group() -> GroupCoordinator:
    return _built(_MOE_TP, "moe_tp")


def get_pp_group() -> GroupCoordinator:
    return _built(_PP, "pp")


def get_self_pp_group() -> GroupCoordinator:
    """The pipeline of this rank alone, which a draft's pipeline scope installs."""
    return _built(_SELF_PP, "self_pp")


def get_world_size() -> int:
    return get_world_group().world_size


def get_world_rank() -> int:
    return get_world_group().rank_in_group


def get_tensor_model_parallel_rank() -> int:
    return get_tp_group().rank_in_group


def get_pipeline_model_parallel_rank() -> int:
    return get_pp_group().rank_in_group


def get_dcp_rank() -> int:
    return get_dcp_group().rank_in_group


def get_moe_expert_parallel_rank() -> int:
    return get_moe_ep_group().rank_in_group


def get_moe_data_parallel_rank() -> int:
    return get_moe_dp_group().rank_in_group


def get_moe_tensor_parallel_rank() -> int:
    return get_moe_tp_group().rank_in_group


def get_attn_tensor_model_parallel_rank() -> int:
    return get_attn_tp_group().rank_in_group


def get_attn_context_model_parallel_rank() -> int:
    return get_attn_cp_group().rank_in_group


def get_attn_tensor_model_parallel_world_size() -> int:
    """The width that was built; the context answers with the published one, which it is checked against."""
    return get_attn_tp_group().world_size
