"""Owns which type of computation is the fastest on this processor: measured once, then read from a file.

Read by resolution where nobody chose a type. It must not load torch: a process of its own measures, in about
two seconds with its start. Where that fails, the processor's features decide, and a line says so.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from sglang.srt.environ import child_environment, envs
from sglang.srt.platforms.cpu import cpu_count, cpu_has_bf16, cpu_identity

logger = logging.getLogger(__name__)

_PROGRAM = "sglang.srt.layers.quantization.measure_dtype"
_LONGEST_S = 60
#: How much faster the other type must be to be taken, so that noise does not turn a choice.
_CLEARLY = 1.15
_TYPES = ("bfloat16", "float32")


def fastest_dtype() -> str:
    """ "bfloat16" or "float32"."""
    seconds = _seconds()
    expected = "bfloat16" if cpu_has_bf16() else "float32"
    return expected if seconds is None else chosen(seconds, expected)


def chosen(seconds: Mapping[str, float], expected: str) -> str:
    """The type that the processor's features promise, unless the other one is clearly faster."""
    [other] = set(_TYPES) - {expected}
    return other if seconds[expected] > _CLEARLY * seconds[other] else expected


def cache_folder() -> Path:
    """Where measurements are kept; not created here."""
    said = envs.SGLANG_CACHE_DIR.get()
    return Path(said) if said is not None else Path.home() / ".cache" / "sglang"


@cache
def _seconds() -> dict[str, float] | None:
    """Seconds by type, from the file or measured now; None where neither works."""
    file = cache_folder() / f"dtype-{_identity()}.json"
    try:
        return _parsed(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        pass  # not measured yet, or not a file of ours
    try:
        seconds = _parsed(_measured())
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        logger.warning("--dtype auto: nothing could be measured (%s); the processor's features decide", error)
        return None
    rates = ", ".join(f"{name} {value:.3f} s" for name, value in seconds.items())
    logger.info("--dtype auto: measured once on this processor, a request in %s", rates)
    _keep(file, seconds)
    return seconds


def _measured() -> str:
    words = [sys.executable, "-m", _PROGRAM]
    environment = child_environment(OMP_WAIT_POLICY="PASSIVE")
    done = subprocess.run(
        words, check=True, capture_output=True, text=True, timeout=_LONGEST_S, env=environment
    )
    return done.stdout


def _parsed(text: str) -> dict[str, float]:
    """`ValueError` for anything but a positive number of seconds for each type."""
    found = json.loads(text)
    if not isinstance(found, dict) or set(found) != set(_TYPES):
        raise ValueError(f"seconds of {' and '.join(_TYPES)} were expected, not {text[:80]!r}")
    if not all(isinstance(value, int | float) and value > 0 for value in found.values()):
        raise ValueError(f"seconds are positive numbers, not {text[:80]!r}")
    return {name: float(value) for name, value in found.items()}


def _keep(file: Path, seconds: Mapping[str, float]) -> None:
    """Write the file at once or not at all; without it the next start measures again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as draft:
            json.dump(dict(seconds), draft)
        os.replace(draft.name, file)
    except OSError as error:
        logger.debug("the measurement is not kept in %s: %s", file, error)


def _identity() -> str:
    """What a measurement depends on, as a short name."""
    parts = [cpu_identity(), str(cpu_count()), str(envs.OMP_NUM_THREADS.get())]
    parts += [str(envs.SGLANG_USE_CPU_KERNELS.get()), str(envs.SGL_KERNEL_ISA.get())]
    for package in ("torch", "sgl_kernel"):
        try:
            parts.append(importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            parts.append("")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
