"""Owns the names that `get_parallel()` answers beside the declared leaves: type, source and rule of each.

Read by `ParallelContext`, which makes a reader of every name, and by type checkers. Must not answer anything
itself, and must not import `distributed`: a getter is named, not called.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.arg_utils import A
from sglang.srt.runtime_context.widths import leads_attn_tp

if TYPE_CHECKING:
    from sglang.srt.arg_groups.fields.parallel import Parallel as _Declared
    from sglang.srt.distributed.group_coordinator import GroupCoordinator
else:
    _Declared = object

__all__ = ["COMPUTED", "COUNTS", "LIVE_READS", "SPAWN_FACTS", "ParallelNames"]


@dataclass(frozen=True)
class Live:
    """Asked of the process group, by a getter of `distributed.parallel_state`."""

    getter: str


@dataclass(frozen=True)
class Counted:
    """Counted once by publish over the whole deployment; a draft's narrower widths leave it as it is."""


@dataclass(frozen=True)
class Spawned:
    """A fact of the spawn that no group and no leaf knows. `missing` says why there is no answer."""

    missing: str


class ParallelNames(_Declared):
    """The names; their values are in `ParallelContext`.

    An annotation says the type and the source, and a property is a rule over other names.
    """

    __slots__ = ()

    num_worlds: A[int, Counted()]
    num_replicas: A[int, Counted()]
    ranks_on_host: A[int, Counted()]

    launch_world_size: A[int, Live("get_world_size")]
    launch_world_rank: A[int, Live("get_world_rank")]
    tp_rank: A[int, Live("get_tensor_model_parallel_rank")]
    pp_rank: A[int, Live("get_pipeline_model_parallel_rank")]
    dcp_rank: A[int, Live("get_dcp_rank")]
    moe_ep_rank: A[int, Live("get_moe_expert_parallel_rank")]
    moe_dp_rank: A[int, Live("get_moe_data_parallel_rank")]
    moe_tp_rank: A[int, Live("get_moe_tensor_parallel_rank")]
    attn_tp_rank: A[int, Live("get_attn_tensor_model_parallel_rank")]
    attn_cp_rank: A[int, Live("get_attn_context_model_parallel_rank")]
    world_group: A["GroupCoordinator", Live("get_world_group")]
    tp_group: A["GroupCoordinator", Live("get_tp_group")]
    pp_group: A["GroupCoordinator", Live("get_pp_group")]
    dcp_group: A["GroupCoordinator", Live("get_dcp_group")]
    moe_ep_group: A["GroupCoordinator", Live("get_moe_ep_group")]
    moe_dp_group: A["GroupCoordinator", Live("get_moe_dp_group")]
    moe_tp_group: A["GroupCoordinator", Live("get_moe_tp_group")]
    attn_tp_group: A["GroupCoordinator", Live("get_attn_tp_group")]
    attn_cp_group: A["GroupCoordinator", Live("get_attn_cp_group")]

    attn_dp_rank: A[
        int,
        Spawned(
            "attn_dp_rank is not known in this process: no group answers it. "
            "publish(..., ranks=SpawnRanks(...)) or initialize_dp_attention() stamps it, "
            "get_parallel().override(attn_dp_rank=...) states it"
        ),
    ]
    dp_rank: A[
        int | None,
        Spawned(
            "dp_rank is not known in this process: it was published without a rank bundle. The entry that "
            "spawned it passes publish(..., ranks=SpawnRanks(dp_rank=...)); None is an answer there"
        ),
    ]
    gpu_id: A[
        int | None,
        Spawned(
            "gpu_id is not known in this process: it was published without a rank bundle. The entry that "
            "spawned it passes publish(..., ranks=SpawnRanks(gpu_id=...)); None is an answer there (a CPU "
            "rank)"
        ),
    ]

    @property
    def max_world_size(self) -> int:
        """Ranks the world group has room for: the configured ceiling, else what it was launched with."""
        ceiling = self.max_ep_size
        return self.launch_world_size if ceiling is None else ceiling

    @property
    def attn_dcp_rank(self) -> int:
        """Position in the decode-context group, 0 when decode-context parallelism is off."""
        return self.dcp_rank if self.dcp_enabled else 0

    @property
    def is_attn_tp_leader(self) -> bool:
        """Whether this rank takes the requests of its attention-TP group and samples for all of it."""
        return self.attn_tp_size == 1 or leads_attn_tp(self.attn_tp_rank)

    @property
    def replica_rank(self) -> int:
        """The replica whose requests this rank holds; 0 where there is only one."""
        return self.attn_dp_rank if self.attn_dp_size > 1 else self.dp_rank or 0


def _declared_by(source: type[Any]) -> dict[str, Any]:
    notes = {name: tp.__metadata__[0] for name, tp in ParallelNames.__annotations__.items()}
    return {name: note for name, note in notes.items() if isinstance(note, source)}


#: Live name -> its getter.
LIVE_READS: dict[str, str] = {name: note.getter for name, note in _declared_by(Live).items()}
#: Name of a spawn fact -> what is said where nobody stated it.
SPAWN_FACTS: dict[str, str] = {name: note.missing for name, note in _declared_by(Spawned).items()}
COUNTS: tuple[str, ...] = tuple(_declared_by(Counted))
#: Computed name -> its rule, which asks last for the name whose value it answers with.
COMPUTED: dict[str, Callable[[Any], Any]] = {
    name: rule.fget
    for name, rule in vars(ParallelNames).items()
    if isinstance(rule, property) and rule.fget is not None
}
