"""Declared fields of the server: sockets, keys, tokenizer, templates, how answers are written.

Read through `get_serving()`. Declarations only: name, type, default, help and what this build serves.
"""

from typing import Any

from sglang.srt.arg_groups.arg_utils import NS, A, Arg, Namespace
from sglang.srt.arg_groups.fields import choices
from sglang.srt.constants import DEFAULT_HOST, DEFAULT_PORT

_NO_PARSER = "leave it out and read the raw text: output parsers come later"


class Serving(Namespace, ns=NS("serving")):
    # Tokenizer
    tokenizer_path: A[
        str | None,
        Arg(help="Where the tokenizer is; default is the model path.", resolvable=True, served=True),
    ] = None
    tokenizer_mode: A[
        str,
        Arg(
            help="auto: the fast tokenizer; slow: the Python one.",
            choices=choices.TOKENIZER_MODES,
            served=("auto",),
            instead="use auto",
        ),
    ] = "auto"
    tokenizer_worker_num: A[
        int, Arg(help="Number of server processes that tokenize.", at_least=1, served=(1,), instead="use 1")
    ] = 1
    detokenizer_worker_num: A[
        int | None,
        Arg(
            help="Detokenizer processes; none or 0: inside the server process.",
            served=(0,),
            at_least=0,
            instead="leave it out: detokenizing runs inside the server process",
        ),
    ] = None
    skip_tokenizer_init: A[
        bool, Arg(help="No tokenizer anywhere: clients send input_ids and get ids back.", served=True)
    ] = False
    enable_tokenizer_batch_encode: A[bool, Arg(help="Tokenize a batch in one call.")] = False

    # Address and keys
    host: A[str, Arg(help="Address the HTTP server binds.", served=True)] = DEFAULT_HOST
    port: A[int, Arg(help="Port of the HTTP server.", served=True, at_least=0, at_most=65535)] = DEFAULT_PORT
    fastapi_root_path: A[str, Arg(help="Path prefix when behind a proxy.", served=True)] = ""
    api_key: A[str | None, Arg(help="Bearer token that normal routes ask for.", served=True, secret=True)] = (
        None
    )
    admin_api_key: A[
        str | None, Arg(help="Bearer token of the control routes.", served=True, secret=True)
    ] = None
    ssl_keyfile: A[str | None, Arg(help="TLS key file.", served=True)] = None
    ssl_certfile: A[str | None, Arg(help="TLS certificate file; switches to https.", served=True)] = None
    enable_http2: A[bool, Arg(help="Serve HTTP/2 as well.")] = False
    grpc_port: A[int | None, Arg(help="Port of a gRPC server beside HTTP.")] = None

    # Names
    served_model_name: A[
        str | None,
        Arg(help="Name shown by /v1/models; default is the model path.", resolvable=True, served=True),
    ] = None
    weight_version: A[str, Arg(help="Free text echoed in answers: which weights answered.", served=True)] = (
        "default"
    )

    # Templates, parsers and tools
    chat_template: A[
        str | None,
        Arg(
            help="Template of chats: the name of one the model brings, a jinja or JSON file, or its text.",
            served=True,
        ),
    ] = None
    hf_chat_template_name: A[
        str | None,
        Arg(
            help="One of several templates the tokenizer brings.", instead="give the name to --chat-template"
        ),
    ] = None
    completion_template: A[str | None, Arg(help="Fill-in-the-middle template for /v1/completions.")] = None
    trust_request_chat_template: A[bool, Arg(help="Let a request bring its own template.")] = False
    default_chat_template_kwargs: A[
        dict[str, Any] | None,
        Arg(help="JSON defaults under each request's chat_template_kwargs.", served=True),
    ] = None
    reasoning_parser: A[
        str | None, Arg(help="Splits thinking from the answer into reasoning_content.", instead=_NO_PARSER)
    ] = None
    tool_call_parser: A[
        str | None, Arg(help="Turns a model's call syntax into tool_calls.", instead=_NO_PARSER)
    ] = None
    tool_server: A[str | None, Arg(help="Tool back ends of the Responses API.")] = None
    strip_thinking_cache: A[bool, Arg(help="Keep thinking out of the prefix cache.")] = False
    enable_strict_thinking: A[bool, Arg(help="Block tool and control tokens while thinking.")] = False
    constrained_json_whitespace_pattern: A[
        str | None, Arg(help="Whitespace regex inside constrained JSON.")
    ] = None
    constrained_json_disable_any_whitespace: A[bool, Arg(help="Force compact constrained JSON.")] = False

    # Answers
    sampling_defaults: A[
        str,
        Arg(
            help="Where unsaid sampling values come from: the model's generation config, or OpenAI.",
            choices=choices.SAMPLING_DEFAULTS,
            served=True,
        ),
    ] = "model"
    preferred_sampling_params: A[
        dict[str, Any] | None, Arg(help="JSON of recommended values that /model_info reports.", served=True)
    ] = None
    allow_auto_truncate: A[
        bool, Arg(help="Cut over-long prompts or token limits instead of answering 400.", served=True)
    ] = False
    stream_interval: A[
        int,
        Arg(
            help="Tokens between stream chunks; the first token always goes at once.", served=True, at_least=1
        ),
    ] = 1
    incremental_streaming_output: A[
        bool, Arg(help="Native streams carry what is new instead of the whole text so far.", served=True)
    ] = False
    stream_response_default_include_usage: A[
        bool, Arg(help="Send the last usage chunk even when the client did not ask.", served=True)
    ] = False
    enable_cache_report: A[bool, Arg(help="Fill usage.prompt_tokens_details.cached_tokens.", served=True)] = (
        False
    )
    enable_response_store: A[bool, Arg(help="Keep Responses objects so that they can be fetched.")] = False
    enable_streaming_session: A[bool, Arg(help="Append-only sessions of low overhead.")] = False

    # Start
    skip_server_warmup: A[bool, Arg(help="Become ready without the self-test request.", served=True)] = False
    warmups: A[str | None, Arg(help="Named extra warm-up routines.")] = None
