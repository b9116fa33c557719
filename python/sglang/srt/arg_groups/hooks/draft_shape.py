"""Chooses how much is drafted in a round: depth, branches a step, tokens verified.

Called by the hook of speculative decoding, after it has checked the algorithm. What nobody says depends on
the algorithm and on the architecture of the model; a number that cannot be is refused with the rule.
"""

import logging

from sglang.srt.arg_groups.adaptive_config import all_candidate_steps
from sglang.srt.arg_groups.fields import LEAVES
from sglang.srt.arg_groups.model_override_base import ResolvingView
from sglang.srt.arg_groups.overrides import max_speculative_num_draft_tokens_of
from sglang.srt.arg_groups.speculative_algorithms import CHAIN, AlgorithmFacts, DraftShape

logger = logging.getLogger(__name__)

#: Tokens verified in a round of n-grams, the newest one included.
_NGRAM_TOKENS = 12


def resolve_draft_shape(view: ResolvingView, facts: AlgorithmFacts, architecture: str) -> None:
    """Decide steps, branches and tokens; `architecture` is the class of the model to serve."""
    if facts.draft is None:
        shape = _ngram_shape(view)
    elif view.speculative_adaptive:
        shape = _adaptive_shape(view)
    else:
        automatic = facts.shapes.get(architecture, CHAIN)
        shape = _tree_shape(view, CHAIN if view.speculative_use_rejection_sampling else automatic)
    view.declare(
        "speculative_hook",
        speculative_num_steps=shape.num_steps,
        speculative_eagle_topk=shape.topk,
        speculative_num_draft_tokens=shape.num_draft_tokens,
    )
    _check_context(view)


def _tree_shape(view: ResolvingView, automatic: DraftShape) -> DraftShape:
    """All three numbers are said or none of them is; the depth of a chain says its width too."""
    steps, topk = view.speculative_num_steps, view.speculative_eagle_topk
    tokens = view.speculative_num_draft_tokens
    if steps is None and topk is None and tokens is None:
        return automatic
    if steps is not None and topk == 1:
        return _chain(steps, tokens)
    if steps is None or topk is None or tokens is None:
        raise ValueError(
            "--speculative-num-steps, --speculative-eagle-topk and --speculative-num-draft-tokens are stated "
            f"together or left out together, got {steps}, {topk} and {tokens}; left out, they are "
            f"{', '.join(map(str, automatic))} for this model"
        )
    # The root, the branches of the first step, and of each further step those of every branch kept.
    most = 1 + topk + (steps - 1) * topk**2
    if tokens > most:
        raise ValueError(
            "speculative_num_draft_tokens <= 1 + topk + (steps - 1) * topk**2 must hold: "
            f"--speculative-num-draft-tokens {tokens}, and --speculative-num-steps {steps} with "
            f"--speculative-eagle-topk {topk} find at most {most}; lower the first or raise one of the others"
        )
    if steps >= tokens:
        raise ValueError(
            "speculative_num_steps < speculative_num_draft_tokens must hold: a tree of "
            f"--speculative-num-draft-tokens {tokens} is at most {tokens - 1} deep, and "
            f"--speculative-num-steps is {steps}; lower it, or verify more tokens"
        )
    return DraftShape(steps, topk, tokens)


def _chain(steps: int, said: int | None) -> DraftShape:
    """A chain verifies its drafts and the newest token, so its width follows from its depth."""
    if said not in (None, steps + 1):
        logger.warning(
            "--speculative-num-draft-tokens %s becomes %s: a chain (--speculative-eagle-topk 1) of %s steps "
            "has one token more than steps",
            said,
            steps + 1,
            steps,
        )
    return DraftShape(steps, 1, steps + 1)


def _adaptive_shape(view: ResolvingView) -> DraftShape:
    """A chain, at first in the middle of the depths that may be chosen."""
    topk, steps = view.speculative_eagle_topk, view.speculative_num_steps
    if topk not in (None, 1):
        raise ValueError(
            f"--speculative-adaptive drafts chains, and --speculative-eagle-topk is {topk}; make it 1 or "
            "leave it out"
        )
    candidates = all_candidate_steps(True, view.speculative_adaptive_config)
    if candidates == (0,):
        raise ValueError(
            f"--speculative-adaptive-config {view.speculative_adaptive_config} has no depth but 0, so "
            "nothing would be drafted; add a depth to candidate_steps, or leave --speculative-algorithm out"
        )
    if steps is None:
        steps = candidates[len(candidates) // 2]
    elif steps not in candidates:
        raise ValueError(
            f"--speculative-num-steps {steps} is none of the depths that --speculative-adaptive may choose "
            f"({', '.join(map(str, candidates))}); take one of them, leave it out, or change "
            "--speculative-adaptive-config"
        )
    return _chain(steps, view.speculative_num_draft_tokens)


def _ngram_shape(view: ResolvingView) -> DraftShape:
    """A tree of n-grams grows as they allow: only its size is chosen, branches and depth are named for it."""
    low, high = view.speculative_ngram_min_bfs_breadth, view.speculative_ngram_max_bfs_breadth
    if low > high:
        raise ValueError(
            "speculative_ngram_min_bfs_breadth <= speculative_ngram_max_bfs_breadth must hold: "
            f"--speculative-ngram-min-bfs-breadth {low}, --speculative-ngram-max-bfs-breadth {high}"
        )
    capacity, depth = view.speculative_ngram_capacity, view.speculative_ngram_max_trie_depth
    if capacity < depth:
        raise ValueError(
            "speculative_ngram_max_trie_depth <= speculative_ngram_capacity must hold, or no n-gram fits: "
            f"--speculative-ngram-max-trie-depth {depth}, --speculative-ngram-capacity {capacity}"
        )
    tokens = view.speculative_num_draft_tokens or _NGRAM_TOKENS
    shape = DraftShape(max(tokens // high, 1), high, tokens)
    follows = {"speculative_num_steps": shape.num_steps, "speculative_eagle_topk": shape.topk}
    for name, value in follows.items():
        said = getattr(view, name)
        if said not in (None, value):
            raise ValueError(
                f"{LEAVES[name].label} {said} has no effect with NGRAM; leave it out, and use "
                "--speculative-num-draft-tokens and --speculative-ngram-max-bfs-breadth"
            )
    return shape


def _check_context(view: ResolvingView) -> None:
    widest, context = max_speculative_num_draft_tokens_of(view), view.context_length
    assert widest is not None and context is not None  # decided above and by the model hook
    if widest >= context:
        raise ValueError(
            f"speculative_num_draft_tokens < context_length must hold: a round verifies up to {widest} "
            f"tokens, and the context is {context}; lower --speculative-num-draft-tokens, or the depths of "
            "--speculative-adaptive-config"
        )
