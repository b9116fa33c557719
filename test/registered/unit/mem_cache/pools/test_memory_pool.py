"""The request table and the page storage: rows are held by one request, storage comes from the back end's
layout.
"""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

from typing import Any

import numpy as np
import pytest
import torch

from sglang.srt.layers.attention.base_attn_backend import KVSpec
from sglang.srt.mem_cache.pools.memory_pool import PagedKVPool, ReqToTokenPool

SPEC = KVSpec(num_layers=3, num_kv_heads=2, head_dim=4, dtype=torch.float32)


class OpaqueLayout:
    """Storage that is no tensor at all: whoever indexes into it fails."""

    def __init__(self, layers: int = 3) -> None:
        self.asked: tuple[Any, ...] = ()
        self.layers = layers

    def allocate(self, spec: KVSpec, num_pages: int, page_size: int, device: torch.device) -> list[Any]:
        self.asked = (spec, num_pages, page_size, device)
        return [object() for _ in range(self.layers)]


def test_the_layout_decides_the_storage_and_gets_one_reserved_page() -> None:
    layout = OpaqueLayout()
    pool = PagedKVPool(10, 16, layout, SPEC, torch.device("cpu"))
    assert layout.asked == (SPEC, 11, 16, torch.device("cpu"))
    assert pool.size == 160
    assert len({id(pool.layer(i)) for i in range(3)}) == 3


def test_a_layout_with_too_few_layers_is_refused_with_both_numbers() -> None:
    with pytest.raises(RuntimeError, match=r"2 layers.*3"):
        PagedKVPool(10, 16, OpaqueLayout(layers=2), SPEC)


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="num_pages >= 1"):
        PagedKVPool(0, 16, OpaqueLayout(), SPEC)


def test_the_layout_moves_slots_of_every_layer() -> None:
    moved: list[Any] = []

    class MovingLayout(OpaqueLayout):
        def move(self, layer: object, sources: torch.Tensor, targets: torch.Tensor) -> None:
            moved.append((layer, sources, targets))

    pool = PagedKVPool(10, 16, MovingLayout(), SPEC)
    sources, targets = torch.tensor([3, 4]), torch.tensor([4, 5])
    pool.move(sources, targets)
    assert moved == [(pool.layer(i), sources, targets) for i in range(3)]


def test_rows_come_lowest_first_and_run_out() -> None:
    rows = ReqToTokenPool(3, 8)
    assert [rows.alloc() for _ in range(4)] == [0, 1, 2, None]
    rows.free(1)
    assert rows.available_size() == 1 and rows.alloc() == 1


def test_a_row_freed_twice_is_an_error() -> None:
    rows = ReqToTokenPool(3, 8)
    rows.alloc()
    rows.free(0)
    with pytest.raises(RuntimeError, match="row 0"):
        rows.free(0)


def test_the_host_table_and_the_tensor_say_the_same() -> None:
    rows = ReqToTokenPool(2, 8)
    rows.write(1, 2, np.array([5, 6, 7]))
    rows.write_many(np.array([0, 1]), np.array([0, 5]), np.array([8, 9]))
    assert rows.req_to_token.dtype == torch.int64
    taken = [[8] + [0] * 7, [0, 0, 5, 6, 7, 9, 0, 0]]
    assert rows.req_to_token.tolist() == rows.host.tolist() == [*taken, [0] * 8]
    assert rows.spare_row == 2
