"""Owns the fields of a request that are known and do not act: each is refused with a cure, or ignored.

They are SGLang's, OpenAI's, vLLM's and llama.cpp's. Read by every door of requests and by the docs page. It
must not name a field that acts: that is declared where it acts.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Literal

#: "generate" is the native request: `/generate` and `Engine.generate`, also inside `sampling_params`.
Route = Literal["chat", "completions", "generate"]
ROUTES: tuple[Route, ...] = ("chat", "completions", "generate")
CHAT: tuple[Route, ...] = ("chat",)
COMPLETIONS: tuple[Route, ...] = ("completions",)

_EMPTY: tuple[object, ...] = (False, "", [], {})


@dataclasses.dataclass(frozen=True)
class Refused:
    """A field that would change the answer and is not served: 400, unless its value asks for nothing.

    Null, empty and false ask for nothing, and `harmless` values. `strict` is for fields that are on by
    default: there false and empty ask for something.
    """

    reason: str
    routes: tuple[Route, ...] = ROUTES
    harmless: tuple[object, ...] = ()
    strict: bool = False

    def allows(self, value: object) -> bool:
        """Whether the value asks for nothing: the field's default, in whatever spelling."""
        nothing = self.harmless if self.strict else (*_EMPTY, *self.harmless)
        return value is None or any(_same(value, one) for one in nothing)

    @property
    def accepted(self) -> str:
        """The harmless values, as the docs page shows them."""
        return ", ".join(f"`{json.dumps(value)}`" for value in self.harmless)


@dataclasses.dataclass(frozen=True)
class WithoutEffect:
    """A known field that is ignored, because the answer is right without it; `reason` says why."""

    reason: str
    routes: tuple[Route, ...] = ROUTES


def _same(one: object, other: object) -> bool:
    """Equal, where 0 is not false."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


_STRUCTURED = "structured output is not supported yet; leave it out and check the answer yourself"
_TOOLS = "tool calls are not supported yet; describe the tools in a message and parse the answer yourself"
_LORA = "adapters are not supported yet; serve a model with the adapter merged into its weights"
_SESSIONS = "sessions are not supported; send the whole conversation, the prefix cache keeps it cheap"
_DISAGGREGATION = "prefill/decode disaggregation is not supported yet; leave it out"
_THINKING = "thinking budgets are not supported yet; limit the whole answer with its token limit"
_TEXT_ONLY = "this model reads text only; leave it out"
_PROCESSORS = "custom logit processors are not supported yet; use logit_bias"
_SAMPLER = "this way of sampling is not supported; use temperature, top_p, top_k and min_p"
_CONTEXT = "the context is never shifted; what does not fit is refused or ends with `length`"
_WRITES_TEXT = "this server writes text only"
_METRICS = "metrics are not supported yet; leave it out"
_TEMPLATE_VARIABLE = "a variable of the chat template goes into chat_template_kwargs"

REFUSED: dict[str, Refused] = {
    # Form of the answer
    "response_format": Refused(_STRUCTURED, harmless=({"type": "text"},)),
    **dict.fromkeys(
        (
            "json_schema",
            "regex",
            "ebnf",
            "structural_tag",
            "structured_outputs",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "guided_decoding_backend",
            "guided_whitespace_pattern",
            "grammar",
            "grammar_lazy",
            "grammar_triggers",
        ),
        Refused(_STRUCTURED),
    ),
    "tools": Refused(_TOOLS, CHAT),
    "tool_choice": Refused(_TOOLS, CHAT, ("none", "auto")),
    "functions": Refused(_TOOLS, CHAT),
    "parse_tool_calls": Refused(_TOOLS),
    "function_call": Refused(_TOOLS, CHAT, ("none", "auto")),
    "modalities": Refused(_WRITES_TEXT, CHAT, (["text"],)),
    "audio": Refused(_WRITES_TEXT, CHAT),
    "web_search_options": Refused("there is no web search; put what was found in a message", CHAT),
    "verbosity": Refused(
        "answers have no set length; say in a message how long the answer should be", CHAT, ("medium",)
    ),
    # Prompts and templates
    "chat_template": Refused(
        "a request does not bring its own template; start the server with --chat-template FILE", CHAT
    ),
    "echo": Refused("a chat does not repeat its last message; put it before the answer yourself", CHAT),
    "add_special_tokens": Refused(
        "a chat prompt begins with exactly one BOS, which the template or the tokenizer adds; write the "
        "whole prompt yourself and post it to /v1/completions",
        CHAT,
    ),
    "enable_thinking": Refused(_TEMPLATE_VARIABLE, CHAT, strict=True),
    "thinking": Refused(_TEMPLATE_VARIABLE, CHAT),
    "system_prompt": Refused("put it into a message of role system, or before the prompt"),
    **dict.fromkeys(
        ("suffix", "input_prefix", "input_suffix", "input_extra"),
        Refused(
            "this server has no completion template; put the whole fill-in-the-middle prompt in `prompt`",
            COMPLETIONS,
        ),
    ),
    "truncate_prompt_tokens": Refused(
        "prompts are not cut on request; shorten it, or start the server with --allow-auto-truncate"
    ),
    "truncation_side": Refused("prompts are not cut on request; shorten it"),
    **dict.fromkeys(
        (
            "input_embeds",
            "prompt_embeds",
            "image_data",
            "video_data",
            "audio_data",
            "multi_modal_data",
            "multimodal_data",
        ),
        Refused(_TEXT_ONLY),
    ),
    # How tokens are drawn
    "use_beam_search": Refused("beam search is not supported; use n for several samples"),
    "best_of": Refused("candidates are not ranked; draw several with n", ("chat", "generate"), (1,)),
    "n_cmpl": Refused("use n", harmless=(1,)),
    "do_sample": Refused("use temperature, where 0 is greedy", harmless=(True,), strict=True),
    "beam_width": Refused("beam search is not supported; use n for several samples", harmless=(0, 1)),
    "bad_words": Refused("words are not banned; ban single tokens with logit_bias -100"),
    "allowed_token_ids": Refused(
        "tokens are not limited to a list; logit_bias 100 for each of them comes close"
    ),
    "logits_processors": Refused(_PROCESSORS),
    "custom_logit_processor": Refused(_PROCESSORS),
    "custom_params": Refused(_PROCESSORS),
    "vllm_xargs": Refused(_PROCESSORS),
    "mirostat": Refused(_SAMPLER, harmless=(0,)),
    "typical_p": Refused(_SAMPLER, harmless=(1.0,)),
    "tfs_z": Refused(_SAMPLER, harmless=(1.0,)),
    "dynatemp_range": Refused(_SAMPLER, harmless=(0.0,)),
    "xtc_probability": Refused(_SAMPLER, harmless=(0.0,)),
    "dry_multiplier": Refused(_SAMPLER, harmless=(0.0,)),
    "top_n_sigma": Refused(_SAMPLER, harmless=(-1.0,)),
    "adaptive_target": Refused(_SAMPLER, harmless=(-1.0,)),
    "min_keep": Refused(_SAMPLER, harmless=(0,)),
    "samplers": Refused(
        "top_p, top_k and min_p all look at the whole distribution, in no order; leave it out"
    ),
    "repeat_last_n": Refused(
        "penalties look at the whole answer; leave it out, or repeat_penalty with it", harmless=(64, -1)
    ),
    "penalize_nl": Refused(
        "penalties look at every token of the answer, newlines too; leave it out",
        harmless=(True,),
        strict=True,
    ),
    "repetition_detection": Refused(
        "answers are not watched for repetitions; use a penalty or a stop string"
    ),
    # Where an answer ends
    "stop_regex": Refused("stopping by regular expression is not supported yet; use stop or stop_token_ids"),
    "n_indent": Refused("indentation does not end an answer; use stop", harmless=(0,)),
    "t_max_predict_ms": Refused(
        "answers have no time limit; use the token limit, or hang up", harmless=(0, -1)
    ),
    **dict.fromkeys(
        (
            "max_thinking_tokens",
            "thinking_budget",
            "thinking_token_budget",
            "thinking_budget_tokens",
            "reasoning_budget",
        ),
        Refused(_THINKING, harmless=(-1,)),
    ),
    # What comes with the answer
    "prompt_logprobs": Refused(
        "is answered in other forms: echo with logprobs on /v1/completions, logprob_start_len on /generate"
    ),
    "n_probs": Refused("use logprobs (and top_logprobs in a chat)", harmless=(0,)),
    "post_sampling_probs": Refused(
        "log-probabilities are those of the whole distribution, before top_p, top_k and min_p; leave it out"
    ),
    "logprob_token_ids": Refused("use token_ids_logprob of /generate"),
    "return_tokens_as_token_ids": Refused("tokens are written as text; return_token_ids adds their ids"),
    "return_tokens": Refused("use return_token_ids"),
    "detokenize": Refused(
        "an answer always has its text, unless the server runs with --skip-tokenizer-init",
        harmless=(True,),
        strict=True,
    ),
    "include_reasoning": Refused(
        "no reasoning parser is served: thinking stays in the content; cut it out yourself",
        CHAT,
        (True,),
        strict=True,
    ),
    "reasoning_format": Refused(
        "no reasoning parser is served: thinking stays in the content", CHAT, ("none", "auto")
    ),
    "thinking_forced_open": Refused("no reasoning parser is served: thinking stays in the content"),
    "chat_format": Refused(
        "answers are not parsed: tool calls and thinking stay in the text; leave it out", harmless=(0,)
    ),
    "preserved_tokens": Refused("use skip_special_tokens: false, which shows all special tokens"),
    "response_fields": Refused("answers are always whole; pick the fields yourself"),
    "return_hidden_states": Refused("hidden states are not returned yet; leave it out"),
    "return_routed_experts": Refused("routed experts are not returned yet; leave it out"),
    "return_entropy": Refused("entropy is not returned yet; leave it out"),
    # Adapters, sessions, placement
    "lora_path": Refused(_LORA),
    "lora": Refused(_LORA),
    "session_id": Refused(_SESSIONS),
    "session_params": Refused(_SESSIONS),
    "priority": Refused(
        "request priorities are not supported yet; leave it out", (*CHAT, *COMPLETIONS), harmless=(0,)
    ),
    **dict.fromkeys(
        ("bootstrap_host", "bootstrap_port", "bootstrap_room", "kv_transfer_params", "ec_transfer_params"),
        Refused(_DISAGGREGATION),
    ),
    "routing_key": Refused("replicas are not chosen by a key; use routed_dp_rank"),
    "kv_hints": Refused("hints for the cache are not supported yet; leave it out"),
    "log_metrics": Refused(_METRICS),
    "custom_labels": Refused(_METRICS),
}

_NO_CALLERS = "names the caller for the operator; nothing is kept about callers"
_NO_BEAMS = "concerns beam search, and a request with beam search is refused"
_NO_TOOLS = "concerns tools, and a request with tools is refused"
_NO_MEDIA = "concerns images and sound, and a request with them is refused"
_NO_REASONING_PARSER = "no reasoning parser is served: thinking stays in the content"
_OTHER_SAMPLER = "concerns a way of sampling that is refused"
_SAME_ANSWER = "adds times and progress; the answer is the same without them"
_DRAFTS = "a hint about speed; the answer is the same without it"

WITHOUT_EFFECT: dict[str, WithoutEffect] = {
    "spaces_between_special_tokens": WithoutEffect(
        "the tokenizers served here never add such spaces", (*CHAT, *COMPLETIONS)
    ),
    "user": WithoutEffect(_NO_CALLERS),
    "safety_identifier": WithoutEffect(_NO_CALLERS),
    "metadata": WithoutEffect("labels of stored answers; nothing is stored"),
    "store": WithoutEffect("answers are never stored"),
    "service_tier": WithoutEffect("there is one tier"),
    "prompt_cache_key": WithoutEffect("the prefix cache finds common prefixes by itself"),
    "prompt_cache_retention": WithoutEffect("the prefix cache keeps what fits"),
    "cache_prompt": WithoutEffect("the prefix cache never changes an answer"),
    "id_slot": WithoutEffect("there are no slots to choose; the prefix cache serves all"),
    "prediction": WithoutEffect(_DRAFTS),
    "speculative.n_max": WithoutEffect(_DRAFTS),
    "speculative.n_min": WithoutEffect(_DRAFTS),
    "speculative.p_min": WithoutEffect(_DRAFTS),
    "parallel_tool_calls": WithoutEffect(_NO_TOOLS, CHAT),
    "separate_reasoning": WithoutEffect(_NO_REASONING_PARSER, CHAT),
    "stream_reasoning": WithoutEffect(_NO_REASONING_PARSER, CHAT),
    "length_penalty": WithoutEffect(_NO_BEAMS),
    "early_stopping": WithoutEffect(_NO_BEAMS),
    "mm_processor_kwargs": WithoutEffect(_NO_MEDIA),
    "media_io_kwargs": WithoutEffect(_NO_MEDIA),
    "mirostat_tau": WithoutEffect(_OTHER_SAMPLER),
    "mirostat_eta": WithoutEffect(_OTHER_SAMPLER),
    "dynatemp_exponent": WithoutEffect(_OTHER_SAMPLER),
    "xtc_threshold": WithoutEffect(_OTHER_SAMPLER),
    "dry_base": WithoutEffect(_OTHER_SAMPLER),
    "dry_allowed_length": WithoutEffect(_OTHER_SAMPLER),
    "dry_penalty_last_n": WithoutEffect(_OTHER_SAMPLER),
    "dry_sequence_breakers": WithoutEffect(_OTHER_SAMPLER),
    "adaptive_decay": WithoutEffect(_OTHER_SAMPLER),
    "n_keep": WithoutEffect(_CONTEXT),
    "n_discard": WithoutEffect(_CONTEXT),
    "timings_per_token": WithoutEffect(_SAME_ANSWER),
    "return_progress": WithoutEffect(_SAME_ANSWER),
}


def unserved(route: Route) -> tuple[dict[str, Refused], dict[str, WithoutEffect]]:
    """The fields that one route refuses, and those that it ignores."""
    return (
        {name: field for name, field in REFUSED.items() if route in field.routes},
        {name: field for name, field in WITHOUT_EFFECT.items() if route in field.routes},
    )
