"""Writing keys and values into the cache against its reference, at every instruction set here."""

import pytest
import torch
from isa_levels import answers_at

from sgl_kernel.attention import kv_shape, move_kv, read_kv, store_kv, store_kv_reference, write_kv

#: Of each kind of cache: type of what is stored, type of the cache.
KINDS = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float16": (torch.float16, torch.float16),
    "float32 as int8": (torch.float32, torch.int8),
    "bfloat16 as int8": (torch.bfloat16, torch.int8),
}
#: A few slots, whole blocks in a row, a run that begins and ends within one, every second one.
SLOTS = (
    [0, 17, 31, 16, 47],
    [*range(16, 80)],
    [*range(5, 71)],
    [*range(0, 64, 2)],
    [*range(32, 48), 3, *range(64, 80)],
    [],
)

BODY = """
from sgl_kernel.attention import store_kv
for k, v, kv, slots in cases:
    store_kv(k, v, kv, slots)
    answers.append(kv)
"""


def random_cache(kind, heads, dim):
    """A cache of 80 slots with numbers in all of them."""
    _, cache = KINDS[kind]
    kv = torch.zeros(kv_shape(heads, 80, dim, cache), dtype=cache)
    write_kv(
        kv,
        torch.arange(80),
        torch.randn(2 * heads, 80, dim).to(torch.float32 if cache == torch.int8 else cache),
    )
    return kv


def case(kind, dim, slots, *, strided=False):
    dtype, _ = KINDS[kind]
    both = torch.randn(len(slots), 2, 3, dim).to(dtype)
    k, v = both.unbind(1) if strided else (both[:, 0].contiguous(), both[:, 1].contiguous())
    return [k, v, random_cache(kind, 3, dim), torch.tensor(slots, dtype=torch.int64)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_level_stores_the_bits_of_the_reference(level, kind, tmp_path):
    cases = [case(kind, dim, slots) for dim in (64, 20, 7) for slots in SLOTS]
    cases += [case(kind, 64, slots, strided=True) for slots in SLOTS]
    found = answers_at(level, BODY, cases, tmp_path)
    for (k, v, kv, slots), answer in zip(cases, found, strict=True):
        store_kv_reference(k, v, kv, slots)
        assert torch.equal(answer.view(torch.int8), kv.view(torch.int8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [64, 20, 7])
def test_what_is_stored_is_read_back_and_nothing_else_changes(kind, dim):
    k, v, kv, slots = case(kind, dim, SLOTS[0])
    before = kv.clone()
    store_kv(k, v, kv, slots)
    rows, found = torch.cat((k, v), dim=1).transpose(0, 1).float(), read_kv(kv, slots, dim).float()
    step = rows.abs().amax(dim=-1, keepdim=True) / 127 if kv.dtype == torch.int8 else torch.zeros(1)
    assert ((found - rows).abs() <= step * 0.5001).all()
    rest = torch.tensor([slot for slot in range(80) if slot not in slots])
    assert torch.equal(read_kv(kv, rest, dim), read_kv(before, rest, dim))


def test_a_row_in_int8_depends_on_itself_alone(level, tmp_path):
    """Stored with 31 others or by itself, in any slot."""
    k, v, kv, slots = case("float32 as int8", 64, [*range(16, 48)])
    alone = [k[20:21], v[20:21], kv.clone(), torch.tensor([3])]
    together, single = answers_at(level, BODY, [[k, v, kv, slots], alone], tmp_path)
    assert torch.equal(read_kv(together, torch.tensor([36]), 64), read_kv(single, torch.tensor([3]), 64))


def test_rows_of_zeros_and_tiny_and_huge_numbers_are_stored_in_int8(level, tmp_path):
    k, v, kv, slots = case("float32 as int8", 16, [0, 1, 2, 3])
    k[0], k[1], k[2] = 0.0, 1e-38, k[2] * 1e30
    wanted = kv.clone()
    (found,) = answers_at(level, BODY, [[k, v, kv, slots]], tmp_path)
    store_kv_reference(k, v, wanted, slots)
    assert torch.equal(found, wanted)
    rows = read_kv(found, slots, 16)[:3]
    assert not rows[:, :2].any() and rows[:, 2].isfinite().all()


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_is_read_back_as_no_number_and_spoils_no_other(level, broken, tmp_path):
    k, v, kv, slots = case("float32 as int8", 64, [*range(16)])
    k[3, 1, 5] = broken
    (found,) = answers_at(level, BODY, [[k, v, kv, slots]], tmp_path)
    rows = read_kv(found, slots, 64)
    assert rows[1, 3].isnan().all()
    assert rows.isnan().sum() == 64


@pytest.mark.parametrize("kind", KINDS)
def test_slots_are_moved_bit_for_bit_also_onto_one_another(kind):
    kv = random_cache(kind, 2, 20)
    before = kv.clone()
    sources, targets = torch.tensor([3, 17, 40]), torch.tensor([17, 40, 41])
    move_kv(kv, sources, targets)
    assert torch.equal(read_kv(kv, targets, 20), read_kv(before, sources, 20))
    rest = torch.tensor([slot for slot in range(80) if slot not in targets])
    assert torch.equal(read_kv(kv, rest, 20), read_kv(before, rest, 20))


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        (0, torch.ones(2, 3, 16), r"k and v are \[rows, kv heads, dim\]"),
        (2, torch.ones(4, 2, 16), r"kv is contiguous \[2 \* kv heads, blocks"),
        (2, torch.ones(6, 2, 256), "planes of keys and of values"),
        (2, torch.ones(4, 2, 256).bfloat16(), "one dtype"),
        (2, torch.ones(4, 2, 256, dtype=torch.int8), "of int8 with 64 more a block"),
        (3, torch.tensor([3]), "an entry a row"),
        (3, torch.tensor([3, 32]), "slot 32 of 32"),
    ],
)
def test_what_cannot_be_stored_is_refused(at, value, said):
    arguments = [
        torch.ones(2, 2, 16),
        torch.ones(2, 2, 16),
        torch.ones(kv_shape(2, 20, 16)),
        torch.tensor([3, 7]),
    ]
    arguments[at] = value
    with pytest.raises(RuntimeError, match=said):
        store_kv(*arguments)


def test_half_floats_and_wide_heads_are_not_stored_in_int8():
    for dtype, dim, said in (
        (torch.float16, 16, "no other dtype"),
        (torch.float32, 272, "heads of up to 256"),
    ):
        kv = torch.zeros(kv_shape(1, 16, dim, torch.int8), dtype=torch.int8)
        with pytest.raises(RuntimeError, match=said):
            store_kv(
                torch.ones(1, 1, dim, dtype=dtype), torch.ones(1, 1, dim, dtype=dtype), kv, torch.tensor([3])
            )


@pytest.mark.parametrize("cache", [torch.float32, torch.int8])
def test_the_operator_keeps_torchs_rules(cache):
    kv = torch.zeros(kv_shape(2, 20, 16, cache), dtype=cache)
    arguments = (torch.randn(2, 2, 16), torch.randn(2, 2, 16), kv, torch.tensor([3, 7]))
    torch.library.opcheck(torch.ops.sgl_kernel.store_kv.default, arguments)
