"""Owns where the weights of a model lay when its graphs were recorded.

Written at capture and compared after a weight update by `CapturedGraphs`. Values may change in place; an
address may not, because a graph goes on reading the old one. It must not hold a weight: that would keep the
memory of a replaced one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


class AddressTable:
    """Name -> address of every parameter and buffer of a model, and of what was derived from them."""

    def __init__(self, model: nn.Module) -> None:
        self._addresses = dict(_addresses(model))

    def check(self, model: nn.Module) -> None:
        """`RuntimeError` naming the first tensor that does not lie where it lay."""
        now = dict(_addresses(model))
        for name in sorted(self._addresses.keys() | now.keys()):
            if self._addresses.get(name) != now.get(name):
                raise RuntimeError(
                    f"captured graphs: weight {name} moved since capture; repeat the update with "
                    "recapture_cuda_graph=true"
                )


def _addresses(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Tensors of modules, and those of plain objects that a module holds (a packed weight, say)."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            held = value if isinstance(value, dict) and name in ("_parameters", "_buffers") else {name: value}
            for key, entry in held.items():
                yield from _of_value(f"{prefix}.{key}".removeprefix("."), entry, seen)


def _of_value(name: str, value: object, seen: set[int]) -> Iterator[tuple[str, int]]:
    """What a value holds; `seen` are the objects that were looked into, so that a circle ends."""
    if isinstance(value, torch.Tensor):
        yield name, value.data_ptr() if value.layout is torch.strided else id(value)
    elif isinstance(value, nn.Module) or id(value) in seen:
        return
    elif type(value).__module__.startswith("sglang."):
        seen.add(id(value))
        for key, entry in getattr(value, "__dict__", {}).items():
            yield from _of_value(f"{name}.{key}", entry, seen)
