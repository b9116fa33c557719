"""Reads the model's own config once and fills in what the operator left open.

Decides the context length and where the tokenizer is, and refuses a layout that the model is too small for.
Must not read weights.
"""

from sglang.kernels import compiled
from sglang.srt.arg_groups.arg_utils import Leaf
from sglang.srt.arg_groups.fields import LEAVES
from sglang.srt.arg_groups.fields.parallel import attn_dp_size_of
from sglang.srt.arg_groups.model_override_base import ResolvingView
from sglang.srt.arg_groups.supported import refusal
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.messages.errors import RequestRejected
from sglang.srt.messages.sampling_fields import sampling_params_of


def refuse_early(view: ResolvingView, *names: str) -> None:
    """Refuse unserved values before files are looked at that depend on them."""
    leaves: list[Leaf] = [LEAVES[name] for name in names]
    sentences = [refusal(leaf, getattr(view, leaf.name)) for leaf in leaves]
    found = [sentence for sentence in sentences if sentence]
    if found:
        raise ValueError("\n".join(found))


def model_config_of(view: ResolvingView) -> ModelConfig:
    """The config of the model to serve, with the operator's context length and overrides."""
    return ModelConfig.from_path(
        view.model_path,
        context_length=view.context_length,
        override_json=view.json_model_override_args,
        load_format=view.load_format,
    )


def _check_sampling_defaults(view: ResolvingView, config: ModelConfig) -> None:
    """Check the model's own defaults now: a wrong one would make every request fail instead of the start."""
    if view.sampling_defaults != "model":
        return
    try:
        sampling_params_of(None, config.generation_defaults)
    except RequestRejected as error:
        raise ValueError(
            f"{config.path / 'generation_config.json'}: {error}; correct the file, or ignore it with "
            "--sampling-defaults openai"
        ) from error


def check_attention_width(view: ResolvingView, config: ModelConfig) -> None:
    """Refuse more attention-TP ranks than query heads.

    Heads that do not divide evenly are padded, but a rank without any head would only cost memory.
    """
    attn_dp = attn_dp_size_of(view.enable_dp_attention, view.dp_size)
    parts, heads = attn_dp * view.attn_cp_size, config.num_heads
    width = view.tp_size // parts
    if width > heads:
        raise ValueError(
            f"attention-TP width <= query heads must hold: {width} ranks (--tp-size {view.tp_size}, "
            f"--attn-dp-size {attn_dp}, --attn-cp-size {view.attn_cp_size}) would share the {heads} query "
            f"heads of {config.path}, and at least {width - heads} of them would hold padding only; lower "
            f"--tp-size to at most {heads * parts}, or raise --attn-dp-size"
        )


def _computes_blocks(view: ResolvingView, config: ModelConfig) -> bool:
    """Whether the blocks of a GGUF file are computed as they are where nobody said otherwise.

    Not where a type of the numbers was asked for: then they are dequantized to it.
    """
    is_open = view.dtype == "auto" and view.load_format != "dummy" and not view.enable_deterministic_inference
    return config.source == "gguf" and is_open and view.device == "cpu" and compiled.are_there()


def resolve_model(view: ResolvingView) -> None:
    refuse_early(view, "load_format", "revision", "download_dir", "quantization")
    config = model_config_of(view)
    if view.quantization == "gguf" and config.source != "gguf":
        raise ValueError(
            f"--quantization gguf needs a GGUF file, and {config.path} holds none; leave the flag out "
            "or give the .gguf file as --model-path"
        )
    if _computes_blocks(view, config):
        view.fill("model_hook", quantization="gguf")
    check_attention_width(view, config)
    _check_sampling_defaults(view, config)
    view.fill("model_hook", context_length=config.context_len)
    if not view.skip_tokenizer_init:
        view.fill("model_hook", tokenizer_path=str(config.path))
