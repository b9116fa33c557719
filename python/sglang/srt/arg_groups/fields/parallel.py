"""Declared placement: the widths an operator sets, and the quotients that follow from them.

Read through ``get_parallel()``. Annotated names are leaves of the record; ``Derived`` names never are.
``INPUTS`` holds the spellings that set other leaves. Declarations only: the arithmetic of the quotients lives
in ``runtime_context/widths.py``.
"""

from collections.abc import Mapping
from typing import Any

from sglang.srt.arg_groups import choices
from sglang.srt.arg_groups.arg_utils import NS, A, Arg, Derived, Input, Namespace

_ONE_RANK = "use 1: layouts of more than one rank come later"
_ONE_HOST = "start one server on one machine: deployments across machines come later"


class Parallel(Namespace, ns=NS("parallel")):
    tp_size: A[
        int,
        Arg(
            help="Tensor-parallel ranks.",
            aliases=("--tensor-parallel-size", "--tp"),
            at_least=1,
            instead=_ONE_RANK,
        ),
    ] = 1
    pp_size: A[
        int,
        Arg(
            help="Pipeline stages.",
            aliases=("--pipeline-parallel-size", "--pp"),
            at_least=1,
            instead=_ONE_RANK,
        ),
    ] = 1
    pp_max_micro_batch_size: A[
        int | None, Arg(help="Largest pipeline micro-batch.", at_least=1, instead=_ONE_RANK)
    ] = None
    pp_async_batch_depth: A[
        int, Arg(help="Extra micro-batches buffered at the last stage.", at_least=0, instead=_ONE_RANK)
    ] = 0
    dp_size: A[
        int,
        Arg(
            help="Full replicas of the model behind the data-parallel controller.",
            aliases=("--data-parallel-size", "--dp"),
            at_least=1,
            instead=_ONE_RANK,
        ),
    ] = 1
    enable_dp_attention: A[
        bool,
        Arg(
            help="Older spelling: makes --dp-size the width of attention data parallelism.",
            deprecated="write --attn-dp-size N in place of --enable-dp-attention --dp-size N",
            resolvable=True,
            instead=_ONE_RANK,
        ),
    ] = False
    load_balance_method: A[
        str,
        Arg(
            help="How the controller spreads requests.",
            choices=choices.LOAD_BALANCE_METHODS,
            instead=_ONE_RANK,
        ),
    ] = "auto"
    ep_size: A[
        int,
        Arg(
            help="Expert-parallel ranks inside the tensor group.",
            aliases=("--expert-parallel-size", "--ep"),
            at_least=1,
            instead=_ONE_RANK,
        ),
    ] = 1
    moe_dp_size: A[
        int,
        Arg(
            help="Data-parallel groups of the expert layers.",
            aliases=("--moe-data-parallel-size",),
            at_least=1,
            instead=_ONE_RANK,
        ),
    ] = 1
    moe_dense_tp_size: A[
        int | None, Arg(help="Tensor width of dense layers in expert models.", at_least=1, instead=_ONE_RANK)
    ] = None
    attn_cp_size: A[
        int,
        Arg(
            help="Context-parallel ranks of attention.",
            aliases=("--attention-context-parallel-size",),
            at_least=1,
            instead=_ONE_RANK,
        ),
    ] = 1
    enable_prefill_cp: A[bool, Arg(help="Split long prompts over the context ranks.", instead=_ONE_RANK)] = (
        False
    )
    cp_strategy: A[
        str | None, Arg(help="How a prompt is split over the context ranks.", instead=_ONE_RANK)
    ] = None
    dcp_size: A[
        int,
        Arg(
            help="Decode context parallelism: ranks over which one sequence's cache is striped.",
            aliases=("--decode-context-parallel-size",),
            at_least=1,
            instead=_ONE_RANK,
        ),
    ] = 1
    enable_dp_lm_head: A[
        bool,
        Arg(help="Shard the head over attention-TP under attention data parallelism.", instead=_ONE_RANK),
    ] = False
    dwdp_size: A[
        int,
        Arg(
            help="Ranks over which dense weights are distributed and fetched.", at_least=1, instead=_ONE_RANK
        ),
    ] = 1
    ep_join_rank_offset: A[
        int, Arg(help="World rank of the first joiner of an elastic scale-up.", at_least=0, instead=_ONE_RANK)
    ] = 0
    max_ep_size: A[
        int | None, Arg(help="Room of the world for elastic scale-ups.", at_least=1, instead=_ONE_RANK)
    ] = None
    nnodes: A[int, Arg(help="Number of machines.", at_least=1, instead=_ONE_HOST)] = 1
    node_rank: A[int, Arg(help="Index of this machine.", at_least=0, instead=_ONE_HOST)] = 0
    dist_init_addr: A[
        str | None, Arg(help="host:port where the ranks meet.", aliases=("--nccl-init-addr",), served=True)
    ] = None
    nccl_port: A[
        int | None,
        Arg(
            help="Port of the process group; a free one is drawn when not given.",
            resolvable=True,
            served=True,
            at_least=1,
            at_most=65535,
        ),
    ] = None
    dist_timeout: A[
        int | None, Arg(help="Seconds that building the process group may take.", served=True, at_least=1)
    ] = None

    # What the leaves decide. Not annotated: never in the record.
    attn_dp_size = Derived(
        "Attention data-parallel replicas inside the tensor group.", ("enable_dp_attention", "dp_size")
    )
    attn_tp_size = Derived(
        "Tensor width of attention.", ("tp_size", "enable_dp_attention", "dp_size", "attn_cp_size")
    )
    moe_ep_size = Derived("Expert-parallel width.", ("ep_size",))
    moe_tp_size = Derived("Tensor width inside one expert.", ("tp_size", "ep_size", "moe_dp_size"))
    dcp_enabled = Derived("Whether one sequence's cache is striped.", ("dcp_size",))
    attn_dcp_size = Derived("Ranks over which one sequence's cache is striped.", ("dcp_size",))


def _attention_data_parallel(value: int, stated: Mapping[str, Any]) -> dict[str, Any]:
    """``attn_dp_size=N`` is ``dp_size=N, enable_dp_attention=True``; one spelling at a time."""
    if value < 1:
        raise ValueError(f"--attn-dp-size must be at least 1, got {value}")
    if "enable_dp_attention" in stated:
        raise ValueError(
            f"--attn-dp-size {value} and --enable-dp-attention both set the attention data-parallel width; "
            "keep --attn-dp-size and remove --enable-dp-attention"
        )
    replicas = stated.get("dp_size", 1)
    if value > 1 and replicas > 1:
        raise ValueError(
            f"--attn-dp-size {value} with --dp-size {replicas}: replicas of replicas are not a layout; "
            f"set one of them to 1 (attn_dp_size == 1 or dp_size == 1, got {value} and {replicas})"
        )
    return {"dp_size": value, "enable_dp_attention": True} if value > 1 else {}


INPUTS = (
    Input(
        name="attn_dp_size",
        type=int,
        help="Attention data-parallel groups inside one tensor group (sets dp_size and enable_dp_attention).",
        aliases=("--attention-data-parallel-size",),
        expand=_attention_data_parallel,
    ),
)
