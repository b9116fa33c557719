"""A real rank that fails in the middle of a step: world rank 1 raises when a batch holds a token of
`FAULTY_TOKEN`.

For `rank_module=`: everything else is `entrypoints/rank_main.py`. It must not change a step that goes well.
"""

from __future__ import annotations

import sys
from typing import Any

from sglang.srt.entrypoints import rank_main
from sglang.srt.entrypoints.rank_life import leave
from sglang.srt.runtime_context import get_parallel

FAULTY_RANK = "sglang.test.faulty_rank"
#: The id that trips the rank.
FAULTY_TOKEN = 13


def _trip_the_model() -> None:
    # Late: the rank must stay free of torch until it has read its configuration.
    from sglang.srt.model_executor.model_runner import ModelRunner

    forward = ModelRunner.forward

    def trip(self: ModelRunner, batch: Any) -> Any:
        if get_parallel().launch_world_rank == 1 and FAULTY_TOKEN in batch.input_ids.tolist():
            raise RuntimeError("this rank was told to fail in its step")
        return forward(self, batch)

    ModelRunner.forward = trip  # type: ignore[method-assign]


def main(argv: list[str]) -> int:
    build = rank_main.build_scheduler

    def build_tripping(*arguments: Any) -> Any:
        _trip_the_model()
        return build(*arguments)

    rank_main.build_scheduler = build_tripping  # type: ignore[assignment]
    return rank_main.main(argv)


if __name__ == "__main__":
    leave(main(sys.argv))
