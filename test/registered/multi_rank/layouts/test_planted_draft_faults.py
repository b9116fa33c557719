"""The proof of drafts notices planted mistakes, and passes where a planted one can do no harm."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=60, suite="multi-rank-cpu")

import re
from collections.abc import Iterator

import pytest

from sglang.test.lab.draft_faults import FAULTS
from sglang.test.lab.layout_lab import LLAMA, Cell, LabDraft, Layout, LayoutLab

TP2 = Layout(tp_size=2)
TP2_DP2 = Layout(tp_size=2, attn_dp_size=2)
OWNING = Cell(TP2_DP2, LLAMA, draft=LabDraft("EAGLE3"))
FOLLOWING = Cell(TP2_DP2, LLAMA, draft=LabDraft("EAGLE"))
DRAFTED = Cell(TP2, LLAMA, draft=LabDraft("EAGLE"))
ORACLE = Cell(TP2, LLAMA, draft=LabDraft("STANDALONE"))

#: Ranks took different steps: a collective failed, or gloo ended a process that got more than it expected.
ENDED = "CollectiveError|gloo::EnforceNotMet"
BUILT_AS_TARGET = "built at tp_size 2,.* attn_dp_size 2,.* cannot run at tp_size 1,.* attn_dp_size 1"
BUILT_AS_DRAFT = "built at tp_size 1,.* attn_dp_size 1,.* cannot run at tp_size 2,.* attn_dp_size 2"
#: Fault, cell, and what the cell must have to say about it.
NOTICED = [
    ("a draft of one group follows its target", OWNING, "(?s)scope was entered.*holds .* bytes of weights"),
    ("the draft's phases outside its scope", OWNING, BUILT_AS_DRAFT),
    ("the draft built on the tensor group", OWNING, BUILT_AS_TARGET),
    ("the target in the draft's scope", OWNING, BUILT_AS_TARGET),
    ("each rank accepts, other rounding", ORACLE, ENDED),
    ("each rank proposes, other proposals", DRAFTED, "ran another batch than its leader"),
    ("idle replicas do not propose", FOLLOWING, ENDED),
    ("request counts for token counts", FOLLOWING, ENDED),
    ("replicas verify by their own room", FOLLOWING, ENDED),
    ("no vote before a step", FOLLOWING, ENDED),
]
#: Without pipeline parallelism its scope says what is so anyway; and where the leader of a group proposes and
#: accepts for all of its ranks, what others compute is used by nobody.
HARMLESS = [
    ("no pipeline scope", OWNING),
    ("other rounding on one rank", ORACLE),
    ("other proposals on one rank", DRAFTED),
]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LayoutLab]:
    """A stuck collective ends after 8 seconds here, and the cell with it."""
    with LayoutLab(tmp_path_factory.mktemp("lab"), timeout_s=8.0, cell_timeout_s=60.0) as lab:
        yield lab


def test_every_fault_that_can_be_planted_is_planted_here() -> None:
    assert {fault for fault, *_ in (*NOTICED, *HARMLESS)} == set(FAULTS)


@pytest.mark.parametrize(("fault", "cell"), HARMLESS)
def test_a_fault_that_nothing_depends_on_changes_nothing(lab: LayoutLab, fault: str, cell: Cell) -> None:
    result = lab.run(cell, fault=fault)
    assert result.passed, result.text()


@pytest.mark.parametrize(("fault", "cell", "sign"), NOTICED)
def test_the_matrix_fails_on_a_planted_fault(lab: LayoutLab, fault: str, cell: Cell, sign: str) -> None:
    result = lab.run(cell, fault=fault)
    assert not result.passed, f"{fault} went unnoticed"
    assert re.search(sign, result.text()), result.text()
