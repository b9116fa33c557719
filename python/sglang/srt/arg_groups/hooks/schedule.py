"""Fills the scheduler's limits: chunk, page, requests decoded at once.

Reads the device and the context length.
"""

from sglang.srt.arg_groups.model_override_base import ResolvingView
from sglang.srt.constants import CPU_CHUNKED_PREFILL_SIZE

#: Requests decoded at once when nothing is said, and the memory their slot table (int64 a token) may take.
_MOST_REQUESTS = 256
_FEWEST_REQUESTS = 16
_SLOT_TABLE_BYTES = 64 << 20


def default_max_running_requests(context_length: int, max_total_tokens: int | None) -> int:
    """Bounded by the slot table's memory and by the pool, of which each request holds a token or more."""
    fitting = max(_FEWEST_REQUESTS, _SLOT_TABLE_BYTES // (8 * context_length))
    requests = min(_MOST_REQUESTS, fitting)
    return requests if max_total_tokens is None else min(requests, max_total_tokens)


def resolve_schedule(view: ResolvingView) -> None:
    context_length = view.context_length
    assert context_length is not None  # the model hook fills it
    if view.enable_dynamic_chunking and view.chunked_prefill_size == -1:
        raise ValueError(
            "--enable-dynamic-chunking says how prompts are cut, and --chunked-prefill-size -1 that they are "
            "not: leave one of them out"
        )
    if view.chunked_prefill_size is None and view.device == "cpu":
        view.declare("schedule_hook", enable_dynamic_chunking=True)
        if view.speculative_algorithm is None:
            view.declare("schedule_hook", enable_mixed_chunk=True)
    view.fill(
        "schedule_hook",
        chunked_prefill_size=CPU_CHUNKED_PREFILL_SIZE,
        page_size=1,
        max_running_requests=default_max_running_requests(context_length, view.max_total_tokens),
    )
    # There is only the plain scheduler loop, and it waits on its sockets when it has nothing to do.
    view.declare("schedule_hook", disable_overlap_schedule=True, sleep_on_idle=True)
