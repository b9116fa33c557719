"""Owns the log of `--log-requests`: a `Receive: obj=...` and a `Finish: obj=...` line for each request.

Used by the tokenizer manager. It must not see headers or keys. A user's text cannot break a line: it is
written as JSON.
"""

from __future__ import annotations

import json
import logging

import msgspec

from sglang.srt.managers.tokenizer_components.state import CallState, SampleState
from sglang.srt.messages.generate_input import GenerateReqInput

logger = logging.getLogger(__name__)

#: Levels: 0 identity and counts, 1 also parameters, 2 also texts cut to this length, 3 whole texts.
_PARAMETERS, _CUT_TEXTS, _WHOLE_TEXTS = 1, 2, 3
_CUT = 2048


class RequestLogger:
    """Writes nothing unless it is switched on; a request with `no_logs` is left out."""

    def __init__(self, *, enabled: bool, level: int, as_json: bool) -> None:
        self._enabled = enabled
        self._level = level
        self._as_json = as_json

    def received(self, obj: GenerateReqInput) -> None:
        if not self._enabled or obj.no_logs:
            return
        fields: dict[str, object] = {"rid": obj.rid, "stream": obj.stream}
        if self._level >= _PARAMETERS:
            fields["sampling_params"] = obj.sampling_params
            fields["return_logprob"] = obj.return_logprob
        if self._level >= _CUT_TEXTS:
            fields |= {"text": self._cut(obj.text), "input_ids": self._cut(obj.input_ids)}
        self._write("Receive", {"obj": fields})

    def finished(self, obj: GenerateReqInput, call: CallState) -> None:
        if not self._enabled or obj.no_logs:
            return
        self._write(
            "Finish", {"obj": {"rid": obj.rid}, "out": [self._outcome(sample) for sample in call.samples]}
        )

    def _outcome(self, sample: SampleState) -> dict[str, object]:
        reason = sample.finish_reason
        fields: dict[str, object] = {
            "id": sample.rid,
            "finish_reason": None if reason is None else reason.to_json(),
            "prompt_tokens": sample.prompt_tokens,
            "completion_tokens": sample.completion_tokens,
            "cached_tokens": sample.cached_tokens,
        }
        if sample.finished_at is not None:
            fields["e2e_latency"] = round(sample.finished_at - sample.created, 4)
        if self._level >= _CUT_TEXTS:
            fields |= {"text": self._cut(sample.text), "output_ids": self._cut(sample.output_ids)}
        return fields

    def _cut(self, value: object) -> object:
        if self._level < _WHOLE_TEXTS and isinstance(value, str | list):
            return value[:_CUT]
        return value

    def _write(self, event: str, fields: dict[str, object]) -> None:
        if self._as_json:
            logger.info("%s", msgspec.json.encode({"event": event.lower(), **fields}).decode())
            return
        parts = ", ".join(
            f"{name}={json.dumps(value, ensure_ascii=False, default=str)}" for name, value in fields.items()
        )
        logger.info("%s: %s", event, parts)
