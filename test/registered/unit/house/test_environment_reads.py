"""The check that only `srt/environ.py` touches the environment refuses every other spelling."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit-cpu")

import pytest

import check_environment_reads as check


def test_this_tree_reads_the_environment_in_one_file():
    assert check.find_offenders(check.ROOT) == []


@pytest.mark.parametrize(
    "text",
    [
        "import os\nos.environ['A']\n",
        "import os\nos.environ.get('A')\n",
        "import os\nos.environ['A'] = 'b'\n",
        "import os\nos.getenv('A')\n",
        "import os as system\nsystem.getenv('A')\n",
        "from os import environ\n",
        "from os import getenv as look\n",
        "def f():\n    import os\n    return dict(os.environ)\n",
        "import os\nos.putenv('A', 'b')\n",
    ],
)
@pytest.mark.parametrize("tree", ["python/sglang/srt/layers", "sgl-kernel/python/sgl_kernel"])
def test_every_spelling_of_a_read_is_refused(plant, tree, text):
    plant(f"{tree}/thing.py", text)
    (offender,) = check.find_offenders(plant.root)
    assert f"{tree}/thing.py:" in offender and "srt/environ.py" in offender


@pytest.mark.parametrize("name", ["python/sglang/srt/environ.py", "python/sglang/test/server.py"])
def test_the_file_that_owns_it_and_the_test_helpers_may(plant, name):
    plant(name, "import os\nos.environ.get('A')\n")
    assert check.find_offenders(plant.root) == []


def test_other_attributes_of_the_same_name_stay_quiet(plant):
    plant(
        "python/sglang/srt/layers/thing.py", "import os\nos.getpid()\nclass C:\n    environ = 1\nC.environ\n"
    )
    assert check.find_offenders(plant.root) == []
