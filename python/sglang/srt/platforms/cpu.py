"""Facts about the host processor and its memory, read from /proc and /sys.

Read by resolution (dtype, pool size) and by the CPU kernels' level choice.
Must not import torch: the server process asks these before any rank exists.
"""

import os
from functools import cache
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")

#: Instruction sets that multiply bf16 natively: x86 AVX-512 and AMX, and Arm's own feature word.
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def parse_cpu_flags(cpuinfo: str) -> frozenset[str]:
    """Feature words of the first processor in the text of /proc/cpuinfo ("Features" is Arm's word)."""
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


def cpu_count() -> int:
    """Cores this process may run on (the affinity mask counts, not the machine)."""
    return len(os.sched_getaffinity(0))


def _cgroup_room() -> int | None:
    """Bytes left under the memory limit of this control group; None where there is no limit."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        return None if limit == "max" else max(0, int(limit) - used)
    except (OSError, ValueError):
        return None


def available_memory_bytes() -> int:
    """Memory that can still be taken: the kernel's estimate, bounded by the control group's limit."""
    available = 0
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            break
    room = _cgroup_room()
    return available if room is None else min(available, room)
