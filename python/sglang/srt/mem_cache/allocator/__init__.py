"""Slot allocators: which slots of the pool the next tokens of a request get."""

from __future__ import annotations

from sglang.srt.mem_cache.allocator.base import SlotAllocator
from sglang.srt.mem_cache.allocator.paged import PagedSlotAllocator
from sglang.srt.mem_cache.allocator.token import TokenSlotAllocator

__all__ = ["PagedSlotAllocator", "SlotAllocator", "TokenSlotAllocator", "make_slot_allocator"]


def make_slot_allocator(num_pages: int, page_size: int) -> SlotAllocator:
    """The allocator for this page size over `num_pages` pages (the reserved page 0 not counted)."""
    if page_size == 1:
        return TokenSlotAllocator(num_pages)
    return PagedSlotAllocator(num_pages, page_size)
