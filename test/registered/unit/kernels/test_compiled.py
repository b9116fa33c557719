"""Compiled kernels are used where they are and not switched off, and a build that is broken is told."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit-cpu")

import importlib
import importlib.util
import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from sglang.kernels import compiled
from sglang.kernels.compiled import are_there, compiled_kernels
from sglang.srt.environ import envs


@pytest.fixture(autouse=True)
def undecided() -> Iterator[None]:
    """What the process has decided does not count here, and what is decided here does not stay."""
    compiled_kernels.cache_clear()
    with envs.SGLANG_USE_CPU_KERNELS.override(True):
        yield
    compiled_kernels.cache_clear()


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="sglang.kernels.compiled")
    return caplog


def stand_in(monkeypatch: pytest.MonkeyPatch, found: object) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)


def test_a_package_that_is_not_there_is_told_with_the_cure(
    monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    stand_in(monkeypatch, None)
    assert compiled_kernels() is None and compiled_kernels() is None
    (line,) = told.messages
    assert "sgl_kernel is not installed" in line and "make kernels" in line


def test_kernels_that_are_switched_off_are_not_even_looked_for(
    monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: pytest.fail("looked for"))
    with envs.SGLANG_USE_CPU_KERNELS.override(False):
        assert compiled_kernels() is None
    assert "SGLANG_USE_CPU_KERNELS=0" in told.text


def test_kernels_that_are_there_are_used_and_their_level_is_told(
    monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    kernels = SimpleNamespace(isa_level=lambda: "avx2", INTERFACE=compiled._INTERFACE)
    stand_in(monkeypatch, object())
    monkeypatch.setattr(importlib, "import_module", lambda name: kernels)
    assert compiled_kernels() is kernels
    assert "at level avx2" in told.text


@pytest.mark.parametrize("error", [ImportError("undefined symbol"), RuntimeError("SGL_KERNEL_ISA=sse9")])
def test_a_build_that_cannot_be_used_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Running slower in silence is what nobody would notice."""

    def fail(name: str) -> None:
        raise error

    stand_in(monkeypatch, object())
    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(RuntimeError, match=f"{error}.*SGLANG_USE_CPU_KERNELS=0"):
        compiled_kernels()


def test_whether_they_are_there_is_known_without_importing_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail("imported"))
    stand_in(monkeypatch, object())
    assert are_there()
    with envs.SGLANG_USE_CPU_KERNELS.override(False):
        assert not are_there()
    stand_in(monkeypatch, None)
    assert not are_there()


@pytest.mark.parametrize(
    ("found", "said"), [(None, "it is the older"), (1, "it is the older"), (99, "the engine is")]
)
def test_a_package_of_another_interface_is_refused_at_once_with_the_cure(
    monkeypatch: pytest.MonkeyPatch, found: int | None, said: str
) -> None:
    kernels = SimpleNamespace(isa_level=lambda: "avx2", **({} if found is None else {"INTERFACE": found}))
    stand_in(monkeypatch, object())
    monkeypatch.setattr(importlib, "import_module", lambda name: kernels)
    with pytest.raises(RuntimeError, match=f"has interface {found or 1} and .* {said}.*make kernels"):
        compiled_kernels()
