"""What a draft proposes, and how much of it is right, does not depend on the layout.

Only a draft that is right part of the time shows it: where nothing is accepted, or everything, a draft that
reads a wrong hidden row behind the first accepted token answers the same.
"""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=45, suite="multi-rank-cpu")

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.spec_worker import SpecWorker
from sglang.test.multi_rank import run_ranks
from sglang.test.spec.rank_rounds import RankRounds
from sglang.test.spec.training import overfit_draft
from sglang.test.tiny_drafts import write_random_draft
from sglang.test.tiny_models import write_tiny_model
from sglang.test.worker_driver import driven_worker

#: Requests of each replica in a round: both, one of them beside an idle replica, both again.
ROUNDS = [(2, 2), (2, 2), (2, 0), (0, 2), (2, 2), (1, 2), (2, 1), (2, 2)]
SHAPES = {
    "chain": {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4},
    "tree": {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp 2": (2, {"tp_size": 2}),
    "tp 2, attn-dp 2": (2, {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}),
    "tp 4, attn-dp 2": (4, {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}),
}
PROMPTS = [[[5, 6, 7, 8, 9], [200, 201]], [[300, 301, 302], [17] * 9]]  # of each replica
#: What a draft has learned of each answer; behind that it guesses.
LEARNED = 12


def forget_rows(worker: SpecWorker) -> None:
    """The mistake that is planted: behind the first accepted token the draft reads zeros."""
    after_accepted = worker.drafter.after_accepted

    def forgetful(verified: Any) -> None:
        hidden = verified.hidden.clone()
        hidden.view(-1, verified.width, hidden.shape[-1])[:, 1:] = 0
        after_accepted(dataclasses.replace(verified, hidden=hidden))

    worker.drafter.after_accepted = forgetful  # type: ignore[method-assign]


def rounds_on_rank(rank: int, model: str, fields: dict[str, Any], forgets: bool = False) -> dict[str, Any]:
    """Of each request of this rank: its tokens and all proposals; and which replica the rank belongs to."""
    with driven_worker(model, rank=rank, **fields) as driver:
        assert isinstance(driver.worker, SpecWorker)
        if forgets:
            forget_rows(driver.worker)
        rounds = RankRounds(driver, PROMPTS)
        parallel = get_parallel()
        alone = parallel.attn_dp_size == 1
        for counts in ROUNDS:
            rounds.run([len(rounds.seqs)] if alone else counts)
        return {
            "ids": [seq.ids for seq in rounds.seqs],
            "proposed": rounds.proposed,
            "first": 0 if alone else 2 * parallel.attn_dp_rank,
        }


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target"), num_layers=3, max_position_embeddings=128)


@pytest.fixture(scope="module")
def trained(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a draft of each kind that knows the beginning of every answer."""
    made: dict[str, Path] = {}

    def draft(kind: Literal["eagle", "eagle3"]) -> Path:
        if kind not in made:
            prompts = [prompt for replica in PROMPTS for prompt in replica]
            with driven_worker(target) as driver:
                answers = [driver.generate([driver.add(prompt)], LEARNED)[0] for prompt in prompts]
            texts = [(prompt + answer, len(prompt)) for prompt, answer in zip(prompts, answers, strict=True)]
            folder = tmp_path_factory.mktemp(kind)
            size = 256 if kind == "eagle3" else None
            start = write_random_draft(folder / "start", target, kind, draft_vocab_size=size)
            made[kind] = overfit_draft(folder / "trained", target, start, texts, steps=10)
        return made[kind]

    return draft  # type: ignore[return-value]


def fields_of(algorithm: str, draft: Path, shape: str) -> dict[str, Any]:
    named = {"speculative_algorithm": algorithm, "speculative_draft_model_path": str(draft)}
    return {**named, **SHAPES[shape]}


def differences(found: list[dict[str, Any]], alone: dict[str, Any]) -> list[str]:
    """Where a rank's proposals or tokens are not those of one rank, as far as it got."""
    problems = []
    for rank, answer in enumerate(found):
        for i, (ids, proposed) in enumerate(zip(answer["ids"], answer["proposed"], strict=True)):
            number = answer["first"] + i
            if proposed != alone["proposed"][number][: len(proposed)]:
                problems.append(f"rank {rank}: proposals for request {number}")
            if ids != alone["ids"][number][: len(ids)]:
                problems.append(f"rank {rank}: tokens of request {number}")
    return problems


@pytest.mark.parametrize(
    ("algorithm", "shape"), [("EAGLE", "chain"), ("EAGLE", "tree"), ("EAGLE3", "chain"), ("EAGLE3", "tree")]
)
def test_proposals_and_what_is_accepted_are_those_of_one_rank(
    target: Path, trained: Callable[[str], Path], algorithm: str, shape: str
) -> None:
    fields = fields_of(algorithm, trained(algorithm.lower()), shape)
    alone = rounds_on_rank(0, str(target), fields)
    gained = sum(len(ids) for ids in alone["ids"]) - sum(len(each) + 1 for one in PROMPTS for each in one)
    assert 1.2 < gained / (len(ROUNDS) * 4) < 3.5, "a draft that is right part of the time"
    for name, (ranks, layout) in LAYOUTS.items():
        found = run_ranks(rounds_on_rank, world_size=ranks, model=str(target), fields={**fields, **layout})
        assert not differences(found, alone), name


def test_a_draft_that_reads_wrong_rows_behind_an_accepted_token_is_noticed(
    target: Path, trained: Callable[[str], Path]
) -> None:
    fields = fields_of("EAGLE3", trained("eagle3"), "chain")
    alone = rounds_on_rank(0, str(target), fields)
    ranks, layout = LAYOUTS["tp 2, attn-dp 2"]
    fields = {**fields, **layout}
    found = run_ranks(rounds_on_rank, world_size=ranks, model=str(target), fields=fields, forgets=True)
    problems = differences(found, alone)
    assert problems and all("proposals" in problem for problem in problems), "and no token changes"
