"""Ranks that are forked from a process with everything imported are processes of their own."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="unit-cpu")

import json
import os
import pathlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from sglang.test import rank_nursery
from sglang.test.rank_nursery import Rank, RankNursery, nursery
from sglang.test.waiting import HANG_GUARD_S

#: What a rank of these tests runs; its argument is Python.
SUBJECT = "import sys\nkept = []\ndef main():\n    exec(sys.argv[1], {'kept': kept})\n    return len(kept)\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankNursery]:
    folder = tmp_path_factory.mktemp("subject")
    (folder / "rank_subject.py").write_text(SUBJECT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        found = RankNursery()
    yield found
    found.close()


def run(made: RankNursery, code: str, log: pathlib.Path) -> Rank:
    with log.open("wb") as file:
        rank = made.start("rank_subject", code, log=file)
    assert rank.wait(HANG_GUARD_S)
    return rank


def test_a_rank_stands_in_the_folder_of_who_asked_and_prints_into_its_log(
    made: RankNursery, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = "import os, sys; print(os.getcwd(), os.getpid()); print('err', file=sys.stderr)"
    rank = run(made, code, tmp_path / "log")
    assert rank.returncode == 0
    assert sorted((tmp_path / "log").read_text().split("\n")) == ["", f"{tmp_path} {rank.pid}", "err"]


def test_what_a_rank_leaves_in_its_modules_is_not_there_in_the_next(
    made: RankNursery, tmp_path: pathlib.Path
) -> None:
    assert [run(made, "kept.append(1)", tmp_path / str(i)).returncode for i in range(3)] == [1, 1, 1]


def test_ends_are_told_as_a_process_tells_them(made: RankNursery, tmp_path: pathlib.Path) -> None:
    assert run(made, "raise SystemExit(7)", tmp_path / "log").returncode == 7
    assert run(made, "import os; os.kill(os.getpid(), 11)", tmp_path / "log").returncode == -11
    assert run(made, "1 / 0", tmp_path / "log").returncode == 1
    assert "ZeroDivisionError" in (tmp_path / "log").read_text()


def test_a_rank_with_pipes_reads_writes_and_ends_with_them(made: RankNursery, tmp_path: pathlib.Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        rank = made.start("rank_subject", "for line in open(0): print(line * 2)", log=log, pipes=True)
    assert rank.stdin is not None and rank.stdout is not None
    assert rank.poll() is None
    rank.stdin.write(b"word")
    rank.stdin.close()
    assert rank.stdout.read() == b"wordword\n"
    assert rank.wait(HANG_GUARD_S) and rank.returncode == 0


def test_a_rank_that_goes_on_for_ever_can_be_killed(made: RankNursery, tmp_path: pathlib.Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        rank = made.start("rank_subject", "while True: pass", log=log)
    assert not rank.wait(0.05)
    rank.kill()
    assert rank.wait(HANG_GUARD_S) and rank.returncode == -9
    rank.kill()  # nothing is left to kill, and nobody else is


def test_other_variables_make_another_nursery(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was imported may have read them."""
    monkeypatch.setattr(rank_nursery, "_nurseries", {})
    monkeypatch.setattr(rank_nursery, "RankNursery", lambda: SimpleNamespace(close=lambda: None))
    first = nursery()
    assert nursery() is first
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "another one")
    assert nursery() is first
    monkeypatch.setenv("SGL_KERNEL_ISA", "base")
    assert nursery() is not first


def test_a_nursery_with_a_thread_of_its_own_starts_no_rank(tmp_path: pathlib.Path) -> None:
    """A fork would copy the locks that the thread holds, and not the thread."""
    (tmp_path / "sitecustomize.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        threaded = RankNursery()
    with (tmp_path / "log").open("wb") as log, pytest.raises(RuntimeError, match="has 2 threads"):
        threaded.start("json.tool", json.dumps(None), log=log)
    threaded.close()
