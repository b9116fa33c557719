"""Which recorder counts how often experts are chosen. Recording arrives with expert load balancing.

Read by expert layers. The recorder in force lives in the context's resources; without one nothing is counted.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_resources

__all__ = ["get_global_expert_distribution_recorder", "set_global_expert_distribution_recorder"]


class _ExpertDistributionRecorderNoop:
    """Counts nothing. Asking it to start or to dump is asking for what does not exist yet."""

    recording = False

    def start_record(self) -> None:
        raise NotImplementedError(
            "counting experts arrives with expert load balancing; this server records nothing"
        )

    def dump_record(self) -> None:
        raise NotImplementedError("counting experts arrives with expert load balancing; nothing was recorded")


_NOOP = _ExpertDistributionRecorderNoop()


def get_global_expert_distribution_recorder() -> Any:
    recorder = get_resources().expert_distribution_recorder
    return _NOOP if recorder is None else recorder


def set_global_expert_distribution_recorder(recorder: Any) -> None:
    get_resources().expert_distribution_recorder = recorder
