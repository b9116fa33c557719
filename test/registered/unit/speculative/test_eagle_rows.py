"""What lies in a draft's rows: the target's features, tokens and positions, against forwards from scratch.

An acceptance length cannot show a wrong rotary position or a missing row, so numbers are compared.
"""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="unit-cpu")

import pathlib
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sglang.srt.batch.forward_batch import ForwardBatch
from sglang.srt.speculative import draft_steps
from sglang.srt.speculative.draft_runner import DraftRunner, shifted_ids
from sglang.srt.speculative.draft_tree import DraftBeam
from sglang.srt.speculative.spec_worker import SpecWorker
from sglang.test.tiny_drafts import write_random_draft
from sglang.test.tiny_models import write_tiny_model
from sglang.test.worker_driver import DrivenSequence, WorkerDriver, driven_worker

PROMPT = [(17 * i) % 400 + 5 for i in range(23)]
CHAIN = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8}
KINDS = {"EAGLE": "eagle", "EAGLE3": "eagle3"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_tiny_model(tmp_path_factory.mktemp("target"), num_layers=4, seed=5)


@pytest.fixture(scope="module", params=KINDS)
def drafted(
    request: pytest.FixtureRequest, target: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The settings of one kind of draft."""
    kind = KINDS[request.param]
    folder = write_random_draft(
        tmp_path_factory.mktemp(kind), target, kind, draft_vocab_size=90 if kind == "eagle3" else None
    )
    return {"speculative_algorithm": request.param, "speculative_draft_model_path": str(folder)}


def draft_of(driver: WorkerDriver) -> DraftRunner[Any]:
    assert isinstance(driver.worker, SpecWorker)
    runner: DraftRunner[Any] = driver.worker.drafter._draft  # type: ignore[attr-defined]
    return runner


def features(driver: WorkerDriver, seq: DrivenSequence) -> tuple[ForwardBatch, torch.Tensor]:
    """The target's captured rows of a whole sequence in one forward of its own."""
    batch = driver.batch([(seq, len(seq.ids))])
    batch.capture_hidden = True
    hidden = driver.target.model_runner.forward(batch).hidden
    assert hidden is not None
    return batch, hidden


def test_captured_rows_are_those_of_transformers(target: pathlib.Path, drafted: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.no_grad():
        states = model.model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    with driven_worker(target, **drafted, **CHAIN) as driver:
        _, hidden = features(driver, driver.add(PROMPT))
        layers = driver.target.model_runner.model.model.aux_layers
    if layers:  # hidden_states[i + 1] is the stream after layer i
        expected = torch.cat([states[layer + 1][0] for layer in layers], dim=-1)
    else:
        expected = states[-1][0]
    torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_committed_rows_of_target_and_draft_equal_forwards_over_the_whole_text(
    target: pathlib.Path, drafted: dict[str, Any], shape: dict[str, int], page_size: int
) -> None:
    """After rounds that accept much, little and nothing; a draft's row p has features p and token p + 1."""
    with driven_worker(target, page_size=page_size, **drafted, **shape) as driver:
        seq = driver.add(PROMPT)
        accepted = _speculate_with_some_right(driver, seq, rounds=8)
        assert 0 in accepted and max(accepted) >= 2, accepted
        draft = draft_of(driver)
        again = driver.add(seq.ids[:-1])
        batch, hidden = features(driver, again)
        output = draft.prompts(batch, shifted_ids(batch, torch.tensor(seq.ids[-1:])), hidden, scores=True)
        pools = driver.target.pools
        rows = seq.slots[: seq.cached]
        for pool in (pools.kv, *pools.drafts):  # what a tree accepted was moved to its place
            for layer in map(pool.layer, range(pool.spec.num_layers)):
                fresh = layer[:, again.slots[: len(rows)]]
                torch.testing.assert_close(layer[:, rows], fresh, atol=1e-5, rtol=1e-5)
        drafter = driver.worker.drafter
        assert output.hidden is not None
        torch.testing.assert_close(
            drafter._streams[seq.req_pool_idx], output.hidden[-1], atol=1e-5, rtol=1e-5
        )


def _speculate_with_some_right(driver: WorkerDriver, seq: DrivenSequence, rounds: int) -> list[int]:
    """Rounds in which the first nodes of a path are the text that follows: none, one, two, three, none."""
    with pytest.MonkeyPatch.context() as patch:
        plain = driver.generate([driver.add(seq.ids)], 4 * rounds + 4)[0]
        drafter, start = driver.worker.drafter, len(seq.ids)
        propose = drafter.propose
        counter = iter(range(rounds))

        def right(round: Any, num_nodes: int) -> Any:
            proposal = propose(round, num_nodes)
            number = next(counter)
            known = plain[len(seq.ids) - start :]
            tree = proposal.tree
            node = 0
            for token in known[: number % 4]:
                node = int((tree.parents[0] == node).nonzero()[-1]) if (tree.parents[0] == node).any() else -1
                if node < 0:
                    break
                tree.token_ids[0, node] = token
            return proposal

        patch.setattr(drafter, "propose", right)
        driver.step([(seq, len(seq.ids))])
        correct: list[int] = []
        for _ in range(rounds):
            correct += driver.round([seq]).num_correct_drafts or []
        assert seq.ids[start:] == plain[: len(seq.ids) - start]
        return correct


def test_each_step_of_a_draft_equals_a_forward_over_its_path(
    target: pathlib.Path, drafted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node of level i sees the committed rows and its own ancestors, at position L + i - 1."""
    with driven_worker(target, **drafted, **TREE) as driver:
        seq = driver.add(PROMPT)
        driver.step([(seq, len(seq.ids))])
        draft, levels = draft_of(driver), []
        beams: list[DraftBeam] = []

        class Beam(DraftBeam):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                beams.append(self)

        def spied(step: int, batch: ForwardBatch) -> Any:
            output = draft.run(step, batch)
            levels.append((beams[0].frontier, batch.positions.clone(), output))
            return output

        monkeypatch.setattr(draft_steps, "DraftBeam", Beam)
        monkeypatch.setattr(driver.worker.drafter._levels, "_run", spied)  # type: ignore[union-attr]
        driver.round([seq])
        assert len(levels) == TREE["speculative_num_steps"] - 1
        length = len(PROMPT)
        for depth, (frontier, positions, output) in enumerate(levels):
            assert positions.unique().tolist() == [length + depth]
            for row in range(frontier.token_ids.shape[1]):
                expected = _from_scratch(driver, draft, _path(levels, depth, row))
                torch.testing.assert_close(output.hidden[row], expected, atol=1e-5, rtol=1e-5)


def _path(levels: list[Any], depth: int, row: int) -> list[int]:
    """The tokens of a node and its ancestors below the root, in the order of the text."""
    tokens: list[int] = []
    for level in range(depth, -1, -1):
        frontier = levels[level][0]
        tokens.insert(0, int(frontier.token_ids[0, row]))
        row = int(frontier.parent_rows[0, row])
    return tokens


def _from_scratch(driver: WorkerDriver, draft: DraftRunner[Any], path: list[int]) -> torch.Tensor:
    """The stream of the last node of a path, one row after another over a sequence of its own."""
    first = driver.generate([driver.add(PROMPT)], 1)[0]
    seq = driver.add(PROMPT)
    batch, hidden = features(driver, seq)
    output = draft.prompts(batch, shifted_ids(batch, torch.tensor(first)), hidden, scores=True)
    stream = output.hidden[-1:]
    seq.ids += [*first, *path]
    for token in path:
        batch = driver.batch([(seq, 1)])
        stream = draft.prompts(batch, torch.tensor([token]), stream, scores=True).hidden
    driver.drop(seq)
    return stream[0]
