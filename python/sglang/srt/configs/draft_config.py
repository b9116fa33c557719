"""What the files of a draft say about it, and whether it fits the model that it drafts for.

Read by resolution, which refuses a wrong draft before a process starts, and by whoever builds the draft. A
`DraftConfig` that exists fits its target, except that vocabularies of tokenizers are compared elsewhere
(`tokenizer/draft_vocabulary.py`). It must not import torch or read tensor data.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Literal

from sglang.srt.configs.architectures.config_values import ConfigValues
from sglang.srt.configs.architectures.decoder import DecoderShape, read_decoder
from sglang.srt.configs.json_file import read_json_object
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_path import resolve_model_path
from sglang.srt.configs.safetensors_header import TensorEntry, checkpoint_entries
from sglang.srt.configs.stored_int8 import refuse_quantized
from sglang.srt.environ import envs

DraftKind = Literal["eagle", "eagle3", "standalone"]

#: Class name in a draft's config -> the kind of draft. Whatever else is served is a whole model.
DRAFT_ARCHITECTURES: dict[str, DraftKind] = {
    "LlamaForCausalLMEagle": "eagle",
    "LlamaForCausalLMEagle3": "eagle3",
}
#: Kind -> the algorithm that drafts with it.
_ALGORITHM_OF: dict[DraftKind, str] = {"eagle": "EAGLE", "eagle3": "EAGLE3", "standalone": "STANDALONE"}
_FLAG = "--speculative-draft-model-path"
#: Tensors that captured rows go through before the first layer.
_BEFORE_FUSION = ("fc.", "fc_norm.", "aux_norm_", "norm_before_fc.")
_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleHead:
    """What an EAGLE or EAGLE3 draft has beside its decoder layers.

    Before them `fc` fuses what is captured from the target; the draft reads the target's embedding table.
    """

    #: Layers of the target whose outputs are captured, low to high in the order of the concatenation; empty:
    #: the one hidden row after the target's last norm.
    aux_layers: tuple[int, ...]
    #: Width of one captured row: the target's hidden size.
    target_hidden_size: int
    #: Rows of the draft's own head; None: a head of the target scores the whole vocabulary.
    draft_vocab_size: int | None
    #: That head of the target is its embedding table.
    tied_head: bool
    #: Columns of `fc`; None: there is no `fc`, since a captured row is as wide as the draft.
    fc_inputs: int | None
    fc_bias: bool
    #: One norm over the concatenated rows before `fc`.
    norm_before_fc: bool
    #: A norm for each captured row before `fc`.
    norm_each_capture: bool
    #: The recurrent state is what comes out of the last norm, not what goes into it.
    norm_output: bool

    @property
    def feature_width(self) -> int:
        """Width of what the target hands over for each token."""
        return max(len(self.aux_layers), 1) * self.target_hidden_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """A draft that fits its target.

    `model` is its decoder as a model of its own, with the target's context. For EAGLE and EAGLE3 the layers
    are counted in the tensors, and positions reach as far as the target's whatever the draft's config says.
    """

    kind: DraftKind
    model: ModelConfig
    #: None for STANDALONE.
    head: EagleHead | None

    @property
    def has_reduced_vocabulary(self) -> bool:
        """Some tokens of the target can never be proposed, and draft ids are not token ids."""
        size = None if self.head is None else self.head.draft_vocab_size
        return size is not None and size < self.model.vocab_size

    @classmethod
    def from_path(
        cls,
        path: str | os.PathLike[str],
        *,
        kind: DraftKind,
        target: ModelConfig,
        load_format: str = "auto",
    ) -> DraftConfig:
        """Read the draft of an algorithm for this target.

        Raises ValueError with both numbers where the draft is of another kind or does not fit.
        """
        resolved = _resolved(path, kind)
        _check_kind(resolved, kind)
        if kind == "standalone":
            model = ModelConfig.from_path(resolved, load_format=load_format)
            _check_context(model, target)
            model = dataclasses.replace(model, context_len=target.context_len)
            return cls(kind=kind, model=model, head=None)
        if load_format == "gguf":
            raise ValueError(
                f"--speculative-draft-load-format gguf is for STANDALONE, and {resolved} is a draft for "
                f"{_ALGORITHM_OF[kind]}; use auto"
            )
        config = resolved / "config.json"
        where = f"{_FLAG} {config}"
        tensors = {} if load_format == "dummy" else _tensors(resolved)
        reader = _HeadReader(read_json_object(config), where, kind, target, tensors)
        shape = reader.shape()
        head = reader.head(shape)
        _check_widths(shape, head, target, where)
        if tensors:
            _check_tensors(tensors, shape, head, resolved)
        model = dataclasses.replace(
            target,
            **vars(shape),
            architecture=reader.architecture,
            checkpoint_dtype=reader.dtype,
            source="hf",
            path=resolved,
        )
        return cls(kind=kind, model=model, head=head)


def _resolved(path: str | os.PathLike[str], kind: DraftKind) -> pathlib.Path:
    """Where the draft lies. A head is never a file or an alias, so neither is named as a cure."""
    try:
        return resolve_model_path(path, _FLAG)
    except ValueError as error:
        text, _, cure = str(error).partition("; give a folder")
        if kind == "standalone" or not cure:
            raise
        raise ValueError(f"{text}; give the folder of an {_ALGORITHM_OF[kind]} draft") from None


def _check_kind(path: pathlib.Path, kind: DraftKind) -> None:
    """Refuse a draft of another algorithm, by the class that its config names."""
    found: DraftKind = "standalone"
    shown = "a GGUF model"
    if path.is_dir():
        names = read_json_object(path / "config.json").get("architectures")
        known = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
        found = next((DRAFT_ARCHITECTURES[name] for name in known if name in DRAFT_ARCHITECTURES), found)
        shown = ", ".join(known) or "a model without architectures in its config.json"
    if found == kind:
        return
    classes = [name for name, it in DRAFT_ARCHITECTURES.items() if it == kind]
    wanted = f"a draft whose config.json names {classes[0]}" if classes else "a whole model"
    raise ValueError(
        f"{_FLAG} {path} holds {shown}, which drafts for {_ALGORITHM_OF[found]} and not for "
        f"{_ALGORITHM_OF[kind]}; use --speculative-algorithm {_ALGORITHM_OF[found]}, or give {wanted}"
    )


def _check_context(draft: ModelConfig, target: ModelConfig) -> None:
    """A whole model has its own reach; beyond it the draft still runs, but its guesses are worth nothing."""
    if draft.context_len >= target.context_len or envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN.get():
        return
    raise ValueError(
        f"{_FLAG} {draft.path} reads {draft.context_len} tokens, and the model {target.context_len}; use a "
        f"draft with the same context, or lower --context-length to {draft.context_len} (with "
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 longer texts are served with a draft that guesses "
        "there)"
    )


def _tensors(folder: pathlib.Path) -> dict[str, TensorEntry]:
    """The tensors of the draft, without the prefix that some exports write before every name."""
    found: dict[str, TensorEntry] = {}
    for entries in checkpoint_entries(folder).values():
        for name, entry in entries.items():
            found[name.removeprefix("model.").replace("midlayer.", "layers.0.")] = entry
    return found


class _HeadReader:
    """Reads one draft's config; keys may stand at the top or inside `eagle_config`."""

    def __init__(
        self,
        config: Mapping[str, object],
        where: str,
        kind: DraftKind,
        target: ModelConfig,
        tensors: Mapping[str, TensorEntry],
    ) -> None:
        refuse_quantized(config, where)
        nested = config.get("eagle_config") or {}
        if not isinstance(nested, dict):
            raise ValueError(f"{where}: eagle_config is {nested!r}; it must be an object or null")
        # The draft's own reach is often written too short; its rows stand at the target's positions.
        reach = {"max_position_embeddings": target.max_position_embeddings}
        self._values = ConfigValues({**config, **nested, **reach}, where)
        self._where, self._kind, self._target, self._tensors = where, kind, target, tensors
        self.architecture = next(name for name, it in DRAFT_ARCHITECTURES.items() if it == kind)
        self.dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")

    def shape(self) -> DecoderShape:
        """The decoder of the draft, with as many layers as there are tensors for."""
        shape = read_decoder(self._values)
        found = {int(match[1]) for name in self._tensors if (match := _LAYER.match(name))}
        return dataclasses.replace(shape, num_layers=len(found)) if found else shape

    def head(self, shape: DecoderShape) -> EagleHead:
        values, third = self._values, self._kind == "eagle3"
        layers = self._aux_layers() if third else ()
        width = values.positive("target_hidden_size", self._target.hidden_size)
        captured = max(len(layers), 1) * width
        own = self._draft_vocab_size() if third else None
        # EAGLE fuses the captured row with the embedding; EAGLE3 fuses captured rows where they are wider.
        wider = captured if captured != shape.hidden_size else None
        return EagleHead(
            aux_layers=layers,
            target_hidden_size=width,
            draft_vocab_size=own,
            tied_head=third and own is None and shape.tie_word_embeddings,
            fc_inputs=wider if third else captured + shape.hidden_size,
            fc_bias="fc.bias" in self._tensors if self._tensors else values.boolean("bias"),
            norm_before_fc=values.boolean("norm_before_fc"),
            norm_each_capture=values.boolean("fc_norm") or values.boolean("use_aux_norm"),
            norm_output=values.boolean("norm_output"),
        )

    def _draft_vocab_size(self) -> int | None:
        stated = self._values.values.get("draft_vocab_size")
        return None if stated is None else self._values.positive("draft_vocab_size")

    def _aux_layers(self) -> tuple[int, ...]:
        """Ids of layer outputs, from 0; by default one near each end and one in the middle."""
        values, layers = self._values.values, self._target.num_layers
        if values.get("use_aux_hidden_state") is False:
            return ()
        stated = values.get("eagle_aux_hidden_state_layer_ids")
        ids = [1, layers // 2 - 1, layers - 4] if stated is None else stated
        if not isinstance(ids, list) or not ids or not all(type(index) is int for index in ids):
            raise ValueError(
                f"{self._where}: eagle_aux_hidden_state_layer_ids is {ids!r}; it must be a list of layer ids"
            )
        outside = [index for index in ids if not 0 <= index < layers]
        if outside:
            source = "by default" if stated is None else "in eagle_aux_hidden_state_layer_ids"
            raise ValueError(
                f"{self._where}: the draft reads the outputs of layers {ids} of the model ({source}), and "
                f"{self._target.path} has layers 0 to {layers - 1}; use a draft that was trained for this "
                "model, or state its layers in eagle_aux_hidden_state_layer_ids"
            )
        pieces = self._values.positive("num_aux_hidden_states", len(ids))
        if pieces != len(ids):
            raise ValueError(
                f"{self._where}: num_aux_hidden_states is {pieces}, and the captured layers are {ids}"
            )
        return tuple(ids)


def _check_widths(shape: DecoderShape, head: EagleHead, target: ModelConfig, where: str) -> None:
    """The draft reads the target's hidden rows and embeddings, so both agree on widths and vocabulary."""
    pairs = (
        ("hidden_size", shape.hidden_size, target.hidden_size),
        ("target_hidden_size", head.target_hidden_size, target.hidden_size),
        ("vocab_size", shape.vocab_size, target.vocab_size),
    )
    for key, found, wanted in pairs:
        if found != wanted:
            raise ValueError(
                f"{where}: the draft's {key} is {found}, and the model {target.path} has {wanted}; use a "
                "draft that was trained for this model"
            )
    if head.draft_vocab_size is not None and head.draft_vocab_size > target.vocab_size:
        raise ValueError(
            f"{where}: draft_vocab_size {head.draft_vocab_size} is above the vocabulary of "
            f"{target.vocab_size}; use a draft that was trained for this model"
        )


def _check_tensors(
    tensors: Mapping[str, TensorEntry], shape: DecoderShape, head: EagleHead, folder: pathlib.Path
) -> None:
    """The tensors that a wrong config would make useless have the shapes that it says."""
    own = head.draft_vocab_size
    unused = [] if head.fc_inputs is not None else [n for n in tensors if n.startswith(_BEFORE_FUSION)]
    if unused:
        raise ValueError(
            f"{_FLAG} {folder} holds {', '.join(unused)}, and its config captures one row as wide as the "
            f"draft ({shape.hidden_size}), which is not fused: such a draft is not served; use one that "
            "captures several layers"
        )
    wanted: dict[str, tuple[int, ...]] = {}
    if head.fc_inputs is not None:
        wanted["fc.weight"] = (shape.hidden_size, head.fc_inputs)
    if own is not None:
        wanted["lm_head.weight"] = (own, shape.hidden_size)
        if own < shape.vocab_size:
            wanted["d2t"] = (own,)
    for name, size in wanted.items():
        if name not in tensors:
            raise ValueError(
                f"{_FLAG} {folder} has no tensor {name}, and its config asks for one of shape {list(size)}; "
                "fetch the draft again"
            )
        if tensors[name].shape != size:
            raise ValueError(
                f"{_FLAG} {folder}: tensor {name} has the shape {list(tensors[name].shape)}, and its config "
                f"and the model ask for {list(size)}; use a draft that was trained for this model"
            )
