"""What to do about an error of the operating system, as a sentence for the operator.

Used by the entry points and by ranks, when a start fails. It must not catch anything itself.
"""

from __future__ import annotations

import errno

_CURES = {
    errno.EMFILE: "this process may not open more files; raise the limit (ulimit -n)",
    errno.ENFILE: "this machine has no room for more open files; end what holds them",
    errno.ENOSPC: "the disk is full; free some room there, or name another folder with SGLANG_RUNTIME_DIR",
    errno.EDQUOT: "the disk quota is used up; name another folder with SGLANG_RUNTIME_DIR",
    errno.EAGAIN: "no more processes or threads are allowed; raise the limit (ulimit -u, or the container's)",
    errno.ENOMEM: "memory is short; free some, or raise the limit (ulimit -v, or the container's)",
}


def cure_of(error: BaseException) -> str | None:
    """What to do about this error; None where nothing is known.

    Errors of libraries may carry the system's number too, or only its words.
    """
    if isinstance(error, ImportError) and ".so" in str(error):
        return "a library cannot be loaded; install the requirements anew, or allow more memory (ulimit -v)"
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return _CURES[errno.ENOMEM]
    number = getattr(error, "errno", None)
    return _CURES.get(number) if isinstance(number, int) else None


def with_cure(error: BaseException) -> str:
    """The error's own text and what to do about it."""
    cure = cure_of(error)
    if cure is None:
        return str(error)
    return f"{error}: {cure}" if str(error) else cure
