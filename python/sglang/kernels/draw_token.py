"""Owns the draw of one token from logits: which tokens are kept, and which of them random numbers pick.

Read by the sampler and the acceptance rules of drafts. It must not know requests: it takes tensors and
numbers. `draw_reference` is the definition, one row at a time; `draw` gives the same ids for many rows and
sorts only what it must.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from sglang.kernels.token_probs import id_bits, kept_weights

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
#: Tokens looked at first in a row with limits.
_CANDIDATES = 256
#: Steps of the bisection for the least probability that may matter, before what is above it is sorted.
_HALVINGS = 12
#: Far above what the order of a float64 sum can change, and too small to keep many tokens more.
_MARGIN = 1e-9
#: Rows worked on at once: float64 rows of a large vocabulary are big.
_ROWS_AT_ONCE = 32


Ids = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float64]
Hashes = npt.NDArray[np.uint64]
#: top_k, top_p and min_p of one row.
Limits = tuple[int, float, float]

#: The random numbers of one draw, each in [0, 1): a plain draw takes one for each bit of a token id.
Uniforms = Callable[[int], float]


class Purpose(enum.IntEnum):
    """What random numbers are used for: each purpose has a stream of its own.

    An accept coin that came from the stream of the proposals would prefer some proposals to others, and the
    result would not follow the target's distribution.
    """

    DRAW = 0
    PROPOSAL = 1
    ACCEPTANCE = 2
    REMAINDER = 3


def _mix(value: int) -> int:
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _mix_all(values: Hashes) -> Hashes:
    """`_mix` of every value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def uniforms(seed: int, position: int, purpose: Purpose = Purpose.DRAW) -> Uniforms:
    """The random numbers of place `position` in the stream of `seed`: a pure function of all of these."""
    start = _mix((seed + _GOLDEN) & _MASK)
    place = _mix((start + (position + 1) * _GOLDEN) & _MASK)
    if purpose is not Purpose.DRAW:
        place = _mix(place ^ _mix(purpose))
    return lambda number: (_mix((place + (number + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53


def uniform_rows(
    seeds: Sequence[int], positions: Sequence[int], purpose: Purpose, numbers: range
) -> torch.Tensor:
    """`uniforms(seeds[r], positions[r], purpose)(numbers[i])` at [r, i]: float64, on the CPU."""

    def multiples(factors: Iterable[int]) -> Hashes:
        """Arithmetic of arrays wraps around at 64 bits, as the mask of `uniforms` does."""
        return (np.fromiter(factors, dtype=np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)

    start = _mix_all(np.array([seed & _MASK for seed in seeds], dtype=np.uint64) + np.uint64(_GOLDEN))
    place = _mix_all(start + multiples(positions))
    if purpose is not Purpose.DRAW:
        place = _mix_all(place ^ np.uint64(_mix(purpose)))
    mixed = _mix_all(place[:, None] + multiples(numbers))
    return torch.from_numpy((mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def draw_reference(
    logits: torch.Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float, u: Uniforms
) -> int:
    """Draw from one row of logits [vocab].

    Tokens are ranked by probability, the lower id first where two are equal. The first of them are kept, as
    many as all three limits allow: `top_k` tokens (-1: all); the fewest tokens that together reach `top_p`;
    tokens of at least `min_p` times the highest probability. All three look at the probabilities of the whole
    vocabulary; the first token is always kept.

    Among the kept ids, the bits of the id are drawn one after another, the highest first: each by the
    probability of the ids that have it set among those that agree so far. Comparing one random number with
    the cumulated probabilities would do too, but rounding moves each of their thousands of borders a little,
    and one draw in some hundreds would change with the other requests of the batch; here only as many borders
    as an id has bits decide.
    """
    rows = kept_weights(logits[None], temperature=[temperature], top_k=[top_k], top_p=[top_p], min_p=[min_p])
    kept = rows[0]
    token = 0
    for bit in reversed(range(id_bits(len(kept)))):
        middle = token + (1 << bit)
        left, right = float(kept[token:middle].sum()), float(kept[middle : middle + (1 << bit)].sum())
        if right > 0 and u(bit) * (left + right) >= left:
            token = middle
    return token


def draw(
    logits: torch.Tensor,
    *,
    temperature: list[float],
    top_k: list[int],
    top_p: list[float],
    min_p: list[float],
    u: list[Uniforms],
) -> list[int]:
    """Draw from each row of logits [rows, vocab]; a row's result does not depend on the other rows."""
    ids: list[int] = []
    for start in range(0, logits.shape[0], _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        divisor = torch.tensor(temperature[part], dtype=torch.float64, device=logits.device)
        probs = torch.softmax(logits[part].double().div_(divisor[:, None]), dim=-1)
        ids += _draw_part(probs, top_k[part], top_p[part], min_p[part], u[part])
    return ids


def _draw_part(
    probs: torch.Tensor, top_k: list[int], top_p: list[float], min_p: list[float], u: list[Uniforms]
) -> list[int]:
    vocab = probs.shape[1]
    picked = [-1] * len(u)
    free = [i for i in range(len(u)) if not 0 < top_k[i] < vocab and top_p[i] >= 1.0 and min_p[i] <= 0.0]
    if free:
        rows = probs if len(free) == len(u) else probs[free]
        everything = range(vocab)
        for i, cumulated in zip(free, rows.cumsum(dim=-1).cpu().numpy(), strict=True):
            picked[i] = _pick(everything, cumulated, vocab, u[i])
    filtered = [i for i in range(len(u)) if picked[i] < 0]
    if filtered:
        rows = probs if len(filtered) == len(u) else probs[filtered]
        best = torch.topk(rows, _CANDIDATES, dim=-1) if vocab > _CANDIDATES else _ranked(rows)
        for at, i in enumerate(filtered):
            limits = (top_k[i], top_p[i], min_p[i])
            kept = _kept_of_first(best.values[at], best.indices[at], limits, vocab)
            values, ids = kept if kept is not None else _kept_of_row(rows[at], limits)
            by_id = ids.argsort()
            weights = values[by_id].cumsum(dim=-1).cpu().numpy()
            picked[i] = _pick(ids[by_id].cpu().numpy(), weights, vocab, u[i])
    return picked


def _ranked(probs: torch.Tensor) -> torch.return_types.sort:
    """All tokens, the most likely first, the lower id first where two are equal (which topk does not do)."""
    return torch.sort(probs, dim=-1, descending=True, stable=True)


def _count(values: torch.Tensor, limits: Limits) -> int:
    """How long the head of a ranking is; `values` are its first probabilities, descending."""
    top_k, top_p, min_p = limits
    keep = values >= min_p * values[0]
    if top_p < 1.0:
        keep &= values.cumsum(dim=-1) - values < top_p
    count = max(1, int(keep.sum()))
    return min(count, top_k) if top_k > 0 else count


def _kept_of_first(
    values: torch.Tensor, ids: torch.Tensor, limits: Limits, vocab: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The head of the ranking out of its first tokens; None when they do not show its end for certain."""
    count = _count(values, limits)
    if len(values) < vocab:
        # The end must lie before the last of them and not cut through tokens as likely as that one: of those,
        # more may follow with lower ids.
        if count >= len(values) or bool(values[count - 1] == values[-1]):
            return None
        # Equal tokens come in any order here: rank them by id before the cut.
        order = ids.argsort()
        order = order[values[order].argsort(descending=True, stable=True)]
        values, ids = values[order], ids[order]
    return values[:count], ids[:count]


def _kept_of_row(row: torch.Tensor, limits: Limits) -> tuple[torch.Tensor, torch.Tensor]:
    """The head of the ranking out of a whole row; sorts only what is likely enough to matter."""
    ids = (row >= _least(row, limits)).nonzero()[:, 0]
    ranked = _ranked(row[ids])
    count = _count(ranked.values, limits)
    return ranked.values[:count], ids[ranked.indices[:count]]


def _least(row: torch.Tensor, limits: Limits) -> float:
    """A probability that every kept token reaches, and about as high as that can be."""
    _, top_p, min_p = limits
    high = float(row.max())
    least = min_p * high
    if top_p + _MARGIN >= 1.0:
        return least
    # What lies below `low` weighs at most 1 - top_p - margin in all, so the rest reaches top_p.
    low = (1.0 - top_p - _MARGIN) / len(row)
    rest = row[row >= low]
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        if float(rest[rest >= middle].sum()) >= top_p + _MARGIN:
            low = middle
        else:
            high = middle
    return max(least, low)


def _pick(ids: Sequence[int] | Ids, cumulated: Weights, vocab: int, u: Uniforms) -> int:
    """Draw one of `ids` (ascending) bit by bit; `cumulated[i]` is the weight of `ids[: i + 1]`."""
    token, start, end = 0, 0, len(ids)
    before, upto = 0.0, float(cumulated[-1])
    for bit in reversed(range(id_bits(vocab))):
        middle = bisect_left(ids, token + (1 << bit), start, end)
        between = float(cumulated[middle - 1]) if middle else 0.0
        left, right = between - before, upto - between
        if right > 0 and u(bit) * (left + right) >= left:
            token, start, before = token + (1 << bit), middle, between
        else:
            end, upto = middle, between
    return token
