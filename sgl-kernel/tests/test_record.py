"""Recorded kernel calls: what is kept, what a replay reads anew, and what is refused."""

import threading

import pytest
import torch

from sgl_kernel.attention import (
    kv_shape,
    paged_attention,
    paged_attention_reference,
    store_kv,
    store_kv_reference,
)
from sgl_kernel.elementwise import silu_and_mul, silu_and_mul_reference
from sgl_kernel.embedding import embed_rows
from sgl_kernel.linear import linear_packed, pack_panels
from sgl_kernel.record import CallList


def test_a_replay_reads_what_lies_in_the_tensors_then():
    x, out = torch.randn(2, 8), torch.empty(2, 4)
    calls = CallList()
    with calls.recording():
        silu_and_mul(x, out)
    assert len(calls) == 1
    x.copy_(torch.randn(2, 8))
    calls.play()
    torch.testing.assert_close(out, silu_and_mul_reference(x))


def test_calls_run_in_their_order_and_only_those_of_the_block_are_kept():
    table, ids = torch.randn(9, 8), torch.tensor([4])
    row, out, scores = torch.empty(1, 8), torch.empty(1, 4), torch.empty(1, 3)
    weight = pack_panels(torch.randn(3, 4))
    calls = CallList()
    silu_and_mul(torch.randn(1, 8), out)
    with calls.recording():
        embed_rows(ids, table, row)
        silu_and_mul(row, out)
        linear_packed(out, weight, None, scores)
    silu_and_mul(torch.randn(1, 8), out)
    assert len(calls) == 3
    ids.fill_(7)
    calls.play()
    wanted = linear_packed(silu_and_mul_reference(table[7:8]), weight, None, torch.empty(1, 3))
    torch.testing.assert_close(scores, wanted)


def test_attention_follows_lengths_slots_and_keys_that_change():
    draw = torch.Generator().manual_seed(1)
    kv, q = torch.randn(kv_shape(2, 20, 8), generator=draw), torch.randn(2, 4, 8, generator=draw)
    k, v = torch.randn(2, 2, 8, generator=draw), torch.randn(2, 2, 8, generator=draw)
    table = torch.stack([torch.randperm(20, generator=draw) for _ in range(3)])
    rows, firsts, lengths = torch.tensor([0, 2]), torch.tensor([0, 1, 2]), torch.tensor([3, 5])
    slots, out = torch.tensor([1, 2]), torch.empty(2, 32)
    calls = CallList()
    with calls.recording():
        store_kv(k, v, kv, slots)
        paged_attention(q, kv, table, rows, firsts, lengths, None, out, 0.5)
    rows.copy_(torch.tensor([1, 0]))
    lengths.copy_(torch.tensor([11, 2]))
    slots.copy_(torch.tensor([table[1, 10], table[0, 1]]))
    k.neg_()
    store_kv_reference(k, v, wanted := kv.clone(), slots)
    calls.play()
    assert torch.equal(kv, wanted)
    torch.testing.assert_close(
        out, paged_attention_reference(q, kv, table, rows, firsts, lengths, None, 0.5), rtol=1e-5, atol=1e-5
    )


def test_what_would_read_outside_of_the_table_is_refused_in_a_replay_too():
    kv, q, out = torch.zeros(kv_shape(1, 8, 4)), torch.zeros(1, 1, 4), torch.empty(1, 4)
    lengths, slots = torch.tensor([2]), torch.tensor([1])
    zero, firsts, table = torch.tensor([0]), torch.tensor([0, 1]), torch.arange(8)[None]
    calls = CallList()
    with calls.recording():
        store_kv(q, q, kv, slots)
        paged_attention(q, kv, table, zero, firsts, lengths, None, out, 1.0)
    lengths.fill_(9)
    with pytest.raises(RuntimeError, match="9 keys, and the table 8 places"):
        calls.play()
    lengths.fill_(2)
    slots.fill_(16)
    with pytest.raises(RuntimeError, match="slot 16 of 16"):
        calls.play()
    slots.fill_(0)
    calls.play()


def test_another_thread_is_not_recorded():
    x, out = torch.randn(1, 8), torch.empty(1, 4)
    calls = CallList()
    with calls.recording():
        other = threading.Thread(target=silu_and_mul, args=(x, out))
        other.start()
        other.join()
    assert len(calls) == 0


def test_a_list_is_recorded_once_and_gone_after_its_drop():
    x, out = torch.randn(1, 8), torch.empty(1, 4)
    calls = CallList()
    with pytest.raises(RuntimeError, match="nothing is recorded"):
        calls.play()
    with calls.recording():
        silu_and_mul(x, out)
    with pytest.raises(RuntimeError, match="recorded already"), calls.recording():
        pass
    calls.drop()
    calls.drop()
    with pytest.raises(RuntimeError, match="nothing is recorded"):
        calls.play()


def test_recording_ends_with_its_block_whatever_happens_in_it_and_does_not_nest():
    x, out = torch.randn(1, 8), torch.empty(1, 4)
    outer = CallList()
    with outer.recording(), pytest.raises(RuntimeError, match="records already"), CallList().recording():
        pass
    with pytest.raises(ZeroDivisionError), CallList().recording():
        raise ZeroDivisionError
    fresh = CallList()
    with fresh.recording():
        silu_and_mul(x, out)
    assert len(fresh) == 1
