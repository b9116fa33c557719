"""Environment variables: typed, read at the moment of the question, and refused by name."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import os
import re

import pytest

from sglang.srt.environ import Envs, envs


def test_a_value_is_looked_up_when_asked(monkeypatch):
    monkeypatch.delenv("SGLANG_TRACE_LEVEL", raising=False)
    assert envs.SGLANG_TRACE_LEVEL.get() == 3
    monkeypatch.setenv("SGLANG_TRACE_LEVEL", "1")
    assert envs.SGLANG_TRACE_LEVEL.get() == 1


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("TRUE", True), ("on", True), ("0", False), ("no", False), ("", False)]
)
def test_switches(monkeypatch, text, value):
    monkeypatch.setenv("SGLANG_FORCE_SHUTDOWN", text)
    assert envs.SGLANG_FORCE_SHUTDOWN.get() is value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("SGLANG_TRACE_LEVEL", "high"),
        ("SGLANG_FORCE_SHUTDOWN", "maybe"),
        ("SGLANG_INIT_NEW_TOKEN_RATIO", "x"),
        ("SGLANG_RUNTIME_DIR", "caf\udce9"),
    ],
)
def test_a_value_nobody_understands_is_refused_by_name(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=re.escape(f"{name}={text!r}")):
        getattr(envs, name).get()


def test_a_stated_value_ends_with_its_block(monkeypatch):
    monkeypatch.setenv("SGLANG_LOG_MS", "0")
    with envs.SGLANG_LOG_MS.override(True):
        assert os.environ["SGLANG_LOG_MS"] == "1"
        assert envs.SGLANG_LOG_MS.get() is True
    assert os.environ["SGLANG_LOG_MS"] == "0"
    monkeypatch.delenv("SGLANG_LOG_MS")
    with envs.SGLANG_LOG_MS.override(True):
        pass
    assert not envs.SGLANG_LOG_MS.is_set()


def test_every_variable_knows_its_name_and_says_what_it_is_for():
    for name, variable in Envs.declared().items():
        assert variable.name == name
        assert len(variable.doc) > 10
