"""Owns running kernels at a forced instruction set: the set is picked once a process, so each has its own.

Read by the tests here. A process is started for each level that is asked for, and serves all tests; cases are
handed over in a file, and the answers come back in it. `scripts/run_kernel_tests.py` says through the
environment which levels have an emulated package, or that levels run under qemu.
"""

import atexit
import functools
import json
import os
import pathlib
import subprocess
import sys
import traceback

import torch

LEVELS = ("base", "avx2", "avx512", "avx512_vnni_bf16")

#: Processors of qemu that have a level and none above it; it knows no AVX-512.
QEMU_PROCESSORS = {"base": "Nehalem", "avx2": "Haswell"}

_processes = {}


def supported_levels():
    """The levels that this processor has, the best one last."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        flags = next((line.split() for line in file if line.startswith("flags")), [])
    return levels_of(flags)


def levels_of(flags):
    """The levels of a processor with these flags of /proc/cpuinfo."""
    has = {"base": True, "avx2": all(flag in flags for flag in ("avx2", "fma", "f16c"))}
    has["avx512"] = has["avx2"] and all(f"avx512{part}" in flags for part in ("f", "bw", "dq", "vl"))
    has["avx512_vnni_bf16"] = has["avx512"] and "avx512_vnni" in flags and "avx512_bf16" in flags
    return [level for level in LEVELS if has[level]]


@functools.cache
def emulation():
    """What the emulated package says of itself: levels that it has, and instructions that others lack."""
    folder = os.environ.get("SGL_KERNEL_EMULATED")
    if not folder:
        return {"emulated": [], "lacking": {}}
    return json.loads(pathlib.Path(folder, "levels.json").read_text(encoding="utf-8"))


def why_untested(level):
    """A sentence where the level cannot run here, else an empty one."""
    if "SGL_KERNEL_QEMU" in os.environ:
        return "" if level in QEMU_PROCESSORS else f"qemu-user has no {level}"
    if level in emulation()["lacking"]:
        return f"SIMDe lacks {', '.join(emulation()['lacking'][level])}, which {level} needs"
    if level in supported_levels() or level in emulation()["emulated"]:
        return ""
    return f"this processor has no {level}; `make kernel-tests` emulates it"


def levels_to_test():
    return [level for level in LEVELS if not why_untested(level)]


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
    environment = {**os.environ, "SGL_KERNEL_ISA": level}
    command = [sys.executable, "-P", __file__]
    if level in emulation()["emulated"]:
        paths = [os.environ["SGL_KERNEL_EMULATED"], os.environ.get("PYTHONPATH")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    elif "SGL_KERNEL_QEMU" in os.environ and level in QEMU_PROCESSORS:
        command = [os.environ["SGL_KERNEL_QEMU"], "-cpu", QEMU_PROCESSORS[level], *command]
    process = subprocess.Popen(
        command,
        env=environment,
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
