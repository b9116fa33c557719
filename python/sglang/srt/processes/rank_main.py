"""Owns the entry of one rank process: publish, build worker and scheduler, report ready, run the loop, leave.

Started by `processes/rank_processes.py` only. It must not resolve anything again and must not outlive its
parent.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from typing import TYPE_CHECKING

from setproctitle import setproctitle

from sglang.srt.arg_groups.public_values import common_values
from sglang.srt.arg_groups.transport import unpack_configuration
from sglang.srt.constants import LOAD_TIMEOUT_S
from sglang.srt.messages import io_struct
from sglang.srt.processes.cpu_binding import bind_to, cores_of_rank
from sglang.srt.processes.heartbeat import Heartbeat
from sglang.srt.processes.model_files import published_model_config, published_tokenizer
from sglang.srt.processes.rank_config import RankConfig
from sglang.srt.processes.rank_life import RankLife, leave
from sglang.srt.processes.wire import RankChannel
from sglang.srt.runtime_context import SpawnRanks, get_context, get_observability, get_parallel, publish
from sglang.srt.runtime_context.placement import override_log_of
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.log_format import configure_logging, rank_suffix
from sglang.srt.utils.os_errors import cure_of

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    """Exit code 0 after an ordered shutdown, 1 after a failure that was reported to the parent."""
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
    # What operators search `ps` and `top` for.
    setproctitle("_".join(["sglang::scheduler", *ranks.split()]))
    starting = True
    try:
        cores = cores_of_rank(config.local_rank, config.ranks_on_host)
        if cores is not None:
            bind_to(cores)
        channel, leaders = join(config, record)
        scheduler, info = build_scheduler(config, channel)
        info |= {"startup_time": time.monotonic() - started, "leaders": leaders}
        life.send(io_struct.RankReady(world_rank=config.world_rank, info=info))
        starting = False
        # What is here now stays. Collections that looked through modules and model again would each hold the
        # loop for tenths of a second, as soon as a crowd of requests sets one off.
        gc.collect()
        gc.freeze()
        scheduler.run_event_loop()
    except Exception as error:  # noqa: BLE001 - reported to the parent, which logs it
        report_failure(life, config, error, starting=starting)
        return 1
    if channel is not None:
        channel.close()
    return 0


def join(config: RankConfig, record: ServerArgs) -> tuple[RankChannel | None, list[str]]:
    """Meet the other ranks, build the groups, and open this rank's channel if it is a leader.

    The second value lists where all leaders of this world listen, in its order. Only the leader of an
    attention-TP group has a channel; its peers get everything from it.
    """
    # torch is imported here and not at the top: until now the rank could be ended within milliseconds.
    from sglang.srt.distributed.parallel_state import initialize_model_parallel
    from sglang.srt.distributed.rendezvous import join_world

    parallel = get_parallel()
    join_world(
        rendezvous=config.rendezvous,
        world_rank=config.world_rank,
        world_size=config.world_size,
        local_rank=config.local_rank,
        timeout_s=parallel.dist_timeout,
        # On one machine the parent sees which rank is missing, and a slow start must not look like a lost
        # one. Several machines are started by hand, one after the other.
        meeting_timeout_s=LOAD_TIMEOUT_S if parallel.nnodes == 1 or parallel.dist_timeout is None else None,
        configuration=common_values(record),
    )
    initialize_model_parallel()
    world = parallel.world_group
    # A rank on another machine does not see the server's folder and learns the server's address here.
    server = world.broadcast_object(config.server, src=0)
    channel = None
    if config.listen is not None:
        channel = RankChannel(listen=config.listen, server=config.server or server)
    listening = world.all_gather_object(None if channel is None else channel.address)
    return channel, [address for address in listening if address is not None]


def report_failure(life: RankLife, config: RankConfig, error: Exception, *, starting: bool) -> None:
    """Log the failure and report it to the parent; a failed collective is taken for another rank's failure.

    A start that the operator can correct is reported by its sentence alone.
    """
    from sglang.srt.distributed.errors import CollectiveError

    secondary = isinstance(error, CollectiveError)
    plain = starting and (type(error) is ValueError or cure_of(error) is not None)
    if plain:
        logger.debug("the start failed here", exc_info=True)
    elif not secondary:
        # The traceback of a lost peer would only point at a socket, and bury the reason in the log.
        logger.exception("Scheduler hit an exception:")
    life.send_failure(config.world_rank, error, secondary=secondary, plain=plain)


def build_scheduler(config: RankConfig, channel: RankChannel | None) -> tuple[Scheduler, dict[str, object]]:
    """The model of this rank and its loop; the second value is what the server needs to know of them."""
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.speculative.algorithms.served import DRAFTERS
    from sglang.srt.speculative.spec_registry import make_worker

    initialize_moe_config()  # before any layer asks which expert back ends are active
    model_config = published_model_config()
    tokenizer = published_tokenizer(model_config)
    num_ids = None if tokenizer is None else tokenizer.num_ids
    worker = make_worker(model_config, DRAFTERS, num_ids=num_ids)
    scheduler = Scheduler(worker, tokenizer=tokenizer, channel=channel, heartbeat=Heartbeat(config.heartbeat))
    return scheduler, {
        "max_total_num_tokens": worker.max_total_num_tokens,
        "context_len": worker.context_len,
        "vocab_size": worker.vocab_size,
        "page_size": worker.page_size,
        "overrides": override_log_of(get_context()),
    }


def _rank_suffix() -> str:
    parallel = get_parallel()
    return rank_suffix(
        (
            ("DP", parallel.replica_rank, parallel.num_replicas),
            ("PP", parallel.pp_rank, parallel.pp_size),
            ("TP", parallel.tp_rank, parallel.tp_size),
            ("EP", parallel.moe_ep_rank, parallel.moe_ep_size),
        )
    )


if __name__ == "__main__":
    leave(main(sys.argv))
