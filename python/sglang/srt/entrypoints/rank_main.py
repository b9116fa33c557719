"""The entry of one rank process: publish, build the worker and the scheduler, say ready, run the loop, leave.

Started by `managers/rank_processes.py` only. Floors above are wired together here and nowhere else; it must
not resolve anything again and must not outlive its parent.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.parallel_hook import replicas_of
from sglang.srt.arg_groups.transport import unpack_configuration
from sglang.srt.entrypoints.model_files import published_model_config, published_tokenizer
from sglang.srt.entrypoints.rank_life import RankLife, leave
from sglang.srt.managers.ipc import RankChannel
from sglang.srt.managers.rank_config import RankConfig
from sglang.srt.messages import io_struct
from sglang.srt.runtime_context import SpawnRanks, get_observability, get_parallel, publish
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.cpu_binding import cores_of_rank
from sglang.srt.utils.heartbeat import Heartbeat
from sglang.srt.utils.log_format import configure_logging, rank_suffix
from sglang.srt.utils.process_title import set_process_title

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    """Exit code 0 after an ordered shutdown, 1 after a failure that the parent has been told."""
    started = time.monotonic()
    life, config = RankLife.begin(argv)
    record = unpack_configuration(config.configuration, ServerArgs)
    publish(
        record,
        role="scheduler",
        ranks=SpawnRanks(world_rank=config.world_rank, dp_rank=config.dp_rank, gpu_id=config.gpu_id),
    )
    ranks = _rank_suffix()
    configure_logging(get_observability().log_level, ranks=ranks)
    set_process_title("_".join(["sglang::scheduler", *ranks.split()]))
    channel = _open_channel(config)
    try:
        cores = cores_of_rank(config.local_rank, config.ranks_on_host)
        if cores is not None:
            os.sched_setaffinity(0, cores)
        scheduler, info = build_scheduler(config, channel)
        info["startup_time"] = time.monotonic() - started
        life.say(io_struct.RankReady(world_rank=config.world_rank, info=info))
        scheduler.run_event_loop()
    except Exception as error:  # noqa: BLE001 - told to the parent, which logs it
        report_failure(life, config, error)
        return 1
    if channel is not None:
        channel.close()
    return 0


def _open_channel(config: RankConfig) -> RankChannel | None:
    """Only the leader of an attention-TP group has sockets; its peers get everything from it."""
    if config.listen is None or config.server is None:
        return None
    return RankChannel(listen=config.listen, server=config.server)


def report_failure(life: RankLife, config: RankConfig, error: Exception) -> None:
    """Log it and tell the parent; a failed collective is another rank's failure until proven otherwise."""
    from sglang.srt.distributed.errors import CollectiveError

    secondary = isinstance(error, CollectiveError)
    if not secondary:
        # The traceback of a lost peer would only point at a socket, and bury the reason in the log.
        logger.exception("Scheduler hit an exception:")
    life.tell_failure(config.world_rank, error, secondary=secondary)


def build_scheduler(config: RankConfig, channel: RankChannel | None) -> tuple[Scheduler, dict[str, Any]]:
    """The world of this rank, its model and its loop; the second value is what the server must know."""
    # torch is loaded here and not at the top: until now the rank could be told to go within milliseconds.
    from sglang.srt.distributed.parallel_state import initialize_model_parallel
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.tp_worker import TpModelWorker

    _join_world(config)
    initialize_model_parallel()
    model_config = published_model_config()
    worker = TpModelWorker(model_config)
    tokenizer = published_tokenizer(model_config)
    scheduler = Scheduler(worker, tokenizer=tokenizer, channel=channel, heartbeat=Heartbeat(config.heartbeat))
    info = {
        "max_total_num_tokens": worker.max_total_num_tokens,
        "context_len": worker.context_len,
        "vocab_size": worker.vocab_size,
        "page_size": worker.page_size,
    }
    return scheduler, info


def _join_world(config: RankConfig) -> None:
    from torch.distributed import FileStore

    from sglang.srt.distributed.parallel_state import init_distributed_environment

    meeting = config.rendezvous
    file = meeting.removeprefix("file:") if meeting.startswith("file:") else None
    init_distributed_environment(
        world_size=config.world_size,
        rank=config.world_rank,
        local_rank=config.local_rank,
        address=None if file else meeting.removeprefix("tcp://"),
        store=FileStore(file, config.world_size) if file else None,
        timeout_s=get_parallel().dist_timeout,
    )


def _rank_suffix() -> str:
    parallel = get_parallel()
    return rank_suffix(
        (
            ("DP", parallel.attn_dp_rank, parallel.attn_dp_size),
            ("DP", parallel.dp_rank or 0, replicas_of(parallel)),
            ("PP", parallel.pp_rank, parallel.pp_size),
            ("TP", parallel.tp_rank, parallel.tp_size),
            ("EP", parallel.moe_ep_rank, parallel.moe_ep_size),
        )
    )


if __name__ == "__main__":
    leave(main(sys.argv))
