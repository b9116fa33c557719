"""Every layout with every draft against one rank without any: fp32, real schedulers and workers on ranks.

The cells are those of the proof matrix with a draft: also rounds in a full pool, and replicas that are idle
beside others. Ids, ends, log-probabilities and the logits of every token are those of plain decoding on one
rank; forwards of each phase, entries into scopes, bytes and collectives are what arithmetic says.
"""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=100, suite="multi-rank-cpu")

from collections.abc import Iterator

import pytest

from sglang.test.lab.draft_matrix import DRAFTS, LAYOUTS, all_cells, main, pairwise_cells
from sglang.test.lab.layout_lab import (
    LLAMA,
    MODELS,
    QWEN3,
    Cell,
    CellResult,
    LabDraft,
    Layout,
    LayoutLab,
)

REPLICAS = Layout(tp_size=2, attn_dp_size=2)

#: What must have run, spelled out: a cell that the generator leaves out is missed here.
PROVEN = [
    "llama, tp 2 attn-dp 1, EAGLE chain",
    "qwen3, tp 2 attn-dp 1, EAGLE3 tree",
    "qwen3, tp 2 attn-dp 1, EAGLE3 reduced chain",
    "llama, tp 2 attn-dp 1, STANDALONE oracle tree",
    "llama, tp 2 attn-dp 1, NGRAM chain",
    "qwen3, tp 2 attn-dp 2, EAGLE tree",
    "llama, tp 2 attn-dp 2, EAGLE3 chain",
    "llama, tp 2 attn-dp 2, EAGLE3 reduced tree",
    "qwen3, tp 2 attn-dp 2, STANDALONE oracle chain",
    "qwen3, tp 2 attn-dp 2, NGRAM tree",
    "llama, tp 4 attn-dp 2, EAGLE chain",
    "qwen3, tp 4 attn-dp 2, EAGLE3 tree",
    "llama, tp 4 attn-dp 2, EAGLE3 reduced chain",
    "qwen3, tp 4 attn-dp 2, STANDALONE oracle tree",
    "llama, tp 4 attn-dp 2, NGRAM chain",
    "qwen3, tp 4 attn-dp 2 dp-lm-head, EAGLE tree",
    "llama, tp 4 attn-dp 2 dp-lm-head, EAGLE3 chain",
    "qwen3, tp 4 attn-dp 2 dp-lm-head, EAGLE3 reduced tree",
    "llama, tp 4 attn-dp 2 dp-lm-head, STANDALONE oracle chain",
    "qwen3, tp 4 attn-dp 2 dp-lm-head, NGRAM tree",
    "llama, 2 replicas of 1, EAGLE chain",
    "qwen3, 2 replicas of 1, EAGLE3 tree",
    "llama, 2 replicas of 1, EAGLE3 reduced chain",
    "qwen3, 2 replicas of 1, STANDALONE oracle tree",
    "llama, 2 replicas of 1, NGRAM chain",
]

_RESULTS: dict[str, CellResult] = {}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LayoutLab]:
    with LayoutLab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


def test_the_cells_are_every_layout_with_every_draft() -> None:
    cells = pairwise_cells()
    assert [cell.name for cell in cells] == PROVEN
    assert len(cells) == len(LAYOUTS) * len(DRAFTS) == 25
    assert len(all_cells()) == 25 * 2 * len(MODELS) and {*cells} <= {*all_cells()}


def test_the_command_says_that_no_cell_has_such_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["llama", "MEDUSA"]) == 2
    assert "no cell's name holds all of llama, MEDUSA" in capsys.readouterr().out


@pytest.mark.parametrize("cell", pairwise_cells(), ids=lambda cell: cell.name)
def test_a_draft_changes_nothing_in_any_layout(lab: LayoutLab, cell: Cell) -> None:
    result = _RESULTS[cell.name] = lab.run(cell)
    assert result.passed, result.text()


@pytest.mark.parametrize(
    "draft", [LabDraft("EAGLE", is_tree=True), LabDraft("EAGLE3")], ids=lambda it: it.name
)
def test_replicas_that_are_idle_in_turn_take_part(lab: LayoutLab, draft: LabDraft) -> None:
    """One request at a time, now to this replica, now to that one: 50 times one of the two is idle."""
    result = lab.run(Cell(REPLICAS, LLAMA, draft=draft, takes_turns=True))
    assert result.passed, result.text()


@pytest.mark.parametrize("layout", [Layout(tp_size=2), REPLICAS], ids=lambda layout: layout.name)
def test_an_oracle_is_always_believed_with_and_without_replicas(lab: LayoutLab, layout: Layout) -> None:
    """All requests are greedy here, and the texts are those of one rank: three drafts and one token more."""
    result = lab.run(Cell(layout, QWEN3, draft=LabDraft("STANDALONE"), takes_turns=True))
    assert result.passed, result.text()
    assert result.accept_length == 4.0


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
    assert [result.name for result in _RESULTS.values() if result.passed] == PROVEN
    assert len(lab.start_seconds) == 4, "two worlds of one rank, and one each of two and four"
