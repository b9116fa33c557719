"""The check of import floors refuses upward imports and circles, and exceptions that are not needed."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import dataclasses

import pytest

import check_import_floors as check


def test_this_tree_imports_downward_only_and_in_no_circle():
    assert check.find_offenders(check.ROOT) == []


def test_every_exception_is_used_and_says_why():
    assert check.idle_exceptions(check.ROOT) == []


def test_there_are_three_upward_imports_and_one_pair_and_no_more():
    """The list is short by agreement; without this another would slip in as one more line of data."""
    rules = check.load_rules()
    assert (len(rules.shims), len(rules.one_folder)) == (3, 1)


def test_an_upward_import_is_refused(plant):
    plant("python/sglang/srt/models/llama.py", "")
    plant("python/sglang/srt/layers/linear.py", "from sglang.srt.models.llama import Llama\n")
    (offender,) = check.find_offenders(plant.root)
    assert "sglang/srt/layers/linear.py:1" in offender
    assert "floor 3 parts imports sglang.srt.models.llama on floor 4 models" in offender


@pytest.mark.parametrize(
    "line",
    [
        "import sglang.srt.models.llama",
        "import sglang.srt.models.llama as llama",
        "from sglang.srt.models import llama",
        "from sglang.srt import models",
        "from ..models import llama",
        "from ..models.llama import Llama",
        "from .. import models",
        "def f():\n    from sglang.srt.models import llama",
        "class C:\n    async def f(self):\n        from ..models import llama",
        "try:\n    from sglang.srt.models import llama\nexcept ImportError:\n    pass",
        "import importlib\nimportlib.import_module('sglang.srt.models.llama')",
        "from importlib import import_module\nimport_module('sglang.srt.models')",
        "from importlib import import_module as load\nload('sglang.srt.models')",
        "import typing\nif typing.TYPE_CHECKING:\n    pass\nelse:\n    from ..models import llama",
        "from sglang.srt.models.not_written_yet import Llama",
    ],
)
def test_every_spelling_of_an_upward_import_is_seen(plant, line):
    plant("python/sglang/srt/models/llama.py", "")
    plant("python/sglang/srt/layers/linear.py", line + "\n")
    offenders = check.find_offenders(plant.root)
    assert len(offenders) == 1 and "linear.py" in offenders[0], offenders


@pytest.mark.parametrize(
    "line",
    [
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from sglang.srt.models import llama",
        "import typing\nif typing.TYPE_CHECKING:\n    from ..models import llama",
        "from sglang.srt.environ import envs",
        "from . import activation",
        "import torch",
        "name = 'sglang.srt.models.llama'",
    ],
)
def test_what_is_allowed_stays_quiet(plant, line):
    plant("python/sglang/srt/models/llama.py", "")
    plant("python/sglang/srt/layers/activation.py", "")
    plant("python/sglang/srt/environ.py", "")
    plant("python/sglang/srt/layers/linear.py", line + "\n")
    assert check.find_offenders(plant.root) == []


def test_the_context_does_not_import_the_groups_but_the_groups_import_the_context(plant):
    """Floor 2 is ordered inside: a sideways import would be a circle once the other side needs it."""
    plant(
        "python/sglang/srt/runtime_context/parallel.py", "from sglang.srt.distributed import parallel_state\n"
    )
    plant("python/sglang/srt/distributed/parallel_state.py", "")
    (offender,) = check.find_offenders(plant.root)
    assert "floor 2.0 context imports" in offender

    plant("python/sglang/srt/runtime_context/parallel.py", "")
    plant(
        "python/sglang/srt/distributed/parallel_state.py", "from sglang.srt.runtime_context import parallel\n"
    )
    assert check.find_offenders(plant.root) == []


def test_the_words_of_a_batch_do_not_reach_into_the_groups_folder_order(plant):
    plant("python/sglang/srt/distributed/parallel_state.py", "from sglang.srt.batch import req\n")
    plant("python/sglang/srt/batch/req.py", "")
    (offender,) = check.find_offenders(plant.root)
    assert "floor 2.1 groups imports sglang.srt.batch.req on floor 2.2" in offender


def test_a_pinned_file_stands_on_its_own_floor_not_on_that_of_its_folder(plant):
    plant("python/sglang/srt/model_executor/runner_utils/pool.py", "from sglang.srt.layers import linear\n")
    plant("python/sglang/srt/layers/linear.py", "")
    (offender,) = check.find_offenders(plant.root)
    assert "runner_utils.pool on floor 2.2" in offender


def test_two_folders_that_import_each_other_are_refused(plant):
    plant("python/sglang/srt/layers/linear.py", "from sglang.srt.mem_cache import pool\n")
    plant("python/sglang/srt/mem_cache/pool.py", "def f():\n    from ..layers import linear\n")
    (offender,) = check.find_offenders(plant.root)
    assert "circle" in offender and "srt/layers -> srt/mem_cache" in offender
    assert "srt/mem_cache -> srt/layers at python/sglang/srt/mem_cache/pool.py:2" in offender


def test_a_folder_and_its_sub_folder_that_import_each_other_are_refused(plant):
    plant("python/sglang/srt/layers/linear.py", "from sglang.srt.layers.moe import topk\n")
    plant("python/sglang/srt/layers/moe/topk.py", "from sglang.srt.layers import linear\n")
    (offender,) = check.find_offenders(plant.root)
    assert "srt/layers -> srt/layers/moe at python/sglang/srt/layers/linear.py:1" in offender


def test_a_pair_that_counts_as_one_folder_is_listed_and_needed(plant):
    plant("python/sglang/srt/arg_groups/arg_utils.py", "")
    plant("python/sglang/srt/arg_groups/fields/lora.py", "from sglang.srt.arg_groups import arg_utils\n")
    rules = check.load_rules()
    (offender,) = check.idle_exceptions(plant.root, dataclasses.replace(rules, shims=[]))
    assert "srt/arg_groups/fields and srt/arg_groups are no circle" in offender
    plant("python/sglang/srt/arg_groups/overrides.py", "from sglang.srt.arg_groups.fields import lora\n")
    assert check.find_offenders(plant.root) == []
    assert check.idle_exceptions(plant.root, dataclasses.replace(rules, shims=[])) == []
    (offender,) = check.find_offenders(plant.root, dataclasses.replace(rules, one_folder=[]))
    assert "circle" in offender


def test_a_longer_circle_is_refused_once(plant):
    plant("python/sglang/srt/layers/a.py", "import sglang.srt.mem_cache.b\n")
    plant("python/sglang/srt/mem_cache/b.py", "import sglang.srt.eplb.c\n")
    plant("python/sglang/srt/eplb/c.py", "import sglang.srt.layers.a\n")
    (offender,) = check.find_offenders(plant.root)
    assert all(step in offender for step in ("srt/layers -> srt/mem_cache", "srt/eplb -> srt/layers"))


def test_a_folder_may_import_itself(plant):
    plant("python/sglang/srt/layers/a.py", "from . import b\n")
    plant("python/sglang/srt/layers/b.py", "def f():\n    from sglang.srt.layers import a\n")
    assert check.find_offenders(plant.root) == []


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("models/llama", "model_loader/loader"),
        ("configs/model_config", "utils/heartbeat"),
        ("environ", "utils/heartbeat"),
        ("disaggregation/prefill", "managers/scheduler"),
    ],
)
def test_folders_that_stay_apart_do_so_although_the_floors_would_allow_it(plant, importer, imported):
    module = f"sglang.srt.{imported.replace('/', '.')}"
    plant(f"python/sglang/srt/{imported}.py", "")
    plant(f"python/sglang/srt/{importer}.py", f"def f():\n    import {module}\n")
    (offender,) = check.find_offenders(plant.root)
    assert f"{importer}.py:2" in offender and f"imports {module}: " in offender
    allowed = dataclasses.replace(check.load_rules(), apart=[])
    assert check.find_offenders(plant.root, allowed) == []


def test_a_module_on_no_floor_is_refused(plant):
    plant("python/sglang/srt/novelty/thing.py", "")
    offenders = check.find_offenders(plant.root)
    assert any("sglang.srt.novelty.thing stands on no floor" in offender for offender in offenders)


def test_an_import_by_a_computed_name_is_refused_on_the_low_floors(plant):
    plant(
        "python/sglang/srt/configs/model_config.py", "import importlib\nimportlib.import_module('a' + 'b')\n"
    )
    (offender,) = check.find_offenders(plant.root)
    assert "only known at run time" in offender


def test_a_shim_covers_its_function_and_nothing_beside_it(plant):
    allowed = """
        def set_global_server_args_for_scheduler(record):
            from sglang.srt.runtime_context import publish
    """
    plant("python/sglang/srt/runtime_context/publish.py", "")
    plant("python/sglang/srt/server_args.py", allowed)
    assert check.find_offenders(plant.root) == []
    plant("python/sglang/srt/server_args.py", allowed.replace("for_scheduler", "for_everybody"))
    assert len(check.find_offenders(plant.root)) == 1


def test_a_shim_that_nothing_uses_is_refused(plant):
    plant("python/sglang/srt/server_args.py", "")
    idle = check.idle_exceptions(plant.root, dataclasses.replace(check.load_rules(), one_folder=[]))
    assert len(idle) == 3 and all("not needed any more" in line for line in idle)


def test_a_shim_without_a_reason_is_refused():
    rules = check.load_rules()
    bare = [dataclasses.replace(shim, reason="because") for shim in rules.shims]
    offenders = check.idle_exceptions(check.ROOT, check.Rules(rules.floors, bare))
    assert len([line for line in offenders if "gives no reason" in line]) == len(bare)


def test_a_file_that_does_not_parse_is_reported(plant):
    plant("python/sglang/srt/layers/broken.py", "def f(:\n")
    assert any("does not parse" in offender for offender in check.find_offenders(plant.root))
