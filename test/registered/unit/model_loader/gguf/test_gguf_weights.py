from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="unit-cpu")

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.gguf.names import hf_name
from sglang.srt.model_loader.gguf.reader import gguf_weights
from sglang.srt.model_loader.loader import open_checkpoint
from sglang.test.tiny_models import write_tiny_gguf


def loaded(file, dtype=torch.float32):
    return {item.name: item.load(dtype) for item in gguf_weights(ModelConfig.from_path(file))}


@pytest.fixture
def add_tensor(monkeypatch):
    """Put one more tensor into every GGUF file written in this test."""

    def add(name, array):
        start = gguf.GGUFWriter.write_header_to_file
        monkeypatch.setattr(
            gguf.GGUFWriter,
            "write_header_to_file",
            lambda self, *a: (self.add_tensor(name, array), start(self, *a)),
        )

    return add


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("tie", [False, True])
def test_an_f32_file_gives_exactly_the_weights_of_the_folder_it_was_made_of(tiny, architecture, tie):
    folder = tiny(architecture=architecture, tie=tie)
    want, got = load_file(folder / "model.safetensors"), loaded(write_tiny_gguf(folder))
    assert set(got) == set(want)
    assert ("lm_head.weight" in got) is not tie
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


def test_the_shuffle_of_q_and_k_really_moves_rows(tiny):
    """The twin of the test above: were the file not shuffled, an un-shuffle that does nothing would pass."""
    file = write_tiny_gguf(tiny())
    stored = {t.name: t.data for t in gguf.GGUFReader(file).tensors}
    got = loaded(file)
    for part in ("q", "k"):
        ours = got[f"model.layers.0.self_attn.{part}_proj.weight"].numpy()
        theirs = stored[f"blk.0.attn_{part}.weight"]
        assert not np.array_equal(ours, theirs)
        assert np.array_equal(np.sort(ours, axis=0), np.sort(theirs, axis=0))


@pytest.mark.parametrize("quantization", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_a_quantised_file_gives_what_the_reference_decodes(tiny, quantization):
    file = write_tiny_gguf(tiny(num_layers=1), quantization=quantization)
    got = loaded(file)
    for tensor in gguf.GGUFReader(file).tensors:
        want = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
        name = hf_name(tensor.name)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            assert torch.equal(got[name].sort(0).values, want.sort(0).values), name
        else:
            assert torch.equal(got[name], want), name


def test_shapes_and_sizes_are_known_before_anything_is_decoded(tiny):
    file = write_tiny_gguf(tiny(), quantization="Q8_0")
    items = {item.name: item for item in gguf_weights(ModelConfig.from_path(file))}
    item = items["model.layers.1.mlp.down_proj.weight"]
    assert (item.shape, item.file, item.nbytes) == ((32, 64), str(file), 32 * 2 * 34)


def test_a_tensor_nobody_wants_is_refused_before_any_weight_is_read(tiny, add_tensor):
    add_tensor("blk.0.ssm_in.weight", np.zeros((3, 5), dtype=np.float32))
    file = write_tiny_gguf(tiny())
    with pytest.raises(ValueError, match=r"nobody wants tensor 'blk.0.ssm_in.weight' of shape \[3, 5\]"):
        open_checkpoint(ModelConfig.from_path(file), "auto", torch.float32)


def test_a_tensor_of_a_type_that_is_not_read_is_refused_by_name(tiny, add_tensor):
    add_tensor("blk.0.attn_q.bias", np.zeros(64, dtype=np.int32))
    with pytest.raises(ValueError, match=r"'blk.0.attn_q.bias' is stored as I32"):
        gguf_weights(ModelConfig.from_path(write_tiny_gguf(tiny())))


def test_a_bias_is_unshuffled_like_its_weight(tiny, add_tensor):
    bias = np.arange(64, dtype=np.float32)  # 4 heads of 16
    add_tensor("blk.0.attn_q.bias", bias)
    got = loaded(write_tiny_gguf(tiny()))["model.layers.0.self_attn.q_proj.bias"]
    # In the file, row 2i of a head is row i of its first half and row 2i + 1 row i of its second half.
    assert got[:16].tolist() == [*range(0, 16, 2), *range(1, 16, 2)]
    assert got[16:32].tolist() == [16 + i for i in [*range(0, 16, 2), *range(1, 16, 2)]]


def test_a_file_cut_after_its_config_was_read_is_refused_before_any_weight_is_read(tiny):
    file = write_tiny_gguf(tiny())
    config = ModelConfig.from_path(file)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(
        ValueError, match=r"truncated: tensor '.*' of shape .* ends at byte \d+, the file has \d+"
    ):
        open_checkpoint(config, "auto", torch.float32)


def test_rotary_factors_are_left_to_the_config(tiny, add_tensor):
    add_tensor("rope_freqs.weight", np.ones(8, dtype=np.float32))
    assert all("rope" not in name for name in loaded(write_tiny_gguf(tiny())))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.12.ffn_gate.weight", "model.layers.12.mlp.gate_proj.weight"),
        ("blk.3.attn_v.bias", "model.layers.3.self_attn.v_proj.bias"),
        ("blk.3.attn_v.scale", None),
        ("blk.x.attn_v.weight", None),
        ("v.blk.0.attn_v.weight", None),
        ("output_norm", None),
    ],
)
def test_names_are_translated_or_not_known(name, expected):
    assert hf_name(name) == expected
