"""Owns a rank process without a model: the same pipe, socket and messages, tokens by counting.

Started by `RankProcesses` in place of the real entry, so that a server starts in a fraction of a second.
Ranks of one world know nothing of each other: a leader works alone, a peer only beats. Three prompts make a
leader fail on purpose. It must not import torch.
"""

from __future__ import annotations

import pathlib
import sys
import threading
from typing import Any

from sglang.srt.arg_groups.transport import unpack_configuration
from sglang.srt.messages import io_struct
from sglang.srt.processes.heartbeat import Heartbeat
from sglang.srt.processes.model_files import published_model_config
from sglang.srt.processes.rank_config import RankConfig
from sglang.srt.processes.rank_life import RankLife
from sglang.srt.processes.wire import RankChannel
from sglang.srt.runtime_context import SpawnRanks, get_context, get_parallel, get_schedule, publish
from sglang.srt.runtime_context.placement import placement_of
from sglang.srt.server_args import ServerArgs
from sglang.test.waiting import holds_within

#: This module's name, for `rank_module=`.
FAKE_RANK = "sglang.test.fakes.fake_rank"
#: The loop raises, and the rank reports it.
RAISE_PROMPT = [7, 7, 7]
#: The rank exits with code 3 and says nothing.
EXIT_PROMPT = [8, 8, 8]
#: The loop never takes another step.
HANG_PROMPT = [9, 9, 9]
STEP_S = 0.01
#: Enough for answers whose end no test waits for.
POOL_TOKENS = 1 << 20
#: A leader leaves this file in the socket folder when it is told to leave; its peers look for it.
_LEFT = "fake-ranks-leave"


class FakeLoop:
    """Every step gives each request its next token: the last one plus one, from 10 up to the vocabulary."""

    def __init__(
        self, channel: RankChannel, heartbeat: Heartbeat, vocab_size: int, *, folder: str, dp_rank: int
    ) -> None:
        self._channel = channel
        self._folder = pathlib.Path(folder)
        self._dp_rank = dp_rank
        #: As the scheduler counts them.
        self._received = 0
        self._finished = 0
        #: Counts of the last DispatchedReq, None before the first.
        self._dispatched: list[int] | None = None
        self._heartbeat = heartbeat
        self._vocab_size = vocab_size
        self._running: dict[str, tuple[io_struct.TokenizedGenerateReqInput, list[int]]] = {}
        self._stopping = False

    def run(self) -> None:
        while not self._stopping:
            self._heartbeat.beat()
            if not self._running:
                self._channel.wait(1.0)
            for message in self._channel.recv_all():
                self._handle(message)
            outputs = [self._advance(*entry) for entry in list(self._running.values())]
            if outputs:
                self._send(outputs)
                self._channel.wait(STEP_S)

    def _handle(self, message: io_struct.Message) -> None:
        match message:
            case io_struct.TokenizedGenerateReqInput():
                self._received += 1
                self._fail_on_purpose(message.input_ids)
                self._running[message.rid] = (message, [])
            case io_struct.AbortReq():
                for rid in [r for r in self._running if self._matches(message, r)]:
                    request, ids = self._running[rid]
                    aborted = io_struct.FinishReason(type="abort", message="Aborted")
                    self._send([self._output(request, ids, [], aborted)])
            case io_struct.FlushCacheReqInput():
                self._channel.send(
                    io_struct.FlushCacheReqOutput(
                        call_id=message.call_id,
                        success=not self._running,
                        message="requests are running" if self._running else "",
                        dp_rank=self._dp_rank,
                    )
                )
            case io_struct.GetInternalStateReq():
                self._channel.send(
                    io_struct.GetInternalStateReqOutput(
                        call_id=message.call_id, state=self._state(), dp_rank=self._dp_rank
                    )
                )
            case io_struct.GetPlacementReq():
                seat = {"world_rank": get_parallel().launch_world_rank, "dp_rank": self._dp_rank}
                self._channel.send(
                    io_struct.GetPlacementReqOutput(
                        call_id=message.call_id,
                        ranks=[{**seat, "names": placement_of(get_context())}],
                        overrides=[],
                        dp_rank=self._dp_rank,
                    )
                )
            case io_struct.DispatchedReq():
                self._dispatched = message.counts
            case io_struct.ShutdownReq():
                (self._folder / _LEFT).touch()
                self._stopping = True

    def _state(self) -> dict[str, Any]:
        return {
            "dp_rank": self._dp_rank,
            "num_running_reqs": len(self._running),
            "num_queue_reqs": 0,
            "num_requests_received": self._received,
            "num_requests_finished": self._finished,
            "dispatched": self._dispatched,
        }

    @staticmethod
    def _matches(message: io_struct.AbortReq, rid: str) -> bool:
        if message.abort_all:
            return True
        return rid == message.rid if message.exact else bool(message.rid) and rid.startswith(message.rid)

    def _fail_on_purpose(self, prompt: list[int]) -> None:
        if prompt == RAISE_PROMPT:
            raise RuntimeError("the fake loop was told to fail")
        if prompt == EXIT_PROMPT:
            sys.exit(3)
        if prompt == HANG_PROMPT:
            self._heartbeat.forward_begin()
            threading.Event().wait()

    def _advance(self, request: io_struct.TokenizedGenerateReqInput, ids: list[int]) -> io_struct.TokenOutput:
        limit = request.sampling_params.max_new_tokens or 0
        last = (ids or request.input_ids)[-1]
        new = [10 + (last + 1 - 10) % (self._vocab_size - 10)] if limit > 0 else []
        ids.extend(new)
        reason = None
        if len(ids) >= limit:
            reason = io_struct.FinishReason(type="length", length=len(ids))
        elif ids[-1] in request.sampling_params.stop_token_ids:
            reason = io_struct.FinishReason(type="stop", matched=ids[-1])
        return self._output(request, ids, new, reason)

    def _output(
        self,
        request: io_struct.TokenizedGenerateReqInput,
        ids: list[int],
        new: list[int],
        reason: io_struct.FinishReason | None,
    ) -> io_struct.TokenOutput:
        if reason is not None:
            del self._running[request.rid]
            self._finished += 1
        return io_struct.TokenOutput(
            rid=request.rid,
            new_ids=new,
            finish_reason=reason,
            prompt_tokens=len(request.input_ids),
            completion_tokens=len(ids),
            cached_tokens=0,
            num_retractions=0,
        )

    def _send(self, outputs: list[io_struct.TokenOutput]) -> None:
        self._channel.send(io_struct.BatchTokenIDOutput(outputs=outputs, dp_rank=self._dp_rank))


def main() -> int:
    life, config = RankLife.begin(sys.argv)
    record = unpack_configuration(config.configuration, ServerArgs)
    publish(
        record,
        role="scheduler",
        ranks=SpawnRanks(world_rank=config.world_rank, dp_rank=config.dp_rank, gpu_id=config.gpu_id),
    )
    channel = None
    if config.listen is not None and config.server is not None:
        channel = RankChannel(listen=config.listen, server=config.server)
    try:
        model_config = published_model_config()
        pool = get_schedule().max_total_tokens or POOL_TOKENS
        info = {
            "max_total_num_tokens": pool,
            "context_len": model_config.context_len,
            "vocab_size": model_config.vocab_size,
            "startup_time": 0.0,
        }
        heartbeat = Heartbeat(config.heartbeat)
        life.send(io_struct.RankReady(world_rank=config.world_rank, info=info))
        if channel is None:
            beat_until_told_to_leave(config, heartbeat)
        else:
            dp_rank = get_parallel().replica_rank
            vocab_size = model_config.vocab_size
            FakeLoop(channel, heartbeat, vocab_size, folder=config.folder, dp_rank=dp_rank).run()
    except Exception as error:  # noqa: BLE001 - reported to the parent, which logs it
        life.send_failure(config.world_rank, error)
        return 1
    if channel is not None:
        channel.close()
    return 0


def beat_until_told_to_leave(config: RankConfig, heartbeat: Heartbeat) -> None:
    """The whole life of a peer; any leader that is told to leave ends it."""
    while not holds_within(0.05, pathlib.Path(config.folder, _LEFT).exists):
        heartbeat.beat()


if __name__ == "__main__":
    sys.exit(main())
