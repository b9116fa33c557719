"""Rows that move between attention-DP replicas, against plain concatenation and addition."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="multi-rank-cpu")

import torch

from sglang.srt.distributed import parallel_state
from sglang.srt.layers.dp_attention import get_global_dp_buffer_len, size_dp_forward
from sglang.srt.layers.exchange.dp_gather import dp_gather, dp_scatter, gather_rows
from sglang.srt.layers.exchange.dp_padding import DpPaddingMode
from sglang.srt.runtime_context import get_parallel
from sglang.test.multi_rank import run_ranks
from sglang.test.test_utils import published_topology

WIDTH = 3
#: Tokens of the replicas: none anywhere, idle ones, odd counts, equal counts.
COUNTS = {
    2: [[0, 0], [1, 0], [0, 1], [0, 3], [1, 3], [3, 5], [5, 5], [8, 2]],
    4: [[0, 0, 0, 0], [0, 0, 0, 1], [1, 3, 5, 0], [5, 5, 5, 5], [2, 0, 7, 1], [0, 4, 4, 4]],
}


def rows_of(replica: int, count: int) -> torch.Tensor:
    """What the tokens of a replica look like; no row of any replica equals another one."""
    first = 100.0 * (replica + 1)
    return first + torch.arange(count * WIDTH, dtype=torch.float32).view(count, WIDTH)


def term_of(tp_rank: int, rows: int) -> torch.Tensor:
    """What a rank adds to each gathered row: small whole numbers, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(tp_rank)
    return torch.randint(-50, 50, (rows, WIDTH), generator=generator).float()


def expected_layout(counts: list[int], mode: DpPaddingMode, attn_tp_size: int) -> list[tuple[int, int]]:
    """(first row, rows with padding) of each replica in the gathered tensor."""
    longest = max(counts)
    while mode.is_max_len() and longest % attn_tp_size:
        longest += 1
    lengths = [longest if mode.is_max_len() else count for count in counts]
    return [(sum(lengths[:replica]), length) for replica, length in enumerate(lengths)]


def check_one(counts: list[int], mode: DpPaddingMode) -> None:
    parallel = get_parallel()
    size_dp_forward(counts, mode)
    replica, own = parallel.attn_dp_rank, counts[parallel.attn_dp_rank]
    places = expected_layout(counts, mode, parallel.attn_tp_size)
    total = sum(length for _, length in places)
    assert get_global_dp_buffer_len() == total

    gathered = dp_gather(rows_of(replica, own))
    expected = torch.zeros(total, WIDTH)
    for other, (first, _) in enumerate(places):
        expected[first : first + counts[other]] = rows_of(other, counts[other])
    assert torch.equal(gathered, expected), (counts, mode, gathered, expected)

    terms = [term_of(rank, total) for rank in range(parallel.tp_size)]
    mine = terms[parallel.tp_rank].clone()
    for other, (first, length) in enumerate(places):
        mine[first + counts[other] : first + length] = float("nan")  # padding: nothing of it may come back
    first, _ = places[replica]
    scattered = dp_scatter(mine)
    assert torch.equal(scattered, torch.stack(terms).sum(0)[first : first + own]), (counts, mode, scattered)


def check_moves(rank: int, layouts: list[int]) -> list[dict[str, int]]:
    """On one rank: every row count of every layout in both paddings. Gives the calls on the tensor group."""
    calls = []
    tp_size = torch.distributed.get_world_size()
    for replicas in layouts:
        fields = {"tp_size": tp_size, "dp_size": replicas, "enable_dp_attention": True}
        with published_topology(**fields, ranks={"world_rank": rank}):
            parallel_state.initialize_model_parallel()
            for counts in COUNTS[replicas]:
                for mode in DpPaddingMode:
                    check_one(counts, mode)
                exact = gather_rows(
                    rows_of(rank * replicas // tp_size, counts[rank * replicas // tp_size]), counts
                )
                assert torch.equal(exact, torch.cat([rows_of(r, n) for r, n in enumerate(counts)]))
            calls.append(dict(get_parallel().tp_group.calls))
            parallel_state.destroy_model_parallel()
    return calls


def test_two_replicas_of_one_rank_exchange_exact_and_padded_rows() -> None:
    first, second = run_ranks(check_moves, world_size=2, layouts=[2])
    assert first == second
    # Every rank is a replica: no exact move goes through a buffer of zeros.
    assert set(first[0]) == {"all_gather", "reduce_scatter", "all_gatherv", "reduce_scatterv"}


def test_four_ranks_as_two_and_as_four_replicas_exchange_exact_and_padded_rows() -> None:
    answers = run_ranks(check_moves, world_size=4, layouts=[2, 4])
    assert all(answer == answers[0] for answer in answers)
    assert set(answers[0][0]) == {"all_gather", "reduce_scatter", "all_reduce"}
    assert set(answers[0][1]) == {"all_gather", "reduce_scatter", "all_gatherv", "reduce_scatterv"}
