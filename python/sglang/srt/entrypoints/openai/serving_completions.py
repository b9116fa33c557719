"""Owns `/v1/completions`: prompts to a job, outputs to texts, echo and its log-probabilities.

Read by `router`. It must not order the stream (`streaming` does).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sglang.srt.entrypoints.openai.choice_progress import ChoiceProgress, ChoiceUpdate
from sglang.srt.entrypoints.openai.logprobs import TextOffsets, completion_lists
from sglang.srt.entrypoints.openai.native_request import make_job
from sglang.srt.entrypoints.openai.protocol import (
    DEFAULT_COMPLETION_TOKENS,
    CompletionRequest,
    unknown_fields,
)
from sglang.srt.entrypoints.openai.serving_job import Job, Manager, tokenizer_of
from sglang.srt.messages.errors import refused
from sglang.srt.messages.request_fields import shown

NOT_RANKED = "candidates are not ranked; draw several with n and choose"
PROMPT_FORMS = "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"


def checked_prompts(prompt: object) -> list[str] | list[list[int]]:
    """The four forms of `prompt` -> a non-empty list of non-empty prompts of one kind."""
    if prompt is None:
        raise refused("prompt", f"is required; it {PROMPT_FORMS}")
    if isinstance(prompt, str):
        prompt = [prompt]
    if not isinstance(prompt, list):
        raise refused("prompt", f"{PROMPT_FORMS}, got {shown(prompt)}")
    if _is_id_list(prompt):
        prompt = [prompt]
    if not prompt or any(part in ("", []) for part in prompt):
        raise refused("prompt", "must not be empty, and no prompt in it may be")
    if not all(isinstance(part, str) for part in prompt) and not all(_is_id_list(part) for part in prompt):
        raise refused("prompt", f"{PROMPT_FORMS}, got {shown(prompt)}")
    return prompt


def _is_id_list(part: object) -> bool:
    return isinstance(part, list) and set(map(type, part)) == {int}


class CompletionDialect:
    """Text completions."""

    request_type = CompletionRequest
    answer_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self.unknown_fields = unknown_fields("completions")

    def prepare(self, request: CompletionRequest, headers: Mapping[str, str]) -> Job:
        """A checked body -> a job. Scoring (`echo` with no new token) is the one use of `max_tokens` 0."""
        prompts = checked_prompts(request.prompt)
        for name in ("max_completion_tokens", "max_tokens"):
            if getattr(request, name) == 0 and not request.echo:
                raise refused(
                    name, "must be at least 1 without echo, got 0; with echo: true it scores the prompt"
                )
        if request.best_of is not None and request.best_of != (request.n or 1):
            raise refused("best_of", f"must equal n ({request.n or 1}), got {request.best_of}: {NOT_RANKED}")
        sent, defaults = self._default_limits(request, self._sent(request, prompts))
        scores_prompt = bool(request.echo) and request.logprobs is not None
        job = make_job(
            request,
            headers,
            self._manager,
            prompts=sent,
            logprob_start_len=0 if scores_prompt else -1,
            default_max_tokens=defaults,
        )
        job.prompts = prompts
        if request.logprobs is not None:
            job.native.return_logprob = True
            job.native.return_prompt_token_ids = True  # where a token's text begins depends on them
            job.native.top_logprobs_num = request.logprobs
        return job

    def _sent(
        self, request: CompletionRequest, prompts: list[str] | list[list[int]]
    ) -> list[str] | list[list[int]]:
        """The prompts as they are sent: ids where the tokenizer must not put special tokens around a text."""
        if request.add_special_tokens is not False:
            return prompts
        encode = tokenizer_of(self._manager).encode
        bare = [encode(p, add_special_tokens=False) if isinstance(p, str) else p for p in prompts]
        if not all(bare):
            raise refused("prompt", "is empty without special tokens; give at least one token")
        return bare

    def _default_limits(
        self, request: CompletionRequest, prompts: list[str] | list[list[int]]
    ) -> tuple[list[str] | list[list[int]], list[int | None]]:
        """The prompts to send, and for each the limit on new tokens where the client names none.

        It is cut to what is left of the context and of the pool. A text that may come close to them is
        tokenized here, once, and sent as ids.
        """
        if request.max_tokens is not None or request.max_completion_tokens is not None:
            return prompts, [None]
        most, least, limits = DEFAULT_COMPLETION_TOKENS, request.min_tokens, self._manager.limits
        if isinstance(least, int) and least > most:
            raise refused("min_tokens", f"got {least}, and the limit is {most} unless max_tokens says more")
        space = min(limits.context_len, limits.pool_tokens)
        # No tokenizer makes more tokens of a text than it has bytes, but for what it puts around it.
        if all(isinstance(p, str) and len(p.encode()) + 8 + most <= space for p in prompts):
            return prompts, [most]
        encode = tokenizer_of(self._manager).encode
        ids = [encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        room = [space - len(prompt) for prompt in ids]
        # Without room the request is refused further on, by an error that names both numbers.
        return ids, [min(most, left) if left > 0 else most for left in room]

    def stream_choices(
        self, job: Job, progress: ChoiceProgress, update: ChoiceUpdate
    ) -> Iterator[dict[str, object]]:
        """One chunk, unless nothing would be in it; the last one carries the finish."""
        echoes = update.is_first and self._echo(job)
        ids = job.request.return_token_ids and update.token_ids
        if echoes or ids or not update.is_empty or update.finish_reason is not None:
            yield self.choice(job, progress, update)

    def choice(self, job: Job, progress: ChoiceProgress, update: ChoiceUpdate) -> dict[str, object]:
        """The choice of a chunk, or of a whole answer, in which everything is new."""
        prompt_text = self._prompt_text(job, progress.index) if update.is_first and self._echo(job) else ""
        choice: dict[str, object] = {
            "index": progress.index,
            "text": prompt_text + update.text,
            "logprobs": self._logprobs(job, progress, update, prompt_text),
            "finish_reason": update.finish_reason,
            "matched_stop": update.matched_stop,
        }
        if job.request.return_token_ids:
            choice["token_ids"] = update.token_ids
            if update.is_first:
                choice["prompt_token_ids"] = update.prompt_token_ids
        return choice

    @staticmethod
    def _echo(job: Job) -> bool:
        return isinstance(job.request, CompletionRequest) and bool(job.request.echo)

    def _prompt_text(self, job: Job, index: int) -> str:
        prompt = job.prompts[index // job.n]
        if isinstance(prompt, str):
            return prompt
        return tokenizer_of(self._manager).decode(prompt, skip_special_tokens=False)

    def _logprobs(
        self, job: Job, progress: ChoiceProgress, update: ChoiceUpdate, prompt_text: str
    ) -> dict[str, list[object]] | None:
        if not job.with_logprobs:
            return None
        tokenizer = tokenizer_of(self._manager)
        if update.is_first:
            progress.offsets = TextOffsets(
                tokenizer,
                start=len(prompt_text),
                before=update.prompt_token_ids or (),
                skip_special_tokens=job.request.skip_special_tokens is not False,
            )
        offsets = []
        if update.prompt_logprobs:
            in_prompt = TextOffsets(tokenizer, text=prompt_text)
            offsets += [in_prompt.next(token.token_id) for token in update.prompt_logprobs]
        assert progress.offsets is not None
        offsets += [progress.offsets.next(token.token_id) for token in update.logprobs]
        return completion_lists([*update.prompt_logprobs, *update.logprobs], offsets, tokenizer)
