"""How fast are linear layers over packed weights, beside torch's and beside a plain read of the same bytes?

Usage: python benchmark/bench_linear.py [--rows 1 2 4 8 16 64 256] [--threads 1] [--repeat 9] [--forms int8].
All linear layers of SmolLM2-135M and its head (up to 16 rows) are walked in order, so that weights come from
memory as in a decode step. The forms take turns; the medians are printed, and the share of the rate at which
one thread only reads a large buffer. Needs the compiled kernels (`make kernels`).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import sgl_kernel
from sgl_kernel.linear import BlockForm, BlockWeight, linear_blocks, linear_packed, pack_blocks, pack_panels
from sgl_kernel.linear_int8 import linear_int8, pack_int8

#: (outputs, inputs) of one layer: q, k and v together, o, gate and up together, down.
LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))
LAYERS, HEAD = 30, (49152, 576)
#: Up to so many rows the head is walked too: in a prompt it scores a few rows only.
MOST_ROWS_OF_HEAD = 16
#: Of a plain read: far more than any cache holds.
_READ_BYTES = 4 * 2 * HEAD[0] * HEAD[1]

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]


@dataclass(frozen=True)
class Form:
    """A way to store a weight: how it is made, and how a row block is multiplied with it."""

    name: str
    dtype: torch.dtype
    make: Callable[[int, int], torch.Tensor]
    multiply: Multiply


def drawn(outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(outputs, inputs) * 0.05).to(dtype)


def blocks(form: BlockForm) -> Form:
    def make(outputs: int, inputs: int) -> torch.Tensor:
        numbers = torch.randint(form.lowest, form.highest + 1, (outputs, inputs)).to(torch.int8)
        scales = (torch.rand(outputs, inputs // 32 * form.scales) * 0.01).half()
        return pack_blocks(BlockWeight(form, numbers, scales, scales if form.has_minimum else None))

    return Form(
        f"blocks {form.name}",
        torch.bfloat16,
        make,
        lambda x, weight, out: linear_blocks(x, weight, None, out, form),
    )


def int8_panels(outputs: int, inputs: int) -> torch.Tensor:
    numbers = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    return pack_int8(numbers, torch.rand(outputs) * 0.01)


FORMS = (
    Form(
        "packed bfloat16",
        torch.bfloat16,
        lambda n, k: pack_panels(drawn(n, k, torch.bfloat16)),
        lambda x, weight, out: linear_packed(x, weight, None, out),
    ),
    Form(
        "torch bfloat16",
        torch.bfloat16,
        lambda n, k: drawn(n, k, torch.bfloat16),
        lambda x, weight, out: F.linear(x, weight),
    ),
    Form(
        "packed float32",
        torch.float32,
        lambda n, k: pack_panels(drawn(n, k, torch.float32)),
        lambda x, weight, out: linear_packed(x, weight, None, out),
    ),
    Form(
        "torch float32",
        torch.float32,
        lambda n, k: drawn(n, k, torch.float32),
        lambda x, weight, out: F.linear(x, weight),
    ),
    Form("int8", torch.bfloat16, int8_panels, lambda x, weight, out: linear_int8(x, weight, None, out)),
    *(blocks(form) for form in BlockForm),
)


class Walk:
    """All weights of one form, in the order of a step."""

    def __init__(self, form: Form) -> None:
        self.form = form
        shapes = [shape for _ in range(LAYERS) for shape in LAYER]
        self.layers = [(form.make(n, k), n, k) for n, k in shapes]
        self.head = (form.make(*HEAD), *HEAD)

    def weights(self, rows: int) -> list[tuple[torch.Tensor, int, int]]:
        return self.layers + ([self.head] if rows <= MOST_ROWS_OF_HEAD else [])

    def seconds(self, rows: int) -> float:
        dtype, weights = self.form.dtype, self.weights(rows)
        x = {k: torch.randn(rows, k).to(dtype) for _, _, k in weights}
        out = {n: torch.empty(rows, n, dtype=dtype) for _, n, _ in weights}
        start = time.perf_counter()
        for weight, n, k in weights:
            self.form.multiply(x[k], weight, out[n])
        return time.perf_counter() - start


def read_rate(size: int) -> float:
    """Bytes a second that a sum over a buffer of this size reads."""
    buffer = torch.zeros(size // 4)
    start = time.perf_counter()
    buffer.sum()
    return size / (time.perf_counter() - start)


def table_row(walk: Walk, rows: int, seconds: float, rate: float) -> str:
    weights = walk.weights(rows)
    size = sum(weight.nbytes for weight, _, _ in weights)
    work = 2 * rows * sum(n * k for _, n, k in weights)
    return (
        f"| {rows} | {walk.form.name} | {seconds * 1e3:.1f} | {size / seconds / 1e9:.1f} "
        f"| {size / seconds / rate:.2f} | {work / seconds / 1e9:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64, 256])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=9, help="turns that each form takes")
    parser.add_argument(
        "--forms", nargs="+", default=[form.name for form in FORMS], choices=[form.name for form in FORMS]
    )
    options = parser.parse_args()
    if min(*options.rows, options.threads, options.repeat) < 1:
        parser.error("rows, threads and repeat are at least 1")
    torch.set_num_threads(options.threads)
    walks = [Walk(form) for form in FORMS if form.name in options.forms]
    print(f"level {sgl_kernel.isa_level()}, threads {options.threads}, medians of {options.repeat}\n")
    print("| rows | form | ms | GB/s | share of a plain read | GFLOP/s |\n|---|---|---|---|---|---|")
    for rows in options.rows:
        found: dict[str, list[float]] = {walk.form.name: [] for walk in walks}
        rates = []
        for _ in range(options.repeat):
            rates.append(read_rate(_READ_BYTES))
            for walk in walks:
                found[walk.form.name].append(walk.seconds(rows))
        rate = statistics.median(rates)
        for walk in walks:
            print(table_row(walk, rows, statistics.median(found[walk.form.name]), rate), flush=True)


if __name__ == "__main__":
    main()
