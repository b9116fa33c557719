"""Owns the runtime flags: state that the process enters and leaves, in declared groups.

Read through `get_flags()`, never kept (`reset_context` replaces the object). Must not hold resolved
configuration: what the operator or resolution decided is in the bags.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from sglang.srt.runtime_context.near_names import nearest
from sglang.srt.runtime_context.scopes import Scope, ScopeStack, refuse_copy

if TYPE_CHECKING:
    import torch

__all__ = ["CaptureFlags", "DpFlags", "FlagGroupBase", "Flags", "MoeFlags"]


class FlagGroupBase:
    """A group of declared leaves: a subclass annotates them with defaults; nothing else can be set."""

    _leaves: ClassVar[dict[str, object]] = {}
    _accessor: ClassVar[str] = "get_flags()"
    _scopes: ScopeStack

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = {name: getattr(cls, name, None) for name in cls.__annotations__ if not name.startswith("_")}
        cls._leaves = {**cls._leaves, **own}

    def __init__(self) -> None:
        for name, default in self._leaves.items():
            object.__setattr__(self, name, default)
        object.__setattr__(self, "_scopes", ScopeStack(type(self).__name__, self.__dict__))

    def __setattr__(self, name: str, value: object) -> None:
        if name not in self._leaves:
            raise AttributeError(f"{type(self).__name__} declares no '{name}'{self._near(name)}")
        object.__setattr__(self, name, value)

    def __reduce__(self) -> NoReturn:
        refuse_copy(type(self).__name__, self._accessor)

    def values(self) -> dict[str, object]:
        """Every leaf with its current value."""
        return {name: getattr(self, name) for name in self._leaves}

    def override(self, **leaves: object) -> Scope:
        """Write leaves for a block; all names are checked before the first is written."""
        unknown = [name for name in leaves if name not in self._leaves]
        if unknown:
            listed = ", ".join(repr(name) for name in unknown)
            raise ValueError(f"{type(self).__name__} declares no {listed}{self._near(unknown[0])}")
        return Scope(self._scopes, leaves)

    def _near(self, name: str) -> str:
        return nearest(name, self._leaves) or f"; declared: {', '.join(sorted(self._leaves))}"


class CaptureFlags(FlagGroupBase):
    """Graph capture and compilation. Seeded by publish, written by the runner while it captures."""

    enable_torch_compile: bool = False
    is_capturing: bool = False


class MoeFlags(FlagGroupBase):
    """Active expert back ends; filled by `initialize_moe_config()`, replaced inside the draft contexts.

    The getters of `layers/moe/utils.py` say what a leaf means that is still None.
    """

    a2a_backend: Any = None
    runner_backend: Any = None
    speculative_a2a_backend: Any = None
    speculative_runner_backend: Any = None
    deepep_mode: str | None = None
    deepep_config: str | None = None
    tbo_enabled: bool = False
    sbo_enabled: bool = False
    tbo_token_distribution_threshold: float | None = None
    disable_fp4_allgather: bool = False
    speculative_context: bool = False


class DpFlags(FlagGroupBase):
    """Attention data parallelism at run time: whether it is on, who gathers, what a gathered row is."""

    enabled: bool = False
    use_world_group_for_gather: bool = False
    joiner_skip_all_gather: bool = False
    hidden_size: int | None = None
    dtype: torch.dtype | None = None
    device: torch.device | None = None


class Flags:
    """The three groups, which only a reset replaces, all together."""

    __slots__ = ("_capture", "_dp", "_moe")

    _capture: CaptureFlags
    _moe: MoeFlags
    _dp: DpFlags

    def __init__(self) -> None:
        object.__setattr__(self, "_capture", CaptureFlags())
        object.__setattr__(self, "_moe", MoeFlags())
        object.__setattr__(self, "_dp", DpFlags())

    @property
    def capture(self) -> CaptureFlags:
        return self._capture

    @property
    def moe(self) -> MoeFlags:
        return self._moe

    @property
    def dp(self) -> DpFlags:
        return self._dp

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Flags takes no '{name}': write a leaf of get_flags().capture, .moe or .dp")

    def __reduce__(self) -> NoReturn:
        refuse_copy("Flags", "get_flags()")

    def scope_stacks(self) -> list[ScopeStack]:
        """Where scopes of the groups are kept."""
        return [group._scopes for group in (self.capture, self.moe, self.dp)]

    def snapshot(self) -> dict[str, dict[str, object]]:
        """All leaves of all groups, for `restore`."""
        return {"capture": self.capture.values(), "moe": self.moe.values(), "dp": self.dp.values()}

    def restore(self, saved: dict[str, dict[str, object]]) -> None:
        for group_name, leaves in saved.items():
            group: FlagGroupBase = getattr(self, group_name)
            for name, value in leaves.items():
                setattr(group, name, value)
