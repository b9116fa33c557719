"""A draft whose rounds are recorded proposes what it proposes operation by operation."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=16, suite="unit-cpu")

import pathlib
from typing import Any

import pytest

from sglang.srt.model_executor.runner.captured_graphs import recapture_all
from sglang.srt.speculative.algorithms.eagle import EagleDrafter
from sglang.srt.speculative.algorithms.standalone import StandaloneDrafter
from sglang.test.fakes.graph_tape import TapeBackend, TapePool
from sglang.test.tiny_drafts import write_random_draft
from sglang.test.tiny_models import write_tiny_model
from sglang.test.worker_driver import WorkerDriver, driven_worker

PROMPTS = [[5, 6, 7, 8, 9], list(range(40, 71)), [200]]
SHAPES = {
    "chain": {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4},
    "tree": {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_tiny_model(tmp_path_factory.mktemp("target"), num_layers=3, max_position_embeddings=128)


@pytest.fixture(scope="module", params=["EAGLE", "EAGLE3", "STANDALONE"])
def drafted(
    request: pytest.FixtureRequest, target: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    kind = request.param.lower()
    folder = tmp_path_factory.mktemp(kind)
    if kind == "standalone":
        write_tiny_model(folder, num_layers=2, max_position_embeddings=128, seed=5)
    else:
        size = 90 if kind == "eagle3" else None
        folder = write_random_draft(folder, target, kind, draft_vocab_size=size)
    return {"speculative_algorithm": request.param, "speculative_draft_model_path": str(folder)}


def drafter_of(driver: WorkerDriver) -> EagleDrafter | StandaloneDrafter:
    drafter = driver.worker.drafter  # type: ignore[union-attr]
    assert isinstance(drafter, EagleDrafter | StandaloneDrafter)
    return drafter


def record(driver: WorkerDriver, *, max_requests: int) -> None:
    tapes, table = TapePool(), driver.target.pools.req_to_token
    drafter_of(driver).init_graphs(lambda: TapeBackend(tapes), table, max_requests=max_requests)


def eager_forwards(drafter: EagleDrafter | StandaloneDrafter) -> list[int]:
    """The rows of every forward that the draft will run operation by operation."""
    rows: list[int] = []
    forward = drafter._draft.runner.forward
    drafter._draft.runner.forward = lambda batch: rows.append(batch.num_tokens) or forward(batch)  # type: ignore[method-assign,func-returns-value]
    return rows


def rounds_of(driver: WorkerDriver, count: int = 8) -> list[Any]:
    """The trees that are proposed for the prompts over some rounds, as ids and parents."""
    drafter, seen = drafter_of(driver), []
    propose = drafter.propose

    def noted(*args: Any) -> Any:
        proposal = propose(*args)
        seen.append([part.tolist() for part in (proposal.tree.token_ids, proposal.tree.parents)])
        return proposal

    drafter.propose = noted  # type: ignore[method-assign]
    seqs = [driver.add(prompt) for prompt in PROMPTS]
    driver.step([(seq, len(seq.ids)) for seq in seqs])
    for number in range(count):
        driver.round(seqs[: 1 + number % 3])  # sizes below and at a captured one
    return seen


@pytest.mark.parametrize("shape", SHAPES)
def test_recorded_rounds_propose_what_eager_ones_do(
    target: pathlib.Path, drafted: dict[str, Any], shape: str
) -> None:
    fields = {**drafted, **SHAPES[shape]}
    with driven_worker(target, **fields) as driver:
        expected = rounds_of(driver)
    with driven_worker(target, **fields) as driver:
        record(driver, max_requests=len(PROMPTS))
        drafter = drafter_of(driver)
        assert len(drafter.graphs) == 2 and all(graphs.is_captured for graphs in drafter.graphs)
        forwards = eager_forwards(drafter)
        assert rounds_of(driver) == expected
        assert not forwards[1:], "only the prompts ran operation by operation"
        recapture_all(drafter.graphs)
        assert rounds_of(driver) == expected


def test_a_round_without_room_to_draft_runs_no_graph_of_a_whole_round(
    target: pathlib.Path, drafted: dict[str, Any]
) -> None:
    """Its one row a request is no round of the recorded width, and the rounds after it go on from there."""
    with driven_worker(target) as driver:
        expected = driver.generate([driver.add(PROMPTS[0])], 24)
    with driven_worker(target, **drafted, **SHAPES["tree"]) as driver:
        record(driver, max_requests=2)
        seq = driver.add(PROMPTS[0])
        driver.step([(seq, len(seq.ids))])
        forwards = eager_forwards(drafter_of(driver))
        for number in range(24):
            driver.round([seq], is_narrow=number % 3 == 1)
        assert [seq.ids[len(PROMPTS[0]) :][:24]] == expected
        assert forwards == [1] * 8, "a narrow round takes one token in, operation by operation"


def test_a_draft_without_graphs_has_none_to_record_anew(
    target: pathlib.Path, drafted: dict[str, Any]
) -> None:
    with driven_worker(target, **drafted, **SHAPES["chain"]) as driver:
        assert drafter_of(driver).graphs == []
        recapture_all(drafter_of(driver).graphs)


def test_chains_that_are_drawn_record_only_what_takes_them_in(
    target: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """They are drawn from seeds, on the host."""
    draft = write_random_draft(tmp_path / "draft", target, "eagle")
    fields = {
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": str(draft),
        "speculative_use_rejection_sampling": True,
        **SHAPES["chain"],
    }
    with driven_worker(target, **fields) as driver:
        record(driver, max_requests=2)
        assert len(drafter_of(driver).graphs) == 1
        seq = driver.add(PROMPTS[0])
        tokens, _ = driver.speculate([seq], 6)
    with driven_worker(target) as driver:
        assert driver.generate([driver.add(PROMPTS[0])], 6) == tokens
