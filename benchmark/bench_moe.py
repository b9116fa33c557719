"""How fast is the feed-forward of a mixture of experts, beside a loop over experts in torch?

Usage: python benchmark/bench_moe.py [--rows 1 4 16 64 256] [--experts 32] [--top 8] [--threads 1]. Experts
have the size of those of Qwen3-30B-A3B (2048 in and out, 768 between); rows choose them at random. The forms
take turns; the medians are printed, with the bytes of the experts in use as a share of what one thread only
reads in that time, and the products made. Needs the compiled kernels (`make kernels`).
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import sgl_kernel
from sgl_kernel.moe import PackedExperts, fused_experts, pack_experts, pack_experts_int8

SIZE, INTERMEDIATE = 2048, 768
_READ_BYTES = 1 << 28

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]


def packed(experts: PackedExperts) -> Run:
    return lambda x, weights, ids: fused_experts(x, experts, weights, ids, torch.empty_like(x))


def in_torch(gate_up: torch.Tensor, down: torch.Tensor) -> Run:
    def run(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32)
        for expert in ids.unique().tolist():
            rows, places = (ids == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[rows], gate_up[expert]).chunk(2, dim=1)
            y = F.linear(F.silu(gate) * up, down[expert])
            out.index_add_(0, rows, y.float() * weights[rows, places, None])
        return out.to(x.dtype)

    return run


def forms(experts: int) -> dict[str, tuple[int, Run]]:
    """By name: the bytes of one expert, and the call."""
    shapes = ((experts, 2 * INTERMEDIATE, SIZE), (experts, SIZE, INTERMEDIATE))
    gate_up, down = ((torch.randn(shape) * 0.02).bfloat16() for shape in shapes)
    numbers = [
        (torch.randint(-127, 128, shape, dtype=torch.int8), torch.rand(shape[:2]) * 0.001) for shape in shapes
    ]
    of_bf16, of_int8 = pack_experts(gate_up, down), pack_experts_int8(*numbers)

    def size(one: PackedExperts) -> int:
        return (one.gate_up.nbytes + one.down.nbytes) // experts

    return {
        "bfloat16": (size(of_bf16), packed(of_bf16)),
        "int8": (size(of_int8), packed(of_int8)),
        "torch bfloat16": (size(of_bf16), in_torch(gate_up, down)),
    }


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top", type=int, default=8, help="experts of a row")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=7, help="turns that each form takes")
    options = parser.parse_args()
    if min(*options.rows, options.top, options.threads, options.repeat) < 1 or options.experts < options.top:
        parser.error("rows, top, threads and repeat are at least 1, and there are at least top experts")
    torch.set_num_threads(options.threads)
    runs, buffer = forms(options.experts), torch.zeros(_READ_BYTES // 4)
    print(f"level {sgl_kernel.isa_level()}, threads {options.threads}, medians of {options.repeat}\n")
    print("| rows | form | ms | GB/s | share of a plain read | GFLOP/s |\n|---|---|---|---|---|---|")
    for rows in options.rows:
        x = torch.randn(rows, SIZE).bfloat16()
        weights, ids = torch.rand(rows, options.experts).topk(options.top, dim=1)
        used = len(ids.unique())
        found: dict[str, list[float]] = {name: [] for name in runs}
        reads = []
        for _ in range(options.repeat):
            reads.append(_READ_BYTES / seconds(buffer.sum))
            for name, (_, run) in runs.items():
                found[name].append(seconds(functools.partial(run, x, weights, ids)))
        rate = statistics.median(reads)
        for name, (size, _) in runs.items():
            took = statistics.median(found[name])
            work = 2 * rows * options.top * 3 * SIZE * INTERMEDIATE
            print(
                f"| {rows} | {name} | {took * 1e3:.2f} | {used * size / took / 1e9:.1f} "
                f"| {used * size / took / rate:.2f} | {work / took / 1e9:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
