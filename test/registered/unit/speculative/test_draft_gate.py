"""Drafts that cost more than they bring are left out, by measured times, and every answer stays as it is."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="unit-cpu")

import pathlib
from typing import Any

import pytest

from sglang.srt.environ import envs
from sglang.srt.speculative import deferred_rows
from sglang.srt.speculative.deferred_rows import MOST_DEFERRED
from sglang.srt.speculative.draft_gate import FIRST_SPELL, LONGEST_SPELL, TRIAL_ROUNDS, DraftGate
from sglang.test.tiny_drafts import write_random_draft
from sglang.test.tiny_models import write_tiny_model
from sglang.test.worker_driver import driven_worker

PROMPTS = [[5, 6, 7, 8, 9], list(range(40, 71)), [200]]
TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
NGRAM = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 6}


class Rounds:
    """Gates that see the same rounds: `seconds` of a round, by whether it drafts, and its `tokens` if so."""

    def __init__(self, draft_seconds: float, plain_seconds: float, tokens: float, gates: int = 1) -> None:
        self.gates = [DraftGate() for _ in range(gates)]
        self.seconds = {True: draft_seconds, False: plain_seconds}
        self.tokens = tokens
        self.now = 5.0

    def run(self, count: int, batch_size: int = 16) -> list[bool]:
        """Which of so many rounds drafted."""
        ways = []
        for _ in range(count):
            (drafts,) = {gate.drafts(batch_size) for gate in self.gates}
            self.now += self.seconds[drafts]
            for gate in self.gates:
                tokens = self.tokens if drafts else 1.0
                gate.note_round(self.now, batch_size, drafted=drafts, tokens=tokens)
            ways.append(drafts)
        return ways

    def gain(self, ways: list[bool]) -> float:
        """Tokens a second beside rounds that never draft."""
        tokens = sum(self.tokens if drafts else 1.0 for drafts in ways)
        return tokens * self.seconds[False] / sum(self.seconds[drafts] for drafts in ways)


def test_drafts_that_pay_go_on() -> None:
    rounds = Rounds(draft_seconds=0.02, plain_seconds=0.015, tokens=2.0)
    ways = rounds.run(2000)
    assert sum(ways) > 1900


@pytest.mark.parametrize("slowdown", [2.1, 4.0, 7.0])
def test_drafts_that_do_not_pay_cost_next_to_nothing(slowdown: float) -> None:
    rounds = Rounds(draft_seconds=0.04 * slowdown, plain_seconds=0.04, tokens=2.0)
    assert rounds.run(2 * TRIAL_ROUNDS + 5)[-5:] == [False] * 5
    assert rounds.gain(rounds.run(2000)) > 0.95


def test_without_a_gate_they_would_cost_half_and_more() -> None:
    rounds = Rounds(draft_seconds=0.16, plain_seconds=0.04, tokens=2.0)
    assert rounds.gain([True] * 2000) == pytest.approx(0.5)


def test_trials_become_rarer_and_a_change_is_noticed() -> None:
    rounds = Rounds(draft_seconds=0.2, plain_seconds=0.05, tokens=2.0)
    rounds.run(4 * LONGEST_SPELL)
    assert sum(rounds.run(LONGEST_SPELL)) <= 2 * TRIAL_ROUNDS
    rounds.tokens = 8.0
    rounds.run(LONGEST_SPELL + 2 * TRIAL_ROUNDS)
    assert sum(rounds.run(FIRST_SPELL)) >= FIRST_SPELL - TRIAL_ROUNDS


def test_each_batch_size_is_measured_by_itself() -> None:
    rounds = Rounds(draft_seconds=0.2, plain_seconds=0.05, tokens=2.0)
    rounds.run(50, batch_size=16)
    assert not rounds.gates[0].drafts(17)
    assert rounds.gates[0].drafts(1)


def test_a_round_after_an_interruption_is_not_measured() -> None:
    """Prompts between two rounds would count as time of the second."""
    rounds = Rounds(draft_seconds=0.02, plain_seconds=0.03, tokens=2.0)
    for _ in range(40):
        rounds.run(2)
        rounds.now += 60.0
        rounds.gates[0].interrupt()
    assert rounds.gates[0].drafts(16)


def test_rare_guesses_that_do_not_pay_are_left_out_too() -> None:
    """Every other round found nothing, so no two rounds with guesses ever followed each other."""
    gate, now, ways = DraftGate(), 5.0, []
    for _ in range(60):
        drafts = gate.drafts(1)
        if drafts:
            now += 0.01
            gate.note_nothing_proposed(now, 1)
        now += 0.02 if drafts else 0.01
        gate.note_round(now, 1, drafted=drafts, tokens=1.2 if drafts else 1.0)
        ways.append(drafts)
    assert ways[0] and not any(ways[-10:])


def test_ranks_that_are_told_the_same_decide_the_same() -> None:
    rounds = Rounds(draft_seconds=0.1, plain_seconds=0.05, tokens=1.9, gates=2)
    for batch_size in (1, 5, 16, 3) * 20:
        rounds.run(9, batch_size)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_tiny_model(tmp_path_factory.mktemp("target"), num_layers=3, max_position_embeddings=128)


def fields_of(algorithm: str, target: pathlib.Path, folder: pathlib.Path) -> dict[str, Any]:
    if algorithm == "NGRAM":
        return NGRAM
    if algorithm == "STANDALONE":
        draft = write_tiny_model(folder, seed=77, max_position_embeddings=128)
    else:
        draft = write_random_draft(folder, target, algorithm.lower())
    return {**TREE, "speculative_algorithm": algorithm, "speculative_draft_model_path": str(draft)}


@pytest.mark.parametrize("algorithm", ["NGRAM", "EAGLE", "EAGLE3"])
def test_answers_stay_whatever_the_gate_decides(
    algorithm: str, target: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    with driven_worker(target) as driver:
        expected = driver.generate([driver.add(prompt) for prompt in PROMPTS], 24)
    with (
        envs.SGLANG_SPEC_SKIP_SLOW_DRAFTS.override(True),
        driven_worker(target, **fields_of(algorithm, target, tmp_path / "draft")) as driver,
    ):
        gate = driver.worker._gate  # type: ignore[union-attr]
        assert gate is not None
        decisions = iter([True, False, False, True, False] * 20)
        widths: list[int] = []
        gate.drafts = lambda batch_size: next(decisions)  # type: ignore[method-assign]
        propose = driver.worker.drafter.propose  # type: ignore[union-attr]
        driver.worker.drafter.propose = lambda round, n: widths.append(n) or propose(round, n)  # type: ignore[union-attr,method-assign,func-returns-value]
        answers, _ = driver.speculate([driver.add(prompt) for prompt in PROMPTS], 24)
    assert answers == expected
    assert 1 in widths and max(widths) > 1


@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE"])
def test_a_draft_proposes_the_same_whether_it_read_each_plain_round_or_many_at_once(
    algorithm: str, target: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a draft has not read is not in its cache: its guesses would get worse, and nobody would know."""
    fields = fields_of(algorithm, target, tmp_path / "draft")
    proposed: dict[int, list[list[list[int]]]] = {}
    for most in (1, 5, MOST_DEFERRED):
        monkeypatch.setattr(deferred_rows, "MOST_DEFERRED", most)
        with envs.SGLANG_SPEC_SKIP_SLOW_DRAFTS.override(True), driven_worker(target, **fields) as driver:
            worker: Any = driver.worker
            decisions = iter([True, *[False] * 9, True, True, False, True] * 20)
            worker._gate.drafts = lambda batch_size, decisions=decisions: next(decisions)
            propose, trees = worker.drafter.propose, proposed.setdefault(most, [])

            def noted(round, n, propose=propose, trees=trees):  # type: ignore[no-untyped-def]
                proposal = propose(round, n)
                trees.append(proposal.tree.token_ids.tolist())
                return proposal

            worker.drafter.propose = noted
            driver.speculate([driver.add(prompt) for prompt in PROMPTS], 24)
    assert proposed[1] == proposed[5] == proposed[MOST_DEFERRED]
    assert sum(len(tree[0]) > 1 for tree in proposed[1]) > 3


def test_without_the_variable_every_round_drafts(target: pathlib.Path) -> None:
    for is_set in (False, True):
        with (
            envs.SGLANG_SPEC_SKIP_SLOW_DRAFTS.override(is_set),
            driven_worker(target, **NGRAM) as driver,
        ):
            assert (driver.worker._gate is not None) == is_set  # type: ignore[union-attr]
