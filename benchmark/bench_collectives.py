"""What does a collective between ranks of one host cost, through shared memory and through gloo?

Usage: python benchmark/bench_collectives.py [--ranks 2] [--rows 1 4 16 256] [--width 576] [--calls 300]
[--rounds 7]. The ranks are processes of their own with a thread each, first spread over the cores that this
process may use, then all on the first of them. In every round the transports take turns at the same calls;
the medians over the rounds of the microseconds of a call are printed, as the slowest rank saw them. Needs the
compiled kernels (`make kernels`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed

from sglang.srt.distributed.device_communicators.gloo_exchange import GlooExchange
from sglang.srt.distributed.shared_memory import cpu_transport
from sglang.srt.environ import envs

TIMEOUT_S = 60.0
DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Case:
    """One collective of one size, on any transport."""

    name: str
    call: Callable[[GlooExchange], object]


def cases(options: argparse.Namespace) -> Iterator[Case]:
    for dtype in DTYPES:
        for rows in options.rows:
            tensor = torch.ones(rows, options.width).to(dtype)
            name = f"all_reduce | {rows} | {str(dtype).removeprefix('torch.')}"
            yield Case(name, lambda on, tensor=tensor: on.all_reduce(tensor, "sum"))
    sizes = [16] * options.ranks
    own, all_rows = torch.ones(16, options.width), torch.ones(16 * options.ranks, options.width)
    yield Case("all_gather | 16 | float32", lambda on: on.all_gather(own, sizes))
    yield Case("reduce_scatter | 16 | float32", lambda on: on.reduce_scatter(all_rows, sizes, "sum"))
    frame = torch.zeros(4096, dtype=torch.uint8)
    yield Case(
        "broadcast of 4 KiB, answered | 1 | uint8", lambda on: [on.broadcast(frame, r) for r in (0, 1)]
    )


def microseconds(case: Case, transport: GlooExchange, calls: int) -> float:
    for _ in range(10):
        case.call(transport)
    start = time.perf_counter()
    for _ in range(calls):
        case.call(transport)
    return (time.perf_counter() - start) / calls * 1e6


def run_rank(rank: int, folder: Path, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    envs.GLOO_SOCKET_IFNAME.set("lo")
    store = torch.distributed.FileStore(str(folder / "store"), options.ranks)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    group = torch.distributed.group.WORLD
    assert group is not None
    gloo = GlooExchange(group, rank, options.ranks)
    shared = cpu_transport(gloo, rank, range(options.ranks), TIMEOUT_S)
    if shared is gloo:
        raise SystemExit("shared memory cannot be used here")
    found: dict[str, tuple[float, float]] = {}
    for case in cases(options):
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(options.rounds):
            for transport, into in zip((shared, gloo), times, strict=True):
                into.append(microseconds(case, transport, options.calls))
        found[case.name] = (statistics.median(times[0]), statistics.median(times[1]))
    (folder / f"found.{rank}").write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def measure(cores: list[int], options: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Microseconds of a call through shared memory and through gloo, by case."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(options.ranks):
            arguments = [sys.executable, *sys.argv, "--run-rank", str(rank), folder]
            core = {cores[rank % len(cores)]}
            ranks.append(
                subprocess.Popen(arguments, preexec_fn=lambda core=core: os.sched_setaffinity(0, core))
            )
        for rank in ranks:
            rank.wait()
        if any(rank.returncode for rank in ranks):
            raise SystemExit("a rank failed")
        found = [
            json.loads(Path(folder, f"found.{rank}").read_text("utf-8")) for rank in range(options.ranks)
        ]
    return {
        name: (max(one[name][0] for one in found), max(one[name][1] for one in found)) for name in found[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 256])
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--run-rank", nargs=2, metavar=("RANK", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min(*options.rows, options.width, options.calls, options.rounds, options.ranks - 1) < 1:
        parser.error("rows, width, calls and rounds are at least 1, ranks at least 2")
    if options.run_rank:
        run_rank(int(options.run_rank[0]), Path(options.run_rank[1]), options)
        return
    cores = sorted(os.sched_getaffinity(0))
    print("| ranks on | collective | rows | dtype | shared memory us | gloo us | gloo / shared |")
    print("|---|---|---|---|---|---|---|")
    for where in [cores, cores[:1]] if len(cores) > 1 else [cores]:
        for name, (shared, gloo) in measure(where, options).items():
            text = f"{min(len(where), options.ranks)} core{'s' if len(where) > 1 else ''}"
            print(f"| {text} | {name} | {shared:.1f} | {gloo:.1f} | {gloo / shared:.1f} |", flush=True)


if __name__ == "__main__":
    main()
