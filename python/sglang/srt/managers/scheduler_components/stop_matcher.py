"""Owns when a running request ends by itself: stop string, end id, length, or an impossible token.

Asked by the result processor after every drawn token. It must not release anything and must not cut text:
the detokenizer does that.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Protocol

from sglang.srt.batch.req import Req
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.messages.io_struct import FinishReason
from sglang.srt.sampling.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

#: Tokens decoded before those that a match can need, so that a decoder that treats its first token
#: specially cannot hide one.
EXTRA_CONTEXT_TOKENS = 4


class StopTokenizer(Protocol):
    """What is asked of a tokenizer here."""

    @property
    def eos_token_ids(self) -> Collection[int]: ...

    @property
    def all_special_ids(self) -> Collection[int]: ...

    def context_of(self, ids: list[int], skip_special_tokens: bool = True) -> list[int]: ...

    def decode(
        self, ids: list[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str: ...


class StopMatcher:
    """Checks in this order: token outside the vocabulary, stop string, EOS or stop id, length.

    A stop string that is a special token is looked for in the text and, since the text may skip such tokens,
    by its id. `min_new_tokens` is the sampler's business (it suppresses end ids); a stop string ends a
    request at any time.
    """

    def __init__(
        self,
        tokenizer: StopTokenizer | None,
        *,
        eos_token_ids: Iterable[int],
        vocab_size: int,
        context_len: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._vocab_size = vocab_size
        self._context_len = context_len
        self._special_ids = frozenset(tokenizer.all_special_ids) if tokenizer is not None else frozenset()

    @property
    def reads_text(self) -> bool:
        """False without a tokenizer: then nobody can ask for a stop string."""
        return self._tokenizer is not None

    def end_ids(self, params: SamplingParams) -> frozenset[int]:
        """The ids that end a request; none with `ignore_eos`, which switches the stop ids off too."""
        return frozenset() if params.ignore_eos else self._eos_token_ids.union(params.stop_token_ids)

    def check(self, req: Req) -> FinishReason | None:
        """Why `req` ends with the token that was just appended to its output; None while it goes on."""
        token_id = req.output_ids[-1]
        if not 0 <= token_id < self._vocab_size:
            return _failure(
                f"drawn token id {token_id} is outside the vocabulary (0 <= id < {self._vocab_size})"
            )
        if req.sampling.params.stop:
            try:
                matched = self._matched_stop_string(req)
            except Exception:
                # The tokens cannot be read: this request ends, and the others of its batch go on.
                logger.exception("no text could be made of the tokens of request %r", req.rid)
                return _failure("no stop string could be looked for in the tokens; the log says more")
            matched = matched or req.special_stops.get(token_id)
            if matched is not None:
                return FinishReason(type="stop", matched=matched)
        if token_id in req.sampling.end_ids:
            return FinishReason(type="stop", matched=token_id)
        if len(req.output_ids) >= req.max_new_tokens or req.seq_len >= self._context_len:
            return FinishReason(type="length", length=len(req.output_ids))
        return None

    def _matched_stop_string(self, req: Req) -> str | None:
        """The stop string that is complete first in the text, wherever its tokens begin and end.

        A token that shows text adds at least one byte, so as many tokens as the longest stop string has
        bytes hold every match that ends in the newest one.
        """
        tokenizer, params = self._tokenizer, req.sampling.params
        assert tokenizer is not None, "without a tokenizer a stop string is refused"
        skip = params.skip_special_tokens
        longest = max(len(text.encode()) for text in params.stop)
        tail = self._tail(req.output_ids, longest + EXTRA_CONTEXT_TOKENS, skip)
        if len(tail) < len(req.output_ids):
            text = _text(tokenizer, tail, params)
        else:
            # The first tokens are decoded behind the prompt, whose own text is not searched.
            if req.stop_context is None:
                req.stop_context = tokenizer.context_of(req.prompt_ids.tolist(), skip)
            before = _text(tokenizer, req.stop_context, params)
            text = _text(tokenizer, req.stop_context + tail, params)[len(before) :]
        best: tuple[int, int, str] | None = None
        for stop in params.stop:
            at = text.find(stop)
            if at >= 0 and (best is None or (at + len(stop), at) < best[:2]):
                best = (at + len(stop), at, stop)
        return best[2] if best is not None else None

    def _tail(self, ids: list[int], wanted: int, skip_special: bool) -> list[int]:
        """The shortest tail of `ids` with `wanted` tokens that show text."""
        if not skip_special:
            return ids[-wanted:]
        start = len(ids)
        while start > 0 and wanted > 0:
            start -= 1
            wanted -= ids[start] not in self._special_ids
        return ids[start:]


def _text(tokenizer: StopTokenizer, ids: list[int], params: SamplingParams) -> str:
    return tokenizer.decode(
        ids,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
    )


def _failure(message: str) -> FinishReason:
    return FinishReason(type="abort", message=message, status_code=500, err_type="InternalServerError")


def end_ids_of_model(tokenizer: StopTokenizer | None, model_config: ModelConfig) -> frozenset[int]:
    """Every id that ends a text according to the tokenizer or the model's config."""
    from_tokenizer = () if tokenizer is None else tokenizer.eos_token_ids
    return frozenset(from_tokenizer).union(model_config.eos_token_ids)
