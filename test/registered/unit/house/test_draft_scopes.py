"""The check that a draft's tensor scope states who owns the attention refuses every other spelling."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import pytest

import check_draft_scopes as check


@pytest.fixture
def planted(plant):
    for tree in check.FIVE_TREES:
        plant(f"{tree}/quiet.py", "")
    return plant


def test_every_scope_of_this_tree_says_who_owns_the_attention():
    assert check.find_offenders(check.ROOT) == []


@pytest.mark.parametrize("tree", check.FIVE_TREES)
@pytest.mark.parametrize(
    "call",
    [
        "draft_tp_context(group)",
        "self.draft_tp_context(runner.tp_group)",
        "patch_tensor_parallel_group(group, True)",
        "parallel_state.patch_tensor_parallel_group(group, **options)",
        "functools.partial(draft_tp_context, group)",
        "make().draft_tp_context(group)",
    ],
)
def test_a_scope_that_does_not_say_is_refused_in_every_tree(planted, tree, call):
    planted(f"{tree}/thing.py", f"with {call}:\n    pass\n")
    (offender,) = check.find_offenders(planted.root)
    assert f"{tree}/thing.py:1" in offender and "owns_attention=" in offender


@pytest.mark.parametrize(
    "line",
    [
        "with draft_tp_context(group, owns_attention=True):\n    pass",
        "s = partial(patch_tensor_parallel_group, group, owns_attention=False)",
        "def draft_tp_context(group, *, owns_attention):\n    pass",
        "scope = draft_tp_context",
    ],
)
def test_a_scope_that_says_stays_quiet(planted, line):
    planted("python/sglang/thing.py", line + "\n")
    assert check.find_offenders(planted.root) == []


@pytest.mark.parametrize("tree", check.FIVE_TREES)
def test_a_tree_without_a_file_is_refused(planted, tree):
    """The census must not report 'clean' for a tree that it never reached."""
    (planted.root / tree / "quiet.py").unlink()
    for rest in (planted.root / tree).rglob("*.py"):
        rest.unlink()
    assert any("holds no Python file" in offender for offender in check.find_offenders(planted.root))
