"""Owns how far one choice of an answer has come, and what each output of the engine adds to it.

Read by both OpenAI routes; a whole answer is one output in which everything is new, so it shares every rule
with a stream. It must not write chunks and must not know which dialect asks.
"""

from __future__ import annotations

import msgspec

from sglang.srt.entrypoints.openai.logprobs import TextOffsets, TokenLogprobs, read_native
from sglang.srt.messages.errors import RequestRejected
from sglang.srt.messages.generate_output import MetaInfo, NativeOutput


class ChoiceUpdate(msgspec.Struct, kw_only=True):
    """What one native output adds to a choice. `finish_reason` and `matched_stop` are None until the end."""

    is_first: bool
    text: str
    token_ids: list[int]
    prompt_token_ids: list[int] | None
    prompt_logprobs: list[TokenLogprobs]
    logprobs: list[TokenLogprobs]
    finish_reason: object = None
    matched_stop: object = None

    @property
    def is_empty(self) -> bool:
        """Nothing that a client would see: the text is held back and no token is reported."""
        return not (self.text or self.logprobs or self.prompt_logprobs)


class ChoiceProgress:
    """One choice. `take` gets each native output of it, in order; nothing follows the one that finishes."""

    def __init__(self, index: int, *, with_logprobs: bool = False) -> None:
        self.index = index
        self.finished = False
        #: That of the last output, for usage.
        self.meta: MetaInfo | None = None
        #: Where the tokens of a completion begin in its text, counted over all its outputs.
        self.offsets: TextOffsets | None = None
        self._with_logprobs = with_logprobs

    def take(self, output: NativeOutput) -> ChoiceUpdate:
        """The next native output; its text, ids and log-probabilities of the output hold what is new."""
        is_first, meta = self.meta is None, output["meta_info"]
        finish = meta["finish_reason"] or {}
        self.meta = meta
        self.finished = bool(finish)
        return ChoiceUpdate(
            is_first=is_first,
            text=output["text"],
            token_ids=output["output_ids"],
            prompt_token_ids=output.get("prompt_token_ids") if is_first else None,
            prompt_logprobs=read_native(meta, "input") if self._with_logprobs and is_first else [],
            logprobs=read_native(meta, "output") if self._with_logprobs else [],
            finish_reason=finish.get("type"),
            matched_stop=finish.get("matched"),
        )


def raise_if_failed(output: NativeOutput) -> None:
    """An abort that carries a status is an error; an abort asked for by the user is an ordinary end."""
    finish = output["meta_info"]["finish_reason"] or {}
    status = finish.get("status_code") if finish.get("type") == "abort" else None
    if isinstance(status, int):
        kind = finish.get("err_type") or ("BadRequestError" if status < 500 else "InternalServerError")
        raise RequestRejected(
            str(finish.get("message") or "the request was aborted"), status, None, str(kind)
        )
