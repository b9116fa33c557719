"""sglang: serves large language models. `import sglang as sgl`; `sgl.Engine(model_path=...)`.

Public names only, each loaded when it is first used; importing this costs nothing and loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sglang.version import __version__

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

__all__ = ["Engine", "ServerArgs", "__version__"]

_HOMES = {"Engine": "sglang.srt.entrypoints.engine", "ServerArgs": "sglang.srt.server_args"}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'sglang' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
