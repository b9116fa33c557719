"""A real rank that goes wrong: world rank 1 raises in the step of a batch that holds `FAULTY_TOKEN`, and
loses a slot of its pool after one that holds `LEAKING_TOKEN`.

For `rank_module=`: everything else is `processes/rank_main.py`. It must not change a step that goes well.
"""

from __future__ import annotations

import sys
from typing import Any

from sglang.srt.processes import rank_main
from sglang.srt.processes.rank_life import leave
from sglang.srt.runtime_context import get_parallel

FAULTY_RANK = "sglang.test.fakes.faulty_rank"
#: The ids that trip the rank.
FAULTY_TOKEN = 13
LEAKING_TOKEN = 14


def _holds(batch: Any, token_id: int) -> bool:
    return get_parallel().launch_world_rank == 1 and token_id in batch.input_ids.tolist()


def _trip_the_model() -> None:
    # Late: the rank must stay free of torch until it has read its configuration.
    from sglang.srt.model_executor.model_runner import ModelRunner

    forward = ModelRunner.forward

    def trip(self: ModelRunner, batch: Any) -> Any:
        if _holds(batch, FAULTY_TOKEN):
            raise RuntimeError("this rank was told to fail in its step")
        return forward(self, batch)

    ModelRunner.forward = trip  # type: ignore[method-assign]


def _trip_the_books(scheduler: Any) -> None:
    process = scheduler.processor.process

    def trip(batch: Any, result: Any) -> None:
        process(batch, result)
        if _holds(batch.forward, LEAKING_TOKEN):
            scheduler.kv.allocator.alloc_extend(0, 1, 0)

    scheduler.processor.process = trip


def main(argv: list[str]) -> int:
    build = rank_main.build_scheduler

    def build_tripping(*arguments: Any) -> Any:
        _trip_the_model()
        scheduler, info = build(*arguments)
        _trip_the_books(scheduler)
        return scheduler, info

    rank_main.build_scheduler = build_tripping  # type: ignore[assignment]
    return rank_main.main(argv)


if __name__ == "__main__":
    leave(main(sys.argv))
