"""Owns one request's state on its way through the scheduler: ids, sampling, slots, logprobs, why it ended.

Read and written by the scheduler's parts and by the request side of the cache. It must not act: no
allocation, no messages, no decisions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sglang.srt.batch.logprobs import LogprobRequest
from sglang.srt.batch.sampling_state import SamplingState
from sglang.srt.messages.io_struct import FinishReason, SpecCounts, TokenizedGenerateReqInput, TokenLogprob

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import CacheNode

Ids = npt.NDArray[np.int64]


class Req:
    """One sequence.

    In the cache: row `req_pool_idx` of the request table lists `reserved_len` slots, of which the first
    `kv_len` hold tokens. The first `shared_len` belong to the prefix cache (`node` is locked), the others are
    the request's own. Between steps every token but the last one drawn is in the cache.
    """

    def __init__(
        self, message: TokenizedGenerateReqInput, sampling: SamplingState, max_new_tokens: int, arrival: int
    ) -> None:
        self.rid = message.rid
        self.extra_key = message.extra_key
        self.stream = message.stream
        self.arrival = arrival
        self.prompt_ids: Ids = np.array(message.input_ids, dtype=np.int64)
        self.output_ids: list[int] = []
        self.sampling = sampling
        self.max_new_tokens = max_new_tokens
        self.finish_reason: FinishReason | None = None
        self.special_stops = message.special_stops
        #: Prompt ids that are decoded before the output to find stop strings; None until they are needed.
        self.stop_context: list[int] | None = None

        # In the cache; a waiting request holds nothing.
        self.req_pool_idx: int | None = None
        self.kv_len = 0
        self.reserved_len = 0
        self.shared_len = 0
        self.node: CacheNode | None = None

        # Log-probabilities. `wants_input_logprobs` turns False once they are complete, so a resumed request
        # asks no second time.
        self.return_logprob = message.return_logprob
        self.logprob_start = message.logprob_start_len
        self.wants_input_logprobs = message.return_logprob and message.logprob_start_len >= 0
        self.input_logprobs: list[TokenLogprob] = []
        self.output_logprobs: list[TokenLogprob] = []
        #: What every decode step asks for; None without logprobs.
        self.logprob_request: LogprobRequest | None = None
        if message.return_logprob:
            self.logprob_request = LogprobRequest(
                top_num=message.top_logprobs_num, token_ids=message.token_ids_logprob
            )

        # For the queue and the stream.
        self.cached_tokens: int | None = None  # prompt tokens found in the prefix cache when it first started
        self.num_retractions = 0
        self.num_sent = 0
        self.spec: SpecCounts | None = None  # None without a draft
        self.deferred_for: str | None = None
        self.deferrals = 0
        self.passed_over_from = 0
        self.queued_at = 0.0
        self.started_at: float | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def seq_len(self) -> int:
        """Prompt and output together; once running, the last of them is not in the cache yet."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def remaining_new_tokens(self) -> int:
        return max(self.max_new_tokens - len(self.output_ids), 0)

    @property
    def draws_a_token(self) -> bool:
        """False for a request that only wants its prompt computed (`max_new_tokens` 0)."""
        return self.max_new_tokens > 0

    @property
    def reuse_limit(self) -> int:
        """How many leading tokens may come from the prefix cache.

        The last one must be computed, and so must those with prompt logprobs.
        """
        limit = self.seq_len - 1
        return min(limit, self.logprob_start) if self.wants_input_logprobs else limit

    def token_ids(self) -> Ids:
        """Prompt and output in one array."""
        if not self.output_ids:
            return self.prompt_ids
        return np.concatenate((self.prompt_ids, np.array(self.output_ids, dtype=np.int64)))

    def recent_ids(self, count: int) -> list[int]:
        """The last `count` tokens of prompt and output, the newest last; fewer where there are fewer."""
        output = self.output_ids[-count:]
        from_prompt = min(count - len(output), len(self.prompt_ids))
        return [*self.prompt_ids[len(self.prompt_ids) - from_prompt :].tolist(), *output]

    def prompt_targets(self, start: int, end: int) -> tuple[int, list[int]]:
        """Where the prompt logprobs begin that a forward over `start .. end - 1` can give, and of which ids.

        Token i predicts token i + 1, so they are those of the tokens after `max(start, logprob_start)`. The
        beginning is counted from `start`.
        """
        if not self.wants_input_logprobs:
            return 0, []
        first = max(start, self.logprob_start)
        last = min(end, len(self.prompt_ids) - 1)
        return first - start, self.prompt_ids[first + 1 : last + 1].tolist()
