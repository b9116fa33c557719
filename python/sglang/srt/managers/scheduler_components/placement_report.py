"""Owns the answer to "where are you": the live placement of all ranks of one attention-TP group.

Called by the scheduler on every rank of the group in the same turn, sent by its leader. It must not be
called by some of them only: it gathers.
"""

from __future__ import annotations

from sglang.srt.messages import io_struct
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.runtime_context.placement import override_log_of, placement_of


class PlacementReporter:
    """Reads the context at the moment of the question, never earlier."""

    def report(self, call_id: int) -> io_struct.GetPlacementReqOutput:
        """The ranks of this group in its order; the same on each of them."""
        parallel, context = get_parallel(), get_context()
        dp_rank = parallel.replica_rank
        seat = {"world_rank": parallel.launch_world_rank, "dp_rank": dp_rank}
        mine = {
            "rank": {**seat, "names": placement_of(context)},
            "overrides": [{**seat, **entry} for entry in override_log_of(context)],
        }
        everyone = parallel.attn_tp_group.all_gather_object(mine)
        return io_struct.GetPlacementReqOutput(
            call_id=call_id,
            ranks=[one["rank"] for one in everyone],
            overrides=[entry for one in everyone for entry in one["overrides"]],
            dp_rank=dp_rank,
        )
