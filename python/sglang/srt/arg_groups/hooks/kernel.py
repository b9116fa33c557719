"""Chooses kernels where the operator did not, and declares the switches that are always on in this build.

What it declares is what runs, so a switch that asks for it is then accepted.
"""

from sglang.kernels import compiled
from sglang.srt.arg_groups.model_override_base import ResolvingView

_ATTENTION = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
#: Types of computation that the compiled attention has.
_COMPILED = ("float32", "bfloat16")


def resolve_kernels(view: ResolvingView) -> None:
    if "cpu" in [getattr(view, name) for name in _ATTENTION] and not compiled.are_there():
        raise ValueError(
            "--attention-backend cpu needs the compiled kernels, which are not installed or switched off "
            "(SGLANG_USE_CPU_KERNELS); run `make kernels`, or use torch_native"
        )
    # One back end serves both phases, so what is said of one phase holds where nothing else is said.
    said = view.decode_attention_backend or view.prefill_attention_backend
    view.fill(
        "kernel_hook",
        attention_backend=said or ("cpu" if _has_compiled_attention(view) else "torch_native"),
        sampling_backend="pytorch",
        grammar_backend="none",
    )
    draft = view.speculative_draft_attention_backend
    own = view.decode_attention_backend or view.attention_backend
    if draft in ("torch_native", "cpu") and draft != own:  # others are refused as not served
        raise ValueError(
            f"--speculative-draft-attention-backend {draft} differs from the model's {own}: both share one "
            "cache layout and one back end; leave it out"
        )
    for flag, name in (
        ("--kv-cache-dtype", view.kv_cache_dtype),
        ("--speculative-draft-kv-cache-dtype", view.speculative_draft_kv_cache_dtype),
    ):
        _check_kv_cache_dtype(view, flag, name, own)
    _choose_graphs(view, own)
    # One rank has nothing to reduce, and gloo has only one all-reduce.
    view.declare("kernel_hook", disable_custom_all_reduce=True)


def _has_compiled_attention(view: ResolvingView) -> bool:
    return view.device == "cpu" and view.dtype in _COMPILED and compiled.are_there()


def _check_kv_cache_dtype(view: ResolvingView, flag: str, name: str | None, attention: str | None) -> None:
    """Refuse a type in which this back end cannot keep keys and values; others is refused later."""
    if name == "int8" and (attention != "cpu" or view.dtype not in _COMPILED):
        raise ValueError(
            f"{flag} int8 needs --attention-backend cpu (`make kernels`) and --dtype float32 or bfloat16, "
            f"and these are {attention} and {view.dtype}; change them, or use auto"
        )
    floating = {"bf16": "bfloat16"}.get(name or "", name)
    if floating in ("float32", "bfloat16") and floating != view.dtype:
        raise ValueError(
            f"{flag} {name} is not --dtype {view.dtype}: keys and values are kept in the type of "
            "computation, or in int8; use auto or int8"
        )


def _choose_graphs(view: ResolvingView, attention_backend: str | None) -> None:
    """Record decode steps where their attention is a kernel call that a list can hold."""
    if view.cuda_graph_config is not None:
        return  # refused as not served
    if view.cuda_graph_backend_decode == "cpu" and not compiled.are_there():
        raise ValueError(
            "--cuda-graph-backend-decode cpu needs the compiled kernels, which are not installed or switched "
            "off (SGLANG_USE_CPU_KERNELS); run `make kernels`, or use disabled"
        )
    view.fill(
        "kernel_hook",
        cuda_graph_backend_decode="cpu" if attention_backend == "cpu" else "disabled",
        cuda_graph_backend_prefill="disabled",
    )
    sizes = ("cuda_graph_max_bs_decode", "cuda_graph_bs_decode")
    said = [name for name in sizes if getattr(view, name) is not None]
    if said and view.cuda_graph_backend_decode == "disabled":
        raise ValueError(
            f"--{said[0].replace('_', '-')} is given, and no decode step is recorded "
            "(--cuda-graph-backend-decode disabled); leave it out, or record with cpu"
        )
    if len(said) == 2:
        raise ValueError(
            "--cuda-graph-max-bs-decode and --cuda-graph-bs-decode both say which batches are recorded; "
            "leave one of them out"
        )
