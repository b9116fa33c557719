"""Decides what speculative decoding leaves open and refuses settings and drafts that do not fit together.

Runs after the layout and the model are known; reads the model's config and the draft's files. What is known
of each algorithm stands in `arg_groups/speculative_algorithms.py`. Must not read tensor data or tokenizers.
"""

import logging

from sglang.srt.arg_groups.arg_utils import Leaf
from sglang.srt.arg_groups.fields import LEAVES, leaves_in
from sglang.srt.arg_groups.fields.parallel import attn_dp_size_of
from sglang.srt.arg_groups.hooks.draft_shape import resolve_draft_shape
from sglang.srt.arg_groups.hooks.model import check_attention_width, model_config_of, refuse_early
from sglang.srt.arg_groups.model_override_base import ResolvingView
from sglang.srt.arg_groups.speculative_algorithms import ALGORITHMS, LATER, AlgorithmFacts, facts_of
from sglang.srt.configs.draft_config import DraftConfig
from sglang.srt.configs.model_config import ModelConfig

logger = logging.getLogger(__name__)

_HOOK = "speculative_hook"
_THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
#: Settings that say something about a draft model.
_DRAFT_SETTINGS = frozenset(
    {
        "speculative_draft_model_path",
        "speculative_draft_model_revision",
        "speculative_draft_load_format",
        "speculative_draft_model_quantization",
        "speculative_draft_kv_cache_dtype",
        "speculative_draft_attention_backend",
    }
)
#: Switch -> what an algorithm must be able to do for it (a field of `AlgorithmFacts`).
_ABILITIES = {
    "speculative_use_rejection_sampling": "rejection_sampling",
    "speculative_use_block_verification": "rejection_sampling",
    "speculative_adaptive": "adaptive",
}


def resolve_speculative(view: ResolvingView) -> None:
    stated = _stated(view)
    name = view.speculative_algorithm
    if name is None:
        _refuse_without_algorithm(stated)
        return
    if name.upper() in LATER:
        refuse_early(view, "speculative_algorithm")
    facts = facts_of(name)
    view.declare(_HOOK, speculative_algorithm=facts.name)
    _check_belonging(stated, facts)
    _check_layout(view, facts)
    _resolve_acceptance(view)
    target = model_config_of(view)
    resolve_draft_shape(view, facts, target.architecture)
    _check_chain(view)
    if facts.draft is not None:
        _check_draft(view, facts, target)


def _stated(view: ResolvingView) -> dict[str, Leaf]:
    """The settings of speculation, without the algorithm, that the operator stated."""
    return {
        name: leaf
        for name, leaf in leaves_in("spec").items()
        if leaf.flags and name != "speculative_algorithm" and getattr(view, name) != leaf.default
    }


def _label(name: str) -> str:
    return LEAVES[name].label


def _refuse_without_algorithm(stated: dict[str, Leaf]) -> None:
    if stated:
        flags = ", ".join(leaf.label for leaf in stated.values())
        raise ValueError(
            f"{flags}: no effect without --speculative-algorithm; add one of {', '.join(ALGORITHMS)}, or "
            f"leave {'it' if len(stated) == 1 else 'them'} out"
        )


def _check_belonging(stated: dict[str, Leaf], facts: AlgorithmFacts) -> None:
    """Refuse a setting that this algorithm would ignore, and a draft model that is missing."""
    for name, leaf in stated.items():
        if name in _DRAFT_SETTINGS and facts.draft is None:
            raise ValueError(
                f"{leaf.label} has no effect with {facts.name}, which has no draft model; leave it out"
            )
        for other in ALGORITHMS.values():
            if other.own_settings and name.startswith(other.own_settings) and other is not facts:
                raise ValueError(
                    f"{leaf.label} has no effect with {facts.name}; leave it out, or use "
                    f"--speculative-algorithm {other.name}"
                )
        ability = _ABILITIES.get(name)
        if ability and not getattr(facts, ability):
            able = [it.name for it in ALGORITHMS.values() if getattr(it, ability)]
            raise ValueError(
                f"{leaf.label} works with {' and '.join(able)}, not with {facts.name}; leave it out"
            )
    if facts.draft is not None and "speculative_draft_model_path" not in stated:
        raise ValueError(
            f"--speculative-algorithm {facts.name} needs a draft; give its folder as "
            "--speculative-draft-model-path, or use NGRAM, which needs none"
        )
    if "speculative_adaptive_config" in stated and "speculative_adaptive" not in stated:
        raise ValueError(
            "--speculative-adaptive-config has no effect without --speculative-adaptive; add it, or leave "
            "the file out"
        )


def _check_layout(view: ResolvingView, facts: AlgorithmFacts) -> None:
    for name in ("attn_cp_size", "dcp_size"):
        width = getattr(view, name)
        if facts.draft is not None and width > 1:
            raise ValueError(
                f"{_label(name)} {width} and a draft model ({facts.name}) cannot be combined yet; leave one "
                "of them out, or use --speculative-algorithm NGRAM"
            )
    width = attn_dp_size_of(view.enable_dp_attention, view.dp_size)
    if view.speculative_adaptive and width > 1:
        raise ValueError(
            f"--speculative-adaptive and --attn-dp-size {width} cannot be combined: replicas would choose "
            "different depths; state --speculative-num-steps instead"
        )


def _resolve_acceptance(view: ResolvingView) -> None:
    """Block verification is a form of rejection sampling; the thresholds are of the other rule."""
    lowered = [name for name in _THRESHOLDS if getattr(view, name) != 1.0]
    if view.speculative_use_block_verification:
        view.declare(_HOOK, speculative_use_rejection_sampling=True)
    for name in lowered:
        if view.speculative_use_rejection_sampling:
            raise ValueError(
                f"{_label(name)} {getattr(view, name)} and {_rejection_flag(view)} cannot be combined: the "
                "threshold belongs to the other rule of acceptance; leave one of them out"
            )
        logger.warning(
            "%s %s is below 1: sampled answers are not distributed as without a draft; leave it out to keep "
            "them so",
            _label(name),
            getattr(view, name),
        )
    if view.speculative_use_rejection_sampling and view.speculative_adaptive:
        logger.warning(
            "%s draws by the rounds that a request had, and with --speculative-adaptive these depend on its "
            "neighbours: a seed does not repeat its text; leave one of them out where it must",
            _rejection_flag(view),
        )


def _rejection_flag(view: ResolvingView) -> str:
    """The switch that asked for rejection sampling."""
    if view.speculative_use_block_verification:
        return _label("speculative_use_block_verification")
    return _label("speculative_use_rejection_sampling")


def _check_chain(view: ResolvingView) -> None:
    topk = view.speculative_eagle_topk
    if view.speculative_use_rejection_sampling and topk != 1:
        raise ValueError(
            f"{_rejection_flag(view)} judges chains, and --speculative-eagle-topk is {topk}; make it 1 or "
            "leave the switch out"
        )


def _check_draft(view: ResolvingView, facts: AlgorithmFacts, target: ModelConfig) -> None:
    """Open the draft's files and compare them with the model; without tensor data and tokenizers."""
    path = view.speculative_draft_model_path
    assert path is not None and facts.draft is not None  # checked above
    is_model = facts.draft == "standalone"
    inherited = "dummy" if is_model and view.load_format == "dummy" else "auto"
    view.fill(_HOOK, speculative_draft_load_format=inherited)
    if view.speculative_draft_load_format == "dummy" and not is_model:
        raise ValueError(
            "--speculative-draft-load-format dummy makes the tensors of a whole model, and "
            f"{facts.name} drafts with a head; leave it out, so that the draft's files are read"
        )
    refuse_early(view, "speculative_draft_model_revision", "speculative_draft_load_format")
    refuse_early(view, "speculative_draft_model_quantization")
    load_format = view.speculative_draft_load_format or "auto"
    draft = DraftConfig.from_path(path, kind=facts.draft, target=target, load_format=load_format)
    check_attention_width(view, draft.model)
    if view.speculative_draft_model_quantization == "w8a8_int8" and not is_model:
        raise ValueError(
            "--speculative-draft-model-quantization w8a8_int8 quantizes a whole model, and "
            f"{facts.name} drafts with a head, which is computed in the type of the model; leave it out"
        )
    if view.speculative_draft_model_quantization == "gguf" and draft.model.source != "gguf":
        raise ValueError(
            f"--speculative-draft-model-quantization gguf needs a GGUF file, and {draft.model.path} holds "
            "none; leave the flag out"
        )
    if view.skip_tokenizer_init and facts.draft == "standalone":
        _check_sizes_alone(draft, target)
    _check_vocabulary(view, draft)


def _check_sizes_alone(draft: DraftConfig, target: ModelConfig) -> None:
    """Without tokenizers only equal sizes speak for equal tokens."""
    if draft.model.vocab_size != target.vocab_size:
        raise ValueError(
            f"the draft {draft.model.path} has a vocabulary of {draft.model.vocab_size} and the model one of "
            f"{target.vocab_size}, and with --skip-tokenizer-init their tokens cannot be compared; leave "
            "that flag out, or use a draft with the same vocabulary"
        )


def _check_vocabulary(view: ResolvingView, draft: DraftConfig) -> None:
    whole = draft.model.vocab_size
    proposed = whole if draft.head is None else draft.head.draft_vocab_size or whole
    if draft.has_reduced_vocabulary and view.speculative_use_rejection_sampling:
        raise ValueError(
            f"{_rejection_flag(view)} needs a draft of the whole vocabulary, and {draft.model.path} proposes "
            f"{proposed} of {whole} tokens; leave the switch out"
        )
    topk = view.speculative_eagle_topk
    if topk is not None and topk > proposed:
        raise ValueError(
            f"--speculative-eagle-topk {topk} is above the {proposed} tokens that {draft.model.path} proposes"
            "; lower it"
        )
