"""Owns the layout lab: gloo ranks that are started once, run one layout after another, and match one rank.

Read by the proof matrix and by whoever changes the parallel layer. Its parts: `scenario` (the requests),
`world` and `rank` (the processes), `comparison` and `arithmetic` (the verdict), `faults` (mistakes to plant).
It must not judge by anything but what ranks report.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang.test.lab.arithmetic import Layout, ModelShape
from sglang.test.lab.comparison import Reference, fitness_problems, furthest_logit, problems_of
from sglang.test.lab.drafts import LabDraft
from sglang.test.lab.messages import CellOrder, RankAnswer, RankReport
from sglang.test.lab.round_comparison import accept_length
from sglang.test.lab.scenario import CHUNK, MAX_RUNNING, POOL_TOKENS, Placed, Scenario
from sglang.test.lab.world import World
from sglang.test.tiny_models import write_tiny_model

__all__ = ["LLAMA", "MODELS", "QWEN3", "Cell", "CellResult", "LabDraft", "LabModel", "Layout", "LayoutLab"]

ONE_RANK = Layout()


@dataclass(frozen=True)
class LabModel:
    """A tiny model whose sizes divide by nothing, and how it is cached."""

    name: str
    architecture: str
    shape: ModelShape
    page_size: int
    seed: int


LLAMA = LabModel(
    "llama",
    "LlamaForCausalLM",
    ModelShape(
        hidden=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        inner=129,
        vocab=301,
        tied=False,
        head_norms=False,
    ),
    page_size=1,
    seed=1,
)
#: Three query heads a key/value head, which two copies of it cannot share evenly.
QWEN3 = LabModel(
    "qwen3",
    "Qwen3ForCausalLM",
    ModelShape(
        hidden=64,
        layers=2,
        heads=6,
        kv_heads=2,
        head_dim=16,
        inner=130,
        vocab=303,
        tied=True,
        head_norms=True,
    ),
    page_size=4,
    seed=2,
)
MODELS = (LLAMA, QWEN3)


@dataclass(frozen=True)
class Cell:
    """One entry of the matrix.

    Without a bundle ranks are read live from the groups, not stamped. `in_draft_scope`: the model is built
    and run in the scope of a draft that owns its attention, and nothing is drafted. `draft`: what the target
    is served with. `takes_turns`: in place of the proof's requests those that replicas get one by one.
    """

    layout: Layout
    model: LabModel
    with_bundle: bool = True
    in_draft_scope: bool = False
    draft: LabDraft | None = None
    takes_turns: bool = False
    is_recorded: bool = False

    @property
    def name(self) -> str:
        suffix = ("" if self.with_bundle else ", live ranks") + (", draft" if self.in_draft_scope else "")
        suffix += "" if self.draft is None else f", {self.draft.name}"
        suffix += (", turns" if self.takes_turns else "") + (", recorded" if self.is_recorded else "")
        return f"{self.model.name}, {self.layout.name}{suffix}"


@dataclass
class CellResult:
    """The verdict on one cell. `failures` are ranks without a report; `seconds` exclude the start."""

    name: str
    seconds: float
    failures: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    steps: int = 0
    #: Largest distance of a logit from that of one rank.
    furthest: float = 0.0
    #: Mean tokens that a request got out of a round with room for a draft; 0 without rounds.
    accept_length: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.failures and not self.problems

    def line(self) -> str:
        """One row of a table: seconds, steps, furthest logit, accept length, name."""
        accepted = f"{self.accept_length:5.2f}" if self.accept_length else "     "
        return f"{self.seconds:7.2f}  {self.steps:5d}  {self.furthest:8.1e}  {accepted}  {self.name}"

    def text(self) -> str:
        """Everything that is wrong."""
        return "\n".join((f"{self.name}:", *self.failures, *self.problems[:20]))


class LayoutLab:
    """Runs cells. `timeout_s` limits each collective of the ranks, `cell_timeout_s` the whole cell."""

    def __init__(self, folder: Path, *, timeout_s: float = 60.0, cell_timeout_s: float = 120.0) -> None:
        self._folder = folder
        self._timeout_s = timeout_s
        self._cell_timeout_s = cell_timeout_s
        self._worlds: dict[tuple[int, int], World] = {}
        self._models: dict[str, str] = {}
        self._scenarios: dict[int, Scenario] = {}
        self._references: dict[str, Reference] = {}
        #: One entry a world that was started.
        self.start_seconds: list[float] = []

    def __enter__(self) -> LayoutLab:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def close(self) -> None:
        """End every world."""
        while self._worlds:
            self._worlds.popitem()[1].close()

    def run(self, cell: Cell, *, fault: str | None = None) -> CellResult:
        """One cell, with a fault in the ranks if one is named, compared with one rank without any."""
        reference = self.reference(cell.model)
        for w in range(cell.layout.num_worlds):
            self._world(cell.layout.tp_size, w)
        started = time.perf_counter()
        answers = self._run(cell, fault, self._phases(cell))
        result = CellResult(cell.name + (f", fault {fault!r}" if fault else ""), 0.0)
        reports = []
        for w, ranks in enumerate(answers):
            for r, answer in enumerate(ranks):
                if answer.error is not None:
                    error = answer.error
                    result.failures.append(
                        f"world {w} rank {r}: {error.kind}: {error.message}\n{error.traceback}"
                    )
            reports.append([answer.report for answer in ranks if answer.report is not None])
        if not result.failures:
            result.steps = max(report.steps for ranks in reports for report in ranks)
            scenario = self._scenario(cell.model)
            layout = cell.layout
            if cell.in_draft_scope:
                layout = layout.of_a_draft()
                reports = _worlds_of(layout, reports)
            result.problems = problems_of(
                scenario,
                reference,
                layout,
                cell.model.shape,
                reports,
                asked=_flat(self._phases(cell)),
                draft=cell.draft,
                is_proof=not cell.takes_turns,
                is_recorded=cell.is_recorded,
            )
            if not result.problems:
                result.furthest = furthest_logit(scenario, reference, reports)
            result.accept_length = accept_length(reports)
        result.seconds = time.perf_counter() - started
        return result

    def reference(self, model: LabModel) -> Reference:
        """The same requests on one rank, run once; refused when it could not tell right from wrong."""
        if model.name not in self._references:
            scenario = self._scenario(model)
            phases = [*scenario.phases(1, fills_pool=True), *scenario.turns(1)]
            ((answer,),) = self._run(Cell(ONE_RANK, model), None, phases)
            if answer.report is None:
                assert answer.error is not None
                raise AssertionError(
                    f"the reference of {model.name} failed: {answer.error.message}\n{answer.error.traceback}"
                )
            reference = Reference.of(scenario, answer.report)
            # The arithmetic and the coverage must hold for one rank, too.
            problems = [
                *fitness_problems(scenario, reference),
                *problems_of(
                    scenario, reference, ONE_RANK, model.shape, [[answer.report]], asked=_flat(phases)
                ),
            ]
            if problems:
                raise AssertionError(f"the reference of {model.name} is unfit:\n" + "\n".join(problems))
            self._references[model.name] = reference
        return self._references[model.name]

    def _phases(self, cell: Cell) -> list[list[Placed]]:
        scenario, replicas = self._scenario(cell.model), cell.layout.num_replicas
        if cell.takes_turns:
            return scenario.turns(replicas)
        return scenario.phases(replicas, fills_pool=cell.draft is not None)

    def _run(
        self, cell: Cell, fault: str | None, phases: Sequence[Sequence[Placed]]
    ) -> list[list[RankAnswer]]:
        """Answers by world and rank. All worlds run at the same time; a broken one is ended."""
        worlds = [self._world(cell.layout.tp_size, w) for w in range(cell.layout.num_worlds)]
        for w, world in enumerate(worlds):
            world.order(self._orders(cell, w, fault, phases))
        answers = [world.reports(self._cell_timeout_s) for world in worlds]
        for w, world in enumerate(worlds):
            if world.broken:
                self._worlds.pop((cell.layout.tp_size, w)).close()
        return answers

    def pids(self, tp_size: int) -> list[int]:
        """The ranks of the first world of that width, in rank order."""
        return self._world(tp_size, 0).pids

    def _world(self, size: int, number: int) -> World:
        if (size, number) not in self._worlds:
            started = time.perf_counter()
            self._worlds[size, number] = World(size, timeout_s=self._timeout_s)
            self.start_seconds.append(time.perf_counter() - started)
        return self._worlds[size, number]

    def _orders(
        self, cell: Cell, world: int, fault: str | None, phases: Sequence[Sequence[Placed]]
    ) -> Sequence[CellOrder]:
        layout, scenario = cell.layout, self._scenario(cell.model)
        fields = self._fields(cell)
        orders = []
        for rank in range(layout.tp_size):
            is_leader, replica = layout.is_attn_tp_leader(rank), layout.replica_rank(world, rank)
            orders.append(
                CellOrder(
                    fields=fields,
                    world_rank=rank,
                    dp_rank=world if layout.num_worlds > 1 else None,
                    with_bundle=cell.with_bundle,
                    is_attn_tp_leader=is_leader,
                    in_draft_scope=cell.in_draft_scope,
                    phases=[scenario.inbox(phase, replica) if is_leader else [] for phase in phases],
                    fault=fault,
                )
            )
        return orders

    def _fields(self, cell: Cell) -> dict[str, Any]:
        layout = cell.layout
        return {
            "model_path": self._model_path(cell.model),
            "dtype": "float32",
            "device": "cpu",
            "attention_backend": "cpu" if cell.is_recorded else "torch_native",
            "cuda_graph_backend_decode": "cpu" if cell.is_recorded else "disabled",
            "page_size": cell.model.page_size,
            "max_total_tokens": POOL_TOKENS,
            "max_running_requests": MAX_RUNNING,
            "chunked_prefill_size": CHUNK,
            "schedule_conservativeness": 0.0,  # admit more than the pool will hold
            "tp_size": layout.tp_size,
            "dp_size": layout.num_replicas,
            "enable_dp_attention": layout.attn_dp_size > 1,
            "enable_dp_lm_head": layout.dp_lm_head,
            **({} if cell.draft is None else cell.draft.fields(Path(self._model_path(cell.model)))),
        }

    def _model_path(self, model: LabModel) -> str:
        if model.name not in self._models:
            shape = model.shape
            path = write_tiny_model(
                self._folder / model.name,
                architecture=model.architecture,
                hidden_size=shape.hidden,
                num_layers=shape.layers,
                num_heads=shape.heads,
                num_kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                intermediate_size=shape.inner,
                vocab_size=shape.vocab,
                tie=shape.tied,
                seed=model.seed,
            )
            self._models[model.name] = str(path)
        return self._models[model.name]

    def _scenario(self, model: LabModel) -> Scenario:
        vocab = model.shape.vocab
        if vocab not in self._scenarios:
            self._scenarios[vocab] = Scenario(vocab)
        return self._scenarios[vocab]


def _flat(phases: Sequence[Sequence[Placed]]) -> list[Placed]:
    return [asked for phase in phases for asked in phase]


def _worlds_of(layout: Layout, reports: Sequence[Sequence[RankReport]]) -> list[list[RankReport]]:
    """The same reports in worlds of that layout, whose ranks sit side by side."""
    ranks = [report for world in reports for report in world]
    return [ranks[first : first + layout.tp_size] for first in range(0, len(ranks), layout.tp_size)]
