"""Small checkpoints that the loader tests share.

Owns the fixtures and a stand-in for a model. Read by the tests beside it.
"""

import pytest
import torch

from sglang.srt.layers.weights.parameter import LoadableParameter, Place, WeightLedger
from sglang.srt.model_loader.dummy import checkpoint_shapes
from sglang.srt.model_loader.loader import load_model, open_checkpoint
from sglang.test.tiny_models import write_tiny_model

SMALL = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
}


class ShelfModel:
    """A model that only keeps its weights: one parameter for each tensor of the checkpoint, with the real
    ledger.
    """

    def __init__(self, model_config, dtype=torch.float32):
        self.shelf = {
            name: LoadableParameter(torch.empty(shape, dtype=dtype), [Place.full(name, shape)])
            for name, shape in checkpoint_shapes(model_config).items()
        }

    @classmethod
    def filled(cls, model_config, load_format="auto", dtype=torch.float32, **options):
        """The checkpoint behind a config, opened and loaded as the model runner does it."""
        checkpoint = open_checkpoint(model_config, load_format, dtype)
        model = cls(checkpoint.config, dtype)
        load_model(model, checkpoint, dtype=dtype, **options)
        return model

    def parameters(self):
        return self.shelf.values()

    def load_weights(self, items):
        WeightLedger(self.parameters()).fill_all(items)


@pytest.fixture
def tiny(tmp_path):
    """Write a small model; keyword arguments go to `write_tiny_model`."""
    return lambda name="m", **changes: write_tiny_model(tmp_path / name, **{**SMALL, **changes})


@pytest.fixture
def shelf():
    return ShelfModel
