"""The values of one config.json, checked as they are read.

Read by the architectures. Each error names the file, the key, the value and what it must be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ConfigValues:
    """A config in Hugging Face's words; `where` is what errors call it."""

    values: Mapping[str, object]
    where: str

    def positive(self, key: str, default: int | None = None) -> int:
        """A whole number above 0; required where there is no default."""
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ValueError(f"{self.where}: {key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{self.where}: {key} is {value!r}; it must be a whole number above 0")
        return value

    def boolean(self, key: str) -> bool:
        """True or false; false where the key is missing or null."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{self.where}: {key} is {value!r}; it must be true or false")
        return bool(value)

    def epsilon(self, key: str, default: float) -> float:
        """A number between 0 and 1."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
            raise ValueError(f"{self.where}: {key} is {value!r}; it must be a number between 0 and 1")
        return float(value)
