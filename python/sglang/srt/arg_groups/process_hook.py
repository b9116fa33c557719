"""Draws what must be the same in every process of a deployment: the seed and the group's port.

Run last, at the door, once: children are handed the results.
"""

import socket
from secrets import randbelow

from sglang.srt.arg_groups.model_override_base import ResolvingView
from sglang.srt.constants import MAX_SEED


def free_port() -> int:
    """A port nobody listens on now; should somebody take it before the group does, the start fails."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def resolve_process(view: ResolvingView) -> None:
    if view.random_seed is None:
        view.declare("process_hook", random_seed=randbelow(MAX_SEED))
    if view.nccl_port is None:
        view.declare("process_hook", nccl_port=free_port())
