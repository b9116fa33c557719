"""Owns one attention-TP group's part of `/placement`: where each of its ranks sits, and its overrides.

Called by the scheduler on every rank of the group in the same step and sent by its leader. It must not be
called on some of them only: it gathers.
"""

from __future__ import annotations

from sglang.srt.messages.io_struct import GetPlacementReqOutput
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.runtime_context.placement import override_log_of, placement_of


def report_placement(call_id: int) -> GetPlacementReqOutput:
    """The ranks of this group in its order, as the context has them now; the same on each of them."""
    parallel, context = get_parallel(), get_context()
    dp_rank = parallel.replica_rank
    seat = {"world_rank": parallel.launch_world_rank, "dp_rank": dp_rank}
    mine = {
        "rank": {**seat, "names": placement_of(context)},
        "overrides": [{**seat, **entry} for entry in override_log_of(context)],
    }
    everyone = parallel.attn_tp_group.all_gather_object(mine)
    return GetPlacementReqOutput(
        call_id=call_id,
        ranks=[one["rank"] for one in everyone],
        overrides=[entry for one in everyone for entry in one["overrides"]],
        dp_rank=dp_rank,
    )
