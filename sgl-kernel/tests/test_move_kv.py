"""The move of keys and values within a cache against its reference, for every type of cache."""

import pytest
import torch

from sgl_kernel.attention import kv_shape, move_kv, move_kv_reference, read_kv, write_kv

HEADS, SLOTS = 3, 80
LONGS = torch.zeros(2, dtype=torch.int64)


def filled(dtype, dim):
    kv = torch.zeros(kv_shape(HEADS, SLOTS, dim, dtype), dtype=dtype)
    rows = torch.randn(2 * HEADS, SLOTS, dim, generator=torch.Generator().manual_seed(dim))
    write_kv(kv, torch.arange(SLOTS), rows if dtype == torch.int8 else rows.to(dtype))
    return kv


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [16, 64, 70])
def test_a_move_is_a_read_before_a_write_bit_for_bit(dtype, dim):
    kv = filled(dtype, dim)
    sources, targets = torch.tensor([5, 33, 7, 79, 15]), torch.tensor([4, 5, 33, 16, 14])
    before, expected = read_kv(kv, sources, dim), kv.clone()
    move_kv_reference(expected, sources, targets)
    move_kv(kv, sources, targets)
    assert torch.equal(kv, expected)
    assert torch.equal(read_kv(kv, targets, dim), before)
    move_kv(kv, sources[:0], targets[:0])
    assert torch.equal(kv, expected)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: move_kv(torch.zeros(2, 1, 256), LONGS, LONGS + 16), "slot 16 of 16"),
        (lambda: move_kv(torch.zeros(2, 1, 256), LONGS, LONGS[:1]), "2 sources and 1 targets"),
        (lambda: move_kv(torch.zeros(2, 1, 256), LONGS.int(), LONGS), "sources is contiguous int64"),
        (lambda: move_kv(torch.zeros(2, 1, 255), LONGS, LONGS), "255 numbers"),
        (lambda: move_kv(torch.zeros(2, 1, 256).double(), LONGS, LONGS), "8, 16 or 32 bits"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call, said):
    with pytest.raises(RuntimeError, match=said):
        call()


def test_the_operator_keeps_torchs_rules():
    torch.library.opcheck(
        torch.ops.sgl_kernel.move_kv.default, (filled(torch.float32, 16), LONGS[:1], LONGS[:1] + 1)
    )
