"""What does a read through the context cost, and a scope? Prints nanoseconds beside a plain module global.

Usage: python benchmark/bench_context_read.py [--rounds N]. Layers ask for widths thousands of times a step,
so a read should stay within about 300 ns; a draft enters its scope several times a step, so that should cost
at most about 15,000 ns. The best of many rounds is shown, each shorter than a time slice, because other work
on the machine only adds time.
"""

from __future__ import annotations

import argparse
import timeit
from functools import partial
from typing import Any

from sglang.srt.distributed.parallel_state import GroupCoordinator, patch_tensor_parallel_group
from sglang.srt.runtime_context import SpawnRanks, get_parallel, get_schedule, publish, reset_context
from sglang.srt.server_args import ServerArgs

PLAIN_GLOBAL = 8

READS = {
    "plain module global": "PLAIN_GLOBAL",
    "leaf        get_parallel().tp_size": "get_parallel().tp_size",
    "derived     get_parallel().attn_tp_size": "get_parallel().attn_tp_size",
    "stamp       get_parallel().tp_rank": "get_parallel().tp_rank",
    "computed    get_parallel().attn_dcp_rank": "get_parallel().attn_dcp_rank",
    "kept reader parallel.attn_tp_size": "parallel.attn_tp_size",
    "bag leaf    get_schedule().page_size": "get_schedule().page_size",
}


#: Empty blocks: only entering and leaving the scope is measured.
SCOPES = {
    "one name    with parallel.override(...)": "with parallel.override(attn_tp_rank=1): pass",
    "a draft's   with patch_tensor_parallel...": "with draft_tensor_scope(): pass",
}

#: Reads of one round: about half a millisecond.
READS_PER_ROUND = 2_000


def nanoseconds(
    statement: str, names: dict[str, Any], rounds: int, per_round: int = READS_PER_ROUND
) -> float:
    """The best round, in nanoseconds per statement."""
    timer = timeit.Timer(statement, globals=names)
    return min(timer.repeat(repeat=rounds, number=per_round)) / per_round * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=300, help="rounds, of which the best counts")
    rounds = parser.parse_args().rounds
    record = ServerArgs(model_path="dummy", tp_size=8, dp_size=2, enable_dp_attention=True)
    publish(record, role="test", ranks=SpawnRanks(world_rank=5))
    parallel = get_parallel()
    names = {
        "PLAIN_GLOBAL": PLAIN_GLOBAL,
        "get_parallel": get_parallel,
        "get_schedule": get_schedule,
        "parallel": parallel,
    }
    rows = {label: nanoseconds(statement, names, rounds) for label, statement in READS.items()}
    stand_in = GroupCoordinator.__new__(GroupCoordinator)
    stand_in.world_size, stand_in.rank_in_group = parallel.attn_tp_size, parallel.attn_tp_rank
    names["draft_tensor_scope"] = partial(patch_tensor_parallel_group, stand_in, owns_attention=True)
    rows |= {label: nanoseconds(statement, names, rounds, 100) for label, statement in SCOPES.items()}
    with parallel.override(attn_tp_rank=1):
        rows["scope       get_parallel().attn_tp_rank"] = nanoseconds(
            "get_parallel().attn_tp_rank", names, rounds
        )
    for label, cost in rows.items():
        print(f"{label:<42} {cost:8.1f} ns")
    reset_context()


if __name__ == "__main__":
    main()
