"""Drafts of several ranks replay their graphs together: also where a replica idles or a round is narrow."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=30, suite="multi-rank-cpu")

from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.batch.forward_batch import DpStep, ForwardBatch
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.algorithms.eagle import EagleDrafter
from sglang.srt.speculative.algorithms.standalone import StandaloneDrafter
from sglang.test.fakes.graph_tape import TapeBackend, TapePool
from sglang.test.multi_rank import run_ranks
from sglang.test.tiny_drafts import write_random_draft
from sglang.test.tiny_models import write_tiny_model
from sglang.test.worker_driver import DrivenSequence, WorkerDriver, driven_worker

#: Requests of each replica in a round, and whether the pool has room for a whole one.
ROUNDS = [((2, 1), True), ((1, 0), True), ((0, 2), False), ((2, 2), False), ((0, 1), True), ((2, 0), False)]
ROUNDS += [((1, 2), True), ((2, 2), True)]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (2, {"tp_size": 2}),
    "replicas": (2, {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}),
}
TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
PROMPTS = [[[5, 6, 7, 8, 9], [200, 201]], [[300, 301, 302], [17] * 9]]  # of each replica


def agreed(counts: tuple[int, ...], rows: int, *, slots: int = 1, is_extend: bool = False) -> DpStep | None:
    """The step of replicas with so many requests, each of so many rows; None where there is one replica."""
    if get_parallel().attn_dp_size == 1:
        return None
    tokens, drawn = [count * rows for count in counts], list(counts)
    return DpStep(tokens, drawn, is_extend=is_extend, num_requests=drawn, slots_per_request=slots)


def prefill(driver: WorkerDriver, prompts: list[list[int]]) -> list[DrivenSequence]:
    """The prompts one after another, which both replicas compute together; the widest says how many rows."""
    seqs = []
    for number, prompt in enumerate(prompts):
        seq = driver.add(prompt)
        batch = driver.batch([(seq, len(prompt))])
        if get_parallel().attn_dp_size > 1:
            tokens = [len(replica[number]) for replica in PROMPTS]
            batch.dp_step = DpStep(tokens, [1, 1], is_extend=True, num_requests=[1, 1])
        result = driver.worker.forward_batch_generation(batch)
        seq.ids += result.next_token_ids[0]
        seq.sampling.append(seq.ids[-1])
        seqs.append(seq)
    return seqs


def texts(rank: int, model: str, fields: dict[str, Any], records: bool) -> dict[str, Any]:
    """The tokens of every request on this rank, what its draft proposed, how often graphs were replayed."""
    with driven_worker(model, rank=rank, **fields) as driver:
        drafter, backends = driver.worker.drafter, []  # type: ignore[union-attr]
        assert isinstance(drafter, EagleDrafter | StandaloneDrafter)
        if records:
            tapes = TapePool()

            def make_backend() -> TapeBackend:
                backends.append(TapeBackend(tapes))
                return backends[-1]

            drafter.init_graphs(make_backend, driver.target.pools.req_to_token, max_requests=2)
        proposed = note_proposals(drafter)
        parallel = get_parallel()
        replica = parallel.attn_dp_rank if parallel.attn_dp_size > 1 else 0
        seqs = prefill(driver, PROMPTS[replica])
        for counts, is_whole in ROUNDS:
            slots = driver.worker.slots_per_step if is_whole else 1
            step = agreed(counts, 1, slots=slots)
            count = max(counts) if step is None else counts[replica]
            if count:
                driver.round(seqs[:count], is_narrow=not is_whole, dp_step=step)
            else:
                assert step is not None
                driver.worker.forward_batch_generation(ForwardBatch.idle(step, torch.device("cpu")))
        return {
            "ids": [seq.ids for seq in seqs],
            "proposed": proposed,
            "replays": [len(backend.replays) for backend in backends],
        }


def note_proposals(drafter: EagleDrafter | StandaloneDrafter) -> list[list[list[int]]]:
    proposed: list[list[list[int]]] = []
    propose = drafter.propose

    def noted(*args: Any) -> Any:
        proposal = propose(*args)
        proposed.append(proposal.tree.token_ids.tolist())
        return proposal

    drafter.propose = noted  # type: ignore[method-assign]
    return proposed


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target"), num_layers=3, max_position_embeddings=128)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "STANDALONE"])
def test_recorded_rounds_on_ranks_are_the_eager_ones(
    target: Path, tmp_path: Path, algorithm: str, layout: str
) -> None:
    ranks, widths = LAYOUTS[layout]
    if algorithm == "STANDALONE":
        draft = write_tiny_model(tmp_path, num_layers=2, max_position_embeddings=128, seed=5)
    else:
        draft = write_random_draft(tmp_path, target, "eagle3" if algorithm == "EAGLE3" else "eagle")
    fields = {
        "speculative_algorithm": algorithm,
        "speculative_draft_model_path": str(draft),
        **TREE,
        **widths,
    }
    eager = run_ranks(texts, world_size=ranks, model=str(target), fields=fields, records=False)
    recorded = run_ranks(texts, world_size=ranks, model=str(target), fields=fields, records=True)
    for plain, graph in zip(eager, recorded, strict=True):
        assert graph["ids"] == plain["ids"]
        assert graph["proposed"] == plain["proposed"]
    replays = [answer["replays"] for answer in recorded]
    assert all(len(counts) == 2 and min(counts) > 0 for counts in replays)
    if algorithm != "EAGLE3" or layout == "tensor":
        assert all(counts == [5, 5] for counts in replays), "one of each unit in a round that is whole"
