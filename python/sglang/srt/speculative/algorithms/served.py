"""Owns which drafter serves which algorithm, and what each is made of.

Handed to `spec_registry.make_worker`. The names must be those that `--speculative-algorithm` serves; a
difference is an error at import.
"""

from __future__ import annotations

import torch

from sglang.srt.arg_groups.adaptive_config import adaptive_slots
from sglang.srt.arg_groups.speculative_algorithms import ALGORITHMS
from sglang.srt.configs.draft_config import DraftConfig, DraftKind
from sglang.srt.model_executor.model_runner_components.load_model import build_model
from sglang.srt.models.common.decoder import DecoderForCausalLM
from sglang.srt.models.drafts.registry import DraftModel
from sglang.srt.runtime_context import get_model, get_parallel, get_spec
from sglang.srt.speculative.adaptive import AdaptiveSteps
from sglang.srt.speculative.algorithms.eagle import EagleDrafter
from sglang.srt.speculative.algorithms.ngram import NgramDrafter
from sglang.srt.speculative.algorithms.ngram_corpus import NgramCorpus
from sglang.srt.speculative.algorithms.ngram_tree import MatchType, NgramTrees
from sglang.srt.speculative.algorithms.standalone import StandaloneDrafter
from sglang.srt.speculative.draft_loading import TargetModel, load_eagle_draft
from sglang.srt.speculative.spec_registry import DraftSetup, MakeDrafter


def _make_eagle(setup: DraftSetup) -> EagleDrafter:
    return _eagle(setup, kind="eagle", owns_attention=False)


def _make_eagle3(setup: DraftSetup) -> EagleDrafter:
    # Its projections all work on one set of rows in one tensor group, so the target's exchange between
    # replicas has no place in it.
    return _eagle(setup, kind="eagle3", owns_attention=get_parallel().attn_dp_size > 1)


def _eagle(setup: DraftSetup, *, kind: DraftKind, owns_attention: bool) -> EagleDrafter:
    draft, spec = _published_draft(setup, kind), get_spec()
    target = TargetModel(setup.target.model_runner.model, setup.target.model_config, get_model().load_format)
    assert draft.head is not None
    target.model.set_aux_layers(draft.head.aux_layers)

    def load(dtype: torch.dtype, device: torch.device) -> DraftModel:
        load_format = spec.speculative_draft_load_format or "auto"
        return load_eagle_draft(draft, target, load_format=load_format, dtype=dtype, device=device)

    adaptive = None
    if spec.speculative_adaptive:
        adaptive = AdaptiveSteps(
            adaptive_slots(spec.speculative_adaptive_config), initial_steps=setup.shape.num_steps
        )
    return EagleDrafter(
        load,
        setup.shape,
        owns_attention=owns_attention,
        draws_proposals=spec.speculative_use_rejection_sampling,
        adaptive=adaptive,
    )


def _make_standalone(setup: DraftSetup) -> StandaloneDrafter:
    config, spec = _published_draft(setup, "standalone").model, get_spec()

    def load(dtype: torch.dtype, device: torch.device) -> DecoderForCausalLM:
        quantization = spec.speculative_draft_model_quantization
        model = build_model(config, dtype=dtype, device=device, quantization=quantization)
        # A draft of a padded head proposes what its target knows, and nothing else.
        model.limit_vocabulary(setup.target.vocab_size)
        return model

    return StandaloneDrafter(load, setup.shape, reach=config.max_position_embeddings)


def _make_ngram(setup: DraftSetup) -> NgramDrafter:
    spec = get_spec()
    corpus = NgramCorpus(
        max_depth=spec.speculative_ngram_max_trie_depth, capacity=spec.speculative_ngram_capacity
    )
    trees = NgramTrees(
        corpus,
        num_nodes=setup.num_nodes,
        match_type=MatchType(spec.speculative_ngram_match_type),
        min_breadth=spec.speculative_ngram_min_bfs_breadth,
        max_breadth=spec.speculative_ngram_max_bfs_breadth,
    )
    return NgramDrafter(corpus, trees, num_nodes=setup.num_nodes)


def _published_draft(setup: DraftSetup, kind: DraftKind) -> DraftConfig:
    spec = get_spec()
    if spec.speculative_draft_model_path is None:
        raise RuntimeError(
            f"speculative_algorithm is {spec.speculative_algorithm} and speculative_draft_model_path is not "
            "set: resolve the arguments first, or publish a path"
        )
    return DraftConfig.from_path(
        spec.speculative_draft_model_path,
        kind=kind,
        target=setup.target.model_config,
        load_format=spec.speculative_draft_load_format or "auto",
    )


DRAFTERS: dict[str, MakeDrafter] = {
    "EAGLE": _make_eagle,
    "EAGLE3": _make_eagle3,
    "STANDALONE": _make_standalone,
    "NGRAM": _make_ngram,
}

if set(DRAFTERS) != set(ALGORITHMS):
    raise ImportError(f"drafters {sorted(DRAFTERS)} are not what the flags serve: {sorted(ALGORITHMS)}")
