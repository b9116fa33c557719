"""How much memory the control groups of this process still leave it, in either version of the interface.

Read by `platforms/cpu.py`. A limit may be set at any level between the process's own group and the root of
the mount, and the tightest one ends the process, so every level is read. What the kernel would free by itself
(clean file pages and caches of its own) is not counted as used.
"""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_OCTAL = re.compile(r"\\([0-7]{3})")


class _Version(NamedTuple):
    """The file and field names of one version of the interface."""

    limits: tuple[str, ...]
    usage: str
    default_mount: str
    #: Fields of memory.stat: file pages that must be written to a disk first, and caches of the kernel's own.
    #: v1 has a `total_` form of each, which counts the groups inside as the usage does.
    unwritten: tuple[str, ...]
    caches: tuple[str, ...] = ()
    #: The field of memory.stat that repeats the tightest limit of the groups around, also of those not
    #: mounted here.
    inherited: str = ""


# memory.high ends no process, but above it each new page waits for another to be freed: no room to plan with.
_V2 = _Version(
    limits=("memory.max", "memory.high"),
    usage="memory.current",
    default_mount="sys/fs/cgroup",
    unwritten=("file_dirty", "file_writeback"),
    caches=("slab_reclaimable",),
)
_V1 = _Version(
    limits=("memory.limit_in_bytes",),
    usage="memory.usage_in_bytes",
    default_mount="sys/fs/cgroup/memory",
    unwritten=("dirty", "writeback"),
    inherited="hierarchical_memory_limit",
)


def memory_room(root: Path = Path("/")) -> int | None:
    """Bytes left under the tightest limit of the groups of this process; None without a limit.

    `root` is the folder that holds `proc` and `sys`. A file that cannot be read sets no limit.
    """
    rooms = [
        room
        for version, group in _own_groups(_text(root / "proc/self/cgroup"))
        for folder in _levels(root, version, group)
        if (room := _room(folder, version)) is not None
    ]
    return min(rooms, default=None)


def _own_groups(text: str) -> list[tuple[_Version, str]]:
    """The group of this process in each hierarchy that may limit memory; a hybrid machine has two."""
    groups = []
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if number == "0" and not controllers:
            groups.append((_V2, group))
        elif "memory" in controllers.split(","):
            groups.append((_V1, group))
    # Where the list cannot be read, the roots of both mounts may still be.
    return groups or [(_V2, "/"), (_V1, "/")]


def _levels(root: Path, version: _Version, group: str) -> Iterator[Path]:
    """The folders of a group and of all groups around it, up to the root of the mount.

    A mount may not contain the group: a container may be told its group's name on the host, or the process
    may be outside its own namespace. Then only the root of the mount is read.
    """
    mounts = list(_mounts(_text(root / "proc/self/mountinfo"), version))
    shown = [(folder, inner) for folder, top in mounts if (inner := _inside(group, top)) is not None]
    if not shown:
        shown = [(folder, PurePosixPath()) for folder, _ in mounts]
    if not shown:
        inner = _inside(group, "/")
        shown = [(version.default_mount, PurePosixPath() if inner is None else inner)]
    for folder, inner in shown:
        for level in (inner, *inner.parents):
            yield root / folder / level


def _mounts(text: str, version: _Version) -> Iterator[tuple[str, str]]:
    """(folder relative to the root, group mounted there) of each mount of this hierarchy."""
    for line in text.splitlines():
        mount, _, source = line.partition(" - ")
        fields, kind = mount.split(), source.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        v2 = kind[0] == "cgroup2" and version is _V2
        if v2 or (kind[0] == "cgroup" and version is _V1 and "memory" in kind[2].split(",")):
            yield _unescaped(fields[4]).lstrip("/"), _unescaped(fields[3])


def _inside(group: str, top: str) -> PurePosixPath | None:
    """The path from group `top` down to `group`; None if it does not lie inside."""
    path = PurePosixPath(group)
    if ".." in path.parts or not path.is_relative_to(top):
        return None
    return path.relative_to(top)


def _room(folder: Path, version: _Version) -> int | None:
    """Limit of one level minus what is used there; None where it sets no limit."""
    stat = _statistics(_text(folder / "memory.stat"))
    limits = [_number(_text(folder / name)) for name in version.limits]
    limits.append(stat.get(version.inherited))
    known = [limit for limit in limits if limit is not None]
    if not known:
        return None
    used = _number(_text(folder / version.usage)) or 0
    return max(0, min(known) - max(0, used - _reclaimable(stat, version)))


def _reclaimable(stat: dict[str, int], version: _Version) -> int:
    """What the kernel frees when memory gets short, without writing anything to a disk first."""

    def total(*names: str) -> int:
        return sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in names)

    # These two lists hold neither shared memory nor locked pages, which are never freed.
    clean = max(0, total("inactive_file", "active_file") - total(*version.unwritten))
    return clean + total(*version.caches)


def _statistics(text: str) -> dict[str, int]:
    fields = (line.split() for line in text.splitlines())
    return {field[0]: int(field[1]) for field in fields if len(field) == 2 and field[1].isdecimal()}


def _number(text: str) -> int | None:
    """The number in a file; None for "max" and for anything else."""
    text = text.strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    """The text of a file; empty where it is missing or may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _unescaped(field: str) -> str:
    r"""mountinfo writes a space as \040."""
    return _OCTAL.sub(lambda match: chr(int(match.group(1), 8)), field)
