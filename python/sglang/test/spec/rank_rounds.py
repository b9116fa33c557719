"""Owns rounds of a driven worker in step with the other ranks: what replicas agree on, and what is proposed.

Read by multi-rank tests of drafts. A test says how many requests each replica has in a round; a replica
without any takes its idle part. It must not judge anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang.srt.batch.forward_batch import DpStep, ForwardBatch
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.spec_worker import SpecWorker
from sglang.test.worker_driver import DrivenSequence, WorkerDriver


class RankRounds:
    """The requests of this rank's replica and what its draft proposed for each, round after round.

    `prompts` lists those of every replica; without replicas all of them are this rank's, in that order.
    """

    def __init__(self, driver: WorkerDriver, prompts: Sequence[Sequence[list[int]]]) -> None:
        assert isinstance(driver.worker, SpecWorker)
        parallel = get_parallel()
        self._driver = driver
        self._replicas = parallel.attn_dp_size
        self._replica = parallel.attn_dp_rank if self._replicas > 1 else 0
        self._prompts = prompts if self._replicas > 1 else [[one for each in prompts for one in each]]
        self.seqs = self._prefill()
        #: For each request the trees proposed for it: their tokens, node by node.
        self.proposed: list[list[list[int]]] = [[] for _ in self.seqs]
        self._note_proposals(driver.worker)

    def run(self, counts: Sequence[int], *, is_narrow: bool = False) -> None:
        """One round of the first requests of each replica; of one rank all of them, or its largest count."""
        slots = 1 if is_narrow else self._driver.worker.slots_per_step
        step = self._agreed(list(counts), [1] * self._replicas, slots=slots)
        count = max(counts) if step is None else counts[self._replica]
        if count:
            self._driver.round(self.seqs[:count], is_narrow=is_narrow, dp_step=step)
            return
        assert step is not None
        self._driver.worker.forward_batch_generation(ForwardBatch.idle(step, torch.device("cpu")))

    def _prefill(self) -> list[DrivenSequence]:
        """The prompts one after another, computed by all replicas together."""
        seqs = []
        for number, prompt in enumerate(self._prompts[self._replica]):
            seq = self._driver.add(prompt)
            batch = self._driver.batch([(seq, len(prompt))])
            rows = [len(each[number]) for each in self._prompts]
            batch.dp_step = self._agreed([1] * self._replicas, rows, is_extend=True)
            result = self._driver.worker.forward_batch_generation(batch)
            seq.ids += result.next_token_ids[0]
            seq.sampling.append(seq.ids[-1])
            seqs.append(seq)
        return seqs

    def _agreed(
        self, counts: list[int], rows: Sequence[int], *, slots: int = 1, is_extend: bool = False
    ) -> DpStep | None:
        """The step of replicas with so many requests, each of so many rows; None where there is one."""
        if self._replicas == 1:
            return None
        tokens = [count * each for count, each in zip(counts, rows, strict=True)]
        return DpStep(tokens, counts, is_extend=is_extend, num_requests=counts, slots_per_request=slots)

    def _note_proposals(self, worker: SpecWorker) -> None:
        drafter, propose = worker.drafter, worker.drafter.propose
        number_of = {seq.req_pool_idx: number for number, seq in enumerate(self.seqs)}

        def noted(round: Any, num_nodes: int) -> Any:
            proposal = propose(round, num_nodes)
            for row, tokens in zip(
                round.req_pool_indices.tolist(), proposal.tree.token_ids.tolist(), strict=True
            ):
                self.proposed[number_of[row]].append(tokens)
            return proposal

        drafter.propose = noted  # type: ignore[method-assign]
