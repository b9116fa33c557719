"""Owns what a request must satisfy on this server before it is sent: vocabulary, lengths, replicas.

Used by `RequestPreparer`. Every refusal names the field, the rule and both numbers. It must not send, keep
state or repair silently.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping

import msgspec

from sglang.srt.environ import envs
from sglang.srt.managers.tokenizer_components.splitting import SinglePrompt
from sglang.srt.messages.errors import RequestRejected, refused
from sglang.srt.messages.request_fields import check_vocabulary
from sglang.srt.messages.requests import TokenizedGenerateReqInput
from sglang.srt.messages.sampling_fields import check_sampled_ids


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """What bounds a request: the model, the smallest pool of all replicas, and the operator's choices.

    `sampling_defaults` fill what a client leaves out.
    """

    context_len: int
    vocab_size: int
    pool_tokens: int
    allow_auto_truncate: bool = False
    has_tokenizer: bool = True
    replicas: int = 1
    sampling_defaults: Mapping[str, object] = dataclasses.field(default_factory=dict)


def check_prompt(prompt: SinglePrompt, limits: RequestLimits) -> None:
    """What can be refused before the prompt is tokenized."""
    replica, count = prompt.routed_dp_rank, limits.replicas
    if replica is not None and not 0 <= replica < count:
        raise refused(
            "routed_dp_rank",
            f"must satisfy 0 <= routed_dp_rank < {count} (the replicas of this server), got {replica}",
        )
    check_sampled_ids(prompt.params, limits.vocab_size)
    if prompt.params.stop and not limits.has_tokenizer:
        raise refused(
            "stop",
            "stop strings need a tokenizer; use stop_token_ids, or start without --skip-tokenizer-init",
        )


def finished_message(
    prompt: SinglePrompt, ids: list[int], limits: RequestLimits
) -> TokenizedGenerateReqInput:
    """The message of one prompt, with all lengths checked and the token limit resolved.

    Its n samples are copied from it by `samples_of`.
    """
    if not ids:
        raise refused("text", "the prompt is empty; give at least one token")
    check_vocabulary("input_ids", ids, limits.vocab_size)
    if limits.allow_auto_truncate:
        ids = _truncated(ids, limits)
    params = prompt.params
    params.max_new_tokens = _resolved_max_new_tokens(len(ids), prompt, limits)
    if params.min_new_tokens > params.max_new_tokens:
        raise refused(
            "min_new_tokens",
            f"at most {params.max_new_tokens} new tokens fit after the prompt ({len(ids)} tokens), "
            f"got min_new_tokens {params.min_new_tokens}",
        )
    start = _logprob_start(prompt, len(ids))
    _check_logprobs(prompt, limits)
    return TokenizedGenerateReqInput(
        rid=prompt.rid,
        input_ids=ids,
        sampling_params=params,
        return_logprob=prompt.return_logprob,
        logprob_start_len=start,
        top_logprobs_num=prompt.top_logprobs_num,
        token_ids_logprob=prompt.token_ids_logprob,
        extra_key=prompt.namespace,
        routed_dp_rank=prompt.routed_dp_rank,
    )


def _resolved_max_new_tokens(prompt_len: int, prompt: SinglePrompt, limits: RequestLimits) -> int:
    """How many tokens may be produced: a client's limit must fit, a default is cut to what is left."""
    context, pool = limits.context_len, limits.pool_tokens
    limit = prompt.params.max_new_tokens
    if prompt_len > context:
        raise RequestRejected(
            f"The input ({prompt_len} tokens) is longer than the model's context length ({context} tokens)."
        )
    if prompt_len == context and limit != 0:
        raise RequestRejected(
            f"The input ({prompt_len} tokens) and one new token are longer than the model's context length "
            f"({context} tokens)."
        )
    if prompt_len > pool or (prompt_len == pool and limit != 0):
        raise RequestRejected(
            f"The input ({prompt_len} tokens) does not fit into the KV cache pool ({pool} tokens); "
            "shorten it, or start the server with a larger --max-total-tokens."
        )
    room = min(context, pool) - prompt_len
    must_fit = prompt.limit_is_clients and not limits.allow_auto_truncate
    if limit is not None and limit > room and must_fit:
        total = prompt_len + limit
        rule = (
            f"are longer than the model's context length ({context} tokens)"
            if total > context
            else f"do not fit into the KV cache pool ({pool} tokens)"
        )
        raise RequestRejected(
            f"The input ({prompt_len} tokens) and max_new_tokens ({limit}), together {total} tokens, {rule}.",
            param="max_new_tokens",
        )
    ceiling = envs.SGLANG_MAX_NEW_TOKENS_LIMIT.get()
    return min(value for value in (limit, room, ceiling) if value is not None)


def samples_of(
    whole: TokenizedGenerateReqInput, *, stream: bool, fresh_seed: int
) -> list[TokenizedGenerateReqInput]:
    """The n sequences of one checked prompt: own rids and own seeds, everything else shared.

    `fresh_seed` is used where the client gave none.
    """
    params = whole.sampling_params
    seed = fresh_seed if params.sampling_seed is None else params.sampling_seed
    return [
        msgspec.structs.replace(
            whole,
            rid=whole.rid if params.n == 1 else f"{whole.rid}_{i}",
            sampling_params=msgspec.structs.replace(params, sampling_seed=sample_seed(seed, i)),
            stream=stream,
            parent_rid=None if params.n == 1 else whole.rid,
        )
        for i in range(params.n)
    ]


def sample_seed(seed: int, sample: int) -> int:
    """The seed of one of n samples: the first has `seed` itself, the others a hash of it and their number."""
    if sample == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _truncated(ids: list[int], limits: RequestLimits) -> list[int]:
    """With --allow-auto-truncate an over-long prompt keeps its end, where a chat asks its question."""
    longest = min(limits.context_len, limits.pool_tokens) - 1
    return ids if len(ids) <= longest else ids[-longest:]


def _logprob_start(prompt: SinglePrompt, prompt_len: int) -> int:
    start = prompt.logprob_start_len
    if not -1 <= start <= prompt_len:
        raise refused(
            "logprob_start_len",
            f"must satisfy -1 <= logprob_start_len <= {prompt_len} (the length of the prompt), got {start}",
        )
    return -1 if not prompt.return_logprob or start == prompt_len else start


def _check_logprobs(prompt: SinglePrompt, limits: RequestLimits) -> None:
    top, chosen = prompt.top_logprobs_num, prompt.token_ids_logprob or []
    size = limits.vocab_size
    if not 0 <= top <= size:
        raise refused("top_logprobs_num", f"must satisfy 0 <= top_logprobs_num <= {size}, got {top}")
    if len(chosen) > size:
        raise refused("token_ids_logprob", f"at most {size} ids (the vocabulary), got {len(chosen)}")
    check_vocabulary("token_ids_logprob", chosen, size)
    if not prompt.return_logprob:
        for name, given in (("top_logprobs_num", top), ("token_ids_logprob", chosen)):
            if given:
                raise refused(name, "needs return_logprob to be true")
