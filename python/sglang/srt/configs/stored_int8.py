"""Owns what a config says of weights that the checkpoint itself stores quantised: int8 is served, else none.

Read by the configs of models and drafts. It must not read tensors: whether they are there and of that form is
the loader's to check.
"""

from __future__ import annotations

from collections.abc import Mapping

#: What the served scheme looks like in the config groups of compressed-tensors.
_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
_INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def refuse_quantized(config: Mapping[str, object], where: str) -> None:
    """ValueError where the checkpoint of this config stores its weights quantised."""
    if config.get("quantization_config"):
        raise ValueError(
            f"{where}: quantization_config is set, and of quantised Hugging Face checkpoints only whole "
            "models in int8 are served, with one scale an output and inputs that are quantised row by "
            "row; use the unquantised checkpoint or a GGUF file"
        )


def is_stored_int8(config: Mapping[str, object], where: str) -> bool:
    """Whether weights are int8 with a scale an output; ValueError where they are quantised otherwise."""
    said = config.get("quantization_config")
    if not said:
        return False
    if isinstance(said, Mapping):
        method = said.get("quant_method")
        if method == "w8a8_int8" and said.get("is_dynamic", True) is True:
            return True
        if method == "compressed-tensors" and _is_int8_scheme(said):
            return True
    refuse_quantized(config, where)
    return False


def _is_int8_scheme(said: Mapping[str, object]) -> bool:
    """All linear layers in int8; the head may be left out, and nothing else."""
    groups, ignored = said.get("config_groups"), said.get("ignore") or []
    if (
        not isinstance(groups, Mapping)
        or not isinstance(ignored, list)
        or set(map(str, ignored)) - {"lm_head"}
    ):
        return False
    return (
        len(groups) == 1
        and said.get("format") in (None, "int-quantized")
        and not said.get("kv_cache_scheme")
        and all(_is_int8_group(group) for group in groups.values())
    )


def _is_int8_group(group: object) -> bool:
    if (
        not isinstance(group, Mapping)
        or group.get("targets") != ["Linear"]
        or group.get("output_activations")
    ):
        return False
    weights, inputs = group.get("weights"), group.get("input_activations")
    return (
        isinstance(weights, Mapping)
        and isinstance(inputs, Mapping)
        and all(weights.get(key) == value for key, value in _WEIGHTS.items())
        and all(inputs.get(key) == value for key, value in _INPUTS.items())
    )
