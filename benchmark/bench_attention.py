"""How fast is attention over the paged cache beside a plain read, and filling the cache beside a copy?

Usage: python benchmark/bench_attention.py [--contexts 128 1024 4096] [--prompts 512 2048] [--threads 1]
[--requests 1] [--repeat 9] [--caches bfloat16 int8]. The layers of SmolLM2-135M (9 heads over 3, 64 wide) are
walked in order, so that keys and values come from memory as in a decode step. The caches take turns; medians
are printed, and beside each decode step the share of the rate at which one thread only reads a large buffer.
Needs the compiled kernels (`make kernels`).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

import sgl_kernel
from sgl_kernel.attention import kv_bytes_per_slot, kv_shape, paged_attention, store_kv

LAYERS, HEADS, KV_HEADS, DIM = 30, 9, 3, 64
#: Of a plain read: more than any cache holds.
_READ_BYTES = 256 << 20


@dataclass(frozen=True)
class Kind:
    """Type of computation and of the cache."""

    name: str
    dtype: torch.dtype
    cache: torch.dtype


KINDS = (
    Kind("float32", torch.float32, torch.float32),
    Kind("bfloat16", torch.bfloat16, torch.bfloat16),
    Kind("float32 over int8", torch.float32, torch.int8),
    Kind("int8", torch.bfloat16, torch.int8),
)


class Walk:
    """Requests of one length in all layers, in blocks of neighbouring slots."""

    def __init__(self, kind: Kind, requests: int, context: int) -> None:
        self.kind, self.requests, self.context = kind, requests, context
        room = -(-context // 16) * 16
        shape = kv_shape(KV_HEADS, requests * room, DIM, kind.cache)
        self.slots = torch.arange(requests * room).view(requests, room)[:, :context].contiguous()
        self.layers = [torch.zeros(shape, dtype=kind.cache) for _ in range(LAYERS)]
        self.k, self.v = torch.randn(2, requests * context, KV_HEADS, DIM).to(kind.dtype)
        for kv in self.layers:
            store_kv(self.k, self.v, kv, self.slots.view(-1))

    @property
    def nbytes(self) -> int:
        """Of the keys and values that a step reads."""
        return LAYERS * self.requests * self.context * kv_bytes_per_slot(KV_HEADS, DIM, self.kind.cache)

    def attend(self, rows: int) -> float:
        """Seconds of a forward with the newest `rows` of each request."""
        count = self.requests
        q = torch.randn(count * rows, HEADS, DIM).to(self.kind.dtype)
        out = torch.empty(count * rows, HEADS * DIM, dtype=self.kind.dtype)
        table_rows, first_rows = torch.arange(count), torch.arange(count + 1) * rows
        lengths = torch.full((count,), self.context)
        start = time.perf_counter()
        for kv in self.layers:
            paged_attention(q, kv, self.slots, table_rows, first_rows, lengths, None, out, 0.125)
        return time.perf_counter() - start

    def store(self, rows: int) -> float:
        """Seconds of writing the newest `rows` of the first request."""
        first = self.context - rows
        part = slice(first, self.context)
        start = time.perf_counter()
        for kv in self.layers:
            store_kv(self.k[part], self.v[part], kv, self.slots[0, part])
        return time.perf_counter() - start


def read_rate() -> float:
    """Bytes a second that a sum over a large buffer reads."""
    buffer = torch.zeros(_READ_BYTES // 4)
    start = time.perf_counter()
    buffer.sum()
    return _READ_BYTES / (time.perf_counter() - start)


def copy_seconds(kind: Kind, rows: int) -> float:
    """Seconds of copying the keys and values of so many rows to other memory, in all layers."""
    k, v = torch.randn(2, rows, KV_HEADS, DIM).to(kind.dtype)
    layers = [(torch.zeros_like(k), torch.zeros_like(v)) for _ in range(LAYERS)]
    start = time.perf_counter()
    for to_k, to_v in layers:
        to_k.copy_(k)
        to_v.copy_(v)
    return time.perf_counter() - start


def medians(
    kinds: list[Kind], repeat: int, measure: Callable[[Kind], tuple[float, float]]
) -> list[tuple[Kind, float, float]]:
    """Of two figures a kind, the kinds in turn."""
    found: dict[str, list[tuple[float, float]]] = {kind.name: [] for kind in kinds}
    for _ in range(repeat):
        for kind in kinds:
            found[kind.name].append(measure(kind))
    return [
        (kind, *(statistics.median(column) for column in zip(*found[kind.name], strict=True)))
        for kind in kinds
    ]


def print_steps(kinds: list[Kind], requests: int, context: int, repeat: int) -> None:
    walks = {kind.name: Walk(kind, requests, context) for kind in kinds}
    for kind, seconds, rate in medians(kinds, repeat, lambda kind: (walks[kind.name].attend(1), read_rate())):
        size = walks[kind.name].nbytes
        print(
            f"| {context} | {kind.name} | {seconds / LAYERS * 1e6:.1f} | {size / seconds / 1e9:.1f} "
            f"| {size / seconds / rate:.2f} |",
            flush=True,
        )


def print_prompt(kinds: list[Kind], rows: int, repeat: int) -> None:
    walks = {kind.name: Walk(kind, 1, rows) for kind in kinds}
    for walk in walks.values():
        walk.attend(rows)
    attended = {kind: walks[kind.name].attend(rows) for kind in kinds}
    for kind, stored, copied in medians(
        kinds, repeat, lambda kind: (walks[kind.name].store(rows), copy_seconds(kind, rows))
    ):
        print(
            f"| {rows} | {kind.name} | {attended[kind] / LAYERS * 1e3:.2f} | {stored / LAYERS * 1e6:.2f} "
            f"| {copied / LAYERS * 1e6:.2f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    names = [kind.name for kind in KINDS]
    parser.add_argument("--contexts", type=int, nargs="*", default=[128, 1024, 4096])
    parser.add_argument("--prompts", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=9, help="turns that each cache takes")
    parser.add_argument("--caches", nargs="+", default=names, choices=names)
    options = parser.parse_args()
    if min(*options.contexts, *options.prompts, options.requests, options.threads, options.repeat) < 1:
        parser.error("all numbers are at least 1")
    torch.set_num_threads(options.threads)
    kinds = [kind for kind in KINDS if kind.name in options.caches]
    print(
        f"level {sgl_kernel.isa_level()}, threads {options.threads}, medians of {options.repeat}, one layer"
    )
    print("\n| decode behind | cache | us | GB/s | share of a plain read |\n|---|---|---|---|---|")
    for context in options.contexts:
        print_steps(kinds, options.requests, context, options.repeat)
    print("\n| rows | cache | attention, ms | storing them, us | copying them, us |\n|---|---|---|---|---|")
    for rows in [1, *options.prompts]:
        print_prompt(kinds, rows, options.repeat)


if __name__ == "__main__":
    main()
