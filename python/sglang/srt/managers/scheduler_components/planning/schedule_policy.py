"""Owns the order of the waiting queue and the estimates behind admission: prefill budget, expected growth.

Read by the planners. It must not look at a clock or at hash order: the same requests always give the same
plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sglang.srt.batch.req import Req
from sglang.srt.environ import envs
from sglang.srt.mem_cache.base_prefix_cache import common_prefix_length

#: A longer queue is served first come, first served: matching every prompt each step would cost more than
#: it saves.
LPM_MAX_QUEUE = 128
#: A request that has seen this many later ones start goes first, whatever the policy.
PASSED_OVER_LIMIT = 64
#: A common prefix of fewer new tokens is computed twice instead of waited for.
SHARE_MIN_TOKENS = 16
#: A request waits for at most this many other requests to compute a prefix it shares.
DEFERRALS_LIMIT = 8
#: Once so many requests wait for others in one step, those behind them are looked at in a later one.
DEFERRED_PER_STEP = 64


def queue_order(
    waiting: deque[Req], policy: str, matched_length: Callable[[Req], int], num_started_ever: int
) -> Sequence[Req]:
    """The waiting requests in the order in which they are offered room.

    `fcfs` keeps the queue's own order (retracted requests stand at its head). `lpm` puts the longest cached
    prefix first, but behind retracted requests and those that were passed over too often, so that nobody
    starves.
    """
    if policy == "fcfs" or len(waiting) > LPM_MAX_QUEUE:
        return waiting
    queue = list(waiting)

    def key(place: int) -> tuple[bool, int, int]:
        req = queue[place]
        urgent = req.num_retractions > 0 or num_started_ever - req.passed_over_from > PASSED_OVER_LIMIT
        return (not urgent, 0 if urgent else -matched_length(req), place)

    return [queue[place] for place in sorted(range(len(queue)), key=key)]


def requeue(waiting: deque[Req], retracted: list[Req]) -> None:
    """Put requests that already ran at the head of the queue, the oldest first."""
    waiting.extendleft(sorted(retracted, key=lambda req: req.arrival, reverse=True))


def take_out(waiting: deque[Req], taken: set[int]) -> None:
    """Remove the requests with these arrival numbers; only the queue up to the last of them is walked."""
    kept: list[Req] = []
    missing = len(taken)
    while missing:
        req = waiting.popleft()
        if req.arrival in taken:
            missing -= 1
        else:
            kept.append(req)
    waiting.extendleft(reversed(kept))


def waits_for(req: Req, matched: int, leaders: Iterable[Req], page_size: int) -> Req | None:
    """The request among `leaders` (being computed now) that will soon have cached more of `req`'s prefix.

    Prompts are compared, not outputs; the share counts up to what `req` may reuse, in whole pages.
    """
    least = matched + max(SHARE_MIN_TOKENS, page_size)
    limit = req.reuse_limit
    if limit < least:
        return None
    prompt = req.prompt_ids
    for leader in leaders:
        theirs = leader.prompt_ids
        if leader.extra_key != req.extra_key or min(len(prompt), len(theirs)) < least:
            continue
        if prompt[least - 1] == theirs[least - 1] and common_prefix_length(prompt, theirs) >= least:
            return leader
    return None


def count_deferral(req: Req, leader: Req) -> bool:
    """Note that `req` waits for `leader`; False when it has waited for enough others already."""
    if req.deferred_for != leader.rid:
        if req.deferrals >= DEFERRALS_LIMIT:
            return False
        req.deferrals += 1
        req.deferred_for = leader.rid
    return True


@dataclass(slots=True)
class PrefillBudget:
    """What one prefill batch may still take."""

    tokens: int
    requests: int
    cuts_prompts: bool

    def take(self, wanted: int, *, first: bool) -> int:
        """How many of `wanted` tokens fit now; without chunking all or none, and the first always fits."""
        if self.requests <= 0:
            return 0
        if self.cuts_prompts:
            return min(wanted, self.tokens)
        return wanted if first or wanted <= self.tokens else 0

    def spend(self, tokens: int) -> None:
        self.tokens -= tokens
        self.requests -= 1


class NewTokenRatio:
    """The share of its allowed output that a request is expected to produce.

    It starts at a guess, falls with every decode step that found room, and jumps up after a retraction.
    """

    def __init__(self, conservativeness: float) -> None:
        self._first = min(envs.SGLANG_INIT_NEW_TOKEN_RATIO.get() * conservativeness, 1.0)
        self._least = min(self._first * envs.SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR.get(), 1.0)
        self._fall = (self._first - self._least) / max(envs.SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS.get(), 1)
        self._clip = envs.SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION.get()
        self._steps_kept_free = envs.SGLANG_RETRACT_DECODE_STEPS.get()
        self.value = self._first

    def settings(self) -> dict[str, float]:
        """Every number that decides here, for ranks that must decide alike."""
        return {
            "new token ratio": self._first,
            "least new token ratio": self._least,
            "new token ratio fall": self._fall,
            "max new tokens estimation": self._clip,
            "retract decode steps": self._steps_kept_free,
        }

    def reset(self) -> None:
        """Nothing runs: what was learned from the last requests is forgotten."""
        self.value = self._first

    def decoded(self) -> None:
        """A decode step found room for every request."""
        self.value = max(self.value - self._fall, self._least)

    def retracted(self, running: list[Req]) -> None:
        """Requests were retracted; what the others have produced so far says how much is really used."""
        produced = sum(len(req.output_ids) for req in running)
        allowed = sum(req.max_new_tokens for req in running)
        self.value = min((produced + self._steps_kept_free * len(running)) / max(allowed, 1), 1.0)

    def expected(self, req: Req) -> int:
        """Tokens that `req` is expected to add from now on."""
        return int(min(req.remaining_new_tokens, self._clip) * self.value)

    def steps_kept_free(self, req: Req) -> int:
        """After a retraction every request that stays keeps room for so many more tokens."""
        return min(req.remaining_new_tokens, self._steps_kept_free)
