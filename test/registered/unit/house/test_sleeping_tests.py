"""The check that no test sleeps refuses every spelling of a sleep."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit-cpu")

import pytest

import check_sleeping_tests as check


def test_no_test_of_this_tree_sleeps():
    assert check.find_offenders(check.ROOT) == []


@pytest.mark.parametrize("tree", check.TREES)
@pytest.mark.parametrize(
    "text",
    [
        "import time\n\ntime.sleep(0.2)\n",
        "import time as t\n\nt.sleep(seconds)\n",
        "from time import sleep\n\nsleep(1)\n",
        "import asyncio\n\nasync def main():\n    await asyncio.sleep(0.05)\n",
        "from asyncio import sleep as rest\n\nasync def main():\n    await rest(1)\n",
    ],
)
def test_a_sleep_is_refused_in_every_tree(plant, tree, text):
    """A time that is long enough on one machine is too short on another, and the test fails now and then."""
    plant(f"{tree}/test_thing.py", text)
    (offender,) = check.find_offenders(plant.root)
    assert offender.startswith(f"{tree}/test_thing.py:") and "sglang.test.waiting" in offender


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (check.HELPER, "import time\n\ntime.sleep(0.01)\n"),
        ("test/test_thing.py", "import asyncio\n\nasync def main():\n    await asyncio.sleep(0)\n"),
        ("test/test_thing.py", "from sglang.test.waiting import wait_until\n\nwait_until(thing.sleep)\n"),
        ("benchmark/thing.py", "import time\n\ntime.sleep(1)\n"),
    ],
)
def test_the_helper_sleeps_and_a_turn_for_others_is_no_sleep(plant, name, text):
    plant(name, text)
    assert check.find_offenders(plant.root) == []
