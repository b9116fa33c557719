"""Chooses the device when the operator did not.

Asks the platform. A device that this build does not serve is never chosen.
"""

from sglang.srt.arg_groups.fields import LEAVES
from sglang.srt.arg_groups.model_override_base import ResolvingView
from sglang.srt.environ import envs
from sglang.srt.platforms import is_cuda


def best_served_device() -> str:
    served = LEAVES["device"].arg.served
    serves_cuda = served is True or (isinstance(served, tuple) and "cuda" in served)
    if serves_cuda and not envs.SGLANG_USE_CPU_ENGINE.get() and is_cuda():
        return "cuda"
    return "cpu"


def resolve_device(view: ResolvingView) -> None:
    view.fill("device_hook", device=best_served_device())
