from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit-cpu")

import pytest

import check_replica_spellings as check


def test_this_tree_asks_for_leader_and_replica():
    assert check.find_offenders(check.ROOT) == []


@pytest.mark.parametrize("home", sorted(check.HOMES))
def test_the_places_that_may_work_it_out_exist(home):
    assert (check.ROOT / home).is_file()


@pytest.mark.parametrize("name", sorted(check.RENAMED))
@pytest.mark.parametrize("use", ["def {0}(): pass", "from a import {0}", "x = {0}(1)", "x = a.{0}"])
@pytest.mark.parametrize("tree", check.FIVE_TREES)
def test_an_earlier_spelling_is_refused_in_every_tree(plant, tree, use, name):
    plant(f"{tree}/thing.py", use.format(name) + "\n")
    (offender,) = check.find_offenders(plant.root)
    assert f"{tree}/thing.py:1" in offender and check.RENAMED[name] in offender


@pytest.mark.parametrize(
    ("text", "cure"),
    [
        ("n = p.attn_dp_size if p.attn_dp_size > 1 else p.dp_size", "num_replicas"),
        ("n = p['dp_size'] if p['enable_dp_attention'] else 1", "attn_dp_size_of"),
        ("r = parallel.attn_dp_rank if attn_dp_size > 1 else 0", "replica_rank"),
        (
            "def f(p):\n    if p.attn_dp_size > 1:\n        return p.attn_dp_rank",
            "replica_rank",
        ),
        ("r = config.dp_rank or 0", "replica_rank"),
        ("n = view.dp_size // view.attn_dp_size", "num_worlds"),
        ("n = dp_size // attn_dp_size(enable_dp_attention, dp_size)", "num_worlds"),
        ("leads = parallel.attn_tp_rank == 0", "is_attn_tp_leader"),
        ("leads = ranks['attn_tp'] == 0", "leads_attn_tp"),
        ("leads = not parallel.attn_tp_rank", "is_attn_tp_leader"),
    ],
)
def test_an_answer_that_is_worked_out_by_hand_is_refused(plant, text, cure):
    plant("python/sglang/srt/layers/thing.py", text + "\n")
    (offender,) = check.find_offenders(plant.root)
    assert "python/sglang/srt/layers/thing.py:" in offender and cure in offender


@pytest.mark.parametrize(
    "text",
    [
        "x = parallel.replica_rank",
        "parts = 1 if parallel.attn_dp_size == 1 else 2",
        "if parallel.attn_dp_size > 1:\n    gather()",
        "name = 'attn_dp_size' if config['enable_dp_attention'] else 'dp_size'",
        "first = parallel.attn_dp_rank == 0",
        "deployments_first = not parallel.dp_rank",
    ],
)
def test_other_questions_stay_quiet(plant, text):
    plant("python/sglang/srt/layers/thing.py", text + "\n")
    assert check.find_offenders(plant.root) == []


def test_a_test_may_compare_with_its_own_arithmetic(plant):
    plant("test/registered/unit/thing.py", "assert parallel.attn_tp_rank == 0\n")
    assert check.find_offenders(plant.root) == []
