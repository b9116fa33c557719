"""Every check script is a hook, has a test and is documented; versions are pinned alike everywhere."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="unit-cpu")

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[4]
CHECKS = sorted((ROOT / "scripts").glob("check_*.py"))


def test_there_are_checks_to_wire():
    assert len(CHECKS) >= 6


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.stem)
def test_a_check_is_a_hook_has_a_test_and_is_documented(check):
    """A check that nobody runs holds nothing; `make lint` takes them all by their name."""
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    entries = [hook["entry"] for repo in hooks for hook in repo["hooks"]]
    assert f"python scripts/{check.name}" in entries
    tests = Path(__file__).parent / check.name.replace("check_", "test_")
    assert re.search(r"^import check_\w+ as check$", tests.read_text(encoding="utf-8"), re.MULTILINE)
    assert f"scripts/{check.name}" in (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")


def test_all_hooks_are_local():
    """A hook repository would have to be fetched."""
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert {repo["repo"] for repo in hooks} == {"local"}


def test_every_pinned_dependency_is_pinned_alike_in_the_requirement_files():
    """Two spellings of one version drift apart; the tests would then run against another than users get."""
    pins: dict[str, set[str]] = {}
    sources = [
        ROOT / "pyproject.toml",
        ROOT / "sgl-kernel" / "pyproject.toml",
        *(ROOT / "requirements").glob("*.txt"),
    ]
    for source in sources:
        for name, version in re.findall(r"([A-Za-z][\w.-]*)==([\w.+]+)", source.read_text(encoding="utf-8")):
            pins.setdefault(re.sub(r"[-_.]+", "-", name).lower(), set()).add(version)
    assert len(pins) > 40
    assert {name: versions for name, versions in pins.items() if len(versions) > 1} == {}
