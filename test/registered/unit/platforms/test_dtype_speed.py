"""The faster type of a processor: measured by a process of its own, kept in a file, checked when read."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="unit-cpu")

import json
import logging
import subprocess

import pytest

from sglang.srt.environ import envs
from sglang.srt.layers.quantization import measure_dtype
from sglang.srt.platforms import dtype_speed
from sglang.srt.platforms.dtype_speed import chosen, fastest_dtype


@pytest.fixture
def folder(tmp_path):
    """An empty cache folder, and a process that has measured nothing yet."""
    with envs.SGLANG_CACHE_DIR.override(str(tmp_path / "cache")):
        dtype_speed._seconds.cache_clear()
        yield tmp_path / "cache"
    dtype_speed._seconds.cache_clear()


@pytest.fixture
def measure(monkeypatch):
    """Stands for the measuring process: `measure(text)` is what it prints; calls are counted."""
    calls = []

    def plan(text):
        def measured():
            calls.append(text)
            if isinstance(text, Exception):
                raise text
            return text

        monkeypatch.setattr(dtype_speed, "_measured", measured)
        return calls

    return plan


def seconds(bfloat16, float32):
    return json.dumps({"bfloat16": bfloat16, "float32": float32})


@pytest.mark.parametrize(
    ("times", "expected", "taken"),
    [
        ((1.0, 2.0), "bfloat16", "bfloat16"),
        ((1.0, 2.0), "float32", "bfloat16"),
        ((2.0, 1.0), "bfloat16", "float32"),
        ((1.1, 1.0), "bfloat16", "bfloat16"),
        ((1.0, 1.1), "float32", "float32"),
    ],
)
def test_the_expected_type_stands_unless_the_other_is_clearly_faster(times, expected, taken):
    assert chosen({"bfloat16": times[0], "float32": times[1]}, expected) == taken


def test_a_processor_is_measured_once_and_read_from_the_file_afterwards(folder, measure, monkeypatch):
    monkeypatch.setattr(dtype_speed, "cpu_has_bf16", lambda: True)
    calls = measure(seconds(3.0, 1.0))
    assert (fastest_dtype(), fastest_dtype()) == ("float32", "float32")
    dtype_speed._seconds.cache_clear()  # another process
    assert fastest_dtype() == "float32" and len(calls) == 1
    assert len(list(folder.iterdir())) == 1


def test_another_instruction_set_is_another_measurement(folder, measure):
    calls = measure(seconds(3.0, 1.0))
    for level in ("base", "avx2", "base"):
        dtype_speed._seconds.cache_clear()
        with envs.SGL_KERNEL_ISA.override(level):
            fastest_dtype()
    assert len(calls) == 2


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"bfloat16": 1}', seconds(0, 1), seconds("1", 2)])
def test_a_file_that_says_something_else_is_measured_anew(folder, measure, text):
    calls = measure(seconds(3.0, 1.0))
    fastest_dtype()
    [file] = folder.iterdir()
    file.write_text(text)
    dtype_speed._seconds.cache_clear()
    fastest_dtype()
    assert len(calls) == 2 and json.loads(file.read_text()) == {"bfloat16": 3.0, "float32": 1.0}


@pytest.mark.parametrize("failure", [subprocess.CalledProcessError(1, "m"), OSError("gone"), "no numbers"])
@pytest.mark.parametrize(("has_bf16", "taken"), [(True, "bfloat16"), (False, "float32")])
def test_where_nothing_can_be_measured_features_decide_and_a_line_says_so(
    folder, measure, monkeypatch, caplog, failure, has_bf16, taken
):
    measure(failure)
    monkeypatch.setattr(dtype_speed, "cpu_has_bf16", lambda: has_bf16)
    with caplog.at_level(logging.WARNING):
        assert fastest_dtype() == taken
    assert "--dtype auto: nothing could be measured" in caplog.text
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_only_costs_the_next_measurement(tmp_path, measure):
    (tmp_path / "file").write_text("no folder")
    calls = measure(seconds(1.0, 3.0))
    with envs.SGLANG_CACHE_DIR.override(str(tmp_path / "file")):
        for _ in range(2):
            dtype_speed._seconds.cache_clear()
            assert fastest_dtype() == "bfloat16"
    dtype_speed._seconds.cache_clear()
    assert len(calls) == 2


def test_the_measuring_process_prints_what_is_read(folder, monkeypatch, capsys):
    monkeypatch.setattr(measure_dtype, "_WEIGHTS", 2)
    assert measure_dtype.main() == 0
    found = dtype_speed._parsed(capsys.readouterr().out)
    assert set(found) == {"bfloat16", "float32"}


def test_the_process_is_really_started(folder):
    assert fastest_dtype() in ("bfloat16", "float32")
    [file] = folder.iterdir()
    assert dtype_speed._parsed(file.read_text())
