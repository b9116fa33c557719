"""Owns which replica a request runs on: the tokenizer manager's channel, spread over several leaders.

Stands between the tokenizer manager and `ServerChannel`. Loads are counted from the requests that are sent
and from their ends, which come back. It must not look into answers beyond that, start processes or import
torch.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence

from sglang.srt.messages import io_struct
from sglang.srt.messages.channel import LeadersChannel


@dataclasses.dataclass(slots=True)
class _Placed:
    """Where one sequence runs, how many tokens it may have, and which prompt it is a sample of."""

    replica: int
    tokens: int
    parent: str | None


class ReplicaLoads:
    """Which replica each sequence runs on, and how much that is."""

    def __init__(self, replicas: int) -> None:
        #: Sequences under way, and the tokens that they have and may still get, by replica.
        self.requests = [0] * replicas
        self.tokens = [0] * replicas
        self._placed: dict[str, _Placed] = {}
        #: Prompts with several samples under way: replica, samples left.
        self._parents: dict[str, tuple[int, int]] = {}

    def replica_of(self, rid: str) -> int | None:
        """The replica that this sequence runs on, None where it has ended."""
        placed = self._placed.get(rid)
        return None if placed is None else placed.replica

    def replica_of_parent(self, parent: str) -> int | None:
        """The replica that the other samples of the same prompt run on."""
        return self._parents.get(parent, (None, 0))[0]

    def add(self, message: io_struct.TokenizedGenerateReqInput, replica: int) -> None:
        tokens = len(message.input_ids) + (message.sampling_params.max_new_tokens or 0)
        self._placed[message.rid] = _Placed(replica, tokens, message.parent_rid)
        self.requests[replica] += 1
        self.tokens[replica] += tokens
        if message.parent_rid is not None:
            left = self._parents.get(message.parent_rid, (replica, 0))[1]
            self._parents[message.parent_rid] = (replica, left + 1)

    def remove(self, rid: str) -> None:
        """The sequence has ended; one that is unknown changes nothing."""
        placed = self._placed.pop(rid, None)
        if placed is None:
            return
        self.requests[placed.replica] -= 1
        self.tokens[placed.replica] -= placed.tokens
        if placed.parent is not None:
            replica, left = self._parents.pop(placed.parent)
            if left > 1:
                self._parents[placed.parent] = (replica, left - 1)


#: Method of --load-balance-method -> what it compares; None: replicas take turns.
_MEASURES: dict[str, Callable[[ReplicaLoads], list[int]] | None] = {
    "auto": None,
    "round_robin": None,
    "total_requests": lambda loads: loads.requests,
    "total_tokens": lambda loads: loads.tokens,
}


class DataParallelController:
    """Sends each request to one replica and everything else to all.

    With attention DP it also says to replica 0 how much was sent. `send` may be called from any thread.
    """

    def __init__(
        self, channel: LeadersChannel, *, replicas: int, attention_dp: bool, method: str = "auto"
    ) -> None:
        if method not in _MEASURES:
            raise ValueError(
                f"--load-balance-method {method} is not served; choose one of {', '.join(_MEASURES)}"
            )
        self.loads = ReplicaLoads(replicas)
        self._channel = channel
        self._replicas = replicas
        self._attention_dp = attention_dp
        self._measure = _MEASURES[method]
        #: Messages sent to each replica; `DispatchedReq` itself is not one of them.
        self._sent = [0] * replicas
        self._last = replicas - 1
        self._lock = threading.Lock()

    def send(self, message: io_struct.Message) -> None:
        """A request goes to one replica, an abort of one sequence to where it runs, the rest to all."""
        with self._lock:
            match message:
                case io_struct.TokenizedGenerateReqInput():
                    self._send_request(message)
                case io_struct.AbortReq(exact=True) if (
                    holder := self.loads.replica_of(message.rid)
                ) is not None:
                    self._dispatch(message, [holder])
                case _:
                    self._dispatch(message, range(self._replicas))

    async def recv(self) -> io_struct.Message:
        """The next message of any replica."""
        message = await self._channel.recv()
        if isinstance(message, io_struct.BatchTokenIDOutput):
            with self._lock:
                for output in message.outputs:
                    if output.finish_reason is not None:
                        self.loads.remove(output.rid)
        return message

    def close(self) -> None:
        self._channel.close()

    def _send_request(self, message: io_struct.TokenizedGenerateReqInput) -> None:
        replica = message.routed_dp_rank
        chosen = False
        if replica is None and message.parent_rid is not None:
            # Where the other samples run, the prompt is in the prefix cache.
            replica = self.loads.replica_of_parent(message.parent_rid)
        if replica is None:
            replica, chosen = self._choose(), True
        elif not 0 <= replica < self._replicas:
            raise ValueError(
                f"routed_dp_rank: must satisfy 0 <= routed_dp_rank < {self._replicas}, got {replica}"
            )
        self._dispatch(message, [replica])
        # Only now: what could not be sent is no load and leaves the next replica the next.
        self.loads.add(message, replica)
        if chosen:
            self._last = replica

    def _choose(self) -> int:
        """The least loaded, or simply the next; among equals the first one after the last choice."""
        order = [(self._last + 1 + step) % self._replicas for step in range(self._replicas)]
        if self._measure is None:
            return order[0]
        loads = self._measure(self.loads)
        return min(order, key=lambda replica: loads[replica])

    def _dispatch(self, message: io_struct.Message, replicas: Sequence[int]) -> None:
        for replica in replicas:
            self._channel.send(message, replica)
            self._sent[replica] += 1
        if self._attention_dp and any(replicas):
            # Replica 0 waits on its socket for all; it must know what is on its way to the others.
            self._channel.send(io_struct.DispatchedReq(counts=list(self._sent)), 0)
