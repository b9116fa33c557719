"""The check that business code asks `get_parallel()` refuses every other spelling."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit-cpu")

import pytest

import check_group_getters as check

STATE = """
    def get_tp_group():
        return None

    def is_initialized():
        return False

    def get_self_pp_group():
        return None

    class GroupCoordinator:
        def get_name(self):
            return ""
"""


@pytest.fixture
def planted(plant):
    plant("python/sglang/srt/distributed/parallel_state.py", STATE)
    return plant


def test_this_tree_asks_the_context():
    assert check.find_offenders(check.ROOT) == []


def test_the_getters_come_from_the_source(planted):
    assert check.getters(planted.root) == {"get_tp_group", "is_initialized"}


def test_this_trees_getters_are_found():
    """An empty or a shrunken set would let every caller through."""
    assert {"get_tp_group", "get_world_group", "get_pp_group"} <= check.getters(check.ROOT)


def test_no_getter_to_watch_is_an_error(plant):
    plant("python/sglang/srt/distributed/parallel_state.py", "X = 1\n")
    with pytest.raises(ValueError, match="watch nothing"):
        check.find_offenders(plant.root)


@pytest.mark.parametrize(
    "text",
    [
        "from sglang.srt.distributed.parallel_state import get_tp_group\n",
        "from sglang.srt.distributed import get_tp_group as ask\n",
        "from ..distributed.parallel_state import get_tp_group\n",
        "from sglang.srt.distributed import parallel_state\nparallel_state.get_tp_group()\n",
        "from sglang.srt.distributed import parallel_state as ps\nps.get_tp_group()\n",
        "import sglang.srt.distributed.parallel_state as ps\nask = ps.get_tp_group\n",
        "import sglang\nsglang.srt.distributed.parallel_state.get_tp_group()\n",
        "from ..distributed import parallel_state\nparallel_state.is_initialized()\n",
        "def f(parallel_state):\n    return parallel_state.get_tp_group()\n",
        "def f():\n    return get_tp_group()\n",
        '"""A text that says get_tp_group() in passing."""\n',
        "x = 1  # as get_tp_group() would say\n",
        "import torch.distributed as dist\ndist.get_rank()\n",
        "import torch\ntorch.distributed.get_world_size()\n",
        "from torch.distributed import get_rank\n",
    ],
)
def test_every_spelling_of_a_call_is_refused(planted, text):
    planted("python/sglang/srt/layers/thing.py", text)
    offenders = check.find_offenders(planted.root)
    assert offenders and all("python/sglang/srt/layers/thing.py:" in offender for offender in offenders)


@pytest.mark.parametrize(
    "text",
    [
        "from sglang.srt.distributed.parallel_state import get_self_pp_group\nget_self_pp_group()\n",
        "# get_tp_group() in a comment of its own\n",
        "class C:\n    def get_tp_group(self):\n        return 1\nC().get_tp_group()\n",
        "from sglang.srt.runtime_context import get_parallel\nget_parallel().tp_group\n",
    ],
)
def test_what_is_allowed_stays_quiet(planted, text):
    planted("python/sglang/srt/layers/thing.py", text)
    assert check.find_offenders(planted.root) == []


@pytest.mark.parametrize("folder", ["srt/distributed", "test"])
def test_the_folder_that_defines_them_and_the_test_helpers_may(planted, folder):
    text = "from sglang.srt.distributed.parallel_state import get_tp_group\nget_tp_group()\n"
    planted(f"python/sglang/{folder}/thing.py", text)
    assert check.find_offenders(planted.root) == []
