"""What the log says of a start before a rank runs."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit-cpu")

import pytest

from sglang.srt.entrypoints.engine_core import speculation_line
from sglang.srt.runtime_context import get_context

SHAPE = {
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 4,
    "speculative_num_draft_tokens": 8,
}
EAGLE3 = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "drafts/one", **SHAPE}


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (EAGLE3, "EAGLE3 with drafts/one, 3 steps, 4 branches a step, 8 tokens verified in a round"),
        # N-grams have no steps; what is resolved for them says nothing.
        ({"speculative_algorithm": "NGRAM", **SHAPE}, "NGRAM, 8 tokens verified in a round"),
        (
            {**EAGLE3, "speculative_num_steps": 1, "speculative_eagle_topk": 1},
            "EAGLE3 with drafts/one, 1 step, a chain, 8 tokens verified in a round",
        ),
        (
            {**EAGLE3, "speculative_adaptive": True, "speculative_use_rejection_sampling": True},
            "verified in a round, the depth adapts, rejection sampling",
        ),
        (
            {
                **EAGLE3,
                "speculative_use_rejection_sampling": True,
                "speculative_use_block_verification": True,
            },
            "verified in a round, block verification",
        ),
    ],
    ids=["tree", "n-grams", "chain", "adaptive", "block"],
)
def test_one_line_says_how_tokens_are_drafted(settings: dict[str, object], line: str) -> None:
    with get_context().override_server_args(**settings):
        assert speculation_line().endswith(line)
