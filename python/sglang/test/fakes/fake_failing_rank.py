"""Owns a real rank process with two faults: a batch that holds a certain token makes world rank 1 fail.

It raises in the step of a batch with `RAISING_TOKEN`, and loses a slot of its pool after one with
`LEAKING_TOKEN`. For `rank_module=`: everything else is `processes/rank_main.py`. It must not change any other
step.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from sglang.srt.processes import rank_main
from sglang.srt.processes.rank_life import leave
from sglang.srt.runtime_context import get_parallel

if TYPE_CHECKING:
    from sglang.srt.batch.forward_batch import ForwardBatch, GenerationBatchResult
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.schedule_batch import ScheduledBatch

FAKE_FAILING_RANK = "sglang.test.fakes.fake_failing_rank"
#: The token ids that make it fail.
RAISING_TOKEN = 13
LEAKING_TOKEN = 14


def _holds(batch: ForwardBatch, token_id: int) -> bool:
    return get_parallel().launch_world_rank == 1 and token_id in batch.input_ids.tolist()


def _make_forward_raise() -> None:
    # Late: the rank must stay free of torch until it has read its configuration.
    from sglang.srt.model_executor.model_runner import ModelRunner

    forward = ModelRunner.forward

    def raising(self: ModelRunner, batch: ForwardBatch) -> LogitsProcessorOutput:
        if _holds(batch, RAISING_TOKEN):
            raise RuntimeError("this rank was told to fail in its step")
        return forward(self, batch)

    ModelRunner.forward = raising  # type: ignore[method-assign]


def _make_pool_leak(scheduler: Scheduler) -> None:
    process = scheduler.processor.process

    def leaking(batch: ScheduledBatch, result: GenerationBatchResult) -> int:
        num_tokens = process(batch, result)
        if _holds(batch.forward, LEAKING_TOKEN):
            scheduler.kv.allocator.alloc_extend(0, 1, 0)
        return num_tokens

    scheduler.processor.process = leaking  # type: ignore[method-assign]


def main(argv: list[str]) -> int:
    build = rank_main.build_scheduler

    def build_failing(*arguments: Any) -> Any:
        _make_forward_raise()
        scheduler, info = build(*arguments)
        _make_pool_leak(scheduler)
        return scheduler, info

    rank_main.build_scheduler = build_failing  # type: ignore[assignment]
    return rank_main.main(argv)


if __name__ == "__main__":
    leave(main(sys.argv))
