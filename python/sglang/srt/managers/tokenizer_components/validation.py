"""Owns what a request must satisfy before anything of it is sent: vocabulary, lengths, ranges.

Used by the tokenizer manager, once per request. Every refusal names the field, the rule and both numbers. It
must not send, keep state or repair silently.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from sglang.srt.environ import envs
from sglang.srt.managers.tokenizer_components.splitting import SinglePrompt, rejected, shown
from sglang.srt.messages.errors import RequestRejected
from sglang.srt.messages.generate_input import GenerateReqInput
from sglang.srt.messages.io_struct import TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """What bounds a request: the model, the smallest pool of all replicas, and the operator's choices.
    `sampling_defaults` fill what was unsaid.
    """

    context_len: int
    vocab_size: int
    pool_tokens: int
    allow_auto_truncate: bool = False
    has_tokenizer: bool = True
    replicas: int = 1
    sampling_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def check_whole_request(obj: GenerateReqInput) -> None:
    """Fields that belong to the request as a whole and not to one of its prompts."""
    for name in ("stream", "return_text_in_logprobs", "return_prompt_token_ids", "no_logs"):
        value = getattr(obj, name)
        if not isinstance(value, bool):
            raise rejected(name, f"must be true or false, got {shown(value)}")
    if obj.priority is not None and (type(obj.priority) is not int or obj.priority != 0):
        raise rejected("priority", "request priorities are not supported yet; leave it out")


def sampling_of(prompt: SinglePrompt, limits: RequestLimits) -> SamplingParams:
    """Checked sampling parameters of one prompt, and its place; a refusal begins with the field."""
    check_replica(prompt.routed_dp_rank, limits.replicas)
    params = SamplingParams.from_request(prompt.sampling, limits.sampling_defaults)
    params.verify_vocabulary(limits.vocab_size)
    if params.stop and not limits.has_tokenizer:
        raise rejected(
            "stop",
            "stop strings need a tokenizer; use stop_token_ids, or start without --skip-tokenizer-init",
        )
    return params


def check_replica(replica: int | None, replicas: int) -> None:
    """A stated replica must exist; a server with one has number 0."""
    if replica is not None and not 0 <= replica < replicas:
        raise rejected(
            "routed_dp_rank",
            f"must satisfy 0 <= routed_dp_rank < {replicas} (the replicas of this server), got {replica}",
        )


def finished_message(
    prompt: SinglePrompt, ids: list[int], params: SamplingParams, limits: RequestLimits
) -> TokenizedGenerateReqInput:
    """The message of one prompt (n samples are copied from it later), all lengths checked and the token
    limit resolved.
    """
    if not ids:
        raise rejected("text", "the prompt is empty; give at least one token")
    _check_ids(ids, "input_ids", limits)
    asked = prompt.sampling.get("max_new_tokens") is not None
    if limits.allow_auto_truncate:
        ids = _truncated(ids, limits)
    params.max_new_tokens = resolved_max_new_tokens(len(ids), params, asked=asked, limits=limits)
    if params.min_new_tokens > params.max_new_tokens:
        raise rejected(
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


def resolved_max_new_tokens(
    prompt_len: int, params: SamplingParams, *, asked: bool, limits: RequestLimits
) -> int:
    """How many tokens may be produced. What was asked for and cannot fit is refused; a default is cut to
    what is left.
    """
    context, pool = limits.context_len, limits.pool_tokens
    wanted = params.max_new_tokens
    if prompt_len > context:
        raise RequestRejected(
            f"The input ({prompt_len} tokens) is longer than the model's context length ({context} tokens)."
        )
    if prompt_len == context and wanted != 0:
        raise RequestRejected(
            f"The input ({prompt_len} tokens) and one new token are longer than the model's context length "
            f"({context} tokens)."
        )
    if prompt_len > pool or (prompt_len == pool and wanted != 0):
        raise RequestRejected(
            f"The input ({prompt_len} tokens) does not fit into the KV cache pool ({pool} tokens); "
            "shorten it, or start the server with a larger --max-total-tokens."
        )
    room = min(context, pool) - prompt_len
    if wanted is not None and wanted > room and asked and not limits.allow_auto_truncate:
        total = prompt_len + wanted
        if total > context:
            raise RequestRejected(
                f"The input ({prompt_len} tokens) and max_new_tokens ({wanted}), together {total} tokens, "
                f"are longer than the model's context length ({context} tokens).",
                param="max_new_tokens",
            )
        raise RequestRejected(
            f"The input ({prompt_len} tokens) and max_new_tokens ({wanted}), together {total} tokens, "
            f"do not fit into the KV cache pool ({pool} tokens).",
            param="max_new_tokens",
        )
    ceiling = envs.SGLANG_MAX_NEW_TOKENS_LIMIT.get()
    return min(value for value in (wanted, room, ceiling) if value is not None)


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
    """The seed of one of n samples: the first has the seed itself, the others a fixed mix of it and their
    number.
    """
    if sample == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _truncated(ids: list[int], limits: RequestLimits) -> list[int]:
    """With --allow-auto-truncate an over-long prompt keeps its end, where a chat asks its question."""
    longest = min(limits.context_len, limits.pool_tokens) - 1
    return ids if len(ids) <= longest else ids[-longest:]


def _check_ids(ids: list[int], name: str, limits: RequestLimits) -> None:
    low, high = min(ids), max(ids)
    if low < 0 or high >= limits.vocab_size:
        wrong = low if low < 0 else high
        raise rejected(name, f"token id {wrong} is outside the vocabulary (0 <= id < {limits.vocab_size})")


def _logprob_start(prompt: SinglePrompt, prompt_len: int) -> int:
    start = prompt.logprob_start_len
    if not -1 <= start <= prompt_len:
        raise rejected(
            "logprob_start_len",
            f"must satisfy -1 <= logprob_start_len <= {prompt_len} (the length of the prompt), got {start}",
        )
    return -1 if not prompt.return_logprob or start == prompt_len else start


def _check_logprobs(prompt: SinglePrompt, limits: RequestLimits) -> None:
    top = prompt.top_logprobs_num
    if not 0 <= top <= limits.vocab_size:
        raise rejected(
            "top_logprobs_num", f"must satisfy 0 <= top_logprobs_num <= {limits.vocab_size}, got {top}"
        )
    if len(prompt.token_ids_logprob or ()) > limits.vocab_size:
        raise rejected(
            "token_ids_logprob",
            f"at most {limits.vocab_size} ids (the vocabulary), got {len(prompt.token_ids_logprob or ())}",
        )
    if prompt.token_ids_logprob:
        _check_ids(prompt.token_ids_logprob, "token_ids_logprob", limits)
    if not prompt.return_logprob:
        for name, given in (("top_logprobs_num", top), ("token_ids_logprob", prompt.token_ids_logprob)):
            if given:
                raise rejected(name, "needs return_logprob to be true")
