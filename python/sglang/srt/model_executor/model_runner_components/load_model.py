"""Owns how a model is made: its class, its type of computation, its weights.

Called once by the model runner. It must not decide which files are read: the loader does.
"""

from __future__ import annotations

import logging
import sys

import torch

from sglang.kernels.compiled import compiled_kernels
from sglang.kernels.compiled_for import COMPILED_DTYPES
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.quantization.gguf import GGUFConfig
from sglang.srt.layers.quantization.unquant import UnquantizedConfig
from sglang.srt.layers.quantization.w8a8_int8 import W8A8Int8Config, has_int8_kernel
from sglang.srt.model_loader.loader import load_model, open_checkpoint
from sglang.srt.models.common.decoder import DecoderForCausalLM
from sglang.srt.models.registry import model_class
from sglang.srt.platforms import return_free_memory
from sglang.srt.runtime_context import get_model, get_parallel

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def published_dtype() -> torch.dtype:
    """The type of computation in force; resolution has made `auto` one of the three."""
    name = get_model().dtype
    if name not in _DTYPES:
        raise RuntimeError(
            f"dtype is {name!r}: resolve the arguments first, or publish one of {', '.join(_DTYPES)}"
        )
    return _DTYPES[name]


def build_model(
    model_config: ModelConfig, *, dtype: torch.dtype, device: torch.device, quantization: str | None = None
) -> DecoderForCausalLM:
    """The model with its weights loaded, ready for forwards; quantized as published unless told otherwise."""
    quant = _quantization(quantization or get_model().quantization, model_config, dtype, device)
    checkpoint = open_checkpoint(model_config, get_model().load_format, dtype)
    with torch.device(device):
        model = model_class(model_config.architecture)(checkpoint.config, dtype=dtype, quant=quant)
    load_model(model, checkpoint, dtype=dtype, show_progress=_is_first_rank() and sys.stderr.isatty())
    return_free_memory()  # of tensors that were read and packed since
    return model.eval()


def _quantization(
    name: str | None, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> QuantizationConfig:
    """How weights are computed with: in int8, or as the blocks of a GGUF file, where that was asked for."""
    if name == "w8a8_int8" or config.stored_int8:
        if not has_int8_kernel(dtype, device):
            logger.warning(
                "w8a8_int8: torch computes %s, to the same numbers and slower than without "
                "the flag, because only the compiled kernels are fast with int8 (float32 and bfloat16, on a "
                "CPU); `make kernels` builds them",
                config.path,
            )
        return W8A8Int8Config(with_head=not config.stored_int8)
    if name != "gguf" or config.source != "gguf":
        return UnquantizedConfig()
    if device.type != "cpu" or dtype not in COMPILED_DTYPES or compiled_kernels() is None:
        logger.warning(
            "--quantization gguf: the blocks of %s are dequantized, because only the compiled kernels "
            "compute with them (float32 and bfloat16, on a CPU); `make kernels` builds these",
            config.path,
        )
        return UnquantizedConfig()
    return GGUFConfig()


def _is_first_rank() -> bool:
    """Whether this is rank 0 of replica 0, which shows the progress for all."""
    parallel = get_parallel()
    return parallel.launch_world_rank == 0 and not parallel.dp_rank
