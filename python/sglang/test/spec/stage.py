"""Owns a real scheduler over a tiny model in this process, stepped by a test, with or without a draft.

Read by tests of speculative decoding on one rank. Invariants are checked after every step. It must not know
what is compared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from sglang.srt.arg_groups.hooks.pipeline import resolve
from sglang.srt.batch.forward_batch import ForwardBatch, ForwardMode
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.stop_matcher import StopTokenizer
from sglang.srt.messages.io_struct import Message
from sglang.srt.processes.model_files import published_model_config
from sglang.srt.runtime_context import SpawnRanks, publish, reset_context
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.algorithms.served import DRAFTERS
from sglang.srt.speculative.spec_registry import make_worker
from sglang.srt.speculative.spec_worker import SpecWorker
from sglang.test.fakes.fake_channel import Answer, FakeChannel, answers
from sglang.test.fakes.scheduler_driver import checked_step


class Stage:
    """One scheduler and what was sent to it.

    `verifies` is noted where the target runs: requests and nodes of each verify forward.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.verifies: list[tuple[int, int]] = []
        if isinstance(scheduler.worker, SpecWorker):
            self._count_verifies(scheduler.worker)

    def send(self, *messages: Message) -> None:
        self._channel.inbox.extend(messages)

    def step(self, count: int = 1) -> None:
        """That many steps, each of which must leave something to do."""
        for _ in range(count):
            assert checked_step(self.scheduler), "everything has ended already"

    def finish(self, *messages: Message, max_steps: int = 5000) -> dict[str, Answer]:
        """Send these, step until nothing is left, and give all answers so far."""
        self.send(*messages)
        for _ in range(max_steps):
            if not checked_step(self.scheduler) and not self._channel.inbox:
                return answers(self._channel)
        raise AssertionError(f"not done after {max_steps} steps")

    @property
    def num_rounds(self) -> int:
        """Verifies of one request each."""
        return sum(requests for requests, _ in self.verifies)

    @property
    def num_proposed(self) -> int:
        """Nodes that were verified, without their roots."""
        return sum(requests * (nodes - 1) for requests, nodes in self.verifies)

    def check_empty(self) -> None:
        """Nothing is held for a request, and without its cache the whole pool is free."""
        kv = self.scheduler.kv
        self.scheduler.invariants.check_idle()
        self.scheduler.invariants.check_slots()
        assert kv.used() == 0
        kv.flush()
        assert kv.allocator.available_size() == kv.size

    @property
    def _channel(self) -> FakeChannel:
        channel = self.scheduler.channel
        assert isinstance(channel, FakeChannel)
        return channel

    def _count_verifies(self, worker: SpecWorker) -> None:
        runner = worker.target.model_runner
        forward = runner.forward

        def counted(batch: ForwardBatch) -> LogitsProcessorOutput:
            if batch.forward_mode is ForwardMode.TARGET_VERIFY:
                assert batch.spec is not None
                self.verifies.append((batch.batch_size, batch.spec.width))
            return forward(batch)

        runner.forward = counted  # type: ignore[method-assign]


@contextlib.contextmanager
def tiny_stage(*, tokenizer: StopTokenizer | None = None, **server_args_fields: Any) -> Iterator[Stage]:
    """A scheduler with these fields for the length of a block; float32, one rank, one thread."""
    record = ServerArgs(dtype="float32", **server_args_fields)
    resolve(record)
    try:
        publish(record, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None))
        parallel_state.init_distributed_environment()
        parallel_state.initialize_model_parallel()
        worker = make_worker(published_model_config(), DRAFTERS)
        torch.set_num_threads(1)  # a tiny model gains nothing from threads, and test machines are busy
        yield Stage(Scheduler(worker, tokenizer=tokenizer, channel=FakeChannel()))
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
        reset_context()
