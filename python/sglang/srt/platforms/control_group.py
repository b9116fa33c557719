"""How much memory the control groups of this process still leave it, whichever version mounts them.

Read by `platforms/cpu.py`. A limit may stand at any level between the own group and the root of the mount,
and the tightest one stops the process, so every level is asked. What the kernel would give back by itself
(clean file pages and caches of its own) is not counted as used. Must not import torch.
"""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_OCTAL = re.compile(r"\\([0-7]{3})")


class _Version(NamedTuple):
    """The files and words of one version of the interface."""

    limits: tuple[str, ...]
    usage: str
    default_mount: str
    #: Rows of memory.stat: file pages that must go to a disk first, and caches of the kernel's own. v1 has a
    #: `total_` form of each, which counts the groups inside as the usage does.
    unwritten: tuple[str, ...]
    caches: tuple[str, ...] = ()
    #: A row of memory.stat that repeats the tightest limit above, also one that no mount here shows.
    inherited: str = ""


# memory.high ends nobody, but above it a new page waits until another is given back: no room to plan with.
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
    """Bytes left under the tightest limit of the groups that hold this process; None where none is told.

    `root` is the folder that holds `proc` and `sys`. What cannot be read limits nothing.
    """
    rooms = [
        room
        for version, group in _own_groups(_text(root / "proc/self/cgroup"))
        for folder in _levels(root, version, group)
        if (room := _room(folder, version)) is not None
    ]
    return min(rooms, default=None)


def _own_groups(text: str) -> list[tuple[_Version, str]]:
    """The group of this process in each hierarchy that may count memory; a hybrid machine has two."""
    groups = []
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if number == "0" and not controllers:
            groups.append((_V2, group))
        elif "memory" in controllers.split(","):
            groups.append((_V1, group))
    # Where the list is hidden, the roots of both mounts may still be read.
    return groups or [(_V2, "/"), (_V1, "/")]


def _levels(root: Path, version: _Version, group: str) -> Iterator[Path]:
    """The folders of a group and of all groups around it, up to the root of the mount that shows them.

    A mount that does not show the group (a container that sees its group's name on the host, or a process
    outside its own namespace) can only be asked at its root.
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
    """(folder relative to the root, the group that it shows there) of each mount of this hierarchy."""
    for line in text.splitlines():
        mount, _, source = line.partition(" - ")
        fields, kind = mount.split(), source.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        v2 = kind[0] == "cgroup2" and version is _V2
        if v2 or (kind[0] == "cgroup" and version is _V1 and "memory" in kind[2].split(",")):
            yield _unescaped(fields[4]).lstrip("/"), _unescaped(fields[3])


def _inside(group: str, top: str) -> PurePosixPath | None:
    """The path from group `top` down to `group`; None if it does not lie inside, or nobody can tell."""
    path = PurePosixPath(group)
    if ".." in path.parts or not path.is_relative_to(top):
        return None
    return path.relative_to(top)


def _room(folder: Path, version: _Version) -> int | None:
    """Limit less what is really held, of one level; None where it sets no limit."""
    stat = _statistics(_text(folder / "memory.stat"))
    limits = [_number(_text(folder / name)) for name in version.limits]
    limits.append(stat.get(version.inherited))
    known = [limit for limit in limits if limit is not None]
    if not known:
        return None
    used = _number(_text(folder / version.usage)) or 0
    return max(0, min(known) - max(0, used - _given_back(stat, version)))


def _given_back(stat: dict[str, int], version: _Version) -> int:
    """What the kernel frees when memory gets short, without writing anything to a disk first."""

    def rows(*names: str) -> int:
        return sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in names)

    # These two lists hold neither shared memory nor locked pages; nobody gets those back.
    clean = max(0, rows("inactive_file", "active_file") - rows(*version.unwritten))
    return clean + rows(*version.caches)


def _statistics(text: str) -> dict[str, int]:
    rows = (line.split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}


def _number(text: str) -> int | None:
    """The value of a file; None for "max" and for what is no number."""
    text = text.strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    """The text of a file; nothing where it is missing or not for us to read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _unescaped(field: str) -> str:
    r"""mountinfo writes a space as \040."""
    return _OCTAL.sub(lambda match: chr(int(match.group(1), 8)), field)
