"""Owns which part of a dimension, and which attention heads, one rank of a tensor-parallel group holds.

Read by linear layers, the vocabulary layers and the attention block. Pure arithmetic: it must not import
torch nor ask the context; widths and ranks arrive as numbers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AxisShare:
    """The part `start : start + length` of a dimension, held in `room` places; the others are zeros.

    `room` is the same on every rank, so that collectives meet tensors of one shape.
    """

    start: int
    length: int
    room: int

    @classmethod
    def whole(cls, total: int) -> AxisShare:
        return cls(0, total, total)

    @classmethod
    def even(cls, total: int, rank: int, width: int) -> AxisShare:
        """Equal shares rounded up; the last ranks hold less, or nothing.

        >>> [AxisShare.even(101, rank, 3) for rank in range(3)][2]
        AxisShare(start=68, length=33, room=34)
        >>> AxisShare.even(5, 3, 4)
        AxisShare(start=5, length=0, room=2)
        """
        room = -(-total // width)
        start = min(rank * room, total)
        return cls(start, min(room, total - start), room)

    def times(self, size: int) -> AxisShare:
        """The same share counted in parts of `size`: heads become rows."""
        return AxisShare(self.start * size, self.length * size, self.room * size)

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def padding(self) -> int:
        return self.room - self.length


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The query heads `q` and key/value heads `kv` of one rank; each query head sits with its own kv head.

    Local query head i uses local kv head i // (q.room / kv.room), as in the whole model. Padding heads have
    zero weights: their rows of the output projection are zero, so they add nothing.
    """

    num_heads: int
    num_kv_heads: int
    width: int
    q: AxisShare
    kv: AxisShare
    replicas: int  # ranks that hold the same kv head

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, width: int, rank: int) -> HeadShare:
        """The share of `rank` out of `width`.

        Up to one rank per kv head, whole groups are dealt out and padded. 9 query and 3 kv heads over 2 ranks
        become 12 and 4:

        >>> share = HeadShare.of(9, 3, width=2, rank=1)
        >>> share.q, share.kv
        (AxisShare(start=6, length=3, room=6), AxisShare(start=2, length=1, room=2))

        A width that is a multiple of the kv heads splits each group over copies of its kv head. 8 query and 2
        kv heads over 4 ranks: ranks 0 and 1 hold kv head 0 and two query heads each:

        >>> share = HeadShare.of(8, 2, width=4, rank=1)
        >>> share.q, share.kv, share.replicas
        (AxisShare(start=2, length=2, room=2), AxisShare(start=0, length=1, room=1), 2)

        A group of 3 over 2 copies is padded to 4; the second copy holds its last head and one of padding:

        >>> HeadShare.of(3, 1, width=2, rank=1).q
        AxisShare(start=2, length=1, room=2)

        Any other width is padded with idle ranks. 8 query and 2 kv heads over 3 ranks: rank 2 is empty:

        >>> HeadShare.of(8, 2, width=3, rank=2).q
        AxisShare(start=8, length=0, room=4)
        """
        if not 0 <= rank < width:
            raise ValueError(f"0 <= rank < width does not hold: rank {rank}, width {width}")
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} query heads are not a multiple of {num_kv_heads} key/value heads")
        group = num_heads // num_kv_heads
        if width > num_kv_heads and width % num_kv_heads == 0:
            replicas = width // num_kv_heads
            head, part = divmod(rank, replicas)
            inside = AxisShare.even(group, part, replicas)
            q = AxisShare(head * group + inside.start, inside.length, inside.room)
            return cls(num_heads, num_kv_heads, width, q, AxisShare(head, 1, 1), replicas)
        kv = AxisShare.even(num_kv_heads, rank, width)
        return cls(num_heads, num_kv_heads, width, kv.times(group), kv, 1)

    def sentence(self) -> str | None:
        """What differs from an even split, for the log; None if each head is held once and none is padded.

        >>> HeadShare.of(9, 3, 2, 0).sentence()  # doctest: +NORMALIZE_WHITESPACE
        '9 query and 3 key/value heads over 2 ranks: padded to 12 and 4 with zero heads, 6 and 2 a rank'
        """
        padded_q, padded_kv = self.q.room * self.width, self.kv.room * self.width // self.replicas
        parts: list[str] = []
        if self.replicas > 1:
            parts.append(f"each key/value head held by {self.replicas} ranks")
        if padded_q != self.num_heads or padded_kv != self.num_kv_heads:
            parts.append(f"padded to {padded_q} and {padded_kv} with zero heads")
        if not parts:
            return None
        return (
            f"{self.num_heads} query and {self.num_kv_heads} key/value heads over {self.width} ranks: "
            f"{', '.join(parts)}, {self.q.room} and {self.kv.room} a rank"
        )
