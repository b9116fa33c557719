"""Fills the scheduler's limits: chunk, page, rows.

Reads the device and the context length.
"""

from sglang.srt.arg_groups.model_override_base import ResolvingView
from sglang.srt.constants import CPU_CHUNKED_PREFILL_SIZE

#: Rows decoded at once when nothing is said, and the memory their slot table (int64 a token) may take.
_DEFAULT_ROWS = 256
_SLOT_TABLE_BYTES = 64 << 20
_FEWEST_ROWS = 16


def default_rows(context_length: int, max_total_tokens: int | None) -> int:
    """Rows decoded at once: bounded by the slot table's memory and the pool (a row holds a token or more)."""
    fitting = max(_FEWEST_ROWS, _SLOT_TABLE_BYTES // (8 * context_length))
    rows = min(_DEFAULT_ROWS, fitting)
    return rows if max_total_tokens is None else min(rows, max_total_tokens)


def resolve_schedule(view: ResolvingView) -> None:
    view.fill(
        "schedule_hook",
        chunked_prefill_size=CPU_CHUNKED_PREFILL_SIZE,
        page_size=1,
        max_running_requests=default_rows(view.context_length, view.max_total_tokens),
    )
    # Only the plain loop exists, and an idle loop waits on its sockets.
    view.declare("schedule_hook", disable_overlap_schedule=True, sleep_on_idle=True)
