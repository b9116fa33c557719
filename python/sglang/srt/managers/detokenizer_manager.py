"""Owns the texts of all running sequences: token outputs in, readable text out.

A component of the server process, driven by the tokenizer manager for every message of the scheduler. It must
not decide when a sequence ends; the scheduler says so and this cuts the text accordingly.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.environ import envs
from sglang.srt.managers.tokenizer_components.incremental_detokenizer import IncrementalDetokenizer
from sglang.srt.messages.errors import RequestRejected
from sglang.srt.messages.io_struct import TokenOutput
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.tokenizer.tokenizer import Tokenizer


class DetokenizerManager:
    """One incremental detokenizer per sequence in flight. Without a tokenizer every text is empty."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._states: dict[str, IncrementalDetokenizer] = {}

    def __len__(self) -> int:
        return len(self._states)

    def check_room(self, count: int) -> None:
        """Refuse (503) so many sequences more, where they would go over the limit."""
        limit = envs.SGLANG_DETOKENIZER_MAX_STATES.get()
        if len(self._states) + count > limit:
            raise RequestRejected(
                f"the server keeps at most {limit} sequences in flight (SGLANG_DETOKENIZER_MAX_STATES); "
                "try again later",
                status_code=503,
                err_type="ServiceUnavailableError",
            )

    def register(self, rid: str, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Begin the text of a sequence that is about to be sent."""
        if self._tokenizer is not None:
            self._states[rid] = IncrementalDetokenizer(
                self._tokenizer,
                prompt_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                stop=params.stop,
                no_stop_trim=params.no_stop_trim,
            )

    def drop(self, rid: str) -> None:
        """Forget a sequence; unknown ones are fine."""
        self._states.pop(rid, None)

    def process(self, output: TokenOutput) -> str:
        """The whole text of this sequence as far as it may be shown."""
        state = self._states.get(output.rid)
        if state is None:
            return ""
        reason = output.finish_reason
        if reason is None:
            state.append(output.new_ids)
        else:
            state.finish(output.new_ids, matched=reason.matched)
        return state.text

    def token_text(self, token_id: int) -> str | None:
        """One token as it reads in the middle of a text, special ones included (texts of logprob entries)."""
        return None if self._tokenizer is None else self._tokenizer.token_text(token_id)
