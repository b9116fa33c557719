"""Owns a tokenizer manager without an engine: it answers requests with outputs that a test wrote down.

Read by the unit tests of the HTTP routes. Parameters are checked by the real `sampling_fields`, chats
rendered by the real `ModelTemplates`; nothing else is real. It must not have rules of its own: what a test
does not script does not happen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from typing import Any, cast

from sglang.srt.managers.tokenizer_components.validation import RequestLimits
from sglang.srt.messages.generate_input import GenerateReqInput
from sglang.srt.messages.generate_output import MetaInfo, NativeAnswer, NativeOutput
from sglang.srt.messages.sampling_fields import check_sampled_ids, sampling_params_of
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.tokenizer.model_templates import ModelTemplates

BOS, EOS, IM_END, TWIN_OF_A = 256, 257, 258, 259
SPECIALS = {BOS: "<s>", EOS: "</s>", IM_END: "<|im_end|>"}
VOCAB_SIZE = 260
TEMPLATE = (
    "<s>{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% if m['tool_calls'] %}"
    "{% for c in m['tool_calls'] %}{% for k, v in c['function']['arguments'].items() %}({{ k }}={{ v }})"
    "{% endfor %}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    "{% if style %}[style {{ style }}]{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


class ByteTokenizer:
    """Ids 0-255 are bytes, then three special tokens, then a second token that reads `a`."""

    vocab_size = VOCAB_SIZE
    eos_token_ids = (EOS,)
    bos_token_id = BOS
    bos_token, eos_token, pad_token = "<s>", "</s>", None
    all_special_ids = tuple(SPECIALS)
    #: As if the template wrote no end of a turn that the metadata leave out; a test may say otherwise.
    chat_end_ids: tuple[int, ...] = ()
    utf8_errors = "replace"

    def __init__(self, *, chat_template: str | None = TEMPLATE, adds_bos: bool = True) -> None:
        self.templates = ModelTemplates({} if chat_template is None else {"default": chat_template}, {})
        self.adds_bos = adds_bos

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [BOS] if add_special_tokens and self.adds_bos else []
        by_name = {name: i for i, name in SPECIALS.items()}
        for part in re.split("(" + "|".join(map(re.escape, by_name)) + ")", text):
            ids.extend([by_name[part]] if part in by_name else part.encode())
        return ids

    def encode_chat(self, prompt: str) -> list[int]:
        return self.encode(prompt, add_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        if token_id == TWIN_OF_A:
            return b"a"
        return SPECIALS[token_id].encode() if token_id in SPECIALS else bytes([token_id])

    first_bytes = token_bytes

    def context_of(self, ids: Sequence[int], skip_special_tokens: bool = True) -> list[int]:
        return []

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        shown = [i for i in ids if not (skip_special_tokens and i in SPECIALS)]
        return b"".join(self.token_bytes(i) for i in shown).decode("utf-8", "replace")


@dataclasses.dataclass
class FakeAnswer:
    """One choice: its token ids, one group for each output, the text shown after each group, and the end.

    `texts` (cumulative) default to the decoded ids. `fails_after` raises that error after so many outputs.
    """

    groups: list[list[int]]
    texts: list[str] | None = None
    finish_reason: dict[str, object] | None = None
    fails_after: int | None = None
    error: Exception | None = None

    @classmethod
    def of(cls, text: str, *, eos: bool = True, **kwargs: Any) -> FakeAnswer:
        """One byte of `text` for each output, then the end token."""
        groups = [[byte] for byte in text.encode()] + ([[EOS]] if eos else [])
        return cls(groups=groups, **kwargs)

    def outputs(self, tokenizer: ByteTokenizer) -> list[tuple[str, list[int]]]:
        """(cumulative text, cumulative ids) of each output. Half a character is not shown before the end."""
        steps: list[tuple[str, list[int]]] = []
        ids: list[int] = []
        for position, group in enumerate(self.groups):
            ids = [*ids, *group]
            text = tokenizer.decode(ids) if self.texts is None else self.texts[position]
            if self.texts is None and position + 1 < len(self.groups):
                text = text.rstrip("\ufffd")
            steps.append((text, ids))
        return steps


def logprob_of(token_id: int) -> float:
    """A float that JSON must carry exactly."""
    return -(token_id + 1) / 3.0


def top_of(token_id: int, count: int) -> list[list[Any]]:
    """`count` alternatives: the token itself first, then its neighbours."""
    ids = [(token_id + step) % VOCAB_SIZE for step in range(count)]
    return [[logprob_of(token_id) - step, other, None] for step, other in enumerate(ids)]


_GROWING = ("output_token_logprobs", "output_top_logprobs")


@dataclasses.dataclass
class FakeModelConfig:
    context_len: int = 512
    vocab_size: int = VOCAB_SIZE
    end_sources: dict[int, str] = dataclasses.field(default_factory=dict)


class FakeManager:
    """`answers` are used in choice order (prompt index * n + sample), again and again."""

    def __init__(
        self,
        *answers: FakeAnswer,
        tokenizer: ByteTokenizer | None = None,
        refusal: Exception | None = None,
        defaults: dict[str, object] | None = None,
        pool: int | None = None,
    ) -> None:
        self.answers = answers or (FakeAnswer.of("hello"),)
        self.tokenizer = tokenizer or ByteTokenizer()
        self.model_config: Any = FakeModelConfig()
        context = self.model_config.context_len
        self.limits = RequestLimits(context_len=context, vocab_size=VOCAB_SIZE, pool_tokens=pool or context)
        self.served_model_name = "org/tiny-model"
        self.refusal = refusal
        self.defaults = defaults or {}
        self.requests: list[GenerateReqInput] = []
        self.params: list[SamplingParams] = []
        #: Requests that ended or were closed; `closed_when_answered` as it was when the answer was complete.
        self.closed = 0
        self.closed_when_answered = 0
        self._held: list[AsyncGenerator[NativeAnswer, None]] = []

    def generate_request(
        self,
        obj: GenerateReqInput,
        is_disconnected: Callable[[], Awaitable[bool]] | None = None,
        *,
        incremental: bool = False,
    ) -> AsyncGenerator[NativeAnswer, None]:
        outputs = self._new_parts(obj) if incremental else self._generate(obj)
        # Held here, so that only a door that closes it closes it, not the garbage collector.
        self._held.append(outputs)
        return outputs

    async def _new_parts(self, obj: GenerateReqInput) -> AsyncGenerator[NativeAnswer, None]:
        """The same with only what is new in each output. Scripts are written down cumulatively."""
        seen: dict[int, tuple[int, int]] = {}
        async with contextlib.aclosing(self._generate(obj)) as items:
            async for item in items:
                assert isinstance(item, dict)
                index = item.get("index", 0)
                chars, ids = seen.get(index, (0, 0))
                seen[index] = max(chars, len(item["text"])), len(item["output_ids"])
                meta: Any = item["meta_info"]
                item["meta_info"] = meta | {k: v[ids:] for k, v in meta.items() if k in _GROWING}
                item["text"], item["output_ids"] = item["text"][chars:], item["output_ids"][ids:]
                yield item

    async def _generate(self, obj: GenerateReqInput) -> AsyncGenerator[NativeAnswer, None]:
        mappings = (
            obj.sampling_params if isinstance(obj.sampling_params, list) else [obj.sampling_params or {}]
        )
        every = [sampling_params_of(mapping, self.defaults) for mapping in mappings]
        params = every[0]
        check_sampled_ids(params, VOCAB_SIZE)
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(obj)
        self.params.extend(every)
        prompts = self._prompts(obj)
        jobs = [
            self._items(obj, prompts[i // params.n], self.answers[i % len(self.answers)], i)
            for i in range(len(prompts) * params.n)
        ]
        try:
            if obj.stream:
                async for item in self._interleaved(jobs, len(jobs) > 1):
                    yield item
            else:
                last = []
                for items in jobs:
                    *_, final = items
                    last.append(final)
                yield last if len(jobs) > 1 or obj.is_batch else last[0]
        finally:
            self.closed += 1

    async def _interleaved(
        self, jobs: list[Iterator[NativeOutput]], with_index: bool
    ) -> AsyncGenerator[NativeAnswer, None]:
        waiting = list(enumerate(jobs))
        while waiting:
            for index, items in list(waiting):
                item = next(items, None)
                if item is None:
                    waiting.remove((index, items))
                    continue
                if with_index:
                    item["index"] = index
                yield item

    def _prompts(self, obj: GenerateReqInput) -> list[list[int]]:
        given: Any = obj.text if obj.text is not None else obj.input_ids
        prompts = given if obj.is_batch else [given]
        return [self.tokenizer.encode(p) if isinstance(p, str) else p for p in prompts]

    def _items(
        self, obj: GenerateReqInput, prompt: list[int], answer: FakeAnswer, index: int
    ) -> Iterator[NativeOutput]:
        steps = answer.outputs(self.tokenizer)
        end = answer.finish_reason or {"type": "stop", "matched": EOS}
        for position, (text, ids) in enumerate(steps):
            if position == answer.fails_after:
                assert answer.error is not None
                raise answer.error
            last = position + 1 == len(steps)
            meta: dict[str, Any] = {
                "id": f"{obj.rid}_{index}",
                "finish_reason": end if last else None,
                "prompt_tokens": len(prompt),
                "completion_tokens": len(ids),
                "cached_tokens": len(prompt) - 1,
                "weight_version": "default",
            }
            if obj.return_logprob:
                assert isinstance(obj.top_logprobs_num, int)
                meta |= self._logprobs("output", ids, obj.top_logprobs_num)
                if obj.logprob_start_len == 0:
                    meta |= self._logprobs("input", prompt, obj.top_logprobs_num)
                    meta["input_token_logprobs"][0][0] = None
                    meta["input_top_logprobs"][0] = None
            item: NativeOutput = {"text": text, "output_ids": ids, "meta_info": cast(MetaInfo, meta)}
            if obj.return_prompt_token_ids:
                item["prompt_token_ids"] = prompt
            yield item

    @staticmethod
    def _logprobs(part: str, ids: list[int], count: int) -> dict[str, Any]:
        return {
            f"{part}_token_logprobs": [[logprob_of(i), i, None] for i in ids],
            f"{part}_top_logprobs": [top_of(i, count) if count else None for i in ids],
        }
