"""Owns which test files make a lane: it finds their registration in the source and runs pytest once per lane.

Called by `make test`. It must not guess: a test file without a registration, with an unknown lane, or in the
folder of another lane stops the run before a single test starts.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from sglang.test.ci.ci_register import CPU_SUITES, SUITES

ROOT = Path(__file__).resolve().parents[1]
TESTS = "test/registered"
REGISTER_CALLS = frozenset({"register_cpu_ci", "register_cuda_ci"})
NO_TESTS_COLLECTED = 5  # pytest's exit status
#: Shown at the end of a lane, so that a slow test is seen before it runs into a limit on a slower machine.
SLOWEST = ("--durations=10", "--durations-min=2")


@dataclass(frozen=True)
class TestFile:
    """One registered file; `name` is its path from the root."""

    __test__ = False  # the class name looks like a test class to pytest

    name: str
    suite: str
    est_time: float


def _registrations(tree: ast.Module) -> list[dict[str, object]]:
    """The keyword arguments of each registration call at the top level: literals only, nothing is run."""
    found: list[dict[str, object]] = []
    for statement in tree.body:
        call = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in REGISTER_CALLS:
            literals = [k for k in call.keywords if k.arg and isinstance(k.value, ast.Constant)]
            found.append({str(k.arg): k.value.value for k in literals if isinstance(k.value, ast.Constant)})
    return found


def _read(path: Path, root: Path) -> TestFile | str:
    """The registered file, or a sentence about what is wrong with it."""
    name = path.relative_to(root).as_posix()
    try:
        registrations = _registrations(ast.parse(path.read_text(encoding="utf-8")))
    except SyntaxError as error:
        return f"{name}:{error.lineno}: does not parse: {error.msg}"
    if len(registrations) != 1:
        return (
            f"{name}: registers itself {len(registrations)} times; every test file calls "
            'register_cpu_ci(est_time=<seconds>, suite="<lane>") once at its top'
        )
    suite, est_time = registrations[0].get("suite"), registrations[0].get("est_time")
    if not isinstance(suite, str) or suite not in SUITES:
        return f"{name}: suite={suite!r} is no lane; use one of {', '.join(SUITES)}"
    if not isinstance(est_time, int | float):
        return f"{name}: est_time={est_time!r} is not a number of seconds"
    folder = SUITES[suite]
    if not name.startswith(f"{TESTS}/{folder}/"):
        return f"{name}: registered for {suite}, whose files lie under {TESTS}/{folder}/"
    return TestFile(name, suite, float(est_time))


def collect(root: Path = ROOT) -> tuple[list[TestFile], list[str]]:
    """Every registered test file, and what is wrong with the others."""
    found = [_read(path, root) for path in sorted((root / TESTS).rglob("test_*.py"))]
    files = [entry for entry in found if isinstance(entry, TestFile)]
    return files, [entry for entry in found if isinstance(entry, str)]


def run_lane(suite: str, files: list[TestFile], pytest_args: list[str]) -> int:
    """One pytest over the files of a lane, in this environment; an empty lane is a failure, not a pass."""
    if not files:
        print(f"{suite}: no test file is registered for this lane", file=sys.stderr)
        return NO_TESTS_COLLECTED
    # -P: the current folder stays off sys.path, so the tests see the installed package and nothing beside it.
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *SLOWEST, *pytest_args]
    print(f"== {suite}: {len(files)} files, about {sum(f.est_time for f in files):.0f} s", flush=True)
    return subprocess.run([*command, *(f.name for f in files)], cwd=ROOT, check=False).returncode


def _list(files: list[TestFile], suites: list[str]) -> None:
    for suite in suites:
        lane = [f for f in files if f.suite == suite]
        print(f"{suite}: {len(lane)} files, about {sum(f.est_time for f in lane):.0f} s")
        for f in lane:
            print(f"  {f.est_time:6.1f}  {f.name}")


def _parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description="Runs the registered tests lane by lane.")
    parser.add_argument("--suite", action="append", choices=list(SUITES), help="a lane; may be repeated")
    parser.add_argument("--list", action="store_true", help="show the files of each lane and run nothing")
    options, rest = parser.parse_known_args(argv)
    return options, rest


def main(argv: list[str] | None = None) -> int:
    options, pytest_args = _parse(argv)
    files, wrong = collect()
    suites = options.suite or list(SUITES if options.list else CPU_SUITES)
    if wrong:
        print(
            "\n".join(["test files that belong to no lane:", *(f"  {line}" for line in wrong)]),
            file=sys.stderr,
        )
        return 2
    if options.list:
        _list(files, suites)
        return 0
    # One thread a process, and no spinning: two OpenMP threads on a busy machine cost a hundredfold.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    outcomes = []
    for suite in suites:
        start = time.monotonic()
        status = run_lane(suite, [f for f in files if f.suite == suite], pytest_args)
        outcomes.append((suite, status, time.monotonic() - start))
    print("== lanes")
    for suite, status, seconds in outcomes:
        print(f"  {suite}: {'ok' if status == 0 else f'FAILED (pytest exit {status})'} in {seconds:.0f} s")
    return 0 if all(status == 0 for _, status, _ in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
