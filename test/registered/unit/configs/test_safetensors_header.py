"""What a safetensors checkpoint announces; broken files are tested with the loader."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit-cpu")

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from sglang.srt.configs.safetensors_header import INDEX_FILE, SINGLE_FILE, TensorEntry, checkpoint_entries


def test_names_types_and_shapes_are_read_also_of_what_is_no_weight(tmp_path):
    save_file({"w": np.zeros((2, 3), np.float32), "d2t": np.zeros(5, np.int64)}, tmp_path / SINGLE_FILE)
    assert checkpoint_entries(tmp_path) == {
        tmp_path / SINGLE_FILE: {
            "w": TensorEntry("F32", (2, 3), 24),
            "d2t": TensorEntry("I64", (5,), 40),
        }
    }


def test_every_file_of_the_index_is_read_and_no_other(tmp_path):
    for name in "abc":
        save_file({f"{name}.weight": np.zeros(1, np.float32)}, tmp_path / f"{name}.safetensors")
    weight_map = {f"{name}.weight": f"{name}.safetensors" for name in "ba"}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    found = checkpoint_entries(tmp_path)
    assert [file.name for file in found] == ["a.safetensors", "b.safetensors"]
    assert [list(entries) for entries in found.values()] == [["a.weight"], ["b.weight"]]


def test_a_folder_without_weights_is_refused_with_the_cure(tmp_path):
    with pytest.raises(ValueError, match=r"holds no safetensors file; fetch the weights into it"):
        checkpoint_entries(tmp_path)
