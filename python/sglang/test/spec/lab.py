"""Owns the tiny model that drafts are tried on: what it answers without one, and schedulers with each draft.

Read by tests of speculative decoding on one rank; a test file makes one and shares it. It must not compare
anything.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sglang.srt.managers.scheduler_components.stop_matcher import StopTokenizer
from sglang.srt.messages.io_struct import TokenizedGenerateReqInput
from sglang.test.fakes.fake_channel import Answer
from sglang.test.spec.cells import PROMPTS, SITUATIONS, TRUTH_LENGTH, Cell, ask, shape_fields
from sglang.test.spec.drafts import DraftShelf
from sglang.test.spec.stage import Stage, tiny_stage
from sglang.test.tiny_models import write_tiny_model

_POOL = {"max_total_tokens": 512, "max_running_requests": 8}


def write_target(folder: pathlib.Path, **fields: Any) -> pathlib.Path:
    """The model of all labs, with these fields of `write_tiny_model` beside its own."""
    return write_tiny_model(folder, num_layers=4, seed=5, **fields)


def in_waves(stage: Stage, *waves: Sequence[TokenizedGenerateReqInput]) -> dict[str, Answer]:
    """Send some requests, and when all of them have ended the next ones; all answers."""
    found: dict[str, Answer] = {}
    for wave in waves:
        found = stage.finish(*wave)
    return found


class SpecLab:
    """A target, its drafts, and its greedy answers to all prompts (`truth`), by name."""

    def __init__(self, folder: pathlib.Path, *, tokenizer: StopTokenizer | None = None) -> None:
        self._tokenizer = tokenizer
        self.target = write_target(folder / "target")
        with self.stage(disable_radix_cache=True, max_total_tokens=1024) as stage:
            self.truth = stage.finish(*(ask(name, TRUTH_LENGTH, logprob_start_len=0) for name in PROMPTS))
        self.texts = {name: answer.ids for name, answer in self.truth.items()}
        self.drafts = DraftShelf(folder, self.target, PROMPTS, self.texts)
        self._plain: dict[str, dict[str, Answer]] = {}

    def plain(self, page_size: int, situation: str) -> dict[str, Answer]:
        """What happens in this situation without a draft; played once."""
        fields = {**SITUATIONS[situation].fields, "page_size": page_size}
        return self._once(f"{situation} {page_size}", SITUATIONS[situation].play, fields)

    def without_draft(self, *waves: Sequence[TokenizedGenerateReqInput], **fields: Any) -> dict[str, Answer]:
        """What `in_waves` gives without a draft; the same is run once."""
        return self._once(f"{waves} {fields}", lambda stage: in_waves(stage, *waves), fields)

    def _once(
        self, key: str, play: Callable[[Stage], dict[str, Answer]], fields: Mapping[str, Any]
    ) -> dict[str, Answer]:
        if key not in self._plain:
            with self.stage(**fields) as stage:
                self._plain[key] = play(stage)
                stage.check_empty()
        return self._plain[key]

    @contextlib.contextmanager
    def stage(self, **fields: Any) -> Iterator[Stage]:
        """A scheduler with these flags, over the target unless they name another model."""
        flags = {"model_path": str(self.target), **_POOL, **fields}
        with tiny_stage(tokenizer=self._tokenizer, **flags) as stage:
            yield stage

    @contextlib.contextmanager
    def drafted(
        self,
        algorithm: str,
        draft: str,
        shape: str,
        *,
        texts: Mapping[str, Sequence[int]] | None = None,
        **fields: Any,
    ) -> Iterator[Stage]:
        """A scheduler with this draft and these flags; `texts` by rid are what an oracle knows."""
        flags = self.drafts.fields(algorithm, draft) | shape_fields(algorithm, shape) | fields
        with self.stage(**flags) as stage:
            self.drafts.prepare(stage, algorithm, draft, self.texts if texts is None else texts)
            yield stage

    @contextlib.contextmanager
    def cell(self, cell: Cell) -> Iterator[Stage]:
        """A scheduler with the draft and the flags of a cell."""
        fields = {**SITUATIONS[cell.situation].fields, "page_size": cell.page_size}
        with self.drafted(cell.algorithm, cell.draft, cell.shape, **fields) as stage:
            yield stage
