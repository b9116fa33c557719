"""Facts about the host's processor and memory, from /proc and /sys.

Read by resolution (dtype, pool size) and by the choice of CPU kernels. Must not import torch: the server
process asks before any rank exists.
"""

import ctypes
import os
from functools import cache
from pathlib import Path

from sglang.srt.platforms.control_group import memory_room

_CPUINFO = Path("/proc/cpuinfo")

#: Instruction sets that multiply bf16 natively: x86 AVX-512 and AMX, and Arm's own feature word.
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def parse_cpu_flags(cpuinfo: str) -> frozenset[str]:
    """The features of the first processor in the text of /proc/cpuinfo; Arm calls the line "Features"."""
    for line in cpuinfo.splitlines():
        key, _, words = line.partition(":")
        if key.strip().lower() in ("flags", "features"):
            return frozenset(words.split())
    return frozenset()


@cache
def cpu_flags() -> frozenset[str]:
    try:
        return parse_cpu_flags(_CPUINFO.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return frozenset()


def cpu_has_bf16() -> bool:
    return bool(cpu_flags() & _BF16_FLAGS)


def cpu_identity() -> str:
    """The name of the processor and its features."""
    try:
        text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return " ".join([*names[:1], *sorted(parse_cpu_flags(text))])


def cpu_count() -> int:
    """Cores this process may run on, by its affinity mask and not by the machine."""
    return len(os.sched_getaffinity(0))


def return_free_memory() -> None:
    """Give memory that was freed back to the system; glibc keeps it for later, others do as they like."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that can still be allocated: the kernel's estimate, bounded by the limits of control groups.

    `root` is the folder that holds `proc` and `sys`.
    """
    available = 0
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            break
    room = memory_room(root)
    return available if room is None else min(available, room)
