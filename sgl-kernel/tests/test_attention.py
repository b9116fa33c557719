"""Attention over the paged cache against its reference, at every instruction set of this processor."""

import pytest
import torch
from isa_levels import answers_at

from sgl_kernel.attention import (
    KV_BLOCK_SLOTS,
    kv_shape,
    move_kv,
    paged_attention,
    paged_attention_reference,
    write_kv,
)

#: (heads, kv heads, dim): shared keys, one head each, odd sizes, the widest head.
HEADS = ((9, 3, 64), (4, 4, 16), (6, 2, 20), (16, 1, 128), (2, 2, 256))
#: (keys, rows) of each request: decode steps, rounds, prompts, ends of blocks of 64 keys and chunks of 256.
REQUESTS = (
    [(1, 1), (63, 1), (64, 1), (65, 1), (300, 1)],
    [(5, 5), (70, 6), (130, 129)],
    [(64, 64)],
    [(255, 3), (256, 1), (257, 1), (519, 40), (700, 2)],
    [],
)
#: Of each kind of cache: type of computation, type of the cache, tolerance.
TYPES = {
    "float32": (torch.float32, torch.float32, 2e-5),
    "bfloat16": (torch.bfloat16, torch.bfloat16, 1e-2),
    "float32 over int8": (torch.float32, torch.int8, 1e-3),
    "bfloat16 over int8": (torch.bfloat16, torch.int8, 1e-2),
}

BODY = """
from sgl_kernel.attention import paged_attention
for case in cases:
    answers.append(paged_attention(*case))
"""


def spoiled(kv_heads, slots, dim, dtype):
    """A cache in which nothing is a number; of int8 each scale is none."""
    shape = kv_shape(kv_heads, slots, dim, dtype)
    if dtype != torch.int8:
        return torch.full(shape, float("nan"), dtype=dtype)
    kv = torch.full(shape, -77, dtype=dtype)
    kv[..., -64:].view(torch.float32).fill_(float("nan"))
    return kv


def make_case(heads, requests, kind, *, tail=0, seed=0):
    """Arguments but `out`: slots of all requests are shuffled, and what no request owns is not a number."""
    draw = torch.Generator().manual_seed(seed)
    dtype, cache, _ = TYPES[kind]
    num_heads, kv_heads, dim = heads
    total = sum(keys for keys, _ in requests)
    slots = torch.randperm(total + 9, generator=draw)
    kv = spoiled(kv_heads, total + 9, dim, cache)
    write_kv(kv, slots[:total], torch.randn(2 * kv_heads, total, dim, generator=draw).to(dtype))
    table = torch.full((len(requests) + 2, 2048), -1)
    table_rows = torch.randperm(len(requests) + 2, generator=draw)[: len(requests)]
    first = 0
    for row, (keys, _) in zip(table_rows.tolist(), requests, strict=True):
        table[row, :keys] = slots[first : first + keys]
        first += keys
    rows = [rows for _, rows in requests]
    first_rows = torch.tensor([0, *rows]).cumsum(0)
    q = torch.randn(sum(rows), num_heads, dim, generator=draw).to(dtype)
    mask = None
    if tail:
        mask = torch.rand(len(requests), rows[0], tail, generator=draw) < 0.5
        mask[:, :, -1] = True
    lengths = torch.tensor([keys for keys, _ in requests], dtype=torch.int64)
    return [q, kv, table, table_rows, first_rows, lengths, mask]


def with_out(case, scale=0.3):
    q = case[0]
    return [*case, torch.full((q.shape[0], q.shape[1] * q.shape[2]), 7.0, dtype=q.dtype), scale]


def assert_near(found, wanted, tolerance):
    torch.testing.assert_close(found.float(), wanted.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", TYPES)
def test_rows_of_any_number_equal_the_reference(level, kind, tmp_path):
    _, _, tolerance = TYPES[kind]
    cases = [make_case(heads, requests, kind) for heads in HEADS for requests in REQUESTS]
    found = answers_at(level, BODY, [with_out(case) for case in cases], tmp_path)
    for case, out in zip(cases, found, strict=True):
        assert_near(out, paged_attention_reference(*case, 0.3), tolerance)


@pytest.mark.parametrize("kind", TYPES)
def test_a_mask_over_the_newest_keys_says_what_is_seen_of_them(level, kind, tmp_path):
    _, _, tolerance = TYPES[kind]
    shapes = [([(8, 6), (70, 6), (200, 6)], 6), ([(9, 2), (100, 2)], 7), ([(4, 4)], 4)]
    cases = [make_case(heads, requests, kind, tail=tail) for heads in HEADS for requests, tail in shapes]
    found = answers_at(level, BODY, [with_out(case) for case in cases], tmp_path)
    for case, out in zip(cases, found, strict=True):
        assert_near(out, paged_attention_reference(*case, 0.3), tolerance)


@pytest.mark.parametrize("kind", TYPES)
def test_a_row_gives_the_same_bits_alone_in_a_chunk_and_beside_others(level, kind, tmp_path):
    """A prompt at once, its rows one by one, and its last rows as a chunk beside another request."""
    case = make_case((9, 3, 64), [(150, 150), (40, 40)], kind)
    q, kv, table, table_rows, _, _, _ = case

    def part(picked):
        """(request, end, rows): the rows of a request that end at key `end`."""
        starts = {0: 0, 1: 150}
        rows = torch.cat([q[starts[b] + end - n : starts[b] + end] for b, end, n in picked])
        firsts = torch.tensor([0, *(n for _, _, n in picked)]).cumsum(0)
        numbers = torch.tensor([b for b, _, _ in picked])
        return [
            rows,
            kv,
            table,
            table_rows[numbers],
            firsts,
            torch.tensor([end for _, end, _ in picked]),
            None,
        ]

    parts = [part([(0, 150, 150), (1, 40, 40)])]
    parts += [part([(0, end, 1)]) for end in (1, 64, 65, 130, 150)]
    parts += [part([(1, 40, 13), (0, 150, 33)])]
    whole, *rest = answers_at(level, BODY, [with_out(case) for case in parts], tmp_path)
    for end, out in zip((1, 64, 65, 130, 150), rest, strict=False):
        assert torch.equal(out[0], whole[end - 1])
    assert torch.equal(rest[-1], torch.cat([whole[150 + 27 : 190], whole[117:150]]))


@pytest.mark.parametrize("kind", TYPES)
def test_keys_that_a_row_does_not_see_leave_no_trace(level, kind, tmp_path):
    """A node of a tree gives the bits of its own path: also where branches of others lie between its keys."""
    for length in (70, 128, 131):
        case = make_case((9, 3, 64), [(length, 6)], kind, tail=6)
        mask = torch.tensor([[[1, 0, 0, 1, 0, 1]] * 6], dtype=torch.bool)
        tree = [*case[:6], mask]
        path = torch.tensor([length - 6, length - 3, length - 1])
        table = case[2].clone()
        row = table[case[3][0]]
        row[length - 6 : length - 3] = row[path].clone()
        alone = [case[0][5:], case[1], table, case[3], torch.tensor([0, 1]), torch.tensor([length - 3]), None]
        found, wanted = answers_at(level, BODY, [with_out(tree), with_out(alone)], tmp_path)
        assert torch.equal(found[5], wanted[0])


def place_kv(to, targets, kv, sources):
    """Copies slots of one cache to slots of another, bit for bit."""
    joined = torch.cat((kv, to), dim=1)
    move_kv(joined, sources, targets + kv.shape[1] * KV_BLOCK_SLOTS)
    to.copy_(joined[:, kv.shape[1] :])


def placed(case, slots, count):
    """The case with the keys of each request in other slots: request after request, in this order."""
    q, kv, table, table_rows, first_rows, lengths, mask = case
    moved = spoiled(kv.shape[0] // 2, count, q.shape[2], kv.dtype)
    other, first = torch.full_like(table, -1), 0
    for row, length in zip(table_rows.tolist(), lengths.tolist(), strict=True):
        own = slots[first : first + length]
        place_kv(moved, own, kv, table[row, :length])
        other[row, :length] = own
        first += length
    return [q, moved, other, table_rows, first_rows, lengths, mask]


@pytest.mark.parametrize("kind", TYPES)
def test_slots_leave_no_trace_in_the_bits(level, kind, tmp_path):
    """In blocks, in a run that begins within one, in pages of four, backwards, two requests in turn."""
    cases = []
    for heads in ((9, 3, 64), (6, 2, 20)):
        for tail, requests in ((0, [(130, 40), (47, 1), (101, 1)]), (5, [(130, 3), (47, 3), (101, 3)])):
            case = make_case(heads, requests, kind, tail=tail)
            total = sum(keys for keys, _ in requests)
            blocks, first = [], 0
            for keys, _ in requests:
                blocks.append(torch.arange(first, first + keys))
                first += -(-keys // 16) * 16
            pages = (torch.randperm(80)[:, None] * 4 + torch.arange(4)).flatten()
            orders = [torch.cat(blocks), torch.arange(5, 5 + total), pages, torch.arange(400, 0, -1)]
            orders.append(torch.cat((torch.arange(0, 400, 2), torch.arange(1, 400, 2))))
            cases += [placed(case, slots, 420) for slots in orders]
    found = answers_at(level, BODY, [with_out(case) for case in cases], tmp_path)
    for first in range(0, len(found), 5):
        for other in found[first + 1 : first + 5]:
            assert torch.equal(found[first], other)


@pytest.mark.parametrize("kind", TYPES)
def test_rows_that_see_nothing_are_zeros_and_broken_ones_stay_alone(kind):
    case = make_case((4, 2, 16), [(8, 4), (8, 4)], kind, tail=8)
    case[6][0] = False
    case[0][6, 1] = float("nan")
    out = paged_attention(*with_out(case))
    assert out[:4].abs().sum() == 0
    broken = out[6].view(4, 16).isnan().any(dim=1)
    assert broken.tolist() == [False, True, False, False]
    assert out[[4, 5, 7]].isfinite().all()


def parts_of_rows(level, kind, requests, ends, tmp_path):
    """A case of one request computed at once, and rows of it that were the last of a shorter text."""
    case = make_case((9, 3, 64), requests, kind)
    q, kv, table, table_rows, _, _, _ = case
    parts = [case]
    for end in ends:
        row = q[end - 1 : end]
        parts.append([row, kv, table, table_rows, torch.tensor([0, 1]), torch.tensor([end]), None])
    return answers_at(level, BODY, [with_out(part) for part in parts], tmp_path)


@pytest.mark.parametrize("kind", TYPES)
def test_a_row_gives_the_same_bits_wherever_its_keys_end_within_a_chunk(level, kind, tmp_path):
    ends = (255, 256, 257, 288, 511, 512, 513, 530)
    whole, *rest = parts_of_rows(level, kind, [(530, 530)], ends, tmp_path)
    for end, out in zip(ends, rest, strict=True):
        assert torch.equal(out[0], whole[end - 1])


@pytest.mark.parametrize("kind", TYPES)
def test_a_tree_across_the_end_of_a_chunk_gives_the_bits_of_its_paths(level, kind, tmp_path):
    for length in (258, 262, 300, 519):
        case = make_case((9, 3, 64), [(length, 6)], kind, tail=6)
        tree = [*case[:6], torch.tensor([[[1, 0, 0, 1, 0, 1]] * 6], dtype=torch.bool)]
        table = case[2].clone()
        row = table[case[3][0]]
        row[length - 6 : length - 3] = row[torch.tensor([length - 6, length - 3, length - 1])].clone()
        alone = [case[0][5:], case[1], table, case[3], torch.tensor([0, 1]), torch.tensor([length - 3]), None]
        found, wanted = answers_at(level, BODY, [with_out(tree), with_out(alone)], tmp_path)
        assert torch.equal(found[5], wanted[0])


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(
    ("requests", "tail"),
    [
        ([(400, 1), (300, 120), (64, 1)], 0),
        ([(2000, 1)], 0),
        ([(1030, 1), (3, 1), (700, 1)], 0),
        ([(900, 5), (40, 5)], 7),
    ],
)
def test_several_threads_give_the_answer_of_one(kind, requests, tail):
    """Also where the keys of one request are cut between them."""
    case = make_case((9, 3, 64), requests, kind, tail=tail)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            found.append(paged_attention(*with_out(case)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert torch.equal(found[0], other)


def changed(at, value):
    arguments = with_out(make_case((4, 2, 16), [(8, 2), (9, 2)], "float32", tail=3))
    arguments[at] = value
    return arguments


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        (0, torch.ones(4, 5, 16), "5 heads over 2 kv heads"),
        (0, torch.ones(4, 98, 16), "up to 48 of them share one"),
        (0, torch.ones(4, 4, 17), r"kv is contiguous \[2 \* kv heads, blocks"),
        (0, torch.ones(4, 16, 4).transpose(1, 2), "each row of q"),
        (0, torch.ones(4, 4, 16).bfloat16(), "one dtype"),
        (2, torch.zeros(4, 8, dtype=torch.int64), "9 keys, and the table 8 places"),
        (2, torch.zeros(4, 512, dtype=torch.int32), "table is contiguous int64"),
        (3, torch.tensor([0, 4]), "row 4 of a table of 4"),
        (3, torch.tensor([0]), "an entry a request"),
        (4, torch.tensor([0, 2, 3]), "from 0 to the 4 rows"),
        (4, torch.tensor([0, 1, 4]), "other rows than the mask"),
        (5, torch.tensor([8, 1]), "2 rows and 1 keys"),
        (5, torch.tensor([2, 9]), "fewer keys than its tail"),
        (6, torch.ones(2, 3, 3, dtype=torch.bool), r"\[requests, rows of each, tail\]"),
        (7, torch.ones(4, 63), r"out is \[rows, heads \* dim\]"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(at, value, said):
    with pytest.raises(RuntimeError, match=said):
        paged_attention(*changed(at, value))


def test_the_operator_keeps_torchs_rules():
    case = make_case((4, 2, 16), [(8, 2), (9, 2)], "float32", tail=3)
    case[1].nan_to_num_()
    torch.library.opcheck(torch.ops.sgl_kernel.paged_attention.default, tuple(with_out(case)))
