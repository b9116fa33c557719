"""The rows of the table: what each asks of a side, and the figure that it makes of the answers.

Owns prompts, row names and the arithmetic from times to figures. Read by the turns and by the table. It must
not know any side. Every turn makes fresh prompts, so that no prefix cache helps unless the row is about one.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from peers.side import Answer, Label, Prompt, Side

#: Words that most byte-pair vocabularies hold as one token each, with a space before them.
_WORDS = """
time people year way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work number night point home water
room mother area money story fact month lot right study book eye job word business issue side kind head
house service friend father power hour game line end member law car city name president team minute idea
body information back parent face others level office door health person art war history party result
change morning reason research girl guy moment air teacher force education
"""


DECODE_TOKENS = 64
SERVED_PROMPT, SERVED_TOKENS = 256, 64
SHARED_PROMPT, OWN_PROMPT, SHARED_TOKENS, SHARED_REQUESTS = 1024, 32, 32, 16
ECHO_WORDS, ECHO_REPEATS, ECHO_TOKENS = 40, 5, 128


@dataclass(frozen=True)
class Sample:
    """One turn of one side in one row. A turn that came back short has a `fault` and no valid figure."""

    value: float
    more: dict[str, float] = field(default_factory=dict)
    fault: str = ""


Encode = Callable[[str], list[int]]


class Prompts:
    """Random sentences of an exact number of tokens; the same `seed` gives every side the same ones."""

    def __init__(self, encode: Encode) -> None:
        self.pieces = [(word, ids[0]) for word in _WORDS.split() if len(ids := encode(" " + word)) == 1]
        if len(self.pieces) < 32:
            raise ValueError(
                f"the tokenizer has only {len(self.pieces)} common words as one token; the rows need 32 to "
                "make prompts of an exact length"
            )

    def make(self, tokens: int, draw: random.Random) -> Prompt:
        chosen = draw.choices(self.pieces, k=tokens)
        return Prompt(tuple(token for _, token in chosen), "".join(" " + word for word, _ in chosen))


def joined(*parts: Prompt) -> Prompt:
    return Prompt(tuple(token for part in parts for token in part.ids), "".join(part.text for part in parts))


@dataclass(frozen=True)
class Row:
    """One line of the table, or as many as it has `names`: `measure` makes a sample of each in one turn."""

    names: tuple[str, ...]
    unit: str
    at_once: int
    is_quick: bool
    measure: Callable[[Side, Prompts, random.Random], list[Sample]]
    is_speculative: bool = False

    def admits(self, label: Label) -> bool:
        return self.at_once <= label.at_most and (self.is_speculative or not label.speculates)


def fault_of(answers: Sequence[Answer], new_tokens: int) -> str:
    short = [answer.tokens for answer in answers if answer.tokens != new_tokens]
    return f"{len(short)} of {len(answers)} answers had {short[0]}, not {new_tokens} tokens" if short else ""


def decode(context: int, *, is_quick: bool) -> Row:
    """Tokens a second between the first and the last token of one request."""

    def measure(side: Side, prompts: Prompts, draw: random.Random) -> list[Sample]:
        answers = side.answer([prompts.make(context, draw)], DECODE_TOKENS, 1)
        return [_rate_of_one(answers, DECODE_TOKENS)]

    return Row((f"decode, context {context}",), "tok/s", 1, is_quick, measure)


def _rate_of_one(answers: list[Answer], new_tokens: int) -> Sample:
    fault = fault_of(answers, new_tokens)
    seconds = answers[0].time_per_token
    return Sample(1 / seconds if seconds > 0 else 0.0, fault=fault or ("" if seconds > 0 else "no stream"))


def prefill(tokens: int, *, is_quick: bool) -> Row:
    """Prompt tokens over the time to the first token."""

    def measure(side: Side, prompts: Prompts, draw: random.Random) -> list[Sample]:
        answers = side.answer([prompts.make(tokens, draw)], 1, 1)
        return [Sample(tokens / answers[0].time_to_first, fault=fault_of(answers, 1))]

    return Row((f"prefill {tokens}",), "tok/s", 1, is_quick, measure)


def burst_sample(answers: list[Answer], new_tokens: int) -> Sample:
    """Output tokens over the time of the whole burst, with medians of the times of a request."""
    begin, end = min(answer.sent for answer in answers), max(answer.last for answer in answers)
    return Sample(
        sum(answer.tokens for answer in answers) / (end - begin),
        {
            "TTFT ms": 1e3 * statistics.median(answer.time_to_first for answer in answers),
            "TPOT ms": 1e3 * statistics.median(answer.time_per_token for answer in answers),
        },
        fault_of(answers, new_tokens),
    )


def served(at_once: int, requests: int, *, is_quick: bool) -> Row:
    def measure(side: Side, prompts: Prompts, draw: random.Random) -> list[Sample]:
        burst = [prompts.make(SERVED_PROMPT, draw) for _ in range(requests)]
        return [burst_sample(side.answer(burst, SERVED_TOKENS, at_once), SERVED_TOKENS)]

    return Row((f"served, {at_once} at once",), "output tok/s", at_once, is_quick, measure)


def shared_prefix() -> Row:
    """Sixteen requests at once that begin alike: first with a beginning nobody has seen, then once more."""

    def measure(side: Side, prompts: Prompts, draw: random.Random) -> list[Sample]:
        beginning = prompts.make(SHARED_PROMPT, draw)
        samples = []
        for _ in ("cold", "warm"):
            burst = [joined(beginning, prompts.make(OWN_PROMPT, draw)) for _ in range(SHARED_REQUESTS)]
            answers = side.answer(burst, SHARED_TOKENS, SHARED_REQUESTS)
            samples.append(burst_sample(answers, SHARED_TOKENS))
        return samples

    names = ("shared 1,024 tokens, cold", "shared 1,024 tokens, warm")
    return Row(names, "output tok/s", SHARED_REQUESTS, False, measure)


def repeated_text() -> Row:
    """Decoding behind a text that repeats itself, the best case of prompt lookup."""

    def measure(side: Side, prompts: Prompts, draw: random.Random) -> list[Sample]:
        text = joined(*[prompts.make(ECHO_WORDS, draw)] * ECHO_REPEATS)
        return [_rate_of_one(side.answer([text], ECHO_TOKENS, 1), ECHO_TOKENS)]

    return Row(("repeated text",), "tok/s", 1, True, measure, is_speculative=True)


def rows(*, quick: bool) -> list[Row]:
    """All rows, the quick ones alone, with fewer requests, if `quick`."""
    everything = [
        decode(128, is_quick=True),
        decode(1024, is_quick=True),
        prefill(512, is_quick=True),
        served(1, 2 if quick else 8, is_quick=True),
        served(4, 8 if quick else 16, is_quick=True),
        served(16, 16 if quick else 32, is_quick=True),
        repeated_text(),
        prefill(2048, is_quick=False),
        shared_prefix(),
    ]
    return [row for row in everything if row.is_quick or not quick]
