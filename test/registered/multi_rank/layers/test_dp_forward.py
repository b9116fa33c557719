"""Forwards over attention-DP replicas that hold different requests, against one rank and one request."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=40, suite="multi-rank-cpu")

from typing import Any

import pytest
import torch

from sglang.srt.batch.forward_batch import NOT_FINITE, DpStep, ForwardBatch
from sglang.srt.batch.logprobs import LogprobRequest
from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.errors import CollectiveError
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.runtime_context import get_parallel
from sglang.test.multi_rank import run_ranks
from sglang.test.spoiled_slots import spoil
from sglang.test.tiny_models import write_tiny_model
from sglang.test.waiting import HANG_GUARD_S
from sglang.test.worker_driver import DrivenSequence, WorkerDriver, driven_worker

NUM_LAYERS = 2
TOLERANCE = 1e-4
#: Rows of one piece of logits: forwards with prompt logprobs then need several.
ROWS_AT_ONCE = 3
PROMPTS = {"a": 7, "b": 5, "c": 8, "d": 9, "e": 6}
#: Prompt logprobs: (first row, targets) of the first forward of this sequence.
TARGETS = {"d": (1, 7)}

Part = dict[str, int]  # sequence -> new tokens in this step
TALKER: list[Part] = [{"a": 7}, {"a": 1}, {"a": 1}, {"a": 1}, {}, {"d": 9}, {"a": 1, "d": 1}, {}]
CROWD: list[Part] = [
    {},  # idle beside a prompt
    {"b": 5, "c": 3},  # prompts beside a decode, one of them cut
    {"b": 1, "c": 5},
    {"b": 1, "c": 1},  # everybody decodes
    {"b": 1, "c": 1},  # alone
    {"b": 1},  # beside prompt logprobs
    {"e": 4},  # rows, but none to score
    {"c": 1, "e": 2},
]
STEPS = len(TALKER)
SCRIPTS: dict[int, list[list[Part]]] = {
    2: [TALKER, CROWD],
    4: [TALKER, CROWD, [{}, *TALKER[:-1]], [{}] * STEPS],  # the last replica never has anything
}


class Announced:
    """The sizes that the replicas would exchange in every step, from the script alone."""

    def __init__(self, scripts: list[list[Part]]) -> None:
        self.scripts = scripts
        self.cached: dict[tuple[int, str], int] = {}
        self.length: dict[tuple[int, str], int] = {}

    def step(self, at: int) -> DpStep:
        parts = [script[at] for script in self.scripts]
        rows, is_extend = [], False
        for replica, part in enumerate(parts):
            scored = 0
            for name, count in part.items():
                key = (replica, name)
                is_extend = is_extend or count > 1
                if key not in self.cached and name in TARGETS:
                    scored += TARGETS[name][1]
                self.cached[key] = self.cached.get(key, 0) + count
                if self.cached[key] == self.length.setdefault(key, PROMPTS[name]):
                    scored += 1
                    self.length[key] += 1
            rows.append(scored)
        return DpStep([sum(part.values()) for part in parts], rows, is_extend)


class Replica:
    """One rank's part of the script, and what it computed: the tokens so far and the logits after them."""

    def __init__(self, driver: WorkerDriver, number: int) -> None:
        self.driver = driver
        self.number = number
        self.seqs: dict[str, DrivenSequence] = {}
        self.draws: list[tuple[list[int], torch.Tensor]] = []
        self.prompt_logprobs: list[tuple[list[int], int, list[float]]] = []

    def seq(self, name: str) -> DrivenSequence:
        if name not in self.seqs:
            generator = torch.Generator().manual_seed(10 * self.number + ord(name))
            ids = torch.randint(3, 500, (PROMPTS[name],), generator=generator).tolist()
            self.seqs[name] = self.driver.add(ids)
        return self.seqs[name]

    def forward(self, part: Part, step: DpStep, asks: dict[str, LogprobRequest]) -> LogitsProcessorOutput:
        runner = self.driver.worker.model_runner
        if not part:
            return runner.forward(ForwardBatch.idle(step, runner.device))
        batch = self.driver.batch(
            [(self.seq(name), count) for name, count in part.items()],
            asks=[asks.get(name) for name in part] if asks else None,
            decode=max(part.values()) == 1,
        )
        batch.dp_step = step
        return runner.forward(batch)

    def run(self, part: Part, step: DpStep) -> None:
        asked = [name for name in part if name in TARGETS and self.seq(name).cached == 0]
        asks = {}
        for name in asked:
            first, count = TARGETS[name]
            asks[name] = LogprobRequest(
                top_num=2, first_row=first, targets=self.seq(name).ids[first + 1 : first + 1 + count]
            )
        output = self.forward(part, step, asks)
        names = list(part)
        assert output.failures == [None] * len(names)
        for at, b in enumerate(output.drawing):
            seq = self.seq(names[b])
            self.draws.append((list(seq.ids), output.logits[at].clone()))
            seq.ids.append(int(output.logits[at].argmax()))
        for name in asked:
            assert output.input_logprobs is not None
            entries = output.input_logprobs[names.index(name)]
            if not get_parallel().is_attn_tp_leader:
                assert entries is None  # its leader reads them
                continue
            assert entries is not None and len(entries) == TARGETS[name][1]
            values = [entry.logprob for entry in entries]
            self.prompt_logprobs.append((self.seq(name).ids[: PROMPTS[name]], TARGETS[name][0], values))

    def poisoned(self) -> None:
        """One request of replica 1 has NaN in its cache: it fails there, and nothing else does."""
        if self.number == 1:
            slot = self.seq("b").slots[1]
            spoil(self.driver.worker.pools.kv, 0, torch.tensor([slot]))
        parts: list[Part] = [{"a": 1}, {"b": 1, "c": 1}, {}, {}]
        replicas = get_parallel().attn_dp_size
        step = DpStep([1, 2, 0, 0][:replicas], [1, 3, 0, 0][:replicas], is_extend=False)
        asks = {"b": LogprobRequest(targets=[4])} if self.number == 1 else {}
        output = self.forward(parts[self.number], step, asks)
        failed = NOT_FINITE if get_parallel().is_attn_tp_leader else None
        assert output.failures == [[None], [failed, None], [], []][self.number]
        for at, name in enumerate(parts[self.number]):
            if name == "b":
                assert not torch.isfinite(output.logits[at]).any()
                assert output.input_logprobs == [None, None]
            else:
                self.draws.append((list(self.seq(name).ids), output.logits[at].clone()))

    def compare(self, one_rank: WorkerDriver) -> None:
        """Every draw and every prompt logprob, each alone on one rank."""
        for ids, logits in self.draws:
            assert logits.shape == (one_rank.worker.vocab_size,)
            assert (logits - _logits(one_rank, ids)).abs().max() < TOLERANCE
        for ids, first, values in self.prompt_logprobs:
            for at, value in enumerate(values, start=first):
                logprobs = torch.log_softmax(_logits(one_rank, ids[: at + 1]), dim=-1)
                assert abs(float(logprobs[ids[at + 1]]) - value) < TOLERANCE


def _logits(driver: WorkerDriver, ids: list[int]) -> torch.Tensor:
    seq = driver.add(ids)
    logits = driver.logits([(seq, len(ids))])[0].clone()
    driver.drop(seq)
    return logits


def _layout(replicas: int) -> dict[str, Any]:
    return {"tp_size": torch.distributed.get_world_size(), "dp_size": replicas, "enable_dp_attention": True}


def check_forwards(rank: int, folders: list[str], layouts: list[int]) -> list[dict[str, Any]]:
    """On one rank: the script for every layout, model and head. Gives the calls on the tensor group."""
    found = []
    for folder in folders:
        for replicas in layouts:
            for dp_head in (False, True):
                layout = _layout(replicas) | {"enable_dp_lm_head": dp_head}
                with driven_worker(folder, rank=rank, **layout) as driver:
                    model = driver.worker.model_runner.model
                    vocab = driver.worker.vocab_size
                    model.logits_processor = LogitsProcessor(vocab, piece_bytes=ROWS_AT_ONCE * 4 * vocab)
                    replica = Replica(driver, get_parallel().attn_dp_rank)
                    announced = Announced(SCRIPTS[replicas])
                    for at in range(STEPS):
                        replica.run(SCRIPTS[replicas][replica.number][at], announced.step(at))
                    replica.poisoned()
                    calls = dict(get_parallel().tp_group.calls)
                with driven_worker(folder) as one_rank:
                    replica.compare(one_rank)
                found.append({"replicas": replicas, "dp_head": dp_head, "calls": calls})
    return found


def check_a_skipped_idle_forward(rank: int, folder: str) -> list[str]:
    """Replica 0 has a prompt twice, replica 1 nothing to do; it comes the first time and then not."""
    parallel_state.get_world_group().timeout_s = 3.0  # what the groups inside the world are built with
    found = []
    with driven_worker(folder, rank=rank, **_layout(2)) as driver:
        replica = Replica(driver, rank)
        # Loading takes them differently long.
        parallel_state.get_world_group().barrier(timeout_s=HANG_GUARD_S)
        for name, skip in (("a", False), ("c", True)):
            part: Part = {name: 7} if rank == 0 else {}
            if rank == 1 and skip:
                found.append("skipped")
                continue
            try:
                replica.forward(part, DpStep([7, 0], [1 if name == "a" else 0, 0], is_extend=True), {})
                found.append("done")
            except CollectiveError as error:
                found.append(str(error))
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """An untied and a tied model; the vocabulary of the second divides by no width."""
    base = tmp_path_factory.mktemp("models")
    shape = {"num_layers": NUM_LAYERS, "seed": 5}
    return [
        str(write_tiny_model(base / "llama", **shape)),
        str(
            write_tiny_model(
                base / "qwen3", architecture="Qwen3ForCausalLM", tie=True, vocab_size=515, **shape
            )
        ),
    ]


def assert_calls(answers: list[list[dict[str, Any]]]) -> None:
    """All ranks call equally often; a head of their own adds nothing to the layers' two calls each."""
    assert all(answer == answers[0] for answer in answers)
    layers = 2 * NUM_LAYERS * (STEPS + 1)
    for found in answers[0]:
        replicas, total = found["replicas"], sum(found["calls"].values())
        if found["dp_head"]:
            assert total == layers, found
            continue
        announced, head = Announced(SCRIPTS[replicas]), 0
        for at in range(STEPS):
            each = max(1, ROWS_AT_ONCE // replicas)
            head += -(-max(announced.step(at).num_logit_rows) // each)
        head += 3  # the poisoned step: three rows on replica 1, one at once
        assert total == layers + 2 * head, found


def test_two_replicas_of_one_rank_compute_what_one_rank_computes(folders: list[str]) -> None:
    assert_calls(run_ranks(check_forwards, world_size=2, folders=folders, layouts=[2]))


def test_four_ranks_as_two_and_as_four_replicas_compute_what_one_rank_computes(folders: list[str]) -> None:
    assert_calls(run_ranks(check_forwards, world_size=4, folders=folders, layouts=[2, 4]))


def test_a_replica_that_skips_its_idle_forward_is_missed(folders: list[str]) -> None:
    """A planted mistake: ranks that do not come equally often do not go on."""
    first, second = run_ranks(check_a_skipped_idle_forward, world_size=2, folder=folders[0])
    assert second == ["done", "skipped"]
    assert first[0] == "done"
    assert "over group 'tp' of world ranks [0, 1] failed on world rank 0" in first[1]
