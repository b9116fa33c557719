"""Chooses kernels where the operator did not, and declares the switches that are always on in this build.

What it declares is what runs, so a switch that asks for it is then accepted.
"""

from sglang.srt.arg_groups.model_override_base import ResolvingView


def resolve_kernels(view: ResolvingView) -> None:
    view.fill(
        "kernel_hook",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
    )
    if view.cuda_graph_config is None:
        view.fill("kernel_hook", cuda_graph_backend_decode="disabled", cuda_graph_backend_prefill="disabled")
    # One rank has nothing to reduce, and gloo has only one all-reduce.
    view.declare("kernel_hook", disable_custom_all_reduce=True)
