"""Declared placement: the widths an operator sets, and the widths that follow from them.

Read through `get_parallel()`. Annotated names are leaves of the record; `Derived` names never are. `INPUTS`
holds the settings that set other leaves. The arithmetic is in `runtime_context/widths.py`, except for what
resolution asks as well: how `dp_size` counts.
"""

from collections.abc import Mapping
from typing import Any

from sglang.srt.arg_groups.arg_utils import NS, A, Arg, Derived, Input, Namespace
from sglang.srt.arg_groups.fields import choices

_STAGES = "leave it out: pipeline stages come later; --tp-size N spreads a model over ranks"
_EXPERTS = "leave it out: experts come later; --tp-size N spreads a model over ranks"
_CONTEXT = "leave it out: context parallelism comes later; --tp-size N spreads a model over ranks"
_SPREADING = "leave it out: this way to spread weights comes later; --tp-size N spreads a model over ranks"
_ELASTIC = "leave it out: a running deployment cannot grow yet"


class Parallel(Namespace, ns=NS("parallel")):
    tp_size: A[
        int,
        Arg(
            help="Tensor-parallel ranks.",
            aliases=("--tensor-parallel-size", "--tp"),
            at_least=1,
            served=True,
        ),
    ] = 1
    pp_size: A[
        int,
        Arg(
            help="Pipeline stages.",
            aliases=("--pipeline-parallel-size", "--pp"),
            at_least=1,
            instead=_STAGES,
        ),
    ] = 1
    pp_max_micro_batch_size: A[
        int | None, Arg(help="Largest pipeline micro-batch.", at_least=1, instead=_STAGES)
    ] = None
    pp_async_batch_depth: A[
        int, Arg(help="Extra micro-batches buffered at the last stage.", at_least=0, instead=_STAGES)
    ] = 0
    dp_size: A[
        int,
        Arg(
            help="Full replicas of the model behind the data-parallel controller.",
            aliases=("--data-parallel-size", "--dp"),
            at_least=1,
            served=True,
        ),
    ] = 1
    enable_dp_attention: A[
        bool,
        Arg(
            help="Older spelling: makes --dp-size the width of attention data parallelism.",
            deprecated="write --attn-dp-size N in place of --enable-dp-attention --dp-size N",
            resolvable=True,
            served=True,
        ),
    ] = False
    load_balance_method: A[
        str,
        Arg(
            help="How the controller spreads requests.",
            choices=choices.LOAD_BALANCE_METHODS,
            served=("round_robin", "total_requests", "total_tokens"),
            instead="use round_robin, total_requests or total_tokens; bootstrap rooms come with "
            "prefill/decode disaggregation",
        ),
    ] = "auto"
    ep_size: A[
        int,
        Arg(
            help="Expert-parallel ranks inside the tensor group.",
            aliases=("--expert-parallel-size", "--ep"),
            at_least=1,
            instead=_EXPERTS,
        ),
    ] = 1
    moe_dp_size: A[
        int,
        Arg(
            help="Data-parallel groups of the expert layers.",
            aliases=("--moe-data-parallel-size",),
            at_least=1,
            instead=_EXPERTS,
        ),
    ] = 1
    moe_dense_tp_size: A[
        int | None, Arg(help="Tensor width of dense layers in expert models.", at_least=1, instead=_EXPERTS)
    ] = None
    attn_cp_size: A[
        int,
        Arg(
            help="Context-parallel ranks of attention.",
            aliases=("--attention-context-parallel-size",),
            at_least=1,
            instead=_CONTEXT,
        ),
    ] = 1
    enable_prefill_cp: A[bool, Arg(help="Split long prompts over the context ranks.", instead=_CONTEXT)] = (
        False
    )
    cp_strategy: A[
        str | None, Arg(help="How a prompt is split over the context ranks.", instead=_CONTEXT)
    ] = None
    dcp_size: A[
        int,
        Arg(
            help="Decode context parallelism: ranks over which one sequence's cache is striped.",
            aliases=("--decode-context-parallel-size",),
            at_least=1,
            instead=_CONTEXT,
        ),
    ] = 1
    enable_dp_lm_head: A[
        bool,
        Arg(
            help="Cut the head over attention-TP under attention data parallelism: each replica "
            "computes the logits of its own requests and holds a whole head.",
            resolvable=True,
            served=True,
        ),
    ] = False
    dwdp_size: A[
        int,
        Arg(
            help="Ranks over which dense weights are distributed and fetched.", at_least=1, instead=_SPREADING
        ),
    ] = 1
    ep_join_rank_offset: A[
        int, Arg(help="World rank of the first joiner of an elastic scale-up.", at_least=0, instead=_ELASTIC)
    ] = 0
    max_ep_size: A[
        int | None, Arg(help="Most ranks that elastic scale-ups may reach.", at_least=1, instead=_ELASTIC)
    ] = None
    nnodes: A[int, Arg(help="Machines that one world of ranks spans.", at_least=1, served=True)] = 1
    node_rank: A[
        int,
        Arg(help="Index of this machine; 0 runs the server, the others only ranks.", at_least=0, served=True),
    ] = 0
    use_ray: A[
        bool,
        Arg(
            help="Let a Ray cluster place the ranks, on --nnodes of its machines. Needs the package ray.",
            served=True,
        ),
    ] = False
    dist_init_addr: A[
        str | None,
        Arg(
            help="host:port where the ranks meet, on machine 0; replica r of --dp-size takes port + r. "
            "Without it the ranks of one machine meet in a file and need no port.",
            aliases=("--nccl-init-addr",),
            served=True,
        ),
    ] = None
    nccl_port: A[
        int | None,
        Arg(
            help="Port of 127.0.0.1 where the ranks of one machine meet; short for --dist-init-addr.",
            served=True,
            at_least=1,
            at_most=65535,
        ),
    ] = None
    dist_timeout: A[
        int | None,
        Arg(
            help="Seconds until a rank that does not answer its peers is an error: open requests fail and "
            "the server ends with the cause. 60 when not given. Loading has a limit of its own. Several "
            "machines wait so long for each other at the start; half an hour when not given.",
            served=True,
            at_least=1,
            at_most=86_400,
        ),
    ] = None

    # What follows from the leaves. Not annotated, so never in the record.
    attn_dp_size = Derived[int](
        "Attention data-parallel replicas inside the tensor group.", ("enable_dp_attention", "dp_size")
    )
    attn_tp_size = Derived[int](
        "Tensor width of attention.", ("tp_size", "enable_dp_attention", "dp_size", "attn_cp_size")
    )
    moe_ep_size = Derived[int]("Expert-parallel width.", ("ep_size",))
    moe_tp_size = Derived[int]("Tensor width inside one expert.", ("tp_size", "ep_size", "moe_dp_size"))
    dcp_enabled = Derived[bool]("Whether one sequence's cache is striped.", ("dcp_size",))
    attn_dcp_size = Derived[int]("Ranks over which one sequence's cache is striped.", ("dcp_size",))


def _attention_data_parallel(value: int, stated: Mapping[str, Any]) -> dict[str, Any]:
    """`attn_dp_size=N` is `dp_size=N, enable_dp_attention=True`; one spelling at a time."""
    if value < 1:
        raise ValueError(f"--attn-dp-size must be at least 1, got {value}")
    if "enable_dp_attention" in stated:
        raise ValueError(
            f"--attn-dp-size {value} and --enable-dp-attention both set the attention data-parallel width; "
            "keep --attn-dp-size and remove --enable-dp-attention"
        )
    replicas = stated.get("dp_size", 1)
    if replicas < 1:  # before the width takes the place of the count in the record
        raise ValueError(f"--dp-size must be at least 1, got {replicas}")
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


def attn_dp_size_of(enable_dp_attention: bool, dp_size: int) -> int:
    """Attention replicas inside one tensor group."""
    return dp_size if enable_dp_attention else 1


def num_worlds_of(enable_dp_attention: bool, dp_size: int) -> int:
    """Worlds of ranks, each with the whole model; they share nothing but the server."""
    return dp_size // attn_dp_size_of(enable_dp_attention, dp_size)
