"""Owns running kernels at a forced instruction set: the set is picked once a process, so each has its own.

Read by the tests here. A process is started for each level that is asked for, and serves all tests; cases are
handed over in a file, and the answers come back in it.
"""

import atexit
import os
import subprocess
import sys
import traceback

import torch

LEVELS = ("base", "avx2", "avx512", "avx512_vnni_bf16")

_processes = {}


def supported_levels():
    """The levels that this processor has, the best one last."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        flags = next((line.split() for line in file if line.startswith("flags")), [])
    has = {"base": True, "avx2": "avx2" in flags and "fma" in flags}
    has["avx512"] = has["avx2"] and all(f"avx512{part}" in flags for part in ("f", "bw", "dq", "vl"))
    has["avx512_vnni_bf16"] = has["avx512"] and "avx512_vnni" in flags and "avx512_bf16" in flags
    return [level for level in LEVELS if has[level]]


def answers_at(level, body, cases, folder):
    """What `body` (Python) appends to `answers` for its `cases` at this level; an assertion if it raises."""
    path = folder / f"{level}.pt"
    torch.save((body, cases), path)
    if level not in _processes:
        _processes[level] = start(level)
    process = _processes[level]
    process.stdin.write(f"{path}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n", f"the process of {level} has ended"
    found, answers = torch.load(path, weights_only=False)
    assert found == level, answers
    return answers


def start(level):
    """A process that runs what it is given at this level, until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-P", __file__],
        env={**os.environ, "SGL_KERNEL_ISA": level},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.communicate)
    return process


def serve():
    import sgl_kernel

    for line in sys.stdin:
        path = line.rstrip("\n")
        body, cases = torch.load(path, weights_only=False)
        answers = []
        try:
            exec(body, {"cases": cases, "answers": answers, "torch": torch, "sgl_kernel": sgl_kernel})
            found = (sgl_kernel.isa_level(), answers)
        except Exception:  # noqa: BLE001 - the test that asked reports it
            found = ("failed", traceback.format_exc())
        torch.save(found, path)
        print("done", flush=True)


if __name__ == "__main__":
    serve()
