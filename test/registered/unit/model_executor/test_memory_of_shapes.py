"""A thousand forwards of different shapes leave the memory of a rank where it was."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=30, suite="unit-cpu")

import os
import subprocess
import sys

import pytest

from sglang.kernels.compiled import compiled_kernels
from sglang.srt.processes.rank_environment import rank_environment
from sglang.test.tiny_models import write_tiny_model

#: What a rank may take more after a thousand shapes than after the first hundred: noise of the allocator.
ROOM = 6 << 20

PROGRAM = """
import pathlib, random, sys
import torch
from sglang.srt.platforms import return_free_memory
from sglang.test.worker_driver import driven_worker

folder, keeps = sys.argv[1], sys.argv[2] == "keeps"

def resident_bytes():
    return_free_memory()
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096

with driven_worker(folder, max_total_tokens=512) as driver:
    runner, kept = driver.target.model_runner, {}
    forward = runner.forward

    def keeping(batch):
        kept.setdefault((batch.num_tokens, batch.batch_size), torch.ones(8192))
        return forward(batch)

    if keeps:
        runner.forward = keeping
    draw, seen, before = random.Random(7), set(), 0
    for turn in range(1000):
        lengths = [draw.randint(1, 90) for _ in range(draw.randint(2, 5))]
        seqs = [driver.add([5 + i % 90 for i in range(length)]) for length in lengths]
        driver.generate(seqs, 2)
        seen.add(tuple(lengths))
        for seq in seqs:
            driver.drop(seq)
        if turn == 99:
            before = resident_bytes()
    print(len(seen), resident_bytes() - before)
"""


@pytest.mark.parametrize("keeps", [False, True], ids=["as it is", "with something kept for each shape"])
@pytest.mark.parametrize("kernels", [False, True], ids=["in torch", "with kernels"])
def test_a_thousand_shapes_leave_memory_flat(tmp_path, kernels, keeps):
    if kernels and compiled_kernels() is None:
        pytest.skip("the compiled kernels are not used")
    folder = write_tiny_model(tmp_path / "model")
    environment = {**rank_environment(0, 1), **os.environ, "SGLANG_USE_CPU_KERNELS": str(int(kernels))}
    words = [sys.executable, "-c", PROGRAM, str(folder), "keeps" if keeps else "as it is"]
    done = subprocess.run(words, check=True, capture_output=True, text=True, env=environment)
    num_shapes, grown = map(int, done.stdout.split())
    assert num_shapes > 900
    assert (grown > ROOM) == keeps, f"{grown >> 10} KiB more after 1,000 shapes"
