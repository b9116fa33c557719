"""Owns random batches of a loaded tiny model, for runners that replay graphs: decode steps and verify rounds.

Read by tests of graph runners, which run each batch eagerly and over a graph. It must not share code with a
runner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from sglang.srt.batch.forward_batch import ForwardBatch, ForwardMode
from sglang.srt.batch.spec_input import DraftTree, SpecInput
from sglang.srt.model_executor.runner.decode_graph_runner import DecodeGraphRunner
from sglang.srt.model_executor.runner.static_batch import ForwardShape, GraphSizes
from sglang.srt.model_executor.runner_backend.base import GraphBackend
from sglang.test.fakes.graph_tape import TapeBackend, TapePool
from sglang.test.spoiled_slots import spoil
from sglang.test.worker_driver import DrivenSequence, WorkerDriver

SIZES = (1, 2, 4)


class GraphCases:
    """Sequences with prompts in the cache, and batches over some of them."""

    def __init__(self, driver: WorkerDriver, *, seed: int = 0) -> None:
        self.driver = driver
        self.runner = driver.target.model_runner
        self.draw = torch.Generator().manual_seed(seed)
        self.pool = TapePool()
        self.backends: list[TapeBackend] = []
        kv, page_size = driver.target.pools.kv, driver.worker.page_size
        for layer_id in range(kv.spec.num_layers):  # whatever lies there is read by nobody
            spoil(kv, layer_id, torch.arange(page_size, kv.size + page_size))

    def number(self, low: int, high: int) -> int:
        """A random number from `low` to `high`, both included."""
        return int(torch.randint(low, high + 1, (1,), generator=self.draw))

    def sequences(self, count: int) -> list[DrivenSequence]:
        """Random prompts of 3 to 40 tokens, in the cache."""
        sequences = []
        for _ in range(count):
            ids = torch.randint(3, 512, (self.number(3, 40),), generator=self.draw).tolist()
            sequences.append(self.driver.add(ids))
            self.driver.logits([(sequences[-1], len(ids))])
        return sequences

    def decode(self, sequences: Sequence[DrivenSequence]) -> ForwardBatch:
        """One random token more for each."""
        for sequence in sequences:
            sequence.ids.append(self.number(3, 511))
        return self.driver.batch([(sequence, 1) for sequence in sequences], decode=True)

    def verify(self, sequences: Sequence[DrivenSequence], width: int, *, trees: bool = False) -> ForwardBatch:
        """Random nodes for each, chains or trees; none of them stays."""
        for sequence in sequences:
            sequence.ids += [self.number(3, 511) for _ in range(width)]
        batch = self.driver.batch([(sequence, width) for sequence in sequences])
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.spec = SpecInput(width)
        for sequence in sequences:
            del sequence.ids[-width:]
            sequence.cached -= width
        if trees:
            parents = [[-1, *(self.number(0, i - 1) for i in range(1, width))] for _ in sequences]
            tree = DraftTree(batch.input_ids.view(-1, width), torch.tensor(parents))
            batch.spec.tail_mask = tree.ancestor_mask()
            batch.positions = (batch.positions.view(-1, width)[:, :1] + tree.depths()).view(-1)
        return batch

    def random_differences(
        self, shape: ForwardShape, runner: DecodeGraphRunner, rounds: int = 8
    ) -> Iterator[float]:
        """`difference` of batches of 1 to 4 of six sequences, in any order: sizes go up and down."""
        sequences = self.sequences(6)
        for _ in range(rounds):
            order = torch.randperm(6, generator=self.draw)[: self.number(1, 4)]
            batch = self.batch_of(shape, [sequences[i] for i in order])
            assert runner.can_run(batch)
            yield self.difference(runner, batch)

    def batch_of(self, shape: ForwardShape, sequences: Sequence[DrivenSequence]) -> ForwardBatch:
        """A batch of this shape; where it has room for trees, every other one on average has them."""
        if shape.mode is ForwardMode.DECODE:
            return self.decode(sequences)
        return self.verify(sequences, shape.width, trees=shape.tail > 0 and bool(self.number(0, 1)))

    def make_backend(self) -> TapeBackend:
        """A tape over the pool of this test."""
        self.backends.append(TapeBackend(self.pool))
        return self.backends[-1]

    def graph_runner(
        self,
        shape: ForwardShape,
        *,
        captures_hidden: bool = False,
        make_backend: Callable[[], GraphBackend] | None = None,
    ) -> DecodeGraphRunner:
        """A runner over the driven model, captured; on tapes unless something else is said."""
        pools = self.driver.target.pools
        runner = DecodeGraphRunner(
            self.runner.model,
            self.runner.attn_backend,
            shape,
            GraphSizes(SIZES, self.driver.target.context_len, pools.req_to_token.spare_row),
            make_backend=make_backend or self.make_backend,
            device=self.runner.device,
            captures_hidden=captures_hidden,
        )
        runner.graphs.capture()
        return runner

    @torch.inference_mode()
    def difference(self, runner: DecodeGraphRunner, batch: ForwardBatch) -> float:
        """How far logits, hidden rows and cache of a step over the graph are from those of an eager step.

        The new tokens' slots are spoilt in between, so the graph has to write them, and no others: slot 0,
        where padding goes, is not compared.
        """
        eager = self.runner.eager_runner.run(batch)
        expected = self._cache()
        kv = self.driver.target.pools.kv
        for layer_id in range(kv.spec.num_layers):
            spoil(kv, layer_id, batch.out_cache_loc)
        found = runner.run(batch)
        assert found.drawing == eager.drawing and found.failures == eager.failures
        assert found.input_logprobs == eager.input_logprobs
        pairs = [(found.logits, eager.logits), (found.hidden, eager.hidden)]
        pairs += [(now, was) for now, was in zip(self._cache(), expected, strict=True)]
        return max(_distance(now, was) for now, was in pairs)

    def _cache(self) -> list[torch.Tensor]:
        kv = self.driver.target.pools.kv
        slots = torch.arange(1, kv.size + 1)
        return [kv.read(layer_id, slots) for layer_id in range(kv.spec.num_layers)]


def _distance(found: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    """The largest difference; infinite where only one of both is a number."""
    if found is None or expected is None:
        assert found is expected
        return 0.0
    assert found.shape == expected.shape
    if not found.numel():
        return 0.0
    same = (found.isnan() & expected.isnan()) | (found == expected)  # infinities too
    worst = (found - expected).masked_fill(same, 0.0).abs().max()
    return float("inf") if bool(worst.isnan()) else float(worst)
