"""A target and a draft that owns its attention on two attention-DP replicas: each runs where it was built."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="multi-rank-cpu")

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from sglang.srt.batch.forward_batch import DpStep
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state_wrapper import ParallelState
from sglang.srt.model_executor.tp_worker import TpModelWorker
from sglang.srt.speculative.spec_utils import draft_tp_context
from sglang.test.multi_rank import run_ranks
from sglang.test.tiny_models import write_tiny_model
from sglang.test.worker_driver import WorkerDriver, driven_worker

PROMPT = list(range(30, 41))
VOCAB = 301
REPLICAS = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
#: Both replicas run the same prompt at the same time.
STEP = DpStep([len(PROMPT)] * 2, [1, 1], is_extend=True)
UNGUARDED = patch.object(ParallelState, "check_in_force", lambda placement: None)


def prompt_logits(driver: WorkerDriver, step: DpStep | None) -> torch.Tensor:
    """Logits [vocab] after the prompt, from a fresh sequence."""
    seq = driver.add(PROMPT)
    batch = driver.batch([(seq, len(PROMPT))])
    batch.dp_step = step
    try:
        return driver.worker.model_runner.forward(batch).logits[0].clone()
    finally:
        driver.drop(seq)


def in_draft_scope() -> AbstractContextManager[None]:
    return draft_tp_context(owns_attention=True)


def refusal(driver: WorkerDriver, step: DpStep | None) -> str:
    with pytest.raises(RuntimeError) as caught:
        prompt_logits(driver, step)
    return str(caught.value)


def both_runners(rank: int, model: str, dp_lm_head: bool) -> dict[str, Any]:
    """On one of two ranks: what each runner gives at home, and away from it with and without the guard."""
    fields = {**REPLICAS, "enable_dp_lm_head": dp_lm_head}
    with driven_worker(model, rank=rank, **fields) as target:
        with in_draft_scope():
            draft = WorkerDriver(TpModelWorker(ModelConfig.from_path(model)))
        found: dict[str, Any] = {}
        for turn in ("first", "again"):  # one after the other, as drafting does
            found[f"target {turn}"] = prompt_logits(target, STEP).tolist()
            with in_draft_scope():
                found[f"draft {turn}"] = prompt_logits(draft, None).tolist()
        with in_draft_scope():
            found["target away"] = refusal(target, None)
        found["draft away"] = refusal(draft, STEP)
        with UNGUARDED:
            found["draft away, unguarded"] = prompt_logits(draft, STEP).tolist()
            with in_draft_scope():
                away = prompt_logits if dp_lm_head else refusal
                logits = away(target, None)
            found["target away, unguarded"] = logits if isinstance(logits, str) else logits.tolist()
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("model")
    return str(write_tiny_model(folder / "tiny", vocab_size=VOCAB, intermediate_size=129, seed=1))


@pytest.mark.parametrize("dp_lm_head", [False, True])
def test_a_runner_answers_like_one_rank_at_home_and_not_at_all_elsewhere(
    model: str, dp_lm_head: bool
) -> None:
    """Layers hold their shares from construction and ask for a group when they run.

    Without the guard the numbers would be far off, in the right shape.
    """
    with driven_worker(model) as driver:
        wanted = prompt_logits(driver, None)
    assert wanted.shape == (VOCAB,)

    def far(logits: list[float]) -> float:
        return (torch.tensor(logits) - wanted).abs().max().item()

    for found in run_ranks(both_runners, world_size=2, model=model, dp_lm_head=dp_lm_head):
        for at_home in ("target first", "draft first", "target again", "draft again"):
            assert far(found[at_home]) < 1e-4, at_home
        assert "built at tp_size 2," in found["target away"] and "run at tp_size 1," in found["target away"]
        assert "built at tp_size 1," in found["draft away"] and "run at tp_size 2," in found["draft away"]
        assert far(found["draft away, unguarded"]) > 1
        if dp_lm_head:
            assert far(found["target away, unguarded"]) > 1
        else:
            assert (
                "cut over 2 ranks, which have 302 columns together, and 151 were gathered"
                in (found["target away, unguarded"])
            )
