"""Declared fields of speculative decoding.

Read through `get_spec()`. Declarations only: name, type, default, help and what this build serves.
"""

from sglang.srt.arg_groups.arg_utils import NS, A, Arg, Namespace

_NO_DRAFT = "leave it out: the model decodes one token a step, drafts come later"


class Spec(Namespace, ns=NS("spec")):
    speculative_algorithm: A[
        str | None,
        Arg(
            help="EAGLE, EAGLE3, NEXTN, STANDALONE, NGRAM, DFLASH, DSPARK or a registered name.",
            instead=_NO_DRAFT,
        ),
    ] = None
    speculative_draft_model_path: A[
        str | None,
        Arg(help="Weights of the draft.", aliases=("--speculative-draft-model",), instead=_NO_DRAFT),
    ] = None
    speculative_num_steps: A[int | None, Arg(help="Depth of a draft.", at_least=1, instead=_NO_DRAFT)] = None
    speculative_eagle_topk: A[int | None, Arg(help="Branches a step.", at_least=1, instead=_NO_DRAFT)] = None
    speculative_num_draft_tokens: A[
        int | None, Arg(help="Tokens verified a step.", at_least=1, instead=_NO_DRAFT)
    ] = None
    speculative_accept_threshold_single: A[
        float, Arg(help="Acceptance threshold of one token.", instead=_NO_DRAFT)
    ] = 1.0
    speculative_accept_threshold_acc: A[
        float, Arg(help="Scale of the cumulative acceptance.", instead=_NO_DRAFT)
    ] = 1.0
    speculative_ngram_max_trie_depth: A[int, Arg(help="Depth of the n-gram trie.", instead=_NO_DRAFT)] = 18
    speculative_draft_model_quantization: A[
        str | None, Arg(help="Quantization of the draft's weights.", instead=_NO_DRAFT)
    ] = None
    speculative_adaptive: A[bool, Arg(help="Choose the draft depth while running.", instead=_NO_DRAFT)] = (
        False
    )
    speculative_adaptive_config: A[
        str | None, Arg(help="JSON file with the candidate depths per batch size.", instead=_NO_DRAFT)
    ] = None
    _speculative_draft_quantization_explicitly_set: A[
        bool | None,
        Arg(help="Whether the operator stated the draft's quantization.", cli=None, resolvable=True),
    ] = None
