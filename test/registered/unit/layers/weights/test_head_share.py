"""Which heads and rows a rank holds: worked examples, and what must hold for every width."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit-cpu")

import doctest
import sys

import pytest

from sglang.srt.layers.weights import head_share
from sglang.srt.layers.weights.head_share import AxisShare, HeadShare

# (query heads, kv heads, width) -> per rank: query range and room, kv range and room.
GOLDEN = {
    (9, 3, 2): [((0, 6, 6), (0, 2, 2)), ((6, 3, 6), (2, 1, 2))],
    (8, 2, 2): [((0, 4, 4), (0, 1, 1)), ((4, 4, 4), (1, 1, 1))],
    (8, 2, 3): [((0, 4, 4), (0, 1, 1)), ((4, 4, 4), (1, 1, 1)), ((8, 0, 4), (2, 0, 1))],
    (8, 2, 4): [
        ((0, 2, 2), (0, 1, 1)),
        ((2, 2, 2), (0, 1, 1)),
        ((4, 2, 2), (1, 1, 1)),
        ((6, 2, 2), (1, 1, 1)),
    ],
    (3, 1, 2): [((0, 2, 2), (0, 1, 1)), ((2, 1, 2), (0, 1, 1))],
    (5, 1, 4): [
        ((0, 2, 2), (0, 1, 1)),
        ((2, 2, 2), (0, 1, 1)),
        ((4, 1, 2), (0, 1, 1)),
        ((5, 0, 2), (0, 1, 1)),
    ],
    (5, 5, 4): [
        ((0, 2, 2), (0, 2, 2)),
        ((2, 2, 2), (2, 2, 2)),
        ((4, 1, 2), (4, 1, 2)),
        ((5, 0, 2), (5, 0, 2)),
    ],
}
SIZES = [(kv * group, kv, width) for kv in range(1, 10) for group in range(1, 6) for width in range(1, 17)]


@pytest.mark.parametrize("sizes", GOLDEN, ids=lambda sizes: "{}q-{}kv-over-{}".format(*sizes))
def test_the_worked_examples(sizes):
    q, kv, width = sizes
    shares = [HeadShare.of(q, kv, width, rank) for rank in range(width)]
    assert [
        ((s.q.start, s.q.length, s.q.room), (s.kv.start, s.kv.length, s.kv.room)) for s in shares
    ] == GOLDEN[sizes]


def test_the_examples_in_the_docstrings_run():
    assert doctest.testmod(head_share, raise_on_error=True).attempted >= 9
    assert "torch" not in vars(head_share)
    assert head_share.__name__ in sys.modules


def faults(shares: list[HeadShare]) -> list[str]:
    """Every rule of a split that these shares of all ranks break."""
    found = []
    one = shares[0]
    group = one.num_heads // one.num_kv_heads
    q_held = [head for s in shares for head in range(s.q.start, s.q.end)]
    if sorted(q_held) != list(range(one.num_heads)):
        found.append(f"query heads held: {q_held}")
    kv_held = [head for s in shares for head in range(s.kv.start, s.kv.end)]
    if sorted(kv_held) != sorted(list(range(one.num_kv_heads)) * one.replicas):
        found.append(f"kv heads held: {kv_held}")
    for rank, s in enumerate(shares):
        if (s.q.room, s.kv.room, s.replicas) != (one.q.room, one.kv.room, one.replicas):
            found.append(f"rank {rank} has another room")
        if s.q.room % s.kv.room:
            found.append(f"rank {rank}: {s.q.room} query heads are no multiple of {s.kv.room}")
            continue
        for local in range(s.q.length):
            own = (s.q.start + local) // group  # the kv head that this query head uses in the whole model
            held = s.kv.start + local // (s.q.room // s.kv.room)
            if own != held or not s.kv.start <= own < s.kv.end:
                found.append(f"rank {rank}: query head {s.q.start + local} sits with kv {held}, not {own}")
    return found


def test_every_real_head_is_held_once_or_by_its_replicas_and_sits_with_its_own_kv_head():
    for q, kv, width in SIZES:
        shares = [HeadShare.of(q, kv, width, rank) for rank in range(width)]
        assert faults(shares) == [], (q, kv, width)
        assert (shares[0].replicas > 1) == (width > kv and width % kv == 0), (q, kv, width)


def test_planted_mistakes_are_found():
    """A split of plain ceil shares parts query heads from their kv head; one rank twice loses heads."""
    plain = [
        HeadShare(9, 3, 2, AxisShare.even(9, rank, 2), AxisShare.even(3, rank, 2), 1) for rank in range(2)
    ]
    assert any("no multiple" in fault for fault in faults(plain))
    plain = [
        HeadShare(12, 3, 2, AxisShare.even(12, rank, 2), AxisShare.even(3, rank, 2), 1) for rank in range(2)
    ]
    assert any("sits with kv" in fault for fault in faults(plain))
    twice = [HeadShare.of(8, 2, 2, 0), HeadShare.of(8, 2, 2, 0)]
    assert any("query heads held" in fault for fault in faults(twice))
    assert any("kv heads held" in fault for fault in faults(twice))


def test_shares_of_an_axis_follow_one_another_and_have_one_room():
    for total in (1, 2, 5, 45, 101, 128):
        for width in range(1, 9):
            shares = [AxisShare.even(total, rank, width) for rank in range(width)]
            assert [i for s in shares for i in range(s.start, s.end)] == list(range(total))
            assert {s.room for s in shares} == {-(-total // width)}
            assert all(0 <= s.padding <= s.room for s in shares)


def test_the_sentence_says_padding_and_copies_and_is_silent_where_nothing_differs():
    assert HeadShare.of(8, 2, 2, 0).sentence() is None
    assert HeadShare.of(9, 3, 1, 0).sentence() is None
    assert HeadShare.of(9, 3, 2, 0).sentence() == (
        "9 query and 3 key/value heads over 2 ranks: padded to 12 and 4 with zero heads, 6 and 2 a rank"
    )
    assert "each key/value head held by 2 ranks, 2 and 1 a rank" in HeadShare.of(8, 2, 4, 0).sentence()


@pytest.mark.parametrize("arguments", [(8, 3, 2, 0), (8, 2, 2, 2), (8, 2, 2, -1), (8, 0, 2, 0)])
def test_numbers_that_make_no_sense_are_refused(arguments):
    with pytest.raises(ValueError, match=r"rank|multiple"):
        HeadShare.of(*arguments)
