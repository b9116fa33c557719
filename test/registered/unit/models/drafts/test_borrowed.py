"""What a draft may borrow of its target: layers that its own scope would cut over the same ranks."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit-cpu")

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.models.common.decoder import DecoderForCausalLM
from sglang.srt.models.drafts.borrowed import borrowed_embedding, copied_head, head_can_be_borrowed
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.spec_utils import draft_tp_context
from sglang.test.fakes.fake_group import FakeGroup
from sglang.test.test_utils import published_topology
from sglang.test.tiny_models import write_tiny_model

DP = {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tp 2": {"tp_size": 2},
    "tp 4 attn-dp 2": DP,
    "tp 4 attn-dp 2 dp-lm-head": {**DP, "enable_dp_lm_head": True},
}


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, ModelConfig]:
    """By whether the head is tied."""
    folder = tmp_path_factory.mktemp("targets")
    return {tie: ModelConfig.from_path(write_tiny_model(folder / str(tie), tie=tie)) for tie in (False, True)}


@contextlib.contextmanager
def built(config: ModelConfig, layout: str) -> Iterator[DecoderForCausalLM]:
    """The target of the last rank, without weights, in its placement."""
    fields = LAYOUTS[layout]
    rank = fields.get("tp_size", 1) - 1
    with published_topology(ranks={"world_rank": rank, "dp_rank": None}, **fields):
        width = get_parallel().attn_tp_size
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parallel_state, "_ATTN_TP", FakeGroup(width, rank % width))
            patch.setattr(parallel_state, "_SELF_PP", FakeGroup(1))
            yield LlamaForCausalLM(config, dtype=torch.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("owns", [False, True])
@pytest.mark.parametrize("tie", [False, True])
def test_what_is_cut_alike_in_the_scope_of_the_draft_is_borrowed(
    configs: dict[bool, ModelConfig], layout: str, owns: bool, tie: bool
) -> None:
    """The head that spans replicas is the one that a draft in one replica cannot share."""
    with built(configs[tie], layout) as target, draft_tp_context(owns_attention=owns):
        assert borrowed_embedding(target) is target.model.embed_tokens
        assert head_can_be_borrowed(target.lm_head) == (not owns or layout != "tp 4 attn-dp 2")


def test_a_copied_head_is_cut_over_the_draft_and_filled_from_the_targets_tensor(
    configs: dict[bool, ModelConfig], caplog: pytest.LogCaptureFixture
) -> None:
    for tie, tensor in ((False, "lm_head.weight"), (True, "model.embed_tokens.weight")):
        with built(configs[tie], "tp 4 attn-dp 2") as target:
            target.limit_vocabulary(500)
            with draft_tp_context(owns_attention=True), caplog.at_level(logging.INFO):
                head = copied_head(target)
        (place,) = head.weight.places
        assert (place.name, place.source_shape, place.share.length) == (tensor, (512, 64), 256)
        assert (head.rank, head.width, head.vocab_size) == (1, 2, 500)
        assert "cut over 2 ranks: the target's is cut over 4" in caplog.text


def test_an_embedding_of_another_width_is_refused_with_both(configs: dict[bool, ModelConfig]) -> None:
    with built(configs[False], "one rank") as target:
        pass
    with (
        built(configs[False], "tp 2"),
        pytest.raises(RuntimeError, match=r"rank 0 of 1, and the draft is built as rank 1 of 2"),
    ):
        borrowed_embedding(target)
