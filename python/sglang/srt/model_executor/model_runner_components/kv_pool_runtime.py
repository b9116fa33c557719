"""Owns the size of the key/value pool and of the request table, and makes both.

Called once by the model runner, after the weights are loaded. It must not lay pages out (the attention back
end's layout does) nor hand slots out (the allocator does). All ranks of a world get pools of one size: they
plan alike.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sglang.srt.arg_groups.hooks.schedule import default_max_running_requests
from sglang.srt.constants import CPU_KV_POOL_MAX_BYTES, CPU_KV_POOL_SHARE, LOAD_TIMEOUT_S
from sglang.srt.layers.attention.base_attn_backend import KVLayout, KVSpec
from sglang.srt.mem_cache.allocator import SlotAllocator, make_slot_allocator
from sglang.srt.mem_cache.pools.memory_pool import PagedKVPool, ReqToTokenPool
from sglang.srt.runtime_context import get_parallel, get_schedule
from sglang.srt.runtime_context.widths import requests_per_replica

logger = logging.getLogger(__name__)

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class KVPools:
    """What one rank caches into.

    `drafts` are the pools of its draft models: they have the same slots, so one table and one allocator serve
    all of them.
    """

    kv: PagedKVPool
    req_to_token: ReqToTokenPool
    allocator: SlotAllocator
    drafts: tuple[PagedKVPool, ...] = ()


class HostMemory(NamedTuple):
    """What one rank saw of its host's memory, before its weights were loaded and after."""

    node: int
    before: int
    now: int


def pool_budget_bytes(
    *, available_before: int, available_now: int, mem_fraction: float | None, ranks: int
) -> int:
    """Bytes that one rank may give to keys and values.

    Without a fraction: the smaller of 2 GiB and a quarter of what is available now, over all ranks. With one:
    that share of what was available before any weights were loaded, less what all of them took.
    """
    if mem_fraction is None:
        return min(CPU_KV_POOL_MAX_BYTES, int(available_now * CPU_KV_POOL_SHARE)) // ranks
    taken = max(0, available_before - available_now)
    return (int(available_before * mem_fraction) - taken) // ranks


def least_budget_bytes(seen: Sequence[HostMemory], *, mem_fraction: float | None, ranks: int) -> int:
    """What every rank of the world can afford: the budget of the host that has least.

    Ranks of a host load at the same time, so its largest number before and its smallest now count.
    """
    hosts: dict[int, list[HostMemory]] = {}
    for memory in seen:
        hosts.setdefault(memory.node, []).append(memory)
    return min(
        pool_budget_bytes(
            available_before=max(memory.before for memory in host),
            available_now=min(memory.now for memory in host),
            mem_fraction=mem_fraction,
            ranks=ranks,
        )
        for host in hosts.values()
    )


def _seen_by_all_ranks(mine: HostMemory) -> list[HostMemory]:
    """One entry a rank of the world. Waits for the slowest loader, whose weights count too."""
    parallel = get_parallel()
    if parallel.tp_size * parallel.pp_size == 1:
        return [mine]
    world = parallel.world_group
    world.barrier(timeout_s=LOAD_TIMEOUT_S)
    return [HostMemory(*entry) for entry in world.all_gather_object(list(mine))]


def pool_tokens(
    *, budget_bytes: int, bytes_per_token: int, page_size: int, max_total_tokens: int | None, useful: int
) -> int:
    """Tokens of the pool, a multiple of the page size.

    They fit in the budget, and are at most `max_total_tokens` and `useful` (all requests at full length).
    """
    fitting = max(0, budget_bytes) // bytes_per_token
    tokens = min(fitting, useful)
    if max_total_tokens is not None:
        if max_total_tokens > fitting:
            logger.warning(
                "max_total_tokens=%d exceeds what the memory holds; the pool gets %d tokens",
                max_total_tokens,
                fitting,
            )
        tokens = min(fitting, max_total_tokens)
    tokens -= tokens % page_size
    if tokens < page_size:
        raise ValueError(
            f"the KV pool has no room for one page of {page_size} tokens: memory holds {fitting} tokens of "
            f"{bytes_per_token} bytes, max_total_tokens is {max_total_tokens}; raise --mem-fraction-static "
            "or --max-total-tokens, or lower --page-size"
        )
    return tokens


def _check_request_table(rows: int, columns: int, available: int) -> None:
    """Refuse a request table that does not fit: 8 bytes for each token that each request may have."""
    needed = 8 * rows * columns
    if needed > available:
        raise ValueError(
            f"the table of {rows} requests of {columns} tokens needs {needed // _MIB} MiB, and "
            f"{available // _MIB} MiB are available; lower --context-length or --max-running-requests"
        )


def make_kv_pools(
    spec: KVSpec,
    layout: KVLayout,
    *,
    drafts: Sequence[KVSpec] = (),
    context_len: int,
    slots_per_step: int = 1,
    device: torch.device,
    available_before: int,
    available_now: int,
) -> KVPools:
    """Size and make the pools of this rank from the published flags and what all ranks can afford.

    Call it in the placement of the target: `drafts` says what draft models cache, and changes no row count.
    The table has `slots_per_step` columns more than the context, for the nodes of a round at its end.
    """
    schedule, parallel = get_schedule(), get_parallel()
    page_size = schedule.page_size or 1
    rows = _request_rows(context_len)
    seen = _seen_by_all_ranks(HostMemory(parallel.node_rank, available_before, available_now))
    available_now = min(memory.now for memory in seen)
    ranks = parallel.ranks_on_host
    budget = least_budget_bytes(seen, mem_fraction=schedule.mem_fraction_static, ranks=ranks)
    bytes_of_drafts = sum(map(layout.bytes_per_token, drafts))
    bytes_per_token = layout.bytes_per_token(spec) + bytes_of_drafts
    columns = context_len + (slots_per_step if slots_per_step > 1 else 0)
    pages_per_request = -(-columns // page_size)
    tokens = pool_tokens(
        budget_bytes=budget,
        bytes_per_token=bytes_per_token,
        page_size=page_size,
        max_total_tokens=schedule.max_total_tokens,
        useful=rows * pages_per_request * page_size,
    )
    pages = tokens // page_size
    rows = min(rows, tokens)
    _check_request_table(rows, columns, available_now // ranks)
    logger.info(
        "KV cache is allocated. tokens=%d, pages=%d of %d, %s, %.1f MiB%s",
        tokens,
        pages,
        page_size,
        str(spec.dtype).removeprefix("torch."),
        tokens * bytes_per_token / _MIB,
        f", {tokens * bytes_of_drafts / _MIB:.1f} of them for drafts" if drafts else "",
    )
    return KVPools(
        kv=PagedKVPool(pages, page_size, layout, spec, device),
        req_to_token=ReqToTokenPool(rows, columns, device),
        allocator=make_slot_allocator(pages, page_size),
        drafts=tuple(PagedKVPool(pages, page_size, layout, each, device) for each in drafts),
    )


def _request_rows(context_len: int) -> int:
    """Rows of the request table: the requests that one replica may run."""
    schedule, parallel = get_schedule(), get_parallel()
    wanted = schedule.max_running_requests or default_max_running_requests(
        context_len, schedule.max_total_tokens
    )
    rows = requests_per_replica(wanted, parallel.attn_dp_size)
    if parallel.attn_dp_size > 1:
        logger.info(
            "max_running_requests=%d over %d attention-DP replicas: each runs at most %d",
            wanted,
            parallel.attn_dp_size,
            rows,
        )
    return rows
