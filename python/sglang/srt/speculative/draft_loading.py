"""Owns how a draft model comes from its files: names as exporters write them, tensors that are not its own.

Called when a draft's runner is built, in the draft's scope. What a draft borrows from its target is not read
again; a head of its own that repeats the target's is filled from the target's files.
"""

from __future__ import annotations

import dataclasses
import logging

import torch

from sglang.srt.configs.draft_config import DraftConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.weights.parameter import WeightItem
from sglang.srt.model_loader.loader import Checkpoint, load_model, open_checkpoint
from sglang.srt.models.common.decoder import DecoderForCausalLM
from sglang.srt.models.drafts.registry import DRAFT_MODELS, DraftModel

logger = logging.getLogger(__name__)

#: Only training reads which tokens have a draft id.
_TRAINING_ONLY = "t2d"
_TOKEN_MAP = "d2t"
_TABLE = "embed_tokens.weight"
_HEAD = "lm_head.weight"
#: Norms of the captured rows, as older exporters name them.
_CAPTURE_NORMS = {
    "aux_norm_low.weight": "fc_norm.0.weight",
    "aux_norm_mid.weight": "fc_norm.1.weight",
    "aux_norm_high.weight": "fc_norm.2.weight",
}


@dataclasses.dataclass(frozen=True, slots=True)
class TargetModel:
    """The target as a draft needs it: its model in this process, and where its tensors can be read again."""

    model: DecoderForCausalLM
    config: ModelConfig
    load_format: str


def load_eagle_draft(
    draft: DraftConfig, target: TargetModel, *, load_format: str, dtype: torch.dtype, device: torch.device
) -> DraftModel:
    """The draft's model over the target's embedding, with its weights loaded."""
    assert draft.head is not None
    with torch.device(device):
        model = DRAFT_MODELS[draft.model.architecture](draft, target.model, dtype=dtype)
    checkpoint = open_checkpoint(draft.model, load_format, dtype)
    items = own_items(checkpoint.items, draft)
    if model.own_head is not None:
        (place,) = model.own_head.weight.places
        if all(item.name != place.name for item in items):
            theirs = open_checkpoint(target.config, target.load_format, dtype).items
            items += [item for item in theirs if item.name == place.name]
    load_model(model, Checkpoint(checkpoint.config, items), dtype=dtype)
    return model.eval()


def own_items(items: list[WeightItem], draft: DraftConfig) -> list[WeightItem]:
    """The tensors that the draft is made of, under the names that its model knows.

    Exporters write them with or without `model.`, and the layer as `midlayer` or `layers.0`. An embedding is
    the target's whatever the file holds, and so is a head, unless the draft has a vocabulary of its own.
    """
    assert draft.head is not None
    borrowed = {_TABLE} if draft.head.draft_vocab_size is not None else {_TABLE, _HEAD}
    kept: list[WeightItem] = []
    for item in items:
        name = item.name.removeprefix("model.").replace("midlayer.", "layers.0.")
        name = _CAPTURE_NORMS.get(name, name)
        if name == _TRAINING_ONLY:
            continue
        if name in borrowed:
            level = logging.WARNING if name == _HEAD else logging.INFO
            logger.log(
                level, "Tensor %s of %s is not loaded: the draft uses the target's", item.name, item.file
            )
        elif name == _TOKEN_MAP and not draft.has_reduced_vocabulary:
            _check_no_map(item)
        else:
            kept.append(dataclasses.replace(item, name=name))
    return kept


def _check_no_map(item: WeightItem) -> None:
    """A draft that knows every token has the target's ids; another order of them is not served."""
    if bool(item.load(torch.int64).any()):
        raise ValueError(
            f"tensor {item.name} of {item.file} gives the tokens other ids, and draft_vocab_size says that "
            "the draft knows all of them: such a map is not served; use a draft without it"
        )
