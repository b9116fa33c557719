"""Owns the files of a draft in the public EAGLE3 format: config.json and model.safetensors.

Written by the training command and the overfit helper, read back by the evaluation. It must not train.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from train_draft.network import DraftNetwork, DraftShape
from train_draft.target import PlainTarget
from train_draft.vocabulary import DraftVocabulary

ARCHITECTURE = "LlamaForCausalLMEagle3"
WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft as it is stored: `tensors` hold the trained ones and both vocabulary maps."""

    config: dict[str, object]
    tensors: dict[str, Tensor]

    def save(self, folder: Path) -> None:
        """Write the folder that `--speculative-draft-model-path` names."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, folder / WEIGHTS_FILE, {"format": "pt"})

    @classmethod
    def read(cls, folder: Path) -> Draft:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return cls(config, load_file(folder / WEIGHTS_FILE))

    def vocabulary(self) -> DraftVocabulary:
        return DraftVocabulary.from_maps(self.tensors["d2t"], self.tensors["t2d"])

    def network(self, target: PlainTarget) -> DraftNetwork:
        """The network in fp32, with the target's embedding.

        Raises ValueError where a tensor does not have the shape that the config describes.
        """
        shape = _shape_of(self.config, len(target.aux_layers))
        weights = {}
        for name, wanted in shape.tensors().items():
            found = tuple(self.tensors[name].shape) if name in self.tensors else None
            if found != wanted:
                raise ValueError(
                    f"the draft's {name} has shape {found}, and its config says {wanted}; train it again"
                )
            weights[name] = self.tensors[name].float()
        return DraftNetwork(shape, weights, target.embedding.float())


def make_draft(
    target: PlainTarget,
    shape: DraftShape,
    weights: Mapping[str, Tensor],
    vocabulary: DraftVocabulary,
    dtype: torch.dtype = torch.bfloat16,
) -> Draft:
    """Weights in `dtype` with everything that a server has to know beside them."""
    c = target.config
    config: dict[str, object] = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": c.hidden_act,
        "vocab_size": c.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "target_hidden_size": c.hidden_size,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": c.max_position_embeddings,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(target.aux_layers),
            "use_aux_hidden_state": True,
        },
    }
    tensors = {name: weights[name].detach().to(dtype) for name in shape.tensors()}
    tensors["d2t"] = vocabulary.offsets()
    tensors["t2d"] = vocabulary.mask()
    return Draft(config, tensors)


def _shape_of(config: Mapping[str, object], pieces: int) -> DraftShape:
    def whole(key: str) -> int:
        value = config[key]
        assert isinstance(value, int), key
        return value

    def real(key: str) -> float:
        value = config[key]
        assert isinstance(value, int | float), key
        return float(value)

    return DraftShape(
        hidden_size=whole("hidden_size"),
        feature_size=whole("target_hidden_size") * pieces,
        intermediate_size=whole("intermediate_size"),
        num_heads=whole("num_attention_heads"),
        num_kv_heads=whole("num_key_value_heads"),
        head_dim=whole("head_dim"),
        draft_vocab_size=whole("draft_vocab_size"),
        rms_norm_eps=real("rms_norm_eps"),
        rope_theta=real("rope_theta"),
    )
