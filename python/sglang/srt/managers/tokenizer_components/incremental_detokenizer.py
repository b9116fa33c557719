"""Owns the text of one running sequence: ids in, readable text out, piece by piece.

Used by the detokenizer manager, one object per sequence. It never shows half a character or a piece of a stop
string, and its joined pieces are what one decode of prompt and output gives behind the text of the prompt. It
must not know about requests or sockets.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence

from sglang.srt.tokenizer.id_reader import REPLACEMENT
from sglang.srt.tokenizer.tokenizer_like import TokenizerLike

#: A window of more ids than this moves on to a character border and keeps the last few as context.
_WINDOW = 24
_CONTEXT = 6


class IncrementalDetokenizer:
    """Text of one sequence after its prompt. `append` takes new ids, `text` is what may be shown by now.

    Only a window of the last ids is decoded again at each step. It begins at a character border and with ids
    whose text is known, the first time with the end of the prompt, so that the text that it adds is what the
    new ids add to everything before.
    """

    def __init__(
        self,
        tokenizer: TokenizerLike,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        stop: Sequence[str] = (),
        no_stop_trim: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._decode_flags = (skip_special_tokens, spaces_between_special_tokens)
        self._special = frozenset(tokenizer.all_special_ids) if skip_special_tokens else frozenset()
        # With the stop text kept there is nothing to hold back.
        self._stops = () if no_stop_trim else tuple(stop)
        self._keep_stop = no_stop_trim
        self._ids = tokenizer.context_of(prompt_ids, skip_special_tokens)
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""  # decoded and complete up to the last character, stop strings included
        self._shown = 0  # how much of it may be shown
        # The last positions in the ids at which no character is begun.
        self._borders: deque[int] = deque(maxlen=4 * _CONTEXT)
        self._window_start = 0
        # Characters of the window's decode that stand in _text or, before the output, in the prompt.
        self._window_shown = len(tokenizer.decode(self._ids, *self._decode_flags))

    @property
    def text(self) -> str:
        """What may be shown: complete characters, without anything that may become a stop string."""
        return self._text[: self._shown]

    def append(self, ids: Sequence[int]) -> None:
        """Take new ids of a sequence that goes on."""
        for token_id in ids:
            if token_id in self._special:
                continue  # it shows nothing, and a window of nothing else could not move on
            self._ids.append(token_id)
            self._bytes.decode(self._tokenizer.token_bytes(token_id))
            if not self._bytes.getstate()[0]:
                self._borders.append(len(self._ids))
        self._grow(final=False)
        self._shown = len(self._text) - self._held_back()

    def finish(self, ids: Sequence[int], *, matched: int | str | None = None) -> None:
        """Take the last ids. `matched` is the stop token or the stop string, which is cut from the text."""
        ids = list(ids)
        if isinstance(matched, int) and not self._keep_stop and ids and ids[-1] == matched:
            ids.pop()
        self._ids.extend(ids)
        self._grow(final=True)
        shown, self._shown = self._shown, len(self._text)
        if isinstance(matched, str):
            found = [at for stop in self._stops if (at := self._text.find(stop)) >= 0]
            if found:
                self._shown = max(shown, min(found))

    def _grow(self, *, final: bool) -> None:
        skip, spaces = self._decode_flags
        window = self._tokenizer.decode(self._ids[self._window_start :], skip, spaces)
        pending = len(self._bytes.getstate()[0])
        if pending and not final:
            # A begun character reads as one replacement mark or one for each byte, and is not shown yet.
            bare = window.rstrip(REPLACEMENT)
            window = window[: max(len(bare), len(window) - pending)]
        if len(window) > self._window_shown:
            self._text += window[self._window_shown :]
            self._window_shown = len(window)
        if not pending and len(self._ids) - self._window_start > _WINDOW:
            self._move_window()

    def _move_window(self) -> None:
        skip, spaces = self._decode_flags
        start = max((at for at in self._borders if at <= len(self._ids) - _CONTEXT), default=0)
        if start <= self._window_start:
            return
        context = self._tokenizer.decode(self._ids[start:], skip, spaces)
        # Some decoders read a whole run of byte tokens at once: then the window waits for the next border.
        if self._text.endswith(context):
            self._window_start = start
            self._window_shown = len(context)

    def _held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = 0
        for stop in self._stops:
            tail = self._text[-(len(stop) - 1) :] if len(stop) > 1 else ""
            at = tail.find(stop[0])
            while at >= 0 and len(tail) - at > longest:
                if stop.startswith(tail[at:]):
                    longest = len(tail) - at
                at = tail.find(stop[0], at + 1)
        return longest
