"""Declared fields of speculative decoding.

Read through `get_spec()`. Declarations only: name, type, default, help and what this build serves. What
belongs to which algorithm is decided in `hooks/speculative.py`.
"""

from sglang.srt.arg_groups.arg_utils import NS, A, Arg, Namespace
from sglang.srt.arg_groups.fields import choices
from sglang.srt.arg_groups.speculative_algorithms import ALGORITHMS, ALIASES

_ALGORITHMS = (*ALGORITHMS, *ALIASES)
_DRAFTS_NOW = (
    "use EAGLE3, EAGLE or STANDALONE with a draft model, or NGRAM without one: block drafts come later"
)
_LOCAL_ONLY = "download the revision you want and give its folder as --speculative-draft-model-path"
_NO_WINDOW = "leave it out: a draft sees the whole text"
_NO_BLOCKS = "leave it out: block drafts come later; --speculative-num-draft-tokens is for what is served"
_NO_CORPUS = "leave it out: n-grams are taken from the running requests, external texts come later"


class Spec(Namespace, ns=NS("spec")):
    speculative_algorithm: A[
        str | None,
        Arg(
            help="How tokens are drafted; default is not at all. NEXTN is another name of EAGLE.",
            resolvable=True,
            served=_ALGORITHMS,
            instead=_DRAFTS_NOW,
        ),
    ] = None
    speculative_draft_model_path: A[
        str | None,
        Arg(
            help="Local folder of the draft; STANDALONE also takes a GGUF file or a known alias.",
            aliases=("--speculative-draft-model",),
            served=True,
        ),
    ] = None
    speculative_draft_model_revision: A[
        str | None, Arg(help="Hub branch, tag or commit of the draft.", instead=_LOCAL_ONLY)
    ] = None
    speculative_draft_load_format: A[
        str | None,
        Arg(
            help="Which loader reads the draft; default: dummy where the model is dummy, else auto.",
            resolvable=True,
            served=choices.SERVED_LOAD_FORMATS,
            instead="convert the draft to safetensors and use auto",
        ),
    ] = None
    speculative_draft_model_quantization: A[
        str | None,
        Arg(
            help="Quantization of the weights of a STANDALONE draft; default is --quantization. Other drafts "
            "are computed in the type of the model.",
            served=("gguf", "w8a8_int8"),
            instead="leave the flag out",
        ),
    ] = None
    speculative_draft_kv_cache_dtype: A[
        str | None,
        Arg(
            help="Type of the draft's cached keys and values, as --kv-cache-dtype; auto follows the draft.",
            choices=choices.KV_CACHE_DTYPES,
            served=choices.SERVED_KV_CACHE_DTYPES,
            instead="use auto or int8",
        ),
    ] = None
    speculative_draft_attention_backend: A[
        str | None,
        Arg(
            help="Attention kernels of the draft; default are the model's.",
            served=("torch_native", "cpu"),
            instead="use torch_native, or cpu where the compiled kernels are",
        ),
    ] = None
    speculative_attention_mode: A[
        str,
        Arg(
            help="Whose attention kernels run verification: those of prefill or of decode.",
            choices=choices.SPECULATIVE_ATTENTION_MODES,
            served=("prefill",),
            instead="use prefill",
        ),
    ] = "prefill"
    speculative_num_steps: A[
        int | None,
        Arg(help="Depth of a draft; default depends on the model.", resolvable=True, served=True, at_least=1),
    ] = None
    speculative_eagle_topk: A[
        int | None,
        Arg(help="Branches a step of a draft; 1: a chain.", resolvable=True, served=True, at_least=1),
    ] = None
    speculative_num_draft_tokens: A[
        int | None,
        Arg(
            help="Tokens verified in a round, the newest one included.",
            resolvable=True,
            served=True,
            at_least=2,
        ),
    ] = None
    speculative_accept_threshold_single: A[
        float,
        Arg(
            help="A draft this probable is accepted in sampling; below 1 the answers change.",
            served=True,
            at_least=0,
            at_most=1,
        ),
    ] = 1.0
    speculative_accept_threshold_acc: A[
        float,
        Arg(
            help="Scale of the probability with which drafts are accepted; below 1 the answers change.",
            served=True,
            at_least=0,
            at_most=1,
        ),
    ] = 1.0
    speculative_use_rejection_sampling: A[
        bool,
        Arg(
            help="Draw drafts from the draft's own distribution and accept by the ratio (chains only).",
            resolvable=True,
            served=True,
        ),
    ] = False
    speculative_use_block_verification: A[
        bool, Arg(help="Rejection sampling that judges a chain as a whole: it accepts more.", served=True)
    ] = False
    speculative_token_map: A[
        str | None,
        Arg(
            help="File with the token ids that an EAGLE draft may propose.",
            instead="leave it out: EAGLE proposes every token, and an EAGLE3 file brings its own list",
        ),
    ] = None
    speculative_draft_window_size: A[
        int | None, Arg(help="Newest tokens that a draft sees.", at_least=1, instead=_NO_WINDOW)
    ] = None
    speculative_draft_sink_size: A[
        int | None, Arg(help="First tokens seen beside the window.", at_least=0, instead=_NO_WINDOW)
    ] = None
    enable_multi_layer_eagle: A[
        bool,
        Arg(
            help="Draft each step with a layer of its own.",
            instead="leave it out: heads of several layers come later; use EAGLE, EAGLE3 or STANDALONE",
        ),
    ] = False
    speculative_adaptive: A[
        bool, Arg(help="Choose the draft depth while running (EAGLE and EAGLE3, chains).", served=True)
    ] = False
    speculative_adaptive_config: A[
        str | None, Arg(help="JSON file with the candidate depths per batch size.", served=True)
    ] = None
    speculative_ngram_min_bfs_breadth: A[
        int, Arg(help="Fewest continuations taken of a token (BFS).", served=True, at_least=1)
    ] = 1
    speculative_ngram_max_bfs_breadth: A[
        int, Arg(help="Most continuations taken of a token (BFS).", served=True, at_least=1)
    ] = 10
    speculative_ngram_match_type: A[
        str,
        Arg(
            help="BFS: the newest continuations; PROB: the most frequent ones.",
            choices=choices.NGRAM_MATCH_TYPES,
            served=True,
        ),
    ] = "BFS"
    speculative_ngram_max_trie_depth: A[
        int, Arg(help="Longest n-gram kept, in tokens.", served=True, at_least=2, at_most=128)
    ] = 18
    speculative_ngram_capacity: A[
        int, Arg(help="Most nodes that the n-grams may take.", served=True, human_int=True, at_least=1)
    ] = 10_000_000
    speculative_ngram_external_corpus_path: A[
        str | None, Arg(help="Text whose n-grams are known from the start.", instead=_NO_CORPUS)
    ] = None
    speculative_ngram_external_sam_budget: A[
        int, Arg(help="Drafts reserved for external texts.", at_least=0, instead=_NO_CORPUS)
    ] = 0
    speculative_dflash_block_size: A[
        int | None, Arg(help="Tokens in a block of DFLASH.", at_least=1, instead=_NO_BLOCKS)
    ] = None
    speculative_dspark_block_size: A[
        int | None, Arg(help="Drafts in a block of DSPARK.", at_least=1, instead=_NO_BLOCKS)
    ] = None
    speculative_dspark_sps_table_path: A[
        str | None, Arg(help="Measured step times for DSPARK.", instead=_NO_BLOCKS)
    ] = None
    speculative_dspark_confidence_sts_path: A[
        str | None, Arg(help="Temperatures of DSPARK's confidence.", instead=_NO_BLOCKS)
    ] = None
    speculative_dspark_align_verify_tokens_to_graph_tier: A[
        bool, Arg(help="Fill DSPARK's verification up to a recorded size.", instead=_NO_BLOCKS)
    ] = False
    speculative_domino_candidate_pool_size: A[
        int, Arg(help="Candidates that Domino keeps.", at_least=0, instead=_NO_BLOCKS)
    ] = 2048
    _speculative_draft_quantization_explicitly_set: A[
        bool | None,
        Arg(help="Whether the operator stated the draft's quantization.", cli=None, resolvable=True),
    ] = None
