"""Which recorder counts how often experts are chosen. Recording comes with expert load balancing.

Read by expert layers. The recorder is one of the context's resources and must not be kept here.
"""

from __future__ import annotations

from sglang.srt.runtime_context import get_resources
from sglang.srt.runtime_context.resources import ExpertRecorder

__all__ = ["get_global_expert_distribution_recorder", "set_global_expert_distribution_recorder"]


class _ExpertDistributionRecorderNoop:
    """Counts nothing; starting or dumping a record is not served yet."""

    recording = False

    def start_record(self) -> None:
        raise NotImplementedError(
            "counting experts arrives with expert load balancing; this server records nothing"
        )

    def dump_record(self) -> None:
        raise NotImplementedError("counting experts arrives with expert load balancing; nothing was recorded")


_NOOP = _ExpertDistributionRecorderNoop()


def get_global_expert_distribution_recorder() -> ExpertRecorder:
    recorder = get_resources().expert_distribution_recorder
    return _NOOP if recorder is None else recorder


def set_global_expert_distribution_recorder(recorder: ExpertRecorder | None) -> None:
    get_resources().expert_distribution_recorder = recorder
