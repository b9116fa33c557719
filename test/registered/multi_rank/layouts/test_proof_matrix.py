"""Every layout against one rank: two models, fp32, the real scheduler and worker on gloo ranks.

A cell runs a mixed batch of odd lengths, a replica alone beside idle ones, a prefix hit, a prompt in pieces,
a crowd that is pushed back, a seeded draw and prompt log-probabilities. Ids must be those of one rank and
every logit that a token was drawn from within 1e-4; bytes and collectives must be what arithmetic says, also
of steps that are replayed.
"""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=110, suite="multi-rank-cpu")

from collections.abc import Iterator

import pytest

from sglang.kernels.compiled import compiled_kernels
from sglang.test.lab.layout_lab import LLAMA, MODELS, QWEN3, Cell, CellResult, Layout, LayoutLab

LAYOUTS = [
    Layout(tp_size=1, num_worlds=2),
    Layout(tp_size=2),
    Layout(tp_size=2, attn_dp_size=2),
    Layout(tp_size=2, attn_dp_size=2, dp_lm_head=True),
    Layout(tp_size=3),
    Layout(tp_size=4),
    Layout(tp_size=4, attn_dp_size=2),
    Layout(tp_size=4, attn_dp_size=2, dp_lm_head=True),
    Layout(tp_size=4, attn_dp_size=4),
]
#: With compiled attention, decode steps from recorded lists, and exchanges in them.
RECORDED = [
    Cell(Layout(tp_size=1, num_worlds=2), QWEN3, is_recorded=True),
    Cell(Layout(tp_size=2), LLAMA, is_recorded=True),
    Cell(Layout(tp_size=2, attn_dp_size=2), QWEN3, is_recorded=True),
    Cell(Layout(tp_size=3), QWEN3, is_recorded=True),
    Cell(Layout(tp_size=4), LLAMA, is_recorded=True),
    Cell(Layout(tp_size=4, attn_dp_size=2, dp_lm_head=True), LLAMA, is_recorded=True),
    Cell(Layout(tp_size=4, attn_dp_size=4), QWEN3, is_recorded=True),
]
CELLS = [Cell(layout, model) for layout in LAYOUTS for model in MODELS] + [
    Cell(Layout(tp_size=3), QWEN3, with_bundle=False),
    Cell(Layout(tp_size=4, attn_dp_size=2), LLAMA, with_bundle=False),
    Cell(Layout(tp_size=2, attn_dp_size=2), LLAMA, in_draft_scope=True),
    Cell(Layout(tp_size=4, attn_dp_size=2, dp_lm_head=True), QWEN3, in_draft_scope=True),
]

#: What must have run, spelled out: a cell that falls out of the lists above is missed here.
PROVEN = [
    "llama, 2 replicas of 1",
    "qwen3, 2 replicas of 1",
    "llama, tp 2 attn-dp 1",
    "qwen3, tp 2 attn-dp 1",
    "llama, tp 2 attn-dp 2",
    "qwen3, tp 2 attn-dp 2",
    "llama, tp 2 attn-dp 2 dp-lm-head",
    "qwen3, tp 2 attn-dp 2 dp-lm-head",
    "llama, tp 3 attn-dp 1",
    "qwen3, tp 3 attn-dp 1",
    "llama, tp 4 attn-dp 1",
    "qwen3, tp 4 attn-dp 1",
    "llama, tp 4 attn-dp 2",
    "qwen3, tp 4 attn-dp 2",
    "llama, tp 4 attn-dp 2 dp-lm-head",
    "qwen3, tp 4 attn-dp 2 dp-lm-head",
    "llama, tp 4 attn-dp 4",
    "qwen3, tp 4 attn-dp 4",
    "qwen3, tp 3 attn-dp 1, live ranks",
    "llama, tp 4 attn-dp 2, live ranks",
    "llama, tp 2 attn-dp 2, draft",
    "qwen3, tp 4 attn-dp 2 dp-lm-head, draft",
]
PROVEN_RECORDED = [
    "qwen3, 2 replicas of 1, recorded",
    "llama, tp 2 attn-dp 1, recorded",
    "qwen3, tp 2 attn-dp 2, recorded",
    "qwen3, tp 3 attn-dp 1, recorded",
    "llama, tp 4 attn-dp 1, recorded",
    "llama, tp 4 attn-dp 2 dp-lm-head, recorded",
    "qwen3, tp 4 attn-dp 4, recorded",
]
with_kernels = pytest.mark.skipif(compiled_kernels() is None, reason="the compiled kernels are not used")

_RESULTS: dict[str, CellResult] = {}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LayoutLab]:
    with LayoutLab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_layout_answers_like_one_rank(lab: LayoutLab, cell: Cell) -> None:
    result = _RESULTS[cell.name] = lab.run(cell)
    assert result.passed, result.text()


@with_kernels
@pytest.mark.parametrize("cell", RECORDED, ids=lambda cell: cell.name)
def test_a_layout_that_replays_recorded_steps_answers_like_one_rank(lab: LayoutLab, cell: Cell) -> None:
    """One rank computes in torch and eagerly, as for the cells above."""
    result = _RESULTS[cell.name] = lab.run(cell)
    assert result.passed, result.text()


def test_the_matrix_ran_every_cell_on_worlds_that_were_started_once(
    lab: LayoutLab, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = sum(result.seconds for result in _RESULTS.values())
    with capsys.disabled():
        print("\n\n  seconds  steps  furthest  accept  cell")
        for result in _RESULTS.values():
            print(f"  {result.line()}")
        print(f"  {seconds:7.2f}  {len(_RESULTS)} cells")
        print(f"  {sum(lab.start_seconds):7.2f}  start of {len(lab.start_seconds)} worlds")
    assert [result.name for result in _RESULTS.values() if result.passed] == [
        *PROVEN,
        *(PROVEN_RECORDED if compiled_kernels() is not None else ()),
    ]
    assert len(lab.start_seconds) == 5, "two worlds of one rank, and one each of two, three and four"
