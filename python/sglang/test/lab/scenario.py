"""Owns the requests of every cell of the layout lab, in phases, for any number of replicas.

Read by `layout_lab`. A request has a name, and the same ids and seed wherever it runs, so that one run on one
rank is the reference of every layout. It must not know ranks, only replicas.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from sglang.srt.messages.io_struct import TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

#: Prompts longer than this are computed in chunks.
CHUNK = 24
#: Tokens of a replica's pool: the crowd does not fit, every request alone does.
POOL_TOKENS = 112
#: What the two requests of a solo have in common.
SHARED_PREFIX = 40
#: More than the crowd, also where four replicas share this number: the pool is to be the limit.
MAX_RUNNING = 32

_MIXED_LENGTHS = (1, 3, 5, 7, 13, 2, 9)
_MIXED_NEW = (5, 3, 7, 4, 6, 2, 5)
_SAMPLED = 2
_WITH_LOGPROBS = 4
_CROWD_LENGTHS = (11, 13, 15, 17, 19)
_CROWD_NEW = 24
#: Together the whole pool, at whose end no draft has room; and a request that has room all the time.
_FULL_LENGTH, _FULL_NEW = 97, POOL_TOKENS - 97
_BESIDE_LENGTH = 6
#: Requests that come one at a time, now to this replica, now to that one.
_TURNS, _TURN_LENGTHS, _TURN_NEW = 25, (1, 4, 9, 30), 3
_UNEVEN_LENGTHS = (4, 8, 3)
_FIRST_SEED = 11


@dataclass(frozen=True)
class Placed:
    """One request by its name and replica; a phase is a list of these."""

    name: str
    replica: int

    @property
    def rid(self) -> str:
        return f"{self.name}@{self.replica}"


class Scenario:
    """The requests of one vocabulary.

    mixed: odd lengths together, one drawn by temperature and seed, one with prompt logprobs, dealt out to the
    replicas. solo: one replica alone, the others idle: a prompt cut in pieces, then one that shares its
    prefix. full: a request that fills the pool of one replica to its last slot, beside a short one on the
    next replica. crowd: more than the pool holds on every replica, in another order on each. turn: one short
    request at a time; at last two on the first replica beside one on the last.
    """

    def __init__(self, vocab_size: int, *, seed: int = 0) -> None:
        self._draw = random.Random(seed)
        self._vocab_size = vocab_size
        self._templates: dict[str, TokenizedGenerateReqInput] = {}
        for place, (length, new) in enumerate(zip(_MIXED_LENGTHS, _MIXED_NEW, strict=True)):
            self._add(f"mixed{place}", self._ids(length), new)
        drawn = self._templates[f"mixed{_SAMPLED}"].sampling_params
        drawn.temperature, drawn.top_p = 0.9, 0.95
        self._ask_logprobs(f"mixed{_WITH_LOGPROBS}", start=0)
        prefix = self._ids(SHARED_PREFIX)
        self._add("long", prefix + self._ids(7), 4)
        self._ask_logprobs("long", start=3)
        self._add("again", prefix + self._ids(5), 3)
        for place, length in enumerate(_CROWD_LENGTHS):
            self._add(f"crowd{place}", self._ids(length), _CROWD_NEW)
        self._add("full", self._ids(_FULL_LENGTH), _FULL_NEW)
        self._add("beside", self._ids(_BESIDE_LENGTH), _FULL_NEW)
        for place in range(_TURNS):
            self._add(f"turn{place}", self._ids(_TURN_LENGTHS[place % len(_TURN_LENGTHS)]), _TURN_NEW)
        for place, length in enumerate(_UNEVEN_LENGTHS):
            self._add(f"uneven{place}", self._ids(length), _CROWD_NEW)

    @property
    def names(self) -> list[str]:
        return list(self._templates)

    @property
    def greedy_names(self) -> list[str]:
        return [name for name, request in self._templates.items() if self._is_greedy(request)]

    def phases(self, replicas: int, *, fills_pool: bool = False) -> list[list[Placed]]:
        """The phases of the proof; each runs until nothing is left, then the next one begins."""
        mixed = [Placed(f"mixed{i}", i % replicas) for i in range(len(_MIXED_LENGTHS))]
        solos = [[Placed(name, r)] for r in range(replicas) for name in ("long", "again")]
        full = [[Placed("full", r), Placed("beside", (r + 1) % replicas)] for r in range(replicas)]
        if replicas == 1:  # they would not fit together
            full = [[Placed("full", 0)], [Placed("beside", 0)]]
        count = len(_CROWD_LENGTHS)
        crowd = [Placed(f"crowd{(i + r) % count}", r) for r in range(replicas) for i in range(count)]
        return [mixed, *solos, *(full if fills_pool else []), crowd]

    def turns(self, replicas: int) -> list[list[Placed]]:
        """One request at a time, to one replica after another, and an uneven rest."""
        turns = [[Placed(f"turn{i}", r)] for i in range(_TURNS) for r in range(replicas)]
        last = replicas - 1
        return [*turns, [Placed("uneven0", 0), Placed("uneven1", 0), Placed("uneven2", last)]]

    def inbox(self, phase: Sequence[Placed], replica: int) -> list[TokenizedGenerateReqInput]:
        """What one replica gets of a phase."""
        return [self._request(placed) for placed in phase if placed.replica == replica]

    def seed_of(self, name: str) -> int:
        """Different in every request, so that a `SamplingState` shows whose it is."""
        return _FIRST_SEED + self.names.index(name)

    def _request(self, placed: Placed) -> TokenizedGenerateReqInput:
        template = self._templates[placed.name]
        fields = {name: getattr(template, name) for name in template.__struct_fields__}
        return TokenizedGenerateReqInput(**{**fields, "rid": placed.rid})

    def _add(self, name: str, ids: list[int], new: int) -> None:
        params = SamplingParams(
            max_new_tokens=new,
            temperature=0.0,
            ignore_eos=True,
            sampling_seed=_FIRST_SEED + len(self._templates),
        )
        self._templates[name] = TokenizedGenerateReqInput(rid=name, input_ids=ids, sampling_params=params)

    def _ask_logprobs(self, name: str, *, start: int) -> None:
        request = self._templates[name]
        request.return_logprob, request.logprob_start_len, request.top_logprobs_num = True, start, 3
        request.token_ids_logprob = [5, self._vocab_size - 1]  # the last one has padding beside it

    def _ids(self, length: int) -> list[int]:
        return [self._draw.randrange(3, self._vocab_size) for _ in range(length)]

    @staticmethod
    def _is_greedy(request: TokenizedGenerateReqInput) -> bool:
        return request.sampling_params.temperature == 0.0
