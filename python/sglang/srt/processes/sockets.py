"""Owns the folder of an engine's sockets: made by its owner, used by its ranks, removed when the owner died.

Used by whoever starts ranks; `wire.py` opens the sockets in it. It must not open any itself.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import pathlib
import shutil
import tempfile

from sglang.srt.configs.utf8 import check_utf8
from sglang.srt.environ import envs

logger = logging.getLogger(__name__)

_PREFIX = "sglang-"
_LOCK = "owner.lock"
# sun_path of a unix socket holds 108 bytes with its closing zero.
_MAX_SOCKET_PATH = 107
_folder_numbers = itertools.count()


class SocketFolder:
    """A 0700 folder named by pid that holds the sockets and heartbeats of one engine.

    The owner holds a lock inside it for as long as it lives, so a later start can tell a folder in use from
    one whose owner was killed, also between containers that share a temporary folder but not their pids.
    """

    def __init__(self) -> None:
        root = _root()
        sweep_dead_folders(root)
        self.path = root / f"{_PREFIX}{os.getpid()}-{next(_folder_numbers)}-{os.urandom(3).hex()}"
        try:
            self.path.mkdir(mode=0o700)
        except OSError as error:
            raise ValueError(
                f"no folder for sockets can be made in {root} ({error.strerror}); set SGLANG_RUNTIME_DIR to "
                "a folder that this user may write to"
            ) from error
        self._lock_fd: int | None = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX)

    @property
    def server_address(self) -> str:
        """Where ranks send."""
        return _address(self.path, "server")

    def rank_address(self, world_rank: int) -> str:
        """Where one rank listens."""
        return _address(self.path, f"rank{world_rank}")

    def heartbeat_path(self, world_rank: int) -> pathlib.Path:
        return self.path / f"heartbeat{world_rank}"

    def remove(self) -> None:
        """Remove it with everything in it; safe to call twice."""
        remove_socket_folder(self.path)
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def remove_socket_folder(path: pathlib.Path) -> None:
    """Remove one folder; another process may be doing the same."""
    shutil.rmtree(path, ignore_errors=True)


def sweep_dead_folders(root: pathlib.Path | None = None) -> list[pathlib.Path]:
    """Remove this user's folders whose owner is gone; returns what was removed."""
    removed = []
    for path in sorted((root or _root()).glob(f"{_PREFIX}[0-9]*-*")):
        if _is_ours(path) and not _owner_lives(path):
            logger.debug("removing %s: its owner is gone", path)
            remove_socket_folder(path)
            removed.append(path)
    return removed


def _root() -> pathlib.Path:
    stated = envs.SGLANG_RUNTIME_DIR.get()
    try:
        # Absolute: ranks may work in another folder.
        root = pathlib.Path(stated or tempfile.gettempdir()).absolute()
    except OSError as error:
        raise ValueError(
            f"there is no folder for sockets ({error.strerror}); set SGLANG_RUNTIME_DIR to a folder that "
            "this user may write to"
        ) from error
    if not root.is_dir():
        raise ValueError(f"SGLANG_RUNTIME_DIR={stated}: is not a folder; create it or leave the variable out")
    check_utf8(root, "the folder for sockets (SGLANG_RUNTIME_DIR, else TMPDIR)")
    return root


def _address(folder: pathlib.Path, name: str) -> str:
    path = str(folder / name)
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        raise ValueError(
            f"the socket path {path} is longer than {_MAX_SOCKET_PATH} bytes; "
            "set SGLANG_RUNTIME_DIR to a shorter folder"
        )
    return f"ipc://{path}"


def _is_ours(path: pathlib.Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return path.is_dir() and not path.is_symlink() and status.st_uid == os.getuid()


def _owner_lives(path: pathlib.Path) -> bool:
    pid = path.name.removeprefix(_PREFIX).split("-", 1)[0]
    try:
        fd = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        # Just made and not locked yet, or half removed: the pid decides.
        return pid.isdecimal() and pathlib.Path(f"/proc/{pid}").exists()
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
