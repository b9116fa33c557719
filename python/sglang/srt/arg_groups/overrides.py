"""What resolution decided, kept beside the record, and the rules that combine several settings.

Read by hooks, publish, the entry points and the published context. Must not write a record: the record keeps
what the operator said, a declared result says what became of it and who decided.

A rule takes anything that answers for the fields under their bare names: a record or a view of one, resolved
or published (`runtime_context/predicates.py`). So an answer before publish and one after it cannot differ.
"""

import json
import weakref
from dataclasses import dataclass, field
from math import lcm
from typing import TYPE_CHECKING

from sglang.srt.arg_groups.adaptive_config import all_candidate_steps
from sglang.srt.arg_groups.prefill_buffer_ceiling import apply_prefill_buffer_ceiling
from sglang.srt.constants import LINEAR_ATTENTION_CHUNK

if TYPE_CHECKING:
    from sglang.srt.arg_groups.fields import Fields
else:
    Fields = object

__all__ = [
    "Declared",
    "ResolvedView",
    "attention_backends_of",
    "declare",
    "declared_provenance",
    "forget",
    "is_resolved",
    "mamba_cache_chunk_size",
    "mark_resolved",
    "max_prefill_buffer_tokens",
    "max_speculative_num_draft_tokens_of",
    "pre_capture_activation_reserve_mb_of",
    "record_of",
    "remote_instance_transfer_engine_of",
    "resolution_result",
    "resolved_view",
]

_MISSING = object()

TRANSFER_ENGINE = "transfer_engine"

#: Rough device memory that one token of a forward occupies before graphs are captured, in MiB:
#: about sixteen bf16 activations of width 4096. To be replaced by a measured figure with the GPU path.
_ACTIVATION_MB_PER_TOKEN = 0.125
#: The reserve never takes more than this share of the device.
_ACTIVATION_SHARE = 0.125
#: Requests decoded at once where neither a limit nor a captured batch size is known.
_DECODE_REQUESTS = 256


@dataclass(frozen=True, slots=True)
class Declared:
    """One decision: the field, its value, who decided."""

    name: str
    value: object
    source: str


@dataclass(slots=True)
class _Entry:
    ref: weakref.ref[object]
    results: dict[str, object] = field(default_factory=dict)
    log: list[Declared] = field(default_factory=list)
    resolved: bool = False


#: id(record) -> entry. Keyed by identity because two records can be equal field by field, and because a
#: record need not be hashable. The weak reference removes the entry and proves that the id was not reused.
_store: dict[int, _Entry] = {}


def _entry(record: object) -> _Entry | None:
    found = _store.get(id(record))
    return found if found is not None and found.ref() is record else None


def _entry_for_writing(record: object) -> _Entry:
    found = _entry(record)
    if found is not None:
        return found
    key = id(record)

    def drop(ref: weakref.ref[object]) -> None:
        if key in _store and _store[key].ref is ref:
            del _store[key]

    try:
        ref = weakref.ref(record, drop)
    except TypeError as error:
        raise TypeError(f"results cannot be declared beside a {type(record).__name__}: {error}") from error
    _store[key] = fresh = _Entry(ref)
    return fresh


def declare(record: object, source: str, /, **values: object) -> None:
    """Decide fields beside the record. The latest declaration wins; every one stays in the provenance."""
    record = record_of(record)
    known = getattr(type(record), "__struct_fields__", None)
    unknown = sorted(set(values) - set(known)) if known is not None else []
    if unknown:
        raise ValueError(
            f"{source} declares {', '.join(unknown)}, which is no field of {type(record).__name__}"
        )
    entry = _entry_for_writing(record)
    for name, value in values.items():
        entry.results[name] = value
        entry.log.append(Declared(name, value, source))


def declared_provenance(record: object) -> tuple[Declared, ...]:
    """Every decision in the order it was made, overruled ones included."""
    entry = _entry(record_of(record))
    return () if entry is None else tuple(entry.log)


def mark_resolved(record: object) -> None:
    """Say that resolution is over for this record, here or in the parent process."""
    _entry_for_writing(record_of(record)).resolved = True


def is_resolved(record: object) -> bool:
    entry = _entry(record_of(record))
    return entry is not None and entry.resolved


def forget(record: object) -> None:
    """Drop what was decided beside this record; the record itself is untouched."""
    record = record_of(record)
    if _entry(record) is not None:
        del _store[id(record)]


def resolution_result(record: object, name: str) -> object:
    """The declared result if there is one, else the record's own value. AttributeError if it has neither."""
    record = record_of(record)
    entry = _entry(record)
    if entry is not None:
        found = entry.results.get(name, _MISSING)
        if found is not _MISSING:
            return found
    return getattr(record, name)


class ResolvedView(Fields):
    """The record as resolved: each attribute is its `resolution_result`."""

    __slots__ = ("_record",)

    def __init__(self, record: object) -> None:
        object.__setattr__(self, "_record", record)

    def __getattr__(self, name: str) -> object:
        return resolution_result(object.__getattribute__(self, "_record"), name)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} cannot be written through a view; declare it beside the record")


def record_of(config: object) -> object:
    """The record behind a view, or the object itself."""
    return object.__getattribute__(config, "_record") if isinstance(config, ResolvedView) else config


def resolved_view(config: object) -> ResolvedView:
    """A view of the record; a view stays what it is."""
    return config if isinstance(config, ResolvedView) else ResolvedView(config)


def attention_backends_of(config: object) -> tuple[str | None, str | None]:
    """(prefill, decode): each phase's own kernels, else the common ones."""
    view = resolved_view(config)
    common = view.attention_backend
    return view.prefill_attention_backend or common, view.decode_attention_backend or common


def mamba_cache_chunk_size(config: object) -> int:
    """Tokens between two cacheable states: an edge of the scan's block and of a cache page at once.

    A value seeded on the record stands for the rule.
    """
    view = resolved_view(config)
    seeded = getattr(view, "_mamba_cache_chunk_size", None)
    return lcm(LINEAR_ATTENTION_CHUNK, view.page_size or 1) if seeded is None else int(seeded)


def max_prefill_buffer_tokens(config: object) -> int:
    """Most tokens one prefill forward may hold, so how large its buffers are.

    A chunk bounds a forward; without chunks the prefill budget does. Dynamic chunking over pipeline stages
    may grow a chunk up to the budget, so then the larger of the two counts. A registered provider has the
    last word.
    """
    view = resolved_view(config)
    chunk, budget = view.chunked_prefill_size or 0, view.max_prefill_tokens
    ceiling = chunk if chunk > 0 else budget
    if view.enable_dynamic_chunking and view.pp_size > 1:
        ceiling = max(ceiling, budget)
    return apply_prefill_buffer_ceiling(record_of(view), ceiling)


def max_speculative_num_draft_tokens_of(config: object) -> int | None:
    """Most tokens a verify round may ever hold; None without a configured number.

    A chain of the deepest candidate has one node more than it has steps: its root. The adaptive file is read
    at each call.
    """
    view = resolved_view(config)
    steps = all_candidate_steps(view.speculative_adaptive, view.speculative_adaptive_config)
    tokens = view.speculative_num_draft_tokens
    return None if tokens is None else max(tokens, max(steps, default=-1) + 1)


def remote_instance_transfer_engine_of(config: object, override: str | None = None) -> bool:
    """Whether weights come in, or are offered, through the transfer engine.

    `override` states the load format of one load (a draft's, a reload's) in place of the configured one.
    """
    view = resolved_view(config)
    if view.remote_instance_weight_loader_start_seed_via_transfer_engine:
        return True
    if (override or view.load_format) != "remote_instance":
        return False
    backend = view.remote_instance_weight_loader_backend
    if backend == "modelexpress":
        return _modelexpress_transport(view.modelexpress_config) == TRANSFER_ENGINE
    return backend == TRANSFER_ENGINE


def _modelexpress_transport(config: str | None) -> object:
    if not config:
        return None
    try:
        parsed = json.loads(config)
    except ValueError as error:
        raise ValueError(f"--modelexpress-config is not JSON: {error}") from error
    return parsed.get("transport") if isinstance(parsed, dict) else None


def pre_capture_activation_reserve_mb_of(config: object, gpu_mem_mb: float | None) -> int:
    """Device memory, in MiB, to keep free for activations before graphs are captured; 0 without a device.

    The widest forward decides: a prefill piece, or on a decode-only server the requests times drafted tokens.
    """
    view = resolved_view(config)
    if gpu_mem_mb is None:
        return 0
    if view.disaggregation_mode == "decode":
        graph = view.cuda_graph_config
        captured = None if graph is None else graph.decode.max_bs
        requests = view.max_running_requests or captured or _DECODE_REQUESTS
        tokens = requests * (view.speculative_num_draft_tokens or 1)
    else:
        tokens = max_prefill_buffer_tokens(view)
    return int(min(tokens * _ACTIVATION_MB_PER_TOKEN, gpu_mem_mb * _ACTIVATION_SHARE))
