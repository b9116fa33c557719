"""Drafts of several ranks replay their graphs together: also where a replica idles or a round is narrow."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=25, suite="multi-rank-cpu")

from pathlib import Path
from typing import Any

import pytest

from sglang.srt.speculative.algorithms.eagle import EagleDrafter
from sglang.srt.speculative.algorithms.standalone import StandaloneDrafter
from sglang.test.fakes.graph_tape import TapeBackend, TapePool
from sglang.test.multi_rank import run_ranks
from sglang.test.spec.rank_rounds import RankRounds
from sglang.test.tiny_drafts import write_random_draft
from sglang.test.tiny_models import write_tiny_model
from sglang.test.worker_driver import driven_worker

#: Requests of each replica in a round, and whether the pool has room for one slot a request only.
ROUNDS = [((2, 1), False), ((1, 0), False), ((0, 2), True), ((2, 2), True), ((0, 1), False), ((2, 0), True)]
ROUNDS += [((1, 2), False), ((2, 2), False)]
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tp_size": 2},
    "replicas": {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
}
TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
PROMPTS = [[[5, 6, 7, 8, 9], [200, 201]], [[300, 301, 302], [17] * 9]]  # of each replica


def texts(rank: int, model: str, fields: dict[str, Any], records: bool) -> dict[str, Any]:
    """The tokens of every request on this rank, what its draft proposed, how often graphs were replayed."""
    with driven_worker(model, rank=rank, **fields) as driver:
        drafter = driver.worker.drafter  # type: ignore[union-attr]
        assert isinstance(drafter, EagleDrafter | StandaloneDrafter)
        backends: list[TapeBackend] = []
        if records:
            tapes = TapePool()

            def make_backend() -> TapeBackend:
                backends.append(TapeBackend(tapes))
                return backends[-1]

            drafter.init_graphs(make_backend, driver.target.pools.req_to_token, max_requests=2)
        rounds = RankRounds(driver, PROMPTS)
        for counts, is_narrow in ROUNDS:
            rounds.run(counts, is_narrow=is_narrow)
        return {
            "ids": [seq.ids for seq in rounds.seqs],
            "proposed": rounds.proposed,
            "replays": [len(backend.replays) for backend in backends],
        }


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target"), num_layers=3, max_position_embeddings=128)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "STANDALONE"])
def test_recorded_rounds_on_ranks_are_the_eager_ones(
    target: Path, tmp_path: Path, algorithm: str, layout: str
) -> None:
    if algorithm == "STANDALONE":
        draft = write_tiny_model(tmp_path, num_layers=2, max_position_embeddings=128, seed=5)
    else:
        draft = write_random_draft(tmp_path, target, "eagle3" if algorithm == "EAGLE3" else "eagle")
    named = {"speculative_algorithm": algorithm, "speculative_draft_model_path": str(draft)}
    fields = {**named, **TREE, **LAYOUTS[layout]}
    eager = run_ranks(texts, world_size=2, model=str(target), fields=fields, records=False)
    recorded = run_ranks(texts, world_size=2, model=str(target), fields=fields, records=True)
    for plain, graph in zip(eager, recorded, strict=True):
        assert graph["ids"] == plain["ids"]
        assert graph["proposed"] == plain["proposed"]
    replays = [answer["replays"] for answer in recorded]
    if algorithm != "EAGLE3" or layout == "tensor":
        assert all(counts == [5, 5] for counts in replays), "one of each unit in a round that is whole"
    else:
        assert replays == [[4, 4], [4, 4]], "a draft that owns its attention knows nothing of idle rounds"
