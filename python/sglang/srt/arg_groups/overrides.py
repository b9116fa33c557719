"""What resolution decided, kept beside the record, and the predicates asked of a config-shaped object.

Read by hooks, publish and the doors. Must not write a record: the record keeps what the operator said, a
declared result says what became of it and who decided.
"""

import weakref
from dataclasses import dataclass
from typing import Any

from sglang.srt.arg_groups import predicates
from sglang.srt.arg_groups.adaptive_config import all_candidate_steps
from sglang.srt.arg_groups.fields import LEAVES
from sglang.srt.arg_groups.prefill_buffer_ceiling import apply_prefill_buffer_ceiling

__all__ = [
    "Declared",
    "ResolvedView",
    "attention_backends_of",
    "declare",
    "declared_provenance",
    "declared_results",
    "forget",
    "is_resolved",
    "mamba_cache_chunk_size",
    "max_prefill_buffer_tokens",
    "mark_resolved",
    "max_speculative_num_draft_tokens_of",
    "pre_capture_activation_reserve_mb_of",
    "provenance_of",
    "record_of",
    "remote_instance_transfer_engine_of",
    "resolution_result",
    "resolved_view",
]

_MISSING = object()


@dataclass(frozen=True, slots=True)
class Declared:
    """One decision: the field, its value, who decided."""

    name: str
    value: Any
    source: str


@dataclass(slots=True)
class _Entry:
    ref: "weakref.ref[Any]"
    results: dict[str, Any]
    log: list[Declared]
    resolved: bool = False


#: id(record) -> entry. Keyed by identity because two records can be equal field by field, and because a
#: record need not be hashable; the weak reference both cleans up and proves that the id was not reused.
_store: dict[int, _Entry] = {}


def _entry(record: Any) -> _Entry | None:
    found = _store.get(id(record))
    return found if found is not None and found.ref() is record else None


def _entry_for_writing(record: Any) -> _Entry:
    found = _entry(record)
    if found is not None:
        return found
    key = id(record)

    def drop(ref: "weakref.ref[Any]") -> None:
        if key in _store and _store[key].ref is ref:
            del _store[key]

    try:
        ref = weakref.ref(record, drop)
    except TypeError as error:
        raise TypeError(f"results cannot be declared beside a {type(record).__name__}: {error}") from error
    fresh = _Entry(ref, {}, [])
    _store[key] = fresh
    return fresh


def _known_fields(record: Any) -> frozenset[str] | None:
    names = getattr(type(record), "__struct_fields__", None)
    return None if names is None else frozenset(names)


def declare(record: Any, source: str, /, **values: Any) -> None:
    """Decide fields beside the record. The latest declaration wins; every one stays in the provenance."""
    record = record_of(record)
    known = _known_fields(record)
    unknown = sorted(set(values) - known) if known is not None else []
    if unknown:
        raise ValueError(
            f"{source} declares {', '.join(unknown)}, which is no field of {type(record).__name__}"
        )
    entry = _entry_for_writing(record)
    for name, value in values.items():
        entry.results[name] = value
        entry.log.append(Declared(name, value, source))


def declared_results(record: Any) -> dict[str, Any]:
    """A copy of everything decided beside this record: name -> value."""
    entry = _entry(record_of(record))
    return {} if entry is None else dict(entry.results)


def declared_provenance(record: Any) -> tuple[Declared, ...]:
    """Every decision in the order it was made, overruled ones included."""
    entry = _entry(record_of(record))
    return () if entry is None else tuple(entry.log)


def provenance_of(record: Any, name: str) -> str:
    """Who set what this field resolves to: a hook's name, else "operator", or "default"."""
    record = record_of(record)
    decided = [item.source for item in declared_provenance(record) if item.name == name]
    if decided:
        return decided[-1]
    leaf = LEAVES[name]
    return "default" if not leaf.required and getattr(record, name) == leaf.default else "operator"


def mark_resolved(record: Any) -> None:
    """Say that resolution is over for this record (or happened in the parent process)."""
    _entry_for_writing(record_of(record)).resolved = True


def is_resolved(record: Any) -> bool:
    entry = _entry(record_of(record))
    return entry is not None and entry.resolved


def forget(record: Any) -> None:
    """Drop what was decided beside this record; the record itself is untouched."""
    record = record_of(record)
    if _entry(record) is not None:
        del _store[id(record)]


def resolution_result(record: Any, name: str) -> Any:
    """The declared result if there is one, else the record's own value. AttributeError if it has neither."""
    record = record_of(record)
    entry = _entry(record)
    if entry is not None:
        found = entry.results.get(name, _MISSING)
        if found is not _MISSING:
            return found
    return getattr(record, name)


class ResolvedView:
    """Attribute reads answered by ``resolution_result``; undeclared names fall through to the record."""

    __slots__ = ("_record",)

    def __init__(self, record: Any) -> None:
        object.__setattr__(self, "_record", record)

    def __getattr__(self, name: str) -> Any:
        return resolution_result(object.__getattribute__(self, "_record"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name} cannot be written through a view; declare it beside the record")


def record_of(config: Any) -> Any:
    """The record behind a view, or the object itself."""
    return object.__getattribute__(config, "_record") if isinstance(config, ResolvedView) else config


def resolved_view(config: Any) -> ResolvedView:
    return ResolvedView(record_of(config))


def attention_backends_of(config: Any) -> tuple[str | None, str | None]:
    """(prefill, decode) kernels."""
    view = resolved_view(config)
    return predicates.attention_backend_pair(
        view.attention_backend, view.prefill_attention_backend, view.decode_attention_backend
    )


def mamba_cache_chunk_size(config: Any) -> int:
    """Tokens between two cacheable states; a value seeded on the record stands for the rule."""
    view = resolved_view(config)
    seeded = getattr(view, "_mamba_cache_chunk_size", None)
    return predicates.mamba_chunk_size(view.page_size) if seeded is None else int(seeded)


def max_prefill_buffer_tokens(config: Any) -> int:
    """Rows that buffers of a prefill forward need."""
    view = resolved_view(config)
    default = predicates.prefill_token_ceiling(
        chunked_prefill_size=view.chunked_prefill_size,
        max_prefill_tokens=view.max_prefill_tokens,
        enable_dynamic_chunking=view.enable_dynamic_chunking,
        pp_size=view.pp_size,
    )
    return apply_prefill_buffer_ceiling(record_of(view), default)


def max_speculative_num_draft_tokens_of(config: Any) -> int | None:
    """Most tokens a verify round may hold; reads the adaptive file at each call."""
    view = resolved_view(config)
    steps = all_candidate_steps(view.speculative_adaptive, view.speculative_adaptive_config)
    return predicates.max_draft_tokens(view.speculative_num_draft_tokens, steps)


def remote_instance_transfer_engine_of(config: Any, override: str | None = None) -> bool:
    view = resolved_view(config)
    return predicates.uses_transfer_engine(
        load_format=view.load_format,
        backend=view.remote_instance_weight_loader_backend,
        modelexpress_config=view.modelexpress_config,
        start_seed=view.remote_instance_weight_loader_start_seed_via_transfer_engine,
        override=override,
    )


def pre_capture_activation_reserve_mb_of(config: Any, gpu_mem_mb: float | None) -> int:
    view = resolved_view(config)
    graph = view.cuda_graph_config
    return predicates.activation_reserve_mb(
        gpu_mem_mb,
        disaggregation_mode=view.disaggregation_mode,
        prefill_tokens=max_prefill_buffer_tokens(view),
        max_running_requests=view.max_running_requests,
        captured_decode_bs=None if graph is None else graph.decode.max_bs,
        num_draft_tokens=view.speculative_num_draft_tokens,
    )
