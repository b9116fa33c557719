"""Owns `/v1/chat/completions`: messages to a job, outputs to messages and deltas.

Read by `router`. It must not render prompts (`chat_messages` does) nor order the stream (`streaming` does).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sglang.srt.entrypoints.openai.chat_messages import prompt_ids
from sglang.srt.entrypoints.openai.choice_progress import ChoiceProgress, News
from sglang.srt.entrypoints.openai.logprobs import chat_content
from sglang.srt.entrypoints.openai.protocol import ChatRequest, reject, unknown_fields
from sglang.srt.entrypoints.openai.serving_base import make_job
from sglang.srt.entrypoints.openai.serving_job import Job, Manager, ServingSettings
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
                raise reject(name, "must be at least 1 in a chat, got 0; leave it out for no limit")
        if request.top_logprobs and not request.logprobs:
            raise reject(
                "top_logprobs", f"needs logprobs: true, got top_logprobs {request.top_logprobs} without it"
            )
        tokenizer = self._manager.tokenizer
        ids = prompt_ids(request, tokenizer, self._default_kwargs)
        ends = chat_end_ids(tokenizer, self._manager.model_config)
        job = make_job(request, headers, self._manager, prompts=[ids], end_ids=ends)
        if request.logprobs:
            job.native.return_logprob = True
            job.native.top_logprobs_num = request.top_logprobs or 0
        return job

    def choice(self, job: Job, progress: ChoiceProgress, news: News) -> dict[str, Any]:
        """A choice of a whole answer."""
        choice = {
            "index": progress.index,
            "message": {"role": "assistant", "content": news.text},
            "logprobs": self._logprobs(job, news),
            "finish_reason": news.finish_reason,
            "matched_stop": news.matched_stop,
        }
        return self._with_ids(choice, job, news)

    def stream_choices(self, job: Job, progress: ChoiceProgress, news: News) -> Iterator[dict[str, Any]]:
        """The role first, then what is new, then the finish: three kinds of chunk, in this order."""
        if news.is_first:
            role = self._delta(progress, {"role": "assistant", "content": ""})
            if job.request.return_token_ids:
                role["prompt_token_ids"] = news.prompt_token_ids
            yield role
        if not news.is_empty or (job.request.return_token_ids and news.token_ids):
            choice = self._delta(progress, {"content": news.text})
            choice["logprobs"] = self._logprobs(job, news)
            if job.request.return_token_ids:
                choice["token_ids"] = news.token_ids
            yield choice
        if news.finish_reason is not None:
            choice = self._delta(progress, {"content": ""})
            choice.update(finish_reason=news.finish_reason, matched_stop=news.matched_stop)
            yield choice

    @staticmethod
    def _delta(progress: ChoiceProgress, delta: dict[str, Any]) -> dict[str, Any]:
        return {
            "index": progress.index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
            "matched_stop": None,
        }

    def _logprobs(self, job: Job, news: News) -> dict[str, Any] | None:
        if not job.with_logprobs:
            return None
        return {"content": chat_content(news.logprobs, self._manager.tokenizer)}

    @staticmethod
    def _with_ids(choice: dict[str, Any], job: Job, news: News) -> dict[str, Any]:
        if job.request.return_token_ids:
            choice["token_ids"] = news.token_ids
            choice["prompt_token_ids"] = news.prompt_token_ids
        return choice
