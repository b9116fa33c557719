"""The proof matrix notices planted mistakes: with one a cell fails for the right reason, else it passes."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=100, suite="multi-rank-cpu")

import os
import re
import signal
from collections.abc import Iterator

import pytest

from sglang.kernels.compiled import compiled_kernels
from sglang.test.lab.faults import FAULTS
from sglang.test.lab.layout_lab import LLAMA, QWEN3, Cell, Layout, LayoutLab

TP2 = Layout(tp_size=2)
TP2_DP2 = Layout(tp_size=2, attn_dp_size=2)
TP2_DP2_HEAD = Layout(tp_size=2, attn_dp_size=2, dp_lm_head=True)
TP4 = Layout(tp_size=4)
TP4_DP2 = Layout(tp_size=4, attn_dp_size=2)

#: Ranks took different steps: a collective failed, or gloo ended a process that got more than it expected.
ENDED = "CollectiveError|gloo::EnforceNotMet"
#: The guard of the model runner, which names where the model lives and where it was run.
BUILT_AS_TARGET = "built at tp_size 2,.* attn_dp_size 2,.* cannot run at tp_size 1,.* attn_dp_size 1"
BUILT_AS_DRAFT = "built at tp_size 1,.* attn_dp_size 1,.* cannot run at tp_size 2,.* attn_dp_size 2"
#: Fault, cell, and what the cell must have to say about it.
PLANTED = [
    ("layers get the rank below", Cell(TP2, LLAMA), "logits differ"),
    ("live tp rank off by one", Cell(TP2, LLAMA, with_bundle=False), "logits differ"),
    ("live attention rank off by one", Cell(TP2, LLAMA, with_bundle=False), "was given no channel"),
    ("stamped attention rank off by one", Cell(TP2, LLAMA), "set by publish"),
    ("attention cut by tp_size", Cell(TP2_DP2, QWEN3), "logits differ"),
    ("attention cut by tp_size", Cell(TP2_DP2, LLAMA), "caches 256 bytes a token, its share is 512"),
    ("attention summed over the tensor group", Cell(TP2, LLAMA), "attn_tp group: "),
    ("attention summed over the tensor group", Cell(TP4_DP2, LLAMA), ENDED),
    ("everything on every rank", Cell(TP2, QWEN3), "tp group: {}"),
    ("one sum skipped by all", Cell(TP2, QWEN3), "logits differ"),
    ("one sum skipped by one rank", Cell(TP2, LLAMA), ENDED),
    ("target in the draft scope", Cell(TP2_DP2, LLAMA), BUILT_AS_TARGET),
    ("target in the draft scope", Cell(TP2_DP2_HEAD, QWEN3), BUILT_AS_TARGET),
    ("draft outside its scope", Cell(TP2_DP2, LLAMA, in_draft_scope=True), BUILT_AS_DRAFT),
    # Without the guard: half a vocabulary, which the head refuses; the right shape and wrong numbers; and a
    # forward that waits for what only a target is given.
    ("target in the draft scope, unguarded", Cell(TP2_DP2, LLAMA), "the head is cut over 2 ranks"),
    ("target in the draft scope, unguarded", Cell(TP2_DP2_HEAD, QWEN3), "logits differ by [1-9]"),
    (
        "draft outside its scope, unguarded",
        Cell(TP2_DP2, LLAMA, in_draft_scope=True),
        "needs the step that they agreed",
    ),
]
#: The same where decode steps are replayed from lists, exchanges in them.
PLANTED_RECORDED = [
    ("layers get the rank below", Cell(TP2, LLAMA, is_recorded=True), "logits differ"),
    (
        "one sum skipped by one rank",
        Cell(TP2, LLAMA, is_recorded=True),
        # Both find the other in another exchange, or the first to find it gives up under the other's eyes.
        "capturing a graph .* over group 'tp' .* failed on world rank",
    ),
    ("attention summed over the tensor group", Cell(TP2, QWEN3, is_recorded=True), "attn_tp group: "),
    ("attention cut by tp_size", Cell(TP2_DP2, QWEN3, is_recorded=True), "logits differ"),
    (
        "target in the draft scope, unguarded",
        Cell(TP2_DP2, LLAMA, is_recorded=True),
        "the head is cut over 2 ranks",
    ),
]
#: Faults that keep something of one cell and do harm in the next.
STALE = [
    ("a stale copy of a destroyed group", Cell(TP2, LLAMA), Cell(TP2, QWEN3), "it was destroyed"),
    ("a stale copy of a group that still works", Cell(TP4_DP2, LLAMA), Cell(TP4, LLAMA), "logits differ"),
]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LayoutLab]:
    """A stuck collective ends after 8 seconds here, and the cell with it."""
    with LayoutLab(tmp_path_factory.mktemp("lab"), timeout_s=8.0, cell_timeout_s=60.0) as lab:
        yield lab


def test_every_fault_that_can_be_planted_is_planted_here() -> None:
    assert {fault for fault, *_ in (*PLANTED, *STALE)} == set(FAULTS)


@pytest.mark.parametrize(("fault", "cell", "sign"), PLANTED)
def test_the_matrix_fails_on_a_planted_fault(lab: LayoutLab, fault: str, cell: Cell, sign: str) -> None:
    assert_noticed(lab, fault, cell, sign)


@pytest.mark.skipif(compiled_kernels() is None, reason="the compiled kernels are not used")
@pytest.mark.parametrize(("fault", "cell", "sign"), PLANTED_RECORDED)
def test_the_matrix_fails_on_a_fault_in_recorded_steps(
    lab: LayoutLab, fault: str, cell: Cell, sign: str
) -> None:
    assert_noticed(lab, fault, cell, sign)


def assert_noticed(lab: LayoutLab, fault: str, cell: Cell, sign: str) -> None:
    result = lab.run(cell, fault=fault)
    assert not result.passed, f"{fault} went unnoticed"
    assert re.search(sign, result.text()), result.text()
    again = lab.run(cell)
    assert again.passed, again.text()


@pytest.mark.parametrize(("fault", "before", "cell", "sign"), STALE)
def test_the_matrix_fails_on_what_an_earlier_layout_left(
    lab: LayoutLab, fault: str, before: Cell, cell: Cell, sign: str
) -> None:
    """Where the copy is still the right one nothing is wrong; one layout later it is."""
    first = lab.run(before, fault=fault)
    assert first.passed, first.text()
    result = lab.run(cell, fault=fault)
    assert not result.passed, f"{fault} went unnoticed"
    assert re.search(sign, result.text()), result.text()
    again = lab.run(cell)
    assert again.passed, again.text()


def test_a_killed_rank_fails_its_cell_and_the_next_cell_has_a_new_world(lab: LayoutLab) -> None:
    cell = Cell(TP2, LLAMA)
    before = lab.pids(2)
    os.kill(before[1], signal.SIGKILL)
    result = lab.run(cell)
    assert not result.passed and "rank 1: Death: exit code -9" in result.text()
    again = lab.run(cell)
    assert again.passed, again.text()
    assert not set(before) & set(lab.pids(2))
