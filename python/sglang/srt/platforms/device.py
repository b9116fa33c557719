"""What a rank asks of the device that its model lives on: the only place that names torch's accelerator.

Read by the model runner, process groups and the context. Must not import torch before it is asked: the
server process, which has no torch, imports this folder too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_ACCELERATOR = "cuda"


def model_device(kind: str | None) -> torch.device:
    """The device of the model for the published `device`; the CPU where none is published."""
    import torch

    return torch.device(kind or "cpu")


def accelerator_device(index: int) -> torch.device:
    """Accelerator number `index` of this machine."""
    import torch

    return torch.device(_ACCELERATOR, index)


def make_stream() -> torch.Stream:
    """A new stream of work on the current accelerator."""
    import torch

    stream: torch.Stream = torch.get_device_module(_ACCELERATOR).Stream()
    return stream
