"""How a checkpoint stretches its rotary embedding, brought into one spelling.

Owns the accepted kinds (`llama3`, or none) and their parameters. Read by the architectures; the rotary layer
reads the result. It must not compute rotary tables for the forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypedDict


class Llama3Scaling(TypedDict):
    """Llama 3's stretching, under the names that checkpoints use."""

    rope_type: str
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


def read_rope(config: Mapping[str, object], where: str) -> tuple[float, Llama3Scaling | None]:
    """`(rope_theta, rope_scaling)` of a Hugging Face config; the scaling is None when there is none.

    Both spellings are read, the older `rope_scaling` and the newer `rope_parameters`.
    """
    parameters: dict[str, object] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = config.get(key)
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"{where}: {key} is {value!r}; it must be an object or null")
        parameters.update(value or {})
    theta = parameters.pop("rope_theta", None)
    if theta is None:
        theta = config.get("rope_theta", 10000.0)
    if isinstance(theta, bool) or not isinstance(theta, (int, float)) or not theta > 0:
        raise ValueError(f"{where}: rope_theta is {theta!r}; it must be a positive number")
    partial = parameters.pop("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    if partial != 1.0:
        raise ValueError(f"{where}: partial_rotary_factor {partial} is not served; only 1.0 is")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return float(theta), None
    if kind != "llama3":
        raise ValueError(f"{where}: rope scaling of type {kind!r} is not served yet; known: default, llama3")
    return float(theta), _read_llama3(parameters, where)


def _read_llama3(parameters: Mapping[str, object], where: str) -> Llama3Scaling:
    def positive(key: str) -> float:
        value = parameters.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ValueError(f"{where}: llama3 rope scaling needs a positive {key}, it has {value!r}")
        return float(value)

    scaling = _llama3(
        factor=positive("factor"),
        low=positive("low_freq_factor"),
        high=positive("high_freq_factor"),
        original=int(positive("original_max_position_embeddings")),
    )
    if scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        raise ValueError(
            f"{where}: llama3 rope scaling needs high_freq_factor above low_freq_factor, it has "
            f"{scaling['high_freq_factor']} and {scaling['low_freq_factor']}"
        )
    return scaling


def _llama3(*, factor: float, low: float = 1.0, high: float = 4.0, original: int = 8192) -> Llama3Scaling:
    """The defaults are what all published Llama 3.1 and later models use."""
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def llama3_factors(scaling: Llama3Scaling, theta: float, head_dim: int) -> list[float]:
    """What each of the head_dim/2 frequencies is divided by: 1 for short waves, `factor` for long ones."""
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    factors: list[float] = []
    for index in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * index / head_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return factors


def llama3_from_factors(factors: Sequence[float], theta: float, head_dim: int, where: str) -> Llama3Scaling:
    """The parameters behind the table of factors that a GGUF file stores in place of them.

    A table that another way of stretching made is refused.
    """
    scaling = _llama3(factor=float(round(max(factors, default=1.0), 3)))
    expected = llama3_factors(scaling, theta, head_dim)
    if len(factors) != len(expected):
        raise ValueError(
            f"{where}: rope_freqs.weight has {len(factors)} values, head_dim {head_dim} needs {len(expected)}"
        )
    for index, (stored, wanted) in enumerate(zip(factors, expected, strict=True)):
        if abs(stored - wanted) > 1e-3 * wanted:
            raise ValueError(
                f"{where}: rope_freqs.weight[{index}] is {stored}, Llama 3 scaling by {scaling['factor']} "
                f"gives {wanted:.5f}; other frequency tables are not served yet"
            )
    return scaling
