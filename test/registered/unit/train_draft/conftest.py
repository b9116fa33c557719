"""Owns what the tests of draft training share: the scripts on the path, a tiny target and its texts."""

import sys
from pathlib import Path

import pytest
import torch

from sglang.test.tiny_models import write_tiny_model

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "scripts"))

from train_draft.overfit import greedy_texts
from train_draft.target import PlainTarget

AUX_LAYERS = (0, 1, 2)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), num_layers=4, vocab_size=320)


@pytest.fixture(scope="session")
def target(tiny_folder):
    """A random Llama of 4 layers with hidden size 64."""
    return PlainTarget.from_path(tiny_folder, torch.float32, AUX_LAYERS)


@pytest.fixture(scope="session")
def prompts():
    """Token ids of a few prompts, of different lengths."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(3, 320, (5 + index % 4,), generator=draw).tolist() for index in range(16)]


@pytest.fixture(scope="session")
def texts(target, prompts):
    """The target's greedy answers to the prompts."""
    return greedy_texts(target, prompts, 20)


@pytest.fixture(scope="session")
def random_draft(target):
    """A draft whose every tensor is random, norms included: no mistake of order hides behind ones."""
    from train_draft.initial import shape_for
    from train_draft.network import DraftNetwork

    draw = torch.Generator().manual_seed(1)
    shape = shape_for(target, 96)
    weights = {}
    for name, size in shape.tensors().items():
        spread = torch.randn(size, generator=draw)
        weights[name] = 1 + 0.3 * spread if len(size) == 1 else spread * size[-1] ** -0.5
    return DraftNetwork(shape, weights, target.embedding)
