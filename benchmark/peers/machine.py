"""What this machine can do at best: how fast it reads memory, and how fast torch multiplies.

Owns these limits, which stand beside the table. They are measured in a process of their own, on the cores
that the sides get, and again before every row: a shared machine drifts. Run as a script it prints one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

READ_BYTES, SIZE, REPEAT = 2**30, 2048, 5


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown processor"


def measure(threads: int, *, products: bool) -> dict[str, float | str]:
    """Limits in GB/s and GFLOP/s, each the best of a few; products take seconds and are asked for once."""
    from peers.process_tree import cores_for  # here: run as a script this file has no package

    cores = cores_for(threads)
    arguments = [sys.executable, __file__, str(threads), *(["products"] if products else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        arguments,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    if done.returncode:
        raise RuntimeError(f"the machine could not be measured: {done.stderr.strip()[-400:]}")
    limits: dict[str, float | str] = json.loads(done.stdout.splitlines()[-1])
    return limits


def _best_seconds(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEAT):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def _main() -> None:
    threads, wants_products = int(sys.argv[1]), "products" in sys.argv
    import torch

    limits: dict[str, float | str] = {}
    buffer = torch.zeros(READ_BYTES // 4)
    for count in sorted({1, threads}):
        torch.set_num_threads(count)
        limits[f"read GB/s, {count} thread"] = READ_BYTES / _best_seconds(buffer.sum) / 1e9
    if wants_products:
        for dtype in (torch.float32, torch.bfloat16):
            left, right = (torch.ones(SIZE, SIZE, dtype=dtype) for _ in "ab")
            seconds = _best_seconds(lambda left=left, right=right: left @ right)
            limits[f"GEMM GFLOP/s, {str(dtype).rpartition('.')[2]}"] = 2 * SIZE**3 / seconds / 1e9
        try:
            import sgl_kernel

            limits["level"] = sgl_kernel.isa_level()
        except ImportError:
            limits["level"] = "torch, without compiled kernels"
    print(json.dumps(limits))


if __name__ == "__main__":
    _main()
