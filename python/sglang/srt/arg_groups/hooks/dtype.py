"""Chooses the type of computation.

On CPU: bfloat16 or float32, whichever was measured to be faster, and always float32 for exact repetition.
"""

from sglang.srt.arg_groups.model_override_base import ResolvingView
from sglang.srt.platforms.dtype_speed import fastest_dtype

#: Other spellings that `--dtype` accepts.
_SYNONYMS = {"half": "float16", "float": "float32"}


def resolve_dtype(view: ResolvingView) -> None:
    asked = view.dtype
    dtype = _SYNONYMS.get(asked, asked)
    if view.enable_deterministic_inference:
        if dtype not in ("auto", "float32"):
            raise ValueError(
                f"--enable-deterministic-inference repeats exactly in float32 only, and --dtype is {asked}; "
                "leave --dtype out or make it float32"
            )
        dtype = "float32"
    elif dtype == "auto":
        # On a GPU every served card has bf16; on a CPU it depends on the processor.
        dtype = "bfloat16" if view.device != "cpu" else fastest_dtype()
    view.declare("dtype_hook", dtype=dtype)
    if dtype == "float32" and not view.enable_deterministic_inference:
        view.declare("dtype_hook", enable_deterministic_inference=True)
