"""Owns the types around one OpenAI request: the job, the settings for answers, what a dialect offers.

Read by both routes, the runner and the stream. It must not act.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.entrypoints.http.unknown_fields import UnknownFields
from sglang.srt.entrypoints.openai.choice_progress import ChoiceProgress, ChoiceUpdate
from sglang.srt.entrypoints.openai.protocol import SharedRequest
from sglang.srt.managers.tokenizer_components.validation import RequestLimits
from sglang.srt.messages.errors import RequestRejected
from sglang.srt.messages.generate_input import GenerateReqInput
from sglang.srt.messages.generate_output import NativeAnswer
from sglang.srt.runtime_context import get_serving
from sglang.srt.tokenizer.tokenizer_like import TokenizerLike

RequestT = TypeVar("RequestT", bound=SharedRequest)


class ServingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the server's flags say about answers."""

    include_usage_by_default: bool = False
    cache_report: bool = False
    default_chat_template_kwargs: dict[str, object] = {}

    @classmethod
    def from_context(cls) -> ServingSettings:
        """As published for this process."""
        serving = get_serving()
        return cls(
            include_usage_by_default=serving.stream_response_default_include_usage,
            cache_report=serving.enable_cache_report,
            default_chat_template_kwargs=dict(serving.default_chat_template_kwargs or {}),
        )


class Manager(Protocol):
    """What the routes need of the tokenizer manager."""

    limits: RequestLimits
    model_config: ModelConfig
    served_model_name: str

    @property
    def tokenizer(self) -> TokenizerLike | None: ...

    def generate_request(
        self,
        obj: GenerateReqInput,
        is_disconnected: Callable[[], Awaitable[bool]] | None = None,
        *,
        incremental: bool = False,
    ) -> AsyncGenerator[NativeAnswer, None]: ...


def tokenizer_of(manager: Manager) -> TokenizerLike:
    """The tokenizer, without which these routes serve nothing."""
    if manager.tokenizer is None:
        raise RequestRejected("the server runs with --skip-tokenizer-init; post input_ids to /generate")
    return manager.tokenizer


class Job(msgspec.Struct, kw_only=True):
    """One request, checked and ready: what goes to the engine and what the answer needs to know."""

    request: SharedRequest
    native: GenerateReqInput
    id: str
    model: str
    num_prompts: int = 1
    n: int = 1
    #: The prompts as the client sent them (text or token ids), for echo.
    prompts: Sequence[str | list[int]] = ()
    created: int = msgspec.field(default_factory=lambda: int(time.time()))

    @property
    def num_choices(self) -> int:
        return self.num_prompts * self.n

    @property
    def with_logprobs(self) -> bool:
        return bool(self.native.return_logprob)

    def envelope(self, object_name: str) -> dict[str, object]:
        """What every chunk and every answer begins with."""
        return {"id": self.id, "object": object_name, "created": self.created, "model": self.model}


class Dialect(Protocol[RequestT]):
    """One route's own part: how a body becomes a job, and how outputs become choices."""

    request_type: type[RequestT]
    unknown_fields: UnknownFields
    #: What `object` says in a whole answer, and in a chunk.
    answer_object: str
    chunk_object: str

    def prepare(self, request: RequestT, headers: Mapping[str, str]) -> Job:
        """Check and translate; refuses with `RequestRejected`."""
        ...

    def choice(self, job: Job, progress: ChoiceProgress, update: ChoiceUpdate) -> dict[str, object]:
        """The finished choice of a whole answer."""
        ...

    def stream_choices(
        self, job: Job, progress: ChoiceProgress, update: ChoiceUpdate
    ) -> Iterator[dict[str, object]]:
        """The choices of the chunks that carry `update`, in order."""
        ...
