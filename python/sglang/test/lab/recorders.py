"""Owns what a rank of the layout lab measures from outside of its worker: forwards, logits, accepted tokens.

Used by `rank`, which wraps the runners and the acceptance of a worker before the first phase. It must not
change what is computed, nor know what the right answer is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from sglang.kernels.compiled import compiled_kernels
from sglang.srt.batch.forward_batch import ForwardBatch, ForwardMode
from sglang.srt.batch.sampling_state import SamplingState
from sglang.srt.layers.attention.kv_block_layout import KVBlockLayout
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.pools.memory_pool import PagedKVPool
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner.captured_graphs import CapturedGraphs
from sglang.srt.model_executor.runner_backend.base import Outputs
from sglang.srt.runtime_context import get_forward, get_parallel
from sglang.srt.speculative.accept import Accepted
from sglang.srt.speculative.algorithms import eagle, standalone
from sglang.srt.speculative.base_spec_worker import Proposal
from sglang.srt.speculative.spec_worker import SpecWorker
from sglang.test.lab.messages import PLACEMENT_NAMES, ModelReport

#: What drafters call to enter their scopes, as they import it.
_SCOPE, _PIPELINE = "draft_tp_context", "draft_pp_context"


class ForwardRecorder:
    """Wraps the forward of one runner and counts what it computes.

    `spans_replicas` is False for a draft that owns its attention.
    """

    def __init__(self, runner: ModelRunner[Any], kv: PagedKVPool, *, spans_replicas: bool) -> None:
        self._runner = runner
        self._kv = kv
        self._forward = runner.forward
        self._num_replays = self._idle_replays = 0
        for graph_runner in runner.graph_runners:
            if graph_runner.graphs is not None:
                self._count_replays(graph_runner.graphs)
        self._spans_replicas = spans_replicas
        self._forwards: Counter[str] = Counter()
        self._paddings: Counter[str] = Counter()
        self._head_calls = 0
        built = runner.placement
        self._placements = {"construction": [getattr(built, field) for field in PLACEMENT_NAMES]}
        runner.forward = self.forward  # type: ignore[method-assign]

    def forward(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        name = forward_name(batch)
        self._note_placement(name)
        before = self._num_replays
        output = self._forward(batch)
        is_replayed = self._num_replays > before
        self._forwards[name] += 1
        if batch.dp_step is not None and self._spans_replicas:
            # Every replica has the rows of the captured size.
            is_padded = is_replayed or get_forward().dp_max_padding
            self._paddings["max_len" if is_padded else "sum_len"] += 1
        # A recorded step scores the rows of every replica once, also of one that is idle.
        heads = 1 if is_replayed else head_calls(batch, spans_replicas=self._spans_replicas)
        self._head_calls += heads
        self._idle_replays += is_replayed and batch.forward_mode is ForwardMode.IDLE
        return output

    def _count_replays(self, graphs: CapturedGraphs) -> None:
        replay = graphs.replay

        def counted(size: int) -> Outputs:
            self._num_replays += 1
            return replay(size)

        graphs.replay = counted  # type: ignore[method-assign]

    def report(self) -> ModelReport:
        return ModelReport(
            num_replays=self._num_replays,
            num_idle_replays=self._idle_replays,
            parameter_bytes=parameter_bytes(self._runner.model),
            kv_bytes_per_token=kv_bytes_per_token(self._kv),
            forwards=dict(self._forwards),
            paddings=dict(self._paddings),
            head_calls=self._head_calls,
            placements=self._placements,
        )

    def _note_placement(self, name: str) -> None:
        found = [_read(field) for field in PLACEMENT_NAMES]
        if self._placements.setdefault(name, found) != found:
            raise AssertionError(
                f"a forward {name!r} read {found} of {PLACEMENT_NAMES}, and another one before it read "
                f"{self._placements[name]}"
            )


def _read(field: str) -> int:
    """One name of the placement; without a stamp nobody says which replica a rank is where there is one."""
    parallel = get_parallel()
    try:
        value: int = getattr(parallel, field)
    except RuntimeError:
        if parallel.attn_dp_size > 1:
            raise
        return 0
    return value


def forward_name(batch: ForwardBatch) -> str:
    """The mode of a forward and its rows of each request, as `ModelReport` counts them."""
    mode, step = batch.forward_mode, batch.dp_step
    if mode is ForwardMode.EXTEND:
        return mode.value
    if mode is not ForwardMode.IDLE:
        return f"{mode.value} x{batch.num_tokens // batch.batch_size}"
    assert step is not None  # a replica is idle beside others
    return "idle extend" if step.is_extend else f"idle x{sum(step.num_tokens) // sum(step.num_requests)}"


def head_calls(batch: ForwardBatch, *, spans_replicas: bool) -> int:
    """How often the head runs for so few rows.

    A head shared by all replicas runs once, the head of one replica once for the rows to draw from (in a
    round, for all that are scored) and once for the rows of prompts.
    """
    if batch.dp_step is not None and spans_replicas and not get_parallel().enable_dp_lm_head:
        return int(sum(batch.dp_step.num_logit_rows) > 0)
    if batch.spec is not None:
        return int(batch.num_logit_rows > 0)
    drawing = sum(row is not None for row in batch.sampling_states)
    return int(drawing > 0) + int(batch.num_logit_rows > drawing)


class DrawRecorder:
    """Records the logits of each token that is drawn, in plain forwards and on the paths of rounds.

    Only the leader of a group draws.
    """

    def __init__(self, runner: ModelRunner[Any], vocab_size: int, *, is_leader: bool) -> None:
        self._forward = runner.forward
        self._is_leader = is_leader
        self.vocab_size = vocab_size
        self.unfinished_prompts = 0
        self._draws: dict[int, list[bytes]] = {}
        #: Seed -> (nodes, tokens) of each round.
        self.rounds: dict[int, list[tuple[int, int]]] = {}
        runner.forward = self.forward  # type: ignore[method-assign]

    def watch_rounds(self, worker: SpecWorker) -> None:
        """See what the worker accepts."""
        accept = worker._accept

        def watched(
            proposal: Proposal, logits: torch.Tensor, states: Sequence[SamplingState]
        ) -> list[Accepted]:
            accepted = accept(proposal, logits, states)
            if not self._is_leader:  # it should not have been asked
                return accepted
            num_nodes = proposal.tree.num_nodes
            for b, (one, state) in enumerate(zip(accepted, states, strict=True)):
                for j, node in enumerate(one.path):
                    self._record(state.seed, state.num_output + j, logits[b * num_nodes + node])
                self.rounds.setdefault(state.seed, []).append((num_nodes, len(one.token_ids)))
            return accepted

        worker._accept = watched

    def forward(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        output = self._forward(batch)
        if batch.forward_mode is ForwardMode.EXTEND and None in batch.sampling_states:
            self.unfinished_prompts += 1
        for at, b in enumerate(output.drawing if self._is_leader else ()):
            state = batch.sampling_states[b]
            assert state is not None
            self._record(state.seed, state.num_output, output.logits[at])
        return output

    def draws(self) -> dict[int, bytes]:
        return {seed: b"".join(rows) for seed, rows in self._draws.items()}

    def _record(self, seed: int, place: int, logits: torch.Tensor) -> None:
        drawn = self._draws.setdefault(seed, [])
        if place != len(drawn):
            raise AssertionError(
                f"the request with seed {seed} draws token {place}, and {len(drawn)} were drawn"
            )
        if tuple(logits.shape) != (self.vocab_size,) or logits.dtype != torch.float32:
            raise AssertionError(f"logits of {tuple(logits.shape)}, {logits.dtype}; {self.vocab_size} wanted")
        drawn.append(logits.numpy().tobytes())  # a copy: the sampler writes into its logits


@contextmanager
def counted_scopes(entries: Counter[str]) -> Iterator[None]:
    """Count the entries of drafters into their scopes, for a block."""
    with ExitStack() as stack:
        for module in (eagle, standalone):
            stack.enter_context(mock.patch.object(module, _SCOPE, _counted(module, entries)))
            stack.enter_context(mock.patch.object(module, _PIPELINE, _counted_pipeline(module, entries)))
        yield


def _counted(module: Any, entries: Counter[str]) -> Callable[..., AbstractContextManager[None]]:
    enter = getattr(module, _SCOPE)

    def counted(owns_attention: bool) -> AbstractContextManager[None]:
        entries["owning" if owns_attention else "following"] += 1
        scope: AbstractContextManager[None] = enter(owns_attention=owns_attention)
        return scope

    return counted


def _counted_pipeline(module: Any, entries: Counter[str]) -> Callable[[], AbstractContextManager[None]]:
    enter = getattr(module, _PIPELINE)

    def counted() -> AbstractContextManager[None]:
        entries["pipeline"] += 1
        scope: AbstractContextManager[None] = enter()
        return scope

    return counted


def parameter_bytes(model: torch.nn.Module) -> int:
    """Bytes of the weights that this rank holds, each unpacked from the form in which it is stored.

    What a layer keeps besides (a second form of the same numbers, rotary tables) is not counted, and a head
    that shares the table of the embedding counts nothing.
    """
    total = sum(parameter.nbytes for parameter in model.parameters())
    for module in model.modules():
        weight, stored = module._parameters.get("weight"), getattr(module, "stored", None)
        if weight is not None and weight.numel() == 0 and stored is not None:  # it was packed
            total += stored.unpack().nbytes
    return total


def kv_bytes_per_token(pool: PagedKVPool) -> int:
    """Bytes of a pool by its number of slots: the reserved page included, and what fills the last block."""
    slots, kernels = pool.size + pool.page_size, compiled_kernels()
    if kernels is not None and isinstance(pool._layout, KVBlockLayout):
        slots = -(-slots // kernels.attention.KV_BLOCK_SLOTS) * kernels.attention.KV_BLOCK_SLOTS
    layers = map(pool.layer, range(pool.spec.num_layers))
    return sum(layer.nbytes for layer in layers if isinstance(layer, torch.Tensor)) // slots
