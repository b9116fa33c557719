"""What a request has brought or written itself is proposed again where its text ends like it did before."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="unit-cpu")

import pathlib
import random

import pytest

from sglang.srt.speculative.algorithms.ngram_own_text import LEAST_MATCH, continuation
from sglang.test.tiny_models import write_tiny_model
from sglang.test.worker_driver import driven_worker

NGRAM = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 6}


def test_the_latest_of_the_longest_ends_is_continued() -> None:
    assert continuation([1, 2, 3, 9, 1, 2, 3], 2) == ([9, 1], 3)
    assert continuation([1, 2, 8, 7, 1, 2, 9, 7, 1, 2], 3) == ([9, 7, 1], 3)
    assert continuation([5, 1, 2, 8, 6, 1, 2, 9, 5, 1, 2], 1) == ([8], 3)


def test_an_end_that_overlaps_its_earlier_place_is_found() -> None:
    assert continuation([4, 4, 4, 4], 8) == ([4], 3)


@pytest.mark.parametrize("text", [[1], [1, 1], [1, 2, 3], [2, 1, 3, 1]])
def test_shorter_ends_than_the_least_match_propose_nothing(text: list[int]) -> None:
    assert continuation(text, 4) == ([], 0)


def test_it_agrees_with_a_search_place_by_place() -> None:
    rng = random.Random(3)
    for _ in range(300):
        text = [rng.randrange(3) for _ in range(rng.randrange(1, 40))]
        lengths = {
            place: next(
                n for n in range(17) if n == 16 or n > place or text[place - n] != text[len(text) - 1 - n]
            )
            for place in range(len(text) - 1)
        }
        longest = max(lengths.values(), default=0)
        if longest < LEAST_MATCH:
            assert continuation(text, 5) == ([], 0)
        else:
            place = max(p for p, n in lengths.items() if n == longest)
            assert continuation(text, 5) == (text[place + 1 : place + 6], longest)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_tiny_model(tmp_path_factory.mktemp("target"), num_layers=3, max_position_embeddings=256)


def test_a_text_that_repeats_itself_gets_wide_rounds_and_one_that_does_not_gets_none(
    target: pathlib.Path,
) -> None:
    prompt = [7, 8, 9, 10, 11]
    with driven_worker(target) as driver:
        (expected,) = driver.generate([driver.add(prompt)], 48)
    with driven_worker(target, **NGRAM) as driver:
        drafter = driver.worker.drafter  # type: ignore[union-attr]
        propose, wide, known = drafter.propose, [], []

        def noted(round, n):  # type: ignore[no-untyped-def]
            proposal = propose(round, n)
            known.append(bool(continuation(round.recent_ids[0], 5)[0]))
            wide.append(proposal.tree.num_nodes == 6)
            return proposal

        drafter.propose = noted  # type: ignore[method-assign]
        answers, _ = driver.speculate([driver.add(prompt)], 48)
    assert answers == [expected]
    assert wide == known and not wide[0] and any(wide)
