"""Owns what an engine reports of itself: configuration without secrets, model, counters.

Read by the information routes and by `Engine`. It must never show a value that is declared secret, not even
as part of the command that started the process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang.srt.arg_groups.fields import LEAVES
from sglang.srt.arg_groups.overrides import resolution_result, resolved_view
from sglang.srt.arg_groups.public_values import public_values
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.server_args import ServerArgs
from sglang.srt.tokenizer.chat_rules import chat_end_ids, end_ids
from sglang.srt.tokenizer.tokenizer import Tokenizer
from sglang.version import __version__

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine_core import EngineCore

_MODEL_FIELDS = (
    "model_path",
    "served_model_name",
    "tokenizer_path",
    "weight_version",
    "load_format",
    "reasoning_parser",
    "tool_call_parser",
    "disaggregation_mode",
)


def model_information(manager: TokenizerManager, record: ServerArgs) -> dict[str, object]:
    """The answer of `/model_info`."""
    values = public_values(record)
    return {name: values[name] for name in _MODEL_FIELDS} | {
        # What the operator recommends to clients; it changes nothing here.
        "preferred_sampling_params": resolved_view(record).preferred_sampling_params,
        "is_generation": not values["is_embedding"],
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": manager.model_config.model_type,
        "architectures": [manager.model_config.architecture],
    }


def tokenizer_information(tokenizer: Tokenizer, model_config: ModelConfig) -> dict[str, object]:
    """The answer of `/tokenizer_info`: what the files hold, and what follows from it for chats."""
    templates = tokenizer.templates
    template = templates.default
    names = ("eos_token", "bos_token", "pad_token", "chat_template")
    return {name: getattr(tokenizer, name) for name in names} | {
        "chat_template_names": templates.names,
        "content_forms": {} if template is None else dict(templates.forms(template).by_role),
        "end_token_ids": list(end_ids(tokenizer, model_config)),
        "chat_end_token_ids": chat_end_ids(tokenizer, model_config),
    }


async def server_information(
    core: EngineCore, manager: TokenizerManager, record: ServerArgs
) -> dict[str, object]:
    """The answer of `/server_info`: the resolved settings, and the counters of the running engine.

    A value that the engine decided after the start stands in place of what the flag said.
    """
    limits = manager.limits
    return (
        public_values(record)
        | core.decided
        | {
            "version": __version__,
            "launch_command": launch_command(sys.argv, record),
            "uptime": time.monotonic() - core.started_at,
            "startup_time": manager.rank_info.get("startup_time"),
            "max_total_num_tokens": limits.pool_tokens,
            "max_req_input_len": min(limits.context_len, limits.pool_tokens) - 1,
            "internal_states": await manager.get_internal_state(),
        }
    )


def launch_command(argv: Sequence[str], record: ServerArgs) -> str:
    """How this process was started, with every secret value blanked wherever it stands."""
    secrets = [resolution_result(record, name) for name, leaf in LEAVES.items() if leaf.arg.secret]
    command = " ".join(argv)
    for secret in sorted((s for s in secrets if isinstance(s, str) and s), key=len, reverse=True):
        command = command.replace(secret, "***")
    return command
