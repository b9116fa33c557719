"""Owns what is done with tensors of a checkpoint that no parameter of the model is made of.

Called by the loader. None is left out before its values were compared and the log has said so; one of a kind
that is not known here is refused by the model.
"""

from __future__ import annotations

import dataclasses
import logging

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.layers.weights.parameter import WeightItem

logger = logging.getLogger(__name__)

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
_FREQUENCIES = "rotary_emb.inv_freq"
# Values compared at once: the two tables together may be larger than what is left of the memory.
_CHUNK_VALUES = 4 << 20


def put_aside(
    model_config: ModelConfig, items: list[WeightItem], dtype: torch.dtype
) -> tuple[ModelConfig, list[WeightItem]]:
    """The config that these tensors agree with, and those of them that a model of that config holds.

    A config may say that the head is the embedding table while the file brings a head as well. A copy is left
    out; a head of other values is the model's own, and the config that comes back says so.
    """
    items = _without_frequencies(model_config, items)
    by_name = {item.name: item for item in items}
    head, table = by_name.get(HEAD), by_name.get(TABLE)
    if not model_config.tie_word_embeddings or head is None:
        return model_config, items
    untied = dataclasses.replace(model_config, tie_word_embeddings=False)
    if table is None or len(table.shape) != 2 or table.shape != head.shape:
        return untied, items  # the model refuses what is missing or of a wrong shape
    row = _first_difference(head, table, dtype)
    if row is None:
        logger.info(
            "Tensor %s of %s is not loaded: it is a copy of %s, to which it is tied", HEAD, head.file, TABLE
        )
        return model_config, [item for item in items if item is not head]
    logger.warning(
        "%s says tie_word_embeddings, but tensor %s of %s is no copy of %s (they differ from row %d on): the "
        "head of the file is used",
        model_config.path,
        HEAD,
        head.file,
        TABLE,
        row,
    )
    return untied, items


def _first_difference(one: WeightItem, other: WeightItem, dtype: torch.dtype) -> int | None:
    """The first row in which two tensors of one shape differ as they would be loaded, bit by bit."""
    rows, columns = one.shape
    step = max(1, _CHUNK_VALUES // max(columns, 1))
    for start in range(0, rows, step):
        length = min(step, rows - start)
        ours, theirs = (item.load(dtype, 0, start, length).view(torch.uint8) for item in (one, other))
        if not torch.equal(ours, theirs):
            return start + int((ours != theirs).any(dim=1).nonzero()[0])
    return None


def _without_frequencies(model_config: ModelConfig, items: list[WeightItem]) -> list[WeightItem]:
    """Old savers wrote the rotary frequencies of each layer, which the model works out of its config."""
    stored = [item for item in items if item.name.endswith(_FREQUENCIES)]
    if not stored:
        return items
    strange = [item for item in stored if not _of_the_config(item, model_config)]
    first = (strange or stored)[0]
    if strange:
        logger.warning(
            "Tensor %s of %s (one of %d) holds other rotary frequencies than the config gives. Those of the "
            "config are used: see whether its rope_theta and rope_scaling are right",
            first.name,
            first.file,
            len(strange),
        )
    else:
        logger.info(
            "Tensor %s of %s (one of %d) is not loaded: its rotary frequencies are those of the config",
            first.name,
            first.file,
            len(stored),
        )
    return [item for item in items if not item.name.endswith(_FREQUENCIES)]


def _of_the_config(item: WeightItem, model_config: ModelConfig) -> bool:
    """Whether these are the config's frequencies, before or after scaling, as 16 bits would round them."""
    theta, head_dim = model_config.rope_theta, model_config.head_dim
    if item.shape != (head_dim // 2,):
        return False
    values = item.load(torch.float32)
    return any(
        torch.allclose(
            values, get_rope(head_dim, theta, scaling, torch.float32).frequencies, rtol=1e-2, atol=1e-7
        )
        for scaling in (None, model_config.rope_scaling)
    )
