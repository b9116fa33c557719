"""The view a resolution hook works through: it reads what is decided so far and declares more.

Used by the hooks and by model-specific overrides. Must not write the record itself.
"""

from sglang.srt.arg_groups.fields import LEAVES
from sglang.srt.arg_groups.overrides import ResolvedView, declare, record_of


def _same(old: object, new: object) -> bool:
    return type(old) is type(new) and bool(old == new)


class ResolvingView(ResolvedView):
    """`view.page_size` reads; `view.declare("page_hook", page_size=16)` decides."""

    __slots__ = ()

    def __init__(self, record: object) -> None:  # a type checker would make one of all fields
        super().__init__(record)

    def declare(self, source: str, /, **values: object) -> None:
        """Decide fields beside the record; TypeError for one that is not declared as resolvable."""
        fixed = sorted(name for name in values if name in LEAVES and not LEAVES[name].arg.resolvable)
        if fixed:
            raise TypeError(f"{source} decides {', '.join(fixed)}, declared without resolvable=True")
        # A value that would not change stays attributed to whoever set it, often the operator.
        changed = {name: value for name, value in values.items() if not _same(getattr(self, name), value)}
        if changed:
            declare(record_of(self), source, **changed)

    def fill(self, source: str, /, **values: object) -> None:
        """Decide those of the fields that are still None."""
        self.declare(source, **{name: value for name, value in values.items() if getattr(self, name) is None})


def resolving_view(config: object) -> ResolvingView:
    return ResolvingView(record_of(config))
