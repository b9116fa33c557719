from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="unit-cpu")

import gc

import pytest
import torch

from sglang.kernels.compiled import compiled_kernels
from sglang.srt.configs.gguf.header import GGUFHeader
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.quantization import unquant
from sglang.srt.layers.quantization.gguf import GGUFConfig
from sglang.srt.layers.quantization.stored_forms import TransposedWeight
from sglang.srt.layers.quantization.unquant import UnquantizedConfig, UnquantizedLinearMethod
from sglang.srt.layers.quantization.w8a8_int8 import W8A8Int8Config
from sglang.srt.model_loader import loader, safetensors_weights
from sglang.srt.model_loader.loader import load_model, open_checkpoint
from sglang.srt.models.registry import model_class
from sglang.test.test_utils import published_topology
from sglang.test.tiny_models import write_tiny_gguf

# Many layers, none of them a large part of the whole; multiples of what kernels pack together.
SHAPE = {
    "hidden_size": 128,
    "num_layers": 12,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "vocab_size": 512,
}


@pytest.fixture(autouse=True)
def one_rank():
    with published_topology(ranks={"world_rank": 0, "dp_rank": None}):
        yield


@pytest.fixture
def new_objects_only():
    """What is there already is left out of the collector's lists, which are long."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def bytes_of_tensors():
    """What the tensors made in this test hold; one memory counts once, by whichever tensors it is seen."""
    held = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


def most_and_last(config, quant, dtype=torch.float32):
    """The most bytes held between two tensors of the file, and those of the loaded model."""
    checkpoint = open_checkpoint(config, "auto", dtype)
    model = model_class(config.architecture)(checkpoint.config, dtype=dtype, quant=quant)
    held = []

    def watched():
        for item in checkpoint.items:
            yield item
            held.append(bytes_of_tensors())

    model.load_weights(watched())
    return max(held), held[-1]


class KeepsPlainWeights(UnquantizedLinearMethod):
    """The planted mistake: what was packed stays beside the packed form until the end."""

    def _store(self, layer, is_table):
        layer.stored = self.pack(layer.weight.data)


class KeepsPlainConfig(UnquantizedConfig):
    def linear_method(self, prefix):
        return KeepsPlainWeights()


def quantization_of(name):
    if name == "gguf":
        if compiled_kernels() is None:
            pytest.skip("sgl_kernel is not installed, or switched off: nothing computes with blocks")
        return GGUFConfig()
    return {"none": UnquantizedConfig, "w8a8_int8": W8A8Int8Config}[name]()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantization", ["none", "w8a8_int8", "gguf"])
@pytest.mark.parametrize("source", ["folder", "gguf"])
def test_between_two_tensors_no_more_is_held_than_one_layer_beside_the_stored_form(
    tiny, monkeypatch, new_objects_only, source, quantization, dtype
):
    monkeypatch.setattr(unquant, "fastest_form", lambda dtype, device: TransposedWeight)
    folder = tiny(**SHAPE)
    config = ModelConfig.from_path(
        folder if source == "folder" else write_tiny_gguf(folder, quantization="Q8_0")
    )
    quant = quantization_of(quantization)
    most, last = most_and_last(config, quant, dtype)
    # Gate and up are one weight. It waits in the model's type, or in int8, for its second half.
    one_weight = 2 * SHAPE["intermediate_size"] * SHAPE["hidden_size"] * dtype.itemsize
    assert most - last <= one_weight < last // 8


def test_plain_weights_that_stay_beside_their_packed_form_would_be_seen(tiny, monkeypatch, new_objects_only):
    monkeypatch.setattr(unquant, "fastest_form", lambda dtype, device: TransposedWeight)
    config = ModelConfig.from_path(tiny(**SHAPE))
    (_, once), (twice, _) = (
        most_and_last(config, UnquantizedConfig()),
        most_and_last(config, KeepsPlainConfig()),
    )
    assert twice > 1.5 * once


def test_a_layer_takes_no_memory_before_its_first_tensor_comes(tiny, new_objects_only):
    config = ModelConfig.from_path(tiny(**SHAPE, tie=True))
    model = model_class(config.architecture)(config, dtype=torch.float32, quant=UnquantizedConfig())
    assert bytes_of_tensors() < sum(parameter.nbytes for parameter in model.parameters()) // 10


# What a file that is shown in memory holds -----------------------------------------------------------------


def shown_bytes(file):
    """How much of a file is in this process's memory."""
    total, is_ours = 0, False
    with open("/proc/self/smaps", encoding="utf-8") as maps:
        for line in maps:
            name, _, value = line.partition(":")
            if " " in name:  # the head of a map: addresses, rights and the file
                is_ours = line.rstrip().endswith(str(file))
            elif name == "Rss" and is_ours:
                total += int(value.split()[0]) * 1024
    return total


WIDE = {**SHAPE, "hidden_size": 256, "head_dim": 64, "intermediate_size": 1024, "num_layers": 4}
#: Gate, up or down; and what the system shows around it, pages of neighbours.
ONE_TENSOR = 256 * 1024 * 4 + (1 << 18)


def most_shown(folder, source):
    """(the most bytes of the file shown after a tensor was read, bytes of the file)."""
    file = folder / "model.safetensors" if source == "folder" else write_tiny_gguf(folder)
    config = ModelConfig.from_path(folder if source == "folder" else file)
    items = open_checkpoint(config, "auto", torch.float32).items
    before = shown_bytes(file)
    shown = []
    for item in items:
        item.load(torch.float32, 0, 0, item.shape[0]).clone()
        shown.append(shown_bytes(file) - before)
    return max(shown), file.stat().st_size


@pytest.mark.parametrize("source", ["folder", "gguf"])
def test_of_a_file_no_more_than_the_tensor_read_last_stays_in_memory(tiny, monkeypatch, source):
    monkeypatch.setattr(safetensors_weights, "_MOST_HELD", 1)
    most, size = most_shown(tiny(**WIDE), source)
    assert most <= ONE_TENSOR < size // 4


@pytest.mark.parametrize("source", ["folder", "gguf"])
def test_a_file_that_stays_in_memory_would_be_seen(tiny, monkeypatch, source):
    monkeypatch.setattr(safetensors_weights, "_MOST_HELD", 1 << 40)
    monkeypatch.setattr(GGUFHeader, "release", lambda self, tensor: None)
    most, size = most_shown(tiny(**WIDE), source)
    assert most > size // 2


def test_tensors_of_several_files_in_turn_are_those_of_the_files(tiny, monkeypatch):
    """One file is open at a time: reading here and there opens them again, and nothing is mixed up."""
    folder = tiny(**SHAPE, shards=3)
    items = open_checkpoint(ModelConfig.from_path(folder), "auto", torch.float32).items
    wanted = {item.name: item.load(torch.float32).clone() for item in items}
    monkeypatch.setattr(safetensors_weights, "_MOST_HELD", 1)
    for item in sorted(items, key=lambda item: item.name[::-1]):
        assert torch.equal(item.load(torch.float32), wanted[item.name])


# What was freed --------------------------------------------------------------------------------------------


def returns_while_loading(monkeypatch, config, least_step=None):
    returns = []
    monkeypatch.setattr(loader, "return_free_memory", lambda: returns.append(1))
    if least_step is not None:
        monkeypatch.setattr(loader, "_LEAST_STEP", least_step)
    checkpoint = open_checkpoint(config, "auto", torch.float32)
    model = model_class(config.architecture)(checkpoint.config, dtype=torch.float32)
    load_model(model, checkpoint, dtype=torch.float32)
    return len(returns)


def test_freed_memory_is_returned_at_most_sixteen_times_while_a_model_is_loaded(tiny, monkeypatch):
    assert 8 <= returns_while_loading(monkeypatch, ModelConfig.from_path(tiny(**SHAPE)), least_step=1) <= 16


def test_for_a_small_model_nothing_is_returned_on_the_way(tiny, monkeypatch):
    assert returns_while_loading(monkeypatch, ModelConfig.from_path(tiny(**SHAPE))) == 0
