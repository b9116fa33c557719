"""What the ranks of one attention-TP group say of themselves, gathered over real groups."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="multi-rank-cpu")

from typing import Any

import msgspec

from sglang.srt.distributed import parallel_state
from sglang.srt.managers.scheduler_components.placement_report import report_placement
from sglang.srt.runtime_context import SpawnRanks, get_context, publish
from sglang.srt.server_args import ServerArgs
from sglang.test.multi_rank import run_ranks

LAYOUTS: list[dict[str, Any]] = [
    {"tp_size": 2},
    {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
]


def report(rank: int) -> list[Any]:
    """On one rank: publish, build, write a setting, report; then take the groups down again."""
    answers = []
    for fields in LAYOUTS:
        publish(ServerArgs(model_path="dummy", **fields), role="test", ranks=SpawnRanks(world_rank=rank))
        parallel_state.initialize_model_parallel()
        get_context().override(f"rank {rank}", max_prefill_tokens=100 + rank)
        answers.append(msgspec.to_builtins(report_placement(7)))
        parallel_state.destroy_model_parallel()
    return answers


def test_ranks_report_stamps_and_live_groups_of_their_attention_tp_group() -> None:
    answers = run_ranks(report, world_size=2)
    tensor, replicas = zip(*answers)
    # Plain tensor parallelism: both ranks in one answer, the same on each.
    assert tensor[0] == tensor[1]
    assert [(r["world_rank"], r["dp_rank"]) for r in tensor[0]["ranks"]] == [(0, 0), (1, 0)]
    assert [(o["world_rank"], o["source"], o["after"]) for o in tensor[0]["overrides"]] == [
        (0, "rank 0", 100),
        (1, "rank 1", 101),
    ]
    assert tensor[0]["call_id"] == 7
    # Attention data parallelism: each replica answers for itself.
    for dp_rank, answer in enumerate(replicas):
        assert answer["dp_rank"] == dp_rank
        (only,) = answer["ranks"]
        assert (only["world_rank"], only["dp_rank"]) == (dp_rank, dp_rank)
        assert only["names"]["attn_dp_rank"] == [dp_rank, "stamp"]
        assert only["names"]["tp_group"] == [[0, 1], "live"]
        assert only["names"]["attn_tp_group"] == [[dp_rank], "live"]
    for answer in (tensor[0], *replicas):
        for rank in answer["ranks"]:
            layers = {name: layer for name, (_, layer) in rank["names"].items()}
            assert {layers[n] for n in layers if n.endswith("_group")} == {"live"}
            assert {layers[n] for n in layers if n.endswith("_rank") and n != "attn_dcp_rank"} - {
                "published"
            } == {"stamp"}
