"""A chain that is drawn: acceptance gets the very distributions that its tokens came from, row by row."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="unit-cpu")

import pathlib
from typing import Any

import pytest
import torch

from sglang.srt.speculative.algorithms.eagle import EagleDrafter
from sglang.srt.speculative.base_spec_worker import Proposal
from sglang.srt.speculative.spec_worker import SpecWorker
from sglang.test.tiny_drafts import write_random_draft
from sglang.test.tiny_models import write_tiny_model
from sglang.test.worker_driver import DrivenSequence, WorkerDriver, driven_worker

PROMPTS = [[5, 6, 7, 8, 9], list(range(40, 71)), [200]]
TEMPERATURES = [0.6, 1.0, 1.7]
STEPS = 3


class Watch:
    """What the draft computed for each request since its last proposal, and what acceptance was given."""

    def __init__(self, driver: WorkerDriver) -> None:
        assert isinstance(driver.worker, SpecWorker)
        drafter = driver.worker.drafter
        assert isinstance(drafter, EagleDrafter)
        self.first: dict[int, torch.Tensor] = {}  # by row of the request table: the logits of its first step
        self.levels: list[torch.Tensor] = []  # the logits of each further step, one row a request
        self.rows: list[int] = []
        self.judged: list[Proposal] = []
        self._watch(driver.worker, drafter)

    def _watch(self, worker: SpecWorker, drafter: EagleDrafter) -> None:
        remember, run, propose, accept = (
            drafter._remember,
            drafter._draft.run,
            drafter.propose,
            worker._accept,
        )

        def remembered(rows: torch.Tensor, logits: torch.Tensor, stream: torch.Tensor) -> None:
            self.first.update(zip(rows.tolist(), logits.clone(), strict=True))
            remember(rows, logits, stream)

        def ran(step: int, batch: Any) -> Any:
            output = run(step, batch)
            self.levels.append(output.logits.clone())
            return output

        def proposed(round: Any, num_nodes: int) -> Proposal:
            self.levels, self.rows = [], round.req_pool_indices.tolist()
            return propose(round, num_nodes)

        def accepted(proposal: Proposal, *rest: Any) -> Any:
            self.judged.append(proposal)
            self.check(proposal)
            return accept(proposal, *rest)

        drafter._remember, drafter._draft.run = remembered, ran  # type: ignore[method-assign]
        drafter.propose, worker._accept = proposed, accepted  # type: ignore[method-assign]

    def check(self, proposal: Proposal) -> None:
        assert proposal.q is not None and proposal.q.shape[1] == STEPS == len(self.levels) + 1
        for i, row in enumerate(self.rows):
            steps = [self.first[row], *(level[i] for level in self.levels)]
            for step, logits in enumerate(steps):
                wanted = torch.softmax(logits.double() / TEMPERATURES[row % len(TEMPERATURES)], dim=-1)
                torch.testing.assert_close(proposal.q[i, step], wanted, rtol=1e-5, atol=1e-9)
                assert proposal.q[i, step, proposal.tree.token_ids[i, step + 1]] > 0


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_tiny_model(tmp_path_factory.mktemp("target"), num_layers=2)


@pytest.fixture(scope="module")
def drawn(target: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    draft = write_random_draft(tmp_path_factory.mktemp("draft"), target, "eagle")
    return {
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": str(draft),
        "speculative_num_steps": STEPS,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": STEPS + 1,
        "speculative_use_rejection_sampling": True,
    }


def prefilled(driver: WorkerDriver) -> list[DrivenSequence]:
    """The prompts, each drawn at the temperature that belongs to its row."""
    seqs = [driver.add(prompt, seed=i + 1) for i, prompt in enumerate(PROMPTS)]
    for seq in seqs:
        seq.sampling.params.temperature = TEMPERATURES[seq.req_pool_idx % len(TEMPERATURES)]
    driver.step([(seq, len(seq.ids)) for seq in seqs])
    return seqs


@pytest.mark.parametrize("judges_blocks", [False, True], ids=["rejection", "block"])
def test_acceptance_gets_the_distributions_that_tokens_were_drawn_from(
    target: pathlib.Path, drawn: dict[str, Any], judges_blocks: bool
) -> None:
    with driven_worker(target, **drawn, speculative_use_block_verification=judges_blocks) as driver:
        watch = Watch(driver)
        seqs = prefilled(driver)
        orders = ((0, 1, 2), (2, 0), (1,), (1, 2, 0), (2, 1))
        for order in orders:
            driver.round([seqs[i] for i in order])
        assert len(watch.judged) == len(orders)


def test_a_distribution_of_another_row_is_noticed(target: pathlib.Path, drawn: dict[str, Any]) -> None:
    with driven_worker(target, **drawn) as driver:
        Watch(driver)
        seqs = prefilled(driver)
        drafter = driver.worker.drafter  # type: ignore[union-attr]
        drafter._first_logits = drafter._first_logits.roll(1, dims=0)
        with pytest.raises(AssertionError, match="not close"):
            driver.round(seqs)
