"""Declared fields of execution: kernels, graphs, experts, communication and the rest below `exec`.

Read through `get_exec()` and its sub-namespaces. Declarations only, with the two mamba switches that follow
from other fields.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from sglang.srt.arg_groups.arg_utils import NS, A, Arg, Derived, Input, Namespace
from sglang.srt.arg_groups.fields import choices

_NATIVE = "use torch_native, or cpu where the compiled kernels are"
_ATTENTION = ("torch_native", "cpu")
_NO_GRAPH = "say it as --cuda-graph-backend-decode, --cuda-graph-max-bs-decode and --cuda-graph-bs-decode"
_NO_MOE = "leave it out: expert models come later"


class Kernel(Namespace, ns=NS("exec.kernel")):
    attention_backend: A[
        str | None,
        Arg(help="Attention kernels.", resolvable=True, served=_ATTENTION, instead=_NATIVE),
    ] = None
    prefill_attention_backend: A[
        str | None, Arg(help="Attention kernels of prefill alone.", served=_ATTENTION, instead=_NATIVE)
    ] = None
    decode_attention_backend: A[
        str | None, Arg(help="Attention kernels of decode alone.", served=_ATTENTION, instead=_NATIVE)
    ] = None
    sampling_backend: A[
        str | None,
        Arg(help="Sampling kernels.", resolvable=True, served=("pytorch",), instead="use pytorch"),
    ] = None
    grammar_backend: A[
        str | None,
        Arg(
            help="Engine of structured output.",
            resolvable=True,
            choices=choices.GRAMMAR_BACKENDS,
            served=("none",),
            instead="use none: structured output is not supported yet",
        ),
    ] = None
    triton_attention_num_kv_splits: A[int, Arg(help="Split of the cache in Triton decode.", at_least=1)] = 8


class PhaseGraphConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Graph settings of one phase, decode or prefill; None means "not said here"."""

    backend: str | None = None
    max_bs: int | None = None
    bs: list[int] | None = None


class CudaGraphConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The value of `--cuda-graph-config`."""

    decode: PhaseGraphConfig = PhaseGraphConfig()
    prefill: PhaseGraphConfig = PhaseGraphConfig()


class Graph(Namespace, ns=NS("exec.graph")):
    cuda_graph_config: A[
        CudaGraphConfig | None, Arg(help="JSON of graph settings per phase; strongest.", instead=_NO_GRAPH)
    ] = None
    cuda_graph_max_bs_decode: A[
        int | None, Arg(help="Largest decode batch recorded; on a CPU 32.", at_least=1, served=True)
    ] = None
    cuda_graph_bs_decode: A[
        list[int] | None, Arg(help="Decode batch sizes recorded; others run eagerly.", served=True)
    ] = None
    cuda_graph_backend_decode: A[
        str | None,
        Arg(
            help="How decode is recorded; by default cpu where the compiled kernels run attention.",
            choices=choices.CUDA_GRAPH_BACKENDS,
            resolvable=True,
            served=("disabled", "cpu"),
            instead="use cpu or disabled: this device has no other recorded graphs",
        ),
    ] = None
    cuda_graph_backend_prefill: A[
        str | None,
        Arg(
            help="How prefill is recorded.",
            choices=choices.CUDA_GRAPH_BACKENDS,
            resolvable=True,
            served=("disabled",),
            instead="use disabled: prompts run without recorded graphs on this device",
        ),
    ] = None
    disable_cuda_graph_padding: A[bool, Arg(help="Replay graphs on exact batch sizes only.", served=True)] = (
        False
    )
    enable_torch_compile: A[bool, Arg(help="Compile the model with torch.compile.")] = False
    torch_compile_max_bs: A[int, Arg(help="Largest batch that is compiled.", at_least=1)] = 32


class Features(Namespace, ns=NS("exec.features")):
    enable_custom_logit_processor: A[
        bool,
        Arg(
            help="Accept Python logit processors from clients.",
            instead="leave it out: code from requests is never run",
        ),
    ] = False
    enable_memory_saver: A[bool, Arg(help="Allow memory to be released and taken back while running.")] = (
        False
    )
    enable_return_hidden_states: A[bool, Arg(help="Allow hidden states in answers.")] = False


class Deterministic(Namespace, ns=NS("exec.deterministic")):
    enable_deterministic_inference: A[
        bool,
        Arg(
            help="The same answer whatever shares the batch; computation is float32 then.",
            resolvable=True,
            served=(True,),
        ),
    ] = False


class Comm(Namespace, ns=NS("exec.comm")):
    disable_custom_all_reduce: A[
        bool, Arg(help="Use the library's all-reduce.", resolvable=True, served=(True,))
    ] = False


def _extra_buffer(*, disable_radix_cache: bool, mamba_radix_cache_strategy: str) -> bool:
    """A second state slot only makes sense while prefixes are cached at all."""
    return not disable_radix_cache and mamba_radix_cache_strategy in ("extra_buffer", "extra_buffer_lazy")


def _extra_buffer_lazy(*, disable_radix_cache: bool, mamba_radix_cache_strategy: str) -> bool:
    return not disable_radix_cache and mamba_radix_cache_strategy == "extra_buffer_lazy"


class Mamba(Namespace, ns=NS("exec.mamba")):
    mamba_radix_cache_strategy: A[
        str,
        Arg(
            help="How states of linear attention are kept in the prefix cache.",
            choices=choices.MAMBA_RADIX_CACHE_STRATEGIES,
            instead="leave it out: models with linear attention come later",
        ),
    ] = "auto"

    enable_mamba_extra_buffer = Derived(
        "A second state slot per request is kept for the prefix cache.",
        ("disable_radix_cache", "mamba_radix_cache_strategy"),
        _extra_buffer,
    )
    enable_mamba_extra_buffer_lazy = Derived(
        "That slot is taken only when a prefix is really cached.",
        ("disable_radix_cache", "mamba_radix_cache_strategy"),
        _extra_buffer_lazy,
    )


class Moe(Namespace, ns=NS("exec.moe")):
    moe_runner_backend: A[str, Arg(help="Expert kernels.", instead=_NO_MOE)] = "auto"
    moe_a2a_backend: A[
        str, Arg(help="Transport between experts.", choices=choices.MOE_A2A_BACKENDS, instead=_NO_MOE)
    ] = "none"
    speculative_moe_runner_backend: A[
        str | None, Arg(help="Expert kernels of the draft.", instead=_NO_MOE)
    ] = None
    speculative_moe_a2a_backend: A[
        str | None,
        Arg(help="Transport between the draft's experts.", choices=choices.MOE_A2A_BACKENDS, instead=_NO_MOE),
    ] = None
    deepep_mode: A[
        str, Arg(help="DeepEP's mode of dispatch.", choices=choices.DEEPEP_MODES, instead=_NO_MOE)
    ] = "auto"
    deepep_config: A[str | None, Arg(help="JSON or file of DeepEP settings.", instead=_NO_MOE)] = None
    disable_flashinfer_cutlass_moe_fp4_allgather: A[
        bool, Arg(help="Gather before quantizing to fp4.", instead=_NO_MOE)
    ] = False
    disable_shared_experts_fusion: A[
        bool, Arg(help="Run shared experts apart from routed ones.", instead=_NO_MOE)
    ] = False
    enable_single_batch_overlap: A[
        bool, Arg(help="Overlap communication inside one batch.", instead=_NO_MOE)
    ] = False
    tbo_token_distribution_threshold: A[
        float, Arg(help="Share of tokens at which a batch is cut in two.", instead=_NO_MOE)
    ] = 0.48
    enable_eplb: A[bool, Arg(help="Rebalance experts while running.", instead=_NO_MOE)] = False
    ep_num_redundant_experts: A[int, Arg(help="Extra replicas of experts.", at_least=0, instead=_NO_MOE)] = 0
    init_expert_location: A[
        str, Arg(help="First placement of experts: trivial, file or JSON.", instead=_NO_MOE)
    ] = "trivial"
    eplb_rebalance_num_iterations: A[
        int, Arg(help="Steps between rebalances.", at_least=1, instead=_NO_MOE)
    ] = 1000
    expert_distribution_recorder_mode: A[
        str | None,
        Arg(help="What is counted about experts.", choices=choices.EXPERT_RECORDER_MODES, instead=_NO_MOE),
    ] = None
    elastic_ep_backend: A[
        str | None,
        Arg(
            help="Transport of elastic expert parallelism.",
            choices=choices.ELASTIC_EP_BACKENDS,
            instead=_NO_MOE,
        ),
    ] = None


class Overlap(Namespace, ns=NS("exec.overlap")):
    enable_two_batch_overlap: A[bool, Arg(help="Overlap two halves of a batch.", instead=_NO_MOE)] = False


class Offload(Namespace, ns=NS("exec.offload")):
    cpu_offload_gb: A[
        int, Arg(help="GB of weights kept in host memory.", at_least=0, instead="leave it out on CPU")
    ] = 0


class Exec:
    """What `get_exec()` answers: its parts, each a namespace of its own."""

    kernel: Kernel
    graph: Graph
    features: Features
    deterministic: Deterministic
    comm: Comm
    mamba: Mamba
    moe: Moe
    overlap: Overlap
    offload: Offload


def _no_graphs(value: bool, stated: Mapping[str, Any]) -> dict[str, Any]:
    """The older switch turns both phases off; a phase stated beside it must agree."""
    if not value:
        return {}
    phases = ("cuda_graph_backend_decode", "cuda_graph_backend_prefill")
    for name in phases:
        said = stated.get(name)
        if said not in (None, "disabled"):
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"--disable-cuda-graph and {flag} {said} contradict each other; remove one of them"
            )
    return dict.fromkeys(phases, "disabled")


INPUTS = (
    Input(
        name="disable_cuda_graph",
        type=bool,
        help="Older spelling: no recorded graphs in either phase.",
        deprecated="write --cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled",
        expand=_no_graphs,
    ),
)
