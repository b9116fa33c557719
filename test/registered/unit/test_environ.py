"""Environment variables: typed, read at the moment of the question, and refused by name."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import os
import re

import pytest

from sglang.srt.entrypoints.engine_core import resolve_and_check
from sglang.srt.environ import Envs, envs
from sglang.srt.server_args import ServerArgs


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


OWN = [name for name, variable in Envs.declared().items() if not variable.foreign]


@pytest.mark.parametrize("name", OWN)
def test_a_value_that_is_needed_late_is_refused_at_the_door(monkeypatch, name):
    """A switch read at the end of a server raised inside its signal handler, and the server never ended."""
    monkeypatch.setenv(name, "-what?")
    try:
        getattr(envs, name).get()
    except ValueError as error:
        with pytest.raises(ValueError, match=f"{name}='-what") as caught:
            envs.check()
        assert str(error) in str(caught.value)
    else:
        envs.check()  # free text


def test_all_values_that_are_not_understood_are_named_at_once(monkeypatch):
    monkeypatch.setenv("SGLANG_FORCE_SHUTDOWN", "maybe")
    monkeypatch.setenv("SGLANG_TIMEOUT_KEEP_ALIVE", "0")
    with pytest.raises(ValueError, match=r"(?s)KEEP_ALIVE='0' .*at least 1.*FORCE_SHUTDOWN='maybe'"):
        envs.check()


def test_a_variable_of_another_library_is_that_librarys_to_judge(monkeypatch):
    """OpenMP takes a list for nested regions."""
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    envs.check()


def test_the_doors_ask(monkeypatch):
    monkeypatch.setenv("SGLANG_FORCE_SHUTDOWN", "maybe")
    with pytest.raises(ValueError, match="SGLANG_FORCE_SHUTDOWN"):
        resolve_and_check(ServerArgs(model_path="none"))


def test_an_idle_connection_outlives_the_patience_of_proxies():
    """They reuse a connection for up to a minute, and one that was closed meanwhile is an error to a user."""
    assert envs.SGLANG_TIMEOUT_KEEP_ALIVE.default >= 75


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
