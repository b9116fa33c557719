"""What the placement printer says beforehand is what real ranks answer for themselves once they stand."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="multi-rank-cpu")

from typing import Any

from sglang.srt.arg_groups.hooks.pipeline import resolve_layout
from sglang.srt.arg_groups.parsing.cli import parse_command_line
from sglang.srt.distributed import parallel_state
from sglang.srt.placement.plan import plan_from_flags
from sglang.srt.placement.table import as_json
from sglang.srt.runtime_context import SpawnRanks, get_context, publish
from sglang.srt.runtime_context.placement import placement_of
from sglang.srt.server_args import ServerArgs
from sglang.test.multi_rank import run_ranks

#: Between them every dimension is two wide once.
LAYOUTS = [
    "--tp-size 4 --attn-dp-size 2 --ep-size 2 --moe-dp-size 2",
    "--tp-size 2 --pp-size 2 --attn-cp-size 2",
    "--tp-size 4 --dcp-size 2 --ep-size 2",
]


def answers_of_rank(rank: int, layouts: list[str]) -> list[dict[str, Any]]:
    """On one rank: what its context answers under each layout, with the groups really built."""
    answers = []
    for flags in layouts:
        record = ServerArgs(model_path="none", **parse_command_line(flags.split(), complete=False))
        resolve_layout(record)
        publish(record, role="test", ranks=SpawnRanks(world_rank=rank))
        parallel_state.initialize_model_parallel()
        answers.append({name: value for name, (value, _) in placement_of(get_context()).items()})
        parallel_state.destroy_model_parallel()
    return answers


def test_ranks_stand_where_the_printer_said() -> None:
    answers = run_ranks(answers_of_rank, world_size=4, layouts=LAYOUTS)
    compared: set[str] = set()
    for at, flags in enumerate(LAYOUTS):
        plan = as_json(plan_from_flags(flags.split(), prog="test"))
        for rank, seat in enumerate(plan["ranks"]):
            live = answers[rank][at]
            assert seat["world_rank"] == rank == live["launch_world_rank"]
            for name, value in {**plan["widths"], **seat}.items():
                if name in live and name != "dp_rank":
                    assert value == live[name], (flags, rank, name)
                    compared.add(name)
            for group in plan["groups"]:
                name = f"{group['kind']}_group"
                if name in live:
                    assert live[name] == next(ranks for ranks in group["ranks"] if rank in ranks)
                    assert group["width"] > 1 or live[name] == [rank]
                    compared.add(name)
    kinds = ("pp", "tp", "attn_cp", "attn_tp", "dcp", "moe_dp", "moe_ep", "moe_tp")
    expected = {f"{kind}_{what}" for kind in (*kinds, "attn_dp") for what in ("size", "rank")}
    assert compared == expected | {f"{kind}_group" for kind in kinds}
