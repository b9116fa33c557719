"""The view a resolution hook works through: reads what is decided so far, writes declarations.

Read by the hooks and by model-specific overrides. The record itself is never written.
"""

from typing import Any

from sglang.srt.arg_groups.overrides import ResolvedView, declare, record_of


class ResolvingView(ResolvedView):
    """``view.page_size`` reads; ``view.declare("page_hook", page_size=16)`` decides."""

    __slots__ = ()

    def declare(self, source: str, /, **values: Any) -> None:
        declare(record_of(self), source, **values)


def resolving_view(config: Any) -> ResolvingView:
    return ResolvingView(record_of(config))
