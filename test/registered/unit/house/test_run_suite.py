"""The runner of the lanes: which files belong to a lane, and what a run returns."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit-cpu")

import pytest

import run_suite
from sglang.test.ci.ci_register import CPU_SUITES, SUITES, register_cuda_ci

REGISTERED = """\
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time={est_time}, suite="{suite}")
"""


def test_every_test_file_of_this_tree_belongs_to_a_lane():
    files, wrong = run_suite.collect()
    assert wrong == []
    assert {f.name for f in files} >= {"test/registered/unit/house/test_run_suite.py"}


def test_files_are_collected_by_their_registration(plant):
    for suite, folder in SUITES.items():
        plant(f"test/registered/{folder}/area/test_a.py", REGISTERED.format(est_time=7, suite=suite))
    files, wrong = run_suite.collect(plant.root)
    assert wrong == []
    assert {(f.suite, f.est_time) for f in files} == {(suite, 7.0) for suite in SUITES}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def test_a():\n    pass\n", "registers itself 0 times"),
        (REGISTERED.format(est_time=1, suite="unit-cpu") * 2, "registers itself 2 times"),
        (REGISTERED.format(est_time=1, suite="nightly"), "is no lane; use one of unit-cpu"),
        ('register_cpu_ci(est_time=1, suite="unit" + "-cpu")\n', "suite=None is no lane"),
        ('register_cpu_ci(suite="unit-cpu")\n', "est_time=None is not a number"),
        (REGISTERED.format(est_time=1, suite="server-cpu"), "whose files lie under test/registered/server/"),
        ('if False:\n    register_cpu_ci(est_time=1, suite="unit-cpu")\n', "registers itself 0 times"),
        ("def test_a(:\n", "does not parse"),
    ],
)
def test_a_file_without_a_proper_registration_is_an_error(plant, text, said):
    plant("test/registered/unit/area/test_a.py", text)
    files, (wrong,) = run_suite.collect(plant.root)
    assert files == []
    assert wrong.startswith("test/registered/unit/area/test_a.py") and said in wrong


def test_one_bad_file_stops_the_run_before_any_test_starts(plant, monkeypatch, capsys):
    plant("test/registered/unit/area/test_a.py", "")
    monkeypatch.setattr(run_suite, "collect", lambda: ([], ["test_a.py: registers itself 0 times"]))
    monkeypatch.setattr(run_suite, "run_lane", lambda *_: pytest.fail("a lane was started"))
    assert run_suite.main([]) == 2
    assert "registers itself 0 times" in capsys.readouterr().err


def lanes_run(monkeypatch, statuses):
    """Runs main with lanes that only record themselves; answers the exit status and the lanes."""
    started = []

    def run_lane(suite, files, pytest_args):
        started.append(suite)
        return statuses.get(suite, 0)

    monkeypatch.setattr(run_suite, "run_lane", run_lane)
    return run_suite.main([]), started


def test_all_cpu_lanes_run_and_pass_together(monkeypatch):
    assert lanes_run(monkeypatch, {}) == (0, list(CPU_SUITES))


@pytest.mark.parametrize("failing", CPU_SUITES)
def test_one_failing_lane_fails_the_run_and_the_others_still_run(monkeypatch, failing):
    assert lanes_run(monkeypatch, {failing: 1}) == (1, list(CPU_SUITES))


def test_an_empty_lane_is_a_failure(capsys):
    assert run_suite.run_lane("unit-cpu", [], []) != 0
    assert "no test file is registered" in capsys.readouterr().err


def test_list_shows_each_lane_and_runs_nothing(monkeypatch, capsys):
    monkeypatch.setattr(run_suite, "run_lane", lambda *_: pytest.fail("a lane was started"))
    assert run_suite.main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert all(suite in shown for suite in SUITES)
    assert "test/registered/unit/house/test_run_suite.py" in shown


def test_a_lane_really_runs_pytest_shows_the_slowest_tests_and_hands_on_its_exit_status(
    plant, monkeypatch, capfd
):
    text = REGISTERED.format(est_time=1, suite="unit-cpu")
    plant("test/registered/unit/test_good.py", text + "def test_a():\n    assert True\n")
    plant("test/registered/unit/test_bad.py", text + "def test_a():\n    assert False\n")
    monkeypatch.setattr(run_suite, "ROOT", plant.root)
    files, _ = run_suite.collect(plant.root)
    bad, good = sorted(files, key=lambda f: f.name)
    assert run_suite.run_lane("unit-cpu", [good], ["--durations-min=0"]) == 0
    assert "slowest 10 durations" in capfd.readouterr().out
    assert run_suite.run_lane("unit-cpu", [good, bad], []) == 1


@pytest.mark.parametrize("register", [register_cpu_ci, register_cuda_ci])
def test_the_registration_refuses_nonsense(register):
    with pytest.raises(ValueError, match="est_time is a positive number"):
        register(est_time=0, suite="unit-cpu")
    with pytest.raises(ValueError, match="suite is the name of a lane"):
        register(est_time=1, suite="")
