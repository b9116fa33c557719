"""Owns the two scopes in which a draft runs.

Entered by draft workers, which state each time whether their draft owns its attention. Must not take a group
from a caller: the group to install is the target's, read from the context when the scope is entered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.parallel_state import (
    GroupCoordinator,
    get_self_pp_group,
    patch_pipeline_parallel_group,
    tensor_scope,
)
from sglang.srt.runtime_context import get_parallel
from sglang.srt.runtime_context.scopes import scope_function

__all__ = ["draft_pp_context", "draft_tp_context"]


def draft_tp_context(owns_attention: bool) -> AbstractContextManager[None]:
    """The tensor placement of a draft; not to be entered inside another.

    True: the draft runs on the target's attention-TP group alone. False: it runs on the layout of the target,
    and nothing is installed.
    """
    if not isinstance(owns_attention, bool):
        raise TypeError(
            "draft_tp_context takes whether the draft owns its attention, a bool, and got "
            f"{type(owns_attention).__name__}; the group is no longer passed in"
        )
    if not owns_attention:
        return _target_placement()
    return tensor_scope(_attention_group, owns_attention=True)


def _attention_group() -> GroupCoordinator:
    return get_parallel().attn_tp_group


@scope_function
def _target_placement() -> Iterator[None]:
    if parallel_state._TP_STATE_PATCHED:
        raise AssertionError(
            "a draft tensor scope is open already; a draft is entered from the target's placement"
        )
    yield


@scope_function
def draft_pp_context() -> Iterator[None]:
    """The pipeline placement of a draft: it is not cut into stages, so this rank is its whole pipeline."""
    with patch_pipeline_parallel_group(get_self_pp_group()):
        yield
