"""A draft changes nothing: text, ends, usage and log-probabilities in every cell of the product, on one rank.

In fp32 and greedy. An oracle reaches all that a round can give and a random draft next to nothing, so a fault
shows on one side or the other.
"""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=55, suite="unit-cpu")

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from sglang.srt.batch.sampling_state import SamplingState
from sglang.srt.messages.io_struct import TokenLogprob
from sglang.srt.speculative import spec_worker
from sglang.srt.speculative.accept import Accepted, follow, path_logprobs
from sglang.srt.speculative.base_spec_worker import Proposal
from sglang.srt.speculative.spec_worker import SpecWorker
from sglang.test.fakes.fake_channel import Answer
from sglang.test.spec.cells import SITUATIONS, Cell, all_cells, close_calls, differences
from sglang.test.spec.lab import SpecLab
from sglang.test.spec.stage import Stage


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> SpecLab:
    return SpecLab(tmp_path_factory.mktemp("cells"))


def test_the_product_has_240_cells() -> None:
    cells = all_cells()
    assert len(cells) == len(set(cells)) == len({cell.id for cell in cells}) == 4 * 3 * 2 * 2 * 5 == 240


def test_no_choice_of_the_model_hangs_on_rounding(lab: SpecLab) -> None:
    assert close_calls(lab.truth) == 0
    for page_size in (1, 16):
        assert all(close_calls(lab.plain(page_size, situation)) == 0 for situation in SITUATIONS)


@pytest.mark.parametrize("cell", [pytest.param(cell, id=cell.id) for cell in all_cells()])
def test_a_draft_changes_nothing(lab: SpecLab, cell: Cell) -> None:
    plain = lab.plain(cell.page_size, cell.situation)
    with lab.cell(cell) as stage:
        answers = SITUATIONS[cell.situation].play(stage)
        stage.check_empty()
        assert SITUATIONS[cell.situation].check(stage, answers), "the situation did not come about"
    assert list(differences(plain, answers)) == []
    for name, answer in answers.items():
        assert answer.ids == lab.truth[name].ids[: len(answer.ids)], name
    _check_counts(cell, stage, answers)


def _check_counts(cell: Cell, stage: Stage, answers: dict[str, Answer]) -> None:
    """What is reported of the draft, against what the target ran, and against what such a draft can reach."""
    counts = [answer.spec for answer in answers.values() if answer.spec is not None]
    assert len(counts) == len(answers)
    rounds, correct = sum(it.num_rounds for it in counts), sum(it.num_correct_drafts for it in counts)
    assert (rounds, sum(it.num_proposed_drafts for it in counts)) == (stage.num_rounds, stage.num_proposed)
    length = 1 + correct / rounds
    assert stage.scheduler.load.state(1.0)["avg_spec_accept_length"] == pytest.approx(length)
    if cell.draft == "oracle":
        assert [it.histogram for it in counts] == [[0] * cell.depth + [it.num_rounds] for it in counts]
        for name, answer in answers.items():
            assert answer.spec is not None
            # Each prompt that was computed, a retracted request's once more, gave one token.
            from_rounds = len(answer.ids) - 1 - answer.num_retractions
            assert answer.spec.num_rounds == -(-from_rounds // (cell.depth + 1)), name
    elif cell.draft == "random":
        assert length < 1.2, f"{length:.2f} tokens a round"
    else:
        assert 1.3 < length < 1 + cell.depth, f"{length:.2f} tokens a round"


@pytest.mark.parametrize(
    "fault", ["takes every draft", "leaves keys where they were", "scores the node before"]
)
def test_a_planted_fault_is_noticed(lab: SpecLab, fault: str) -> None:
    """In a round that accepts what it must not, in the cache, and in the log-probabilities."""
    cell = Cell("EAGLE", "random" if fault == "takes every draft" else "oracle", "tree", 1, "joined midway")
    with lab.cell(cell) as stage:
        worker = stage.scheduler.worker
        assert isinstance(worker, SpecWorker)
        with pytest.MonkeyPatch.context() as patch:
            if fault == "takes every draft":
                patch.setattr(worker, "_accept", _first_children)
            elif fault == "leaves keys where they were":
                patch.setattr(worker.target.pools.kv, "move", lambda *_: None)
            else:
                patch.setattr(spec_worker, "path_logprobs", _one_node_early)
            answers = SITUATIONS[cell.situation].play(stage)
    assert list(differences(lab.plain(1, cell.situation), answers))


def _first_children(
    proposal: Proposal, logits: torch.Tensor, states: Sequence[SamplingState]
) -> list[Accepted]:
    """Accept the first child of every root, whatever the target says."""
    right = follow(proposal.tree, logits, states)
    return [
        Accepted([0, 1], [ids[1], one.token_ids[-1]])
        for one, ids in zip(right, proposal.tree.token_ids.tolist())
    ]


def _one_node_early(
    logits: torch.Tensor, accepted: Sequence[Accepted], *rest: Any
) -> list[list[TokenLogprob]]:
    """The right tokens, scored with the logits of the node before."""
    early = [replace(one, path=[0, *one.path[:-1]]) for one in accepted]
    return path_logprobs(logits, early, *rest)
