"""Owns `/v1/chat/completions`: messages to a job, outputs to messages and deltas.

Read by `router`. It must not render prompts (`chat_messages` does) nor order the stream (`streaming` does).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sglang.srt.entrypoints.openai.chat_messages import prompt_ids
from sglang.srt.entrypoints.openai.choice_progress import ChoiceProgress, ChoiceUpdate
from sglang.srt.entrypoints.openai.logprobs import chat_content
from sglang.srt.entrypoints.openai.native_request import make_job
from sglang.srt.entrypoints.openai.protocol import ChatRequest, unknown_fields
from sglang.srt.entrypoints.openai.serving_job import Job, Manager, ServingSettings, tokenizer_of
from sglang.srt.messages.errors import refused
from sglang.srt.tokenizer.chat_rules import chat_end_ids


class ChatDialect:
    """Chat completions."""

    request_type = ChatRequest
    answer_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, manager: Manager, settings: ServingSettings) -> None:
        self._manager = manager
        self.unknown_fields = unknown_fields("chat")
        self._default_kwargs = settings.default_chat_template_kwargs

    def prepare(self, request: ChatRequest, headers: Mapping[str, str]) -> Job:
        """A checked body -> a job. The prompt travels as ids, so that nobody adds a second BOS."""
        for name in ("max_completion_tokens", "max_tokens"):
            if getattr(request, name) == 0:
                raise refused(name, "must be at least 1 in a chat, got 0; leave it out for no limit")
        if request.top_logprobs and not request.logprobs:
            raise refused(
                "top_logprobs", f"needs logprobs: true, got top_logprobs {request.top_logprobs} without it"
            )
        tokenizer = tokenizer_of(self._manager)
        ids = prompt_ids(request, tokenizer, self._default_kwargs)
        ends = chat_end_ids(tokenizer, self._manager.model_config)
        job = make_job(request, headers, self._manager, prompts=[ids], end_ids=ends)
        if request.logprobs:
            job.native.return_logprob = True
            job.native.top_logprobs_num = request.top_logprobs or 0
        return job

    def choice(self, job: Job, progress: ChoiceProgress, update: ChoiceUpdate) -> dict[str, object]:
        """A choice of a whole answer."""
        choice: dict[str, object] = {
            "index": progress.index,
            "message": {"role": "assistant", "content": update.text},
            "logprobs": self._logprobs(job, update),
            "finish_reason": update.finish_reason,
            "matched_stop": update.matched_stop,
        }
        if job.request.return_token_ids:
            choice["token_ids"] = update.token_ids
            choice["prompt_token_ids"] = update.prompt_token_ids
        return choice

    def stream_choices(
        self, job: Job, progress: ChoiceProgress, update: ChoiceUpdate
    ) -> Iterator[dict[str, object]]:
        """The role first, then what is new, then the finish: three kinds of chunk, in this order."""
        if update.is_first:
            role = self._delta(progress, {"role": "assistant", "content": ""})
            if job.request.return_token_ids:
                role["prompt_token_ids"] = update.prompt_token_ids
            yield role
        if not update.is_empty or (job.request.return_token_ids and update.token_ids):
            choice = self._delta(progress, {"content": update.text})
            choice["logprobs"] = self._logprobs(job, update)
            if job.request.return_token_ids:
                choice["token_ids"] = update.token_ids
            yield choice
        if update.finish_reason is not None:
            choice = self._delta(progress, {"content": ""})
            choice.update(finish_reason=update.finish_reason, matched_stop=update.matched_stop)
            yield choice

    @staticmethod
    def _delta(progress: ChoiceProgress, delta: dict[str, object]) -> dict[str, object]:
        return {
            "index": progress.index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
            "matched_stop": None,
        }

    def _logprobs(self, job: Job, update: ChoiceUpdate) -> dict[str, object] | None:
        if not job.with_logprobs:
            return None
        return {"content": chat_content(update.logprobs, tokenizer_of(self._manager))}
