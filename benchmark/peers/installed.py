"""Whether another Python has a module, asked without importing it here."""

from __future__ import annotations

import shutil
import subprocess


def has_module(python: str, module: str) -> bool:
    """Of a dotted name the package is looked for, which answers without importing it."""
    if shutil.which(python) is None:
        raise ValueError(f"{python}: there is no such program; give the Python that has {module}")
    question = (
        f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module.split('.')[0]!r}) is None)"
    )
    return subprocess.run([python, "-c", question], capture_output=True, check=False).returncode == 0
