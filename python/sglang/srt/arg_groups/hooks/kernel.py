"""Chooses kernels where the operator did not, and declares the switches that are always on in this build.

What it declares is what runs, so a switch that asks for it is then accepted.
"""

from sglang.kernels import compiled
from sglang.srt.arg_groups.model_override_base import ResolvingView

_ATTENTION = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def resolve_kernels(view: ResolvingView) -> None:
    if "cpu" in [getattr(view, name) for name in _ATTENTION] and not compiled.are_there():
        raise ValueError(
            "--attention-backend cpu needs the compiled kernels, which are not installed or switched off "
            "(SGLANG_USE_CPU_KERNELS); run `make kernels`, or use torch_native"
        )
    view.fill(
        "kernel_hook",
        attention_backend="torch_native",
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
    if view.cuda_graph_config is None:
        view.fill("kernel_hook", cuda_graph_backend_decode="disabled", cuda_graph_backend_prefill="disabled")
    # One rank has nothing to reduce, and gloo has only one all-reduce.
    view.declare("kernel_hook", disable_custom_all_reduce=True)
