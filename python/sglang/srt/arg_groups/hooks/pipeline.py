"""The one resolution pass: an ordered list of small hooks, run once before the first process starts.

Called by the entry points (`launch_server`, `Engine`). A child process does not resolve again: it is handed
the record and what was declared beside it. Must not hold a rule of its own.
"""

from collections.abc import Callable

from sglang.srt.arg_groups.hooks.device import resolve_device
from sglang.srt.arg_groups.hooks.dtype import resolve_dtype
from sglang.srt.arg_groups.hooks.kernel import resolve_kernels
from sglang.srt.arg_groups.hooks.model import resolve_model
from sglang.srt.arg_groups.hooks.parallel import check_meeting_place, resolve_parallel
from sglang.srt.arg_groups.hooks.process import resolve_process
from sglang.srt.arg_groups.hooks.schedule import resolve_schedule
from sglang.srt.arg_groups.hooks.serving import resolve_serving
from sglang.srt.arg_groups.hooks.speculative import resolve_speculative
from sglang.srt.arg_groups.hooks.values import check_values
from sglang.srt.arg_groups.model_override_base import ResolvingView, resolving_view
from sglang.srt.arg_groups.overrides import (
    declare,
    declared_provenance,
    forget,
    is_resolved,
    mark_resolved,
    record_of,
)

Hook = Callable[[ResolvingView], None]

#: Hooks that need only the record: a wrong layout is refused before a model file is opened.
LAYOUT_HOOKS: tuple[Hook, ...] = (check_values, resolve_parallel)

#: Order matters: each hook may read what the ones above it decided.
HOOKS: tuple[Hook, ...] = (
    *LAYOUT_HOOKS,
    check_meeting_place,
    resolve_device,
    resolve_model,
    resolve_speculative,
    resolve_dtype,
    resolve_kernels,
    resolve_schedule,
    resolve_serving,
    resolve_process,
)


def resolve(record: object) -> None:
    """Decide every open field of this record, once; ValueError for what the operator must change.

    A refused record keeps exactly the declarations it came with.
    """
    record = record_of(record)
    if is_resolved(record):
        raise RuntimeError("this record is resolved already; build a fresh one to resolve again")
    _run(HOOKS, record)
    mark_resolved(record)


def resolve_layout(record: object) -> None:
    """Decide and check only what places the ranks, without a model or a device; for `placement`."""
    _run(LAYOUT_HOOKS, record_of(record))


def _run(hooks: tuple[Hook, ...], record: object) -> None:
    before = declared_provenance(record)
    view = resolving_view(record)
    try:
        for hook in hooks:
            hook(view)
    except BaseException:
        forget(record)
        for item in before:
            declare(record, item.source, **{item.name: item.value})
        raise
