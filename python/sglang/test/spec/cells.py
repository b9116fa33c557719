"""Owns the product of what a draft must not change: the cells, their flags, and what happens in each.

Read by the tests of speculative decoding on one rank. A situation is a list of requests and of the steps
between them, the same with and without a draft. It must not run anything by itself, nor know how a draft is
made.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.messages.io_struct import AbortReq, TokenizedGenerateReqInput, TokenLogprob
from sglang.test.fakes.fake_channel import Answer
from sglang.test.fakes.scheduler_driver import make_request
from sglang.test.spec.stage import Stage

ALGORITHMS = ("EAGLE", "EAGLE3", "STANDALONE", "NGRAM")
DRAFTS = ("trained", "oracle", "random")
SHAPES = ("chain", "tree")
PAGE_SIZES = (1, 16)

#: Log-probabilities with and without a draft lie at most so far apart.
TOLERANCE = 1e-4
#: A step whose best tokens are closer than this could go either way.
MARGIN = 1e-4
VOCAB_SIZE = 512

_CHAIN = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
#: All nodes of three levels, so that every level has a path on which an oracle can be right.
_TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 11}
_NGRAM_CHAIN = {"speculative_num_draft_tokens": 4, "speculative_ngram_max_bfs_breadth": 1}
_NGRAM_TREE = {"speculative_num_draft_tokens": 8, "speculative_ngram_max_bfs_breadth": 4}


@dataclass(frozen=True)
class Cell:
    """One point of the product."""

    algorithm: str
    draft: str
    shape: str
    page_size: int
    situation: str

    @property
    def id(self) -> str:
        return f"{self.algorithm}-{self.draft}-{self.shape}-page{self.page_size}-{self.situation}"

    @property
    def depth(self) -> int:
        """The most drafts of a round that can be right (S)."""
        return 7 if (self.algorithm, self.shape) == ("NGRAM", "tree") else 3


def all_cells() -> list[Cell]:
    """Every combination, in a fixed order."""
    return [Cell(*point) for point in itertools.product(ALGORITHMS, DRAFTS, SHAPES, PAGE_SIZES, SITUATIONS)]


def shape_fields(algorithm: str, shape: str) -> dict[str, Any]:
    """The flags of a chain of 3 drafts, or of a tree."""
    if algorithm == "NGRAM":
        return _NGRAM_TREE if shape == "tree" else _NGRAM_CHAIN
    return _TREE if shape == "tree" else _CHAIN


def _prompts() -> dict[str, list[int]]:
    rng = random.Random(10)
    lengths = {"a": 40, "d": 45, "e": 20, "f": 21, "g": 22, "h": 37}
    found = {name: [rng.randrange(5, VOCAB_SIZE) for _ in range(count)] for name, count in lengths.items()}
    # b shares most of a; the whole of c lies in a, so that all of it but its last token may be cached.
    found["b"] = found["a"][:33] + found["e"][:7]
    found["c"] = found["a"][:33]
    found["long"] = [rng.randrange(5, VOCAB_SIZE) for _ in range(70)]
    return found


#: The prompts of all situations, by the name of the request.
PROMPTS = _prompts()
#: How far the texts behind the prompts are known: further than any situation goes, by more than a round.
TRUTH_LENGTH = 36


def ask(rid: str, max_new_tokens: int = 16, **fields: Any) -> TokenizedGenerateReqInput:
    """A greedy request with all kinds of log-probabilities.

    Its prompt is the one named by `rid`, up to a slash.
    """
    defaults = {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [7, 300]}
    prompt = PROMPTS[rid.partition("/")[0]]
    return make_request(rid, prompt, max_new_tokens, **{"ignore_eos": True, **defaults, **fields})


@dataclass(frozen=True)
class Situation:
    """What happens in a cell.

    `fields` are flags, the same with and without a draft. `play` sends and steps; `check` says what must have
    happened for the situation to be the one it is named after.
    """

    play: Callable[[Stage], dict[str, Answer]]
    check: Callable[[Stage, dict[str, Answer]], bool]
    fields: dict[str, Any]


def _cache_hit(stage: Stage) -> dict[str, Answer]:
    stage.finish(ask("a", logprob_start_len=0))
    stops: dict[str, Any] = {"ignore_eos": False, "stop_token_ids": list(range(100, 140))}
    return stage.finish(ask("b", logprob_start_len=33, **stops), ask("c"))


def _chunked_prompt(stage: Stage) -> dict[str, Answer]:
    return stage.finish(ask("d", logprob_start_len=0), ask("h"))


def _retracted(stage: Stage) -> dict[str, Answer]:
    return stage.finish(ask("e", 18, logprob_start_len=0), ask("f", 18), ask("g", 18, logprob_start_len=5))


def _neighbour_aborted(stage: Stage) -> dict[str, Answer]:
    stage.send(ask("h", 20), ask("e", 20), ask("f", 20, logprob_start_len=0))
    stage.step(2)
    return stage.finish(AbortReq(rid="e"))


def _joined_midway(stage: Stage) -> dict[str, Answer]:
    stage.send(ask("d", 20), ask("f", 20, logprob_start_len=0))
    stage.step(2)
    stops: dict[str, Any] = {"ignore_eos": False, "stop_token_ids": list(range(300, 340))}
    return stage.finish(ask("g", logprob_start_len=0, **stops), ask("b", 9))


SITUATIONS: dict[str, Situation] = {
    "cache hit": Situation(
        _cache_hit, lambda _, answers: min(answers[name].cached_tokens for name in "bc") >= 32, {}
    ),
    "chunked prompt": Situation(_chunked_prompt, lambda *_: True, {"chunked_prefill_size": 16}),
    "retracted": Situation(
        _retracted,
        lambda stage, _: stage.scheduler.load.num_retractions > 0,
        {"max_total_tokens": 80, "schedule_conservativeness": 0.0},
    ),
    "neighbour aborted": Situation(_neighbour_aborted, lambda _, answers: 0 < len(answers["e"].ids) < 20, {}),
    "joined midway": Situation(_joined_midway, lambda *_: True, {}),
}


def differences(plain: dict[str, Answer], drafted: dict[str, Answer]) -> Iterator[str]:
    """What of the answers a draft has changed, a sentence each; none if it is right.

    A request that was aborted ends where it stood, so only what both got of it is compared.
    """
    if plain.keys() != drafted.keys():
        yield f"answered were {sorted(drafted)}, without a draft {sorted(plain)}"
        return
    for name, one in plain.items():
        other, shared = drafted[name], None
        if one.finish_reason is not None and one.finish_reason.type == "abort":
            shared = min(len(one.ids), len(other.ids))
        else:
            for what in ("finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens"):
                if getattr(one, what) != getattr(other, what):
                    yield f"{name}: {what} {getattr(other, what)}, without a draft {getattr(one, what)}"
        if one.ids[:shared] != other.ids[:shared]:
            yield f"{name}: ids {other.ids}, without a draft {one.ids}"
        output = one.output_logprobs[:shared], other.output_logprobs[:shared]
        yield from (f"{name} output: {it}" for it in _logprob_differences(*output))
        prompt = one.input_logprobs or [], other.input_logprobs or []
        yield from (f"{name} prompt: {it}" for it in _logprob_differences(*prompt))


def _logprob_differences(plain: Sequence[TokenLogprob], drafted: Sequence[TokenLogprob]) -> Iterator[str]:
    if len(plain) != len(drafted):
        yield f"{len(drafted)} entries, without a draft {len(plain)}"
        return
    for place, (one, other) in enumerate(zip(plain, drafted, strict=True)):
        mine, theirs = _numbers(one), _numbers(other)
        if [token_id for _, token_id in mine] != [token_id for _, token_id in theirs]:
            yield f"entry {place} is about {theirs}, without a draft {mine}"
        elif not all(
            math.isclose(a, b, abs_tol=TOLERANCE, rel_tol=0) for (a, _), (b, _) in zip(mine, theirs)
        ):
            yield f"entry {place} says {theirs}, without a draft {mine}"


def _numbers(entry: TokenLogprob) -> list[tuple[float, int]]:
    """Every value of an entry with its token; the first prompt token has none, which reads 1."""
    own = (1.0 if entry.logprob is None else entry.logprob, entry.token_id)
    return [own, *(entry.top or []), *(entry.chosen or [])]


def close_calls(answers: dict[str, Answer]) -> int:
    """How many entries name alternatives that rounding could put in another order."""
    entries = [it for one in answers.values() for it in (*one.output_logprobs, *(one.input_logprobs or []))]
    return sum(
        any(better - worse < MARGIN for (better, _), (worse, _) in itertools.pairwise(entry.top or []))
        for entry in entries
    )
