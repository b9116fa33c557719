"""Owns a worker without a model: its next token is a function of the sequence as read back from the slots.

Read by scheduler tests. Any mistake with slots, prefixes or chunks shows as a wrong token. It must not share
code with what it tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from sglang.srt.batch.forward_batch import DpStep, ForwardBatch, ForwardMode, GenerationBatchResult
from sglang.srt.batch.logprobs import LogprobRequest
from sglang.srt.batch.sampling_state import SamplingState
from sglang.srt.mem_cache.allocator import make_slot_allocator
from sglang.srt.mem_cache.pools.memory_pool import ReqToTokenPool
from sglang.srt.messages.io_struct import TokenLogprob
from sglang.srt.model_executor.result_broadcast import share_result
from sglang.srt.runtime_context import get_parallel

VOCAB_SIZE = 1000
EOS_ID = 999
SPECIAL_ID = 998
_MIX = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


class FakeTokenizer:
    """Ids below 256 are bytes, below 512 a space and the byte `id - 256`; the others read `<id>`."""

    vocab_size = VOCAB_SIZE
    eos_token_ids = (EOS_ID,)
    all_special_ids = (SPECIAL_ID, EOS_ID)

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return b" " + bytes([token_id - 256]) if token_id < 512 else f"<{token_id}>".encode()

    def context_of(self, ids: Sequence[int], skip_special_tokens: bool = True) -> list[int]:
        return []

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        shown = (i for i in ids if not (skip_special_tokens and i in self.all_special_ids))
        return b"".join(map(self.token_bytes, shown)).decode(errors="replace")


def prefix_states(ids: np.ndarray) -> np.ndarray:
    """One number for each prefix `ids[: i + 1]`, which depends on every id and its place."""
    places = np.arange(1, len(ids) + 1, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    with np.errstate(over="ignore"):
        return np.cumsum((ids.astype(np.uint64) + np.uint64(7)) * places * _MIX, dtype=np.uint64)


def _mixed(state: int, salt: int) -> int:
    value = (state ^ (salt * 0xBF58476D1CE4E5B9)) & _MASK
    value = ((value ^ (value >> 31)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 29)


def fake_next_token(state: int) -> int:
    """The token after a prefix: any id but the special ones."""
    return _mixed(state, 1) % SPECIAL_ID


def fake_logprob(state: int, token_id: int) -> float:
    """The log-probability of a token after a prefix: between -20 and 0, in steps that floats hold exactly."""
    return -(_mixed(state, token_id + 2) % 5120) / 256


def fake_token_logprob(state: int, token_id: int, ask: LogprobRequest) -> TokenLogprob:
    """One entry; the best alternatives are simply the lowest ids."""
    top = [(fake_logprob(state, i), i) for i in range(ask.top_num)]
    return TokenLogprob(
        logprob=fake_logprob(state, token_id),
        token_id=token_id,
        top=sorted(top, reverse=True) if ask.top_num else None,
        chosen=None if ask.token_ids is None else [(fake_logprob(state, i), i) for i in ask.token_ids],
    )


def expected_output(prompt: Sequence[int], count: int) -> list[int]:
    """What a request alone, without any cache, draws."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(fake_next_token(int(prefix_states(np.array(ids))[-1])))
    return ids[len(prompt) :]


class FakeWorker:
    """The surface of `TpModelWorker`. A test may set `next_token(ids)` and `failure(ids)`.

    With `slots_per_step` above 1 it is one with a draft: decode steps are verify rounds of as many nodes, and
    `num_correct(ids)` says how many drafts of a request are right in the round that begins with these ids.
    The others are written into their slots all the same.

    `forwards` counts forwards by mode, `rows` new tokens by mode, `batch_sizes` lists every batch, `widths`
    the nodes of every verify round and `steps` what the replicas agreed on for each forward. Over several
    ranks only the leader's choice counts, and a forward of a data-parallel step meets the other ranks of the
    tensor group, as a real one does.
    """

    def __init__(
        self,
        *,
        pool_tokens: int = 4096,
        page_size: int = 1,
        max_requests: int = 64,
        context_len: int = 2048,
        slots_per_step: int = 1,
        num_recent_ids: int = 0,
    ) -> None:
        num_pages = pool_tokens // page_size
        self.page_size = page_size
        self.vocab_size = VOCAB_SIZE
        self.context_len = context_len
        self.slots_per_step = slots_per_step
        self.num_recent_ids = num_recent_ids
        self.max_total_num_tokens = num_pages * page_size
        self.model_config: Any = SimpleNamespace(eos_token_ids=(EOS_ID,), vocab_size=VOCAB_SIZE)
        self.req_to_token_pool = ReqToTokenPool(max_requests, context_len + slots_per_step)
        self.token_to_kv_pool_allocator = make_slot_allocator(num_pages, page_size)
        slots = (num_pages + 1) * page_size
        self._ids_in_slots: np.ndarray = np.full(slots, -1, dtype=np.int64)
        self._positions_in_slots: np.ndarray = np.full(slots, -1, dtype=np.int64)
        self.next_token: Callable[[list[int]], int] | None = None
        self.failure: Callable[[list[int]], str | None] | None = None
        self.num_correct: Callable[[list[int]], int] = lambda ids: ids[-1] % slots_per_step
        self.forwards = {"extend": 0, "decode": 0}
        self.rows = {"extend": 0, "decode": 0}
        self.batch_sizes: list[int] = []
        self.widths: list[int] = []
        self.steps: list[DpStep | None] = []

    def forward_batch_generation(self, batch: ForwardBatch) -> GenerationBatchResult:
        mode, step = batch.forward_mode.value, batch.dp_step
        self.forwards[mode] = self.forwards.get(mode, 0) + 1
        self.rows[mode] = self.rows.get(mode, 0) + batch.num_tokens
        self.batch_sizes.append(batch.batch_size)
        self.steps.append(step)
        width = min(self.slots_per_step, batch.slots_per_request if step is None else step.slots_per_request)
        if step is not None:
            is_mixed = step.is_extend and batch.forward_mode is ForwardMode.DECODE
            assert not (is_mixed and self.slots_per_step > 1), "prompts and verify rounds in one step"
            self._meet_the_others(batch, step, width)
        if batch.forward_mode is ForwardMode.IDLE:
            assert step is not None, "an idle forward has no place outside a data-parallel step"
            return GenerationBatchResult([], [])
        self._check_shapes(batch)
        slots = batch.out_cache_loc.numpy()
        self._ids_in_slots[slots] = batch.input_ids.numpy()
        self._positions_in_slots[slots] = batch.positions.numpy()
        result = GenerationBatchResult(next_token_ids=[], failures=[], output_logprobs=[], input_logprobs=[])
        is_round = self.slots_per_step > 1 and batch.forward_mode is ForwardMode.DECODE
        if is_round:
            self.widths.append(width)
            result.num_correct_drafts, result.num_proposed_drafts = [], width - 1
        for place in range(batch.batch_size):
            self._row(batch, place, width if is_round else 1, result)
        if batch.logprob_requests is None:
            result.output_logprobs = result.input_logprobs = None
        return share_result(batch, lambda: result)

    def _meet_the_others(self, batch: ForwardBatch, step: DpStep, width: int) -> None:
        """The collectives of a forward: of a verify round one more for each phase, with its own rows."""
        self._meet([batch.num_tokens, batch.num_logit_rows], step)
        if self.slots_per_step > 1 and not step.is_extend:
            for rows in (1, width):
                sizes = [rows * batch.batch_size] * 2
                self._meet(sizes, step.of_phase(rows=rows, logit_rows=rows))

    def _meet(self, mine: list[int], step: DpStep) -> None:
        parallel = get_parallel()
        everyone = parallel.tp_group.all_gather(torch.tensor([mine])).tolist()
        ranks_each = len(everyone) // parallel.attn_dp_size
        agreed = zip(step.num_tokens, step.num_logit_rows, strict=True)
        assert everyone == [list(sizes) for sizes in agreed for _ in range(ranks_each)]

    def _check_shapes(self, batch: ForwardBatch) -> None:
        assert batch.num_tokens == sum(batch.extend_lens) == len(batch.positions) == len(batch.out_cache_loc)
        assert batch.seq_lens.tolist() == batch.seq_lens_list
        assert len(batch.sampling_states) == len(batch.req_pool_indices) == batch.batch_size
        assert int(batch.out_cache_loc.min()) >= self.page_size, "the reserved page was handed out"
        assert len(set(batch.out_cache_loc.tolist())) == batch.num_tokens, "two tokens share a slot"

    def _row(self, batch: ForwardBatch, place: int, width: int, result: GenerationBatchResult) -> None:
        """The tokens of one request: one after its new tokens, and one after each draft that was right."""
        length = batch.seq_lens_list[place]
        slots = self._slots(batch, place, length + width - 1)
        ask = None if batch.logprob_requests is None else batch.logprob_requests[place]
        if batch.recent_ids is not None:
            assert batch.recent_ids[place] == self._read(slots[:length])[-self.num_recent_ids :].tolist()
        if width > 1:
            self._write_drafts(slots, length, batch.sampling_states[place])
        tokens: list[int] = []
        entries: list[TokenLogprob] = []
        failure = None
        while failure is None and len(tokens) < width:
            ids = self._read(slots[: length + len(tokens)])
            if tokens and ids[-1] != tokens[-1]:
                break  # the draft was wrong
            failure = None if self.failure is None else self.failure(ids.tolist())
            token = self._draw(ids, batch.sampling_states[place], len(tokens))
            if token is None or failure is not None:
                break
            tokens.append(token)
            if ask is not None:
                entries.append(fake_token_logprob(int(prefix_states(ids)[-1]), token, ask))
        result.next_token_ids.append(tokens)
        result.failures.append(failure)
        if result.num_correct_drafts is not None:
            result.num_correct_drafts.append(max(len(tokens) - 1, 0))
        assert result.output_logprobs is not None and result.input_logprobs is not None
        result.output_logprobs.append(entries)
        states = prefix_states(self._read(slots[:length]))
        result.input_logprobs.append(self._input_logprobs(batch, place, states, ask))

    def _slots(self, batch: ForwardBatch, place: int, count: int) -> np.ndarray:
        table = self.req_to_token_pool.req_to_token
        slots: np.ndarray = table[batch.req_pool_indices[place], :count].numpy()
        offsets = np.arange(count) % self.page_size
        assert (slots % self.page_size == offsets).all(), "a page is not filled in order"
        assert (slots >= self.page_size).all(), "a row lacks slots"
        return slots

    def _read(self, slots: np.ndarray) -> np.ndarray:
        positions = self._positions_in_slots[slots]
        assert (positions == np.arange(len(slots))).all(), "a slot holds a token of another position"
        ids: np.ndarray = self._ids_in_slots[slots]
        return ids

    def _write_drafts(self, slots: np.ndarray, length: int, row: SamplingState | None) -> None:
        """Behind the `length` tokens there: so many right ones as `num_correct` says, then wrong ones."""
        ids = self._read(slots[:length])
        num_correct = self.num_correct(ids.tolist())
        for place in range(length, len(slots)):
            token = self._draw(ids, row, place - length)
            assert token is not None
            is_right = place - length < num_correct
            ids = np.append(ids, token if is_right else (token + 1) % VOCAB_SIZE)
        self._ids_in_slots[slots[length:]] = ids[length:]
        self._positions_in_slots[slots[length:]] = np.arange(length, len(slots))

    def _draw(self, ids: np.ndarray, row: SamplingState | None, num_earlier: int) -> int | None:
        """The token after `ids`; `num_earlier` tokens were drawn in this step before it."""
        if row is None:
            return None
        state = int(prefix_states(ids)[-1])
        token = fake_next_token(state) if self.next_token is None else self.next_token(ids.tolist())
        while row.num_output + num_earlier < row.params.min_new_tokens and token in row.end_ids:
            token = (token + 1) % VOCAB_SIZE
        return token

    def _input_logprobs(
        self, batch: ForwardBatch, place: int, states: np.ndarray, ask: LogprobRequest | None
    ) -> list[TokenLogprob] | None:
        if ask is None or not ask.targets:
            return None
        first = batch.seq_lens_list[place] - batch.extend_lens[place] + ask.first_row
        assert ask.first_row + len(ask.targets) <= batch.extend_lens[place], "a target without a row"
        return [
            fake_token_logprob(int(states[first + i]), target, ask) for i, target in enumerate(ask.targets)
        ]


def expected_logprobs(ids: Sequence[int], start: int, ask: LogprobRequest) -> list[TokenLogprob]:
    """Entries of the tokens `ids[start:]`, each after its true prefix; None for the very first token."""
    states = prefix_states(np.array(ids))
    return [fake_token_logprob(int(states[i - 1]), ids[i], ask) for i in range(start, len(ids))]
