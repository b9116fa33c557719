"""Owns how a model runner gets its recorded graphs: whether, for which sizes, over which back end.

Called when a rank has its pools, in the scope that is open then. It must not decide what a graph computes.
All ranks that capture together come to the same answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.pools.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.runner.captured_graphs import CapturedGraphs
from sglang.srt.model_executor.runner.decode_graph_runner import DecodeGraphRunner
from sglang.srt.model_executor.runner.static_batch import ForwardShape, GraphSizes
from sglang.srt.model_executor.runner_backend.base import GraphBackend
from sglang.srt.model_executor.runner_backend.cpu_graph import CpuGraphBackend
from sglang.srt.model_executor.runner_utils.sizes import (
    LEAST_FREE_BYTES,
    MOST_REQUESTS_ON_CPU,
    check_sizes,
    default_sizes,
    may_capture,
)
from sglang.srt.models.common.decoder import DecoderForCausalLM
from sglang.srt.runtime_context import get_exec, get_parallel

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


def published_graph_backend() -> Callable[[], GraphBackend] | None:
    """What records the decode steps and rounds of this server; None where they run eagerly."""
    return CpuGraphBackend if get_exec().graph.cuda_graph_backend_decode == "cpu" else None


def most_recorded_requests(table: ReqToTokenPool) -> int:
    """The largest batch for which graphs are recorded, as published."""
    return min(get_exec().graph.cuda_graph_max_bs_decode or MOST_REQUESTS_ON_CPU, table.size)


def graph_sizes(table: ReqToTokenPool, *, width: int, max_requests: int) -> GraphSizes:
    """The sizes that serve every batch of up to so many requests over this table, or published ones.

    `ValueError` where the ranks of an attention-TP group cannot share the rows of a published size.
    """
    graph, attn_tp_size = get_exec().graph, get_parallel().attn_tp_size
    sizes = graph.cuda_graph_bs_decode
    if sizes is None:
        sizes = default_sizes(max_requests, width=width, attn_tp_size=attn_tp_size)
    else:
        check_sizes(sizes, width=width, attn_tp_size=attn_tp_size)
    return GraphSizes(
        sizes,
        max_len=table.req_to_token.shape[1],
        spare_row=table.spare_row,
        pads=not graph.disable_cuda_graph_padding,
    )


def add_decode_graphs(
    runner: ModelRunner[DecoderForCausalLM],
    table: ReqToTokenPool,
    shape: ForwardShape,
    make_backend: Callable[[], GraphBackend],
    *,
    max_requests: int,
    free_bytes: int,
    captures_hidden: bool = False,
) -> DecodeGraphRunner | None:
    """Capture a runner's decode steps or verify rounds; None where some rank has no memory for it.

    Batches of another shape go on running eagerly.
    """
    parallel = get_parallel()
    if not may_capture(free_bytes, parallel.tp_group if parallel.tp_size > 1 else None):
        logger.warning(
            "No graphs are captured for %s: a rank has less than %d MiB free; steps run eagerly",
            shape.mode.value,
            LEAST_FREE_BYTES >> 20,
        )
        return None
    graphs = DecodeGraphRunner(
        runner.model,
        runner.attn_backend,
        shape,
        graph_sizes(table, width=shape.width, max_requests=max_requests),
        make_backend=make_backend,
        device=runner.device,
        captures_hidden=captures_hidden,
    )
    graphs.graphs.capture()
    runner.graph_runners.append(graphs)
    logger.info(_summary(graphs.graphs, shape))
    return graphs


def _summary(graphs: CapturedGraphs, shape: ForwardShape) -> str:
    """The line that log readers search for once graphs are there."""
    shared = graphs.shared_bytes
    memory = "unknown" if shared is None else f"{shared / 2**20:.1f} MiB"
    return (
        f"Graphs are captured. mode={shape.mode.value}, #graphs={len(graphs.sizes)}, sizes={graphs.sizes}, "
        f"memory of all graphs so far={memory}"
    )
