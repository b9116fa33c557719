"""Owns one running engine from start to end: socket folder, ranks, channel and tokenizer manager.

Used by the HTTP server and by `Engine`, which add their own ways in. It must not install signal handlers, end
the process, or know about HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence

from sglang.srt.arg_groups.hooks.pipeline import resolve
from sglang.srt.arg_groups.public_values import short_description
from sglang.srt.arg_groups.supported import refuse_unserved
from sglang.srt.environ import envs
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.messages import io_struct
from sglang.srt.messages.channel import Channel
from sglang.srt.messages.control import Report
from sglang.srt.messages.generate_input import GenerateReqInput
from sglang.srt.processes.machines.rank_layout import (
    Machine,
    hold_port,
    layout_line,
    rank_configs,
    refuse_taken_ports,
    refuse_unknown_interface,
)
from sglang.srt.processes.machines.ray_machines import RayMachines, connect_to_ray
from sglang.srt.processes.model_files import (
    published_model_config,
    published_tokenizer,
    refuse_other_tokens,
)
from sglang.srt.processes.rank_processes import RANK_MODULE, RankProcesses
from sglang.srt.processes.sockets import SocketFolder
from sglang.srt.processes.wire import open_wire
from sglang.srt.runtime_context import get_context, get_device, get_parallel, get_spec, publish
from sglang.srt.server_args import ServerArgs
from sglang.srt.tokenizer.chat_rules import report_chat

logger = logging.getLogger(__name__)

#: How long ranks may take to end after the shutdown message.
STOP_GRACE_S = 5.0
_SELF_TEST_TEXT = "The capital city of France is"
_SELF_TEST_TOKENS = 8
#: What a rank reports at its start that bounds a request.
LIMITS = ("max_total_num_tokens", "context_len", "vocab_size")


def resolve_and_check(record: ServerArgs) -> None:
    """Decide every open field and refuse what is not served, before anything is started (`ValueError`)."""
    envs.check()
    resolve(record)
    refuse_unserved(record)
    refuse_other_tokens(record)
    if not record.use_ray:  # ranks elsewhere have interfaces of their own
        refuse_unknown_interface()


def speculation_line() -> str:
    """How tokens are drafted, in one line, for the log."""
    spec = get_spec()
    parts = [str(spec.speculative_algorithm)]
    if spec.speculative_draft_model_path is not None:
        parts[0] += f" with {spec.speculative_draft_model_path}"
        steps, topk = spec.speculative_num_steps, spec.speculative_eagle_topk
        parts.append("1 step" if steps == 1 else f"{steps} steps")
        parts.append("a chain" if topk == 1 else f"{topk} branches a step")
    parts.append(f"{spec.speculative_num_draft_tokens} tokens verified in a round")
    if spec.speculative_adaptive:
        parts.append("the depth adapts")
    if spec.speculative_use_block_verification:
        parts.append("block verification")
    elif spec.speculative_use_rejection_sampling:
        parts.append("rejection sampling")
    return ", ".join(parts)


class EngineCore:
    """A started engine: the constructor publishes the resolved record and starts the ranks.

    `connect` waits for them.
    """

    def __init__(self, record: ServerArgs, *, role: str, rank_module: str = RANK_MODULE) -> None:
        publish(record, role=role)
        refuse_taken_ports()
        logger.info("server_args=%s", short_description(record))
        if get_spec().speculative_algorithm is not None:
            logger.info("speculative decoding: %s", speculation_line())
        self.started_at = time.monotonic()
        self.manager: TokenizerManager | None = None
        self.rank_infos: list[Report] = []
        #: Fields that were decided after resolution, by name: what `/server_info` shows in place of the flag.
        self.decided: dict[str, object] = {}
        self._cause: str | None = None
        self._on_death: Callable[[str], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channel: Channel | None = None
        self._leaders: list[str] = []
        self._watchdog_timeout = get_device().watchdog_timeout
        #: Where leaders on other machines send; the port is held until the channel has it.
        self._address: str | None = None
        self._port: socket.socket | None = None
        self.folder = SocketFolder()
        try:
            self.ranks = self._start_ranks(record, rank_module)
        except BaseException:
            self._close_port()
            self.folder.remove()
            raise

    def _start_ranks(self, record: ServerArgs, rank_module: str) -> RankProcesses | RayMachines:
        """On this machine, or on those that Ray gives us."""
        parallel = get_parallel()
        if parallel.use_ray:
            host = connect_to_ray()
            self._port, self._address = hold_port(host)
            logger.info("layout: %s", layout_line(0))
            return RayMachines(record, server=self._address, on_death=self._rank_died, module=rank_module)
        if parallel.nnodes > 1:
            self._port, self._address = hold_port()
        configs = rank_configs(record, self.folder, Machine.of_flags(self.folder, self._address))
        logger.info("layout: %s", layout_line(len(configs)))
        self._leaders = [config.listen for config in configs if config.listen is not None]
        return RankProcesses(
            configs,
            on_death=self._rank_died,
            watchdog_timeout=self._watchdog_timeout,
            hold_limit=parallel.dist_timeout,
            module=rank_module,
        )

    async def connect(self) -> TokenizerManager:
        """Wait until all ranks are ready, then accept requests on this event loop."""
        self._loop = asyncio.get_running_loop()
        model_config = published_model_config()
        # The tokenizer is read while the ranks read their weights.
        tokenizer, ready = await asyncio.gather(
            asyncio.to_thread(published_tokenizer, model_config), asyncio.to_thread(self.ranks.wait_ready)
        )
        if tokenizer is not None:
            report_chat(tokenizer, model_config)
        self.rank_infos = [message.info for message in ready]
        for source, leaves in decisions_of_ranks(self.rank_infos).items():
            self.note_decision(source, **leaves)
        leaders = self._leaders
        if self._address is not None:
            # Each world's first rank knows where its leaders listen.
            leaders = [
                address for message in ready if message.world_rank == 0 for address in message.info["leaders"]
            ]
        self._channel = open_wire(self.folder, leaders, bind=self._address)
        self._close_port()
        self.manager = TokenizerManager(
            model_config=model_config,
            tokenizer=tokenizer,
            channel=self._channel,
            rank_info=smallest_limits(self.rank_infos),
            on_broken=self._declare_dead,
        )
        self.manager.start()
        if self._cause:
            self._declare_dead(self._cause)
        return self.manager

    def note_decision(self, source: str, **leaves: object) -> None:
        """Publish what the running engine decided for these fields; `source` names who did."""
        get_context().override(source, **leaves)
        self.decided |= leaves

    async def self_test(self) -> None:
        """Stream a few tokens from every replica, the way a request does; whatever is wrong raises here."""
        manager = self.manager
        if manager is None:
            raise RuntimeError("connect() must come before self_test()")
        timeout = envs.SGLANG_WARMUP_TIMEOUT.get()
        seconds = 600 if timeout < 0 else timeout
        replicas = manager.limits.replicas
        prompt = _self_test_prompt(manager)
        request = GenerateReqInput(
            input_ids=[prompt] * replicas,
            routed_dp_rank=list(range(replicas)),
            sampling_params={"temperature": 0.0, "max_new_tokens": _self_test_tokens(manager, len(prompt))},
            # A stream makes text of every token by itself, which is harder than one text in the end.
            stream=True,
            no_logs=True,
        )
        try:
            async with asyncio.timeout(seconds):
                async for _ in manager.generate_request(request):
                    pass
                await manager.flush_cache()
        except TimeoutError as error:
            raise TimeoutError(
                f"the self-test was not done in {seconds} s; allow more with SGLANG_WARMUP_TIMEOUT, or leave "
                "it out with --skip-server-warmup"
            ) from error

    def notify_death(self, callback: Callable[[str], None]) -> None:
        """Call `callback(cause)` on the event loop when a rank has died (at once if one has)."""
        self._on_death = callback
        if self._cause:
            callback(self._cause)

    @property
    def cause_of_death(self) -> str | None:
        return self._cause

    def _rank_died(self, cause: str) -> None:
        """Called on the watcher's thread."""
        self._cause = cause
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._declare_dead, cause)

    def _declare_dead(self, cause: str) -> None:
        self._cause = cause
        if self.manager is not None:
            self.manager.fail_all(cause)
        if self._on_death is not None:
            self._on_death(cause)

    def why_unhealthy(self) -> str | None:
        """None while every rank's loop runs; a forward pass may take the watchdog's time."""
        if self._cause:
            return self._cause
        allowed_idle = envs.SGLANG_HEALTH_CHECK_TIMEOUT.get()
        for name, heartbeat in self.ranks.heartbeats:
            allowed = max(self._watchdog_timeout, allowed_idle) if heartbeat.in_forward else allowed_idle
            if heartbeat.age() > allowed:
                return f"the loop of {name} has not turned for {heartbeat.age():.0f} s"
        return None

    async def close(self) -> None:
        """End everything; open connections are still answered, because a thread waits for the ranks."""
        await self.begin_close()
        try:
            await asyncio.to_thread(self.stop_ranks)
        finally:
            await self.finish_close()

    async def begin_close(self) -> None:
        """Fail what is open and send the ranks the shutdown message."""
        if self.manager is not None:
            await self.manager.stop()
        if self._channel is not None:
            self._channel.send(io_struct.ShutdownReq())

    def stop_ranks(self) -> None:
        """Wait for the ranks to end, on any thread; an engine that never connected is closed then."""
        will_end = self._channel is not None and not self._cause
        self.ranks.stop(grace_s=STOP_GRACE_S if will_end else 0.0)
        self._close_port()
        if self._channel is None:
            self.folder.remove()

    def _close_port(self) -> None:
        if self._port is not None:
            self._port.close()
            self._port = None

    async def finish_close(self) -> None:
        """Close the channel, on the event loop that it belongs to, and remove the socket folder."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self.folder.remove()


def smallest_limits(infos: Sequence[Report]) -> Report:
    """What every rank can take: a request may land on any of them."""
    smallest = dict(infos[0])
    for info in infos[1:]:
        for name in LIMITS:
            if name in info:
                smallest[name] = min(smallest.get(name, info[name]), info[name])
        smallest["startup_time"] = max(smallest["startup_time"], info["startup_time"])
    return smallest


def _self_test_prompt(manager: TokenizerManager) -> list[int]:
    """A text, or one token where there is no tokenizer or the text cannot be written in its vocabulary."""
    try:
        return (manager.tokenizer.encode(_SELF_TEST_TEXT) if manager.tokenizer is not None else None) or [0]
    except ValueError:
        return [0]


def decisions_of_ranks(infos: Sequence[Report]) -> dict[str, Report]:
    """Source -> the fields that ranks replaced after publish.

    Where ranks differ the smallest value counts, as for the limits: a request may land on any of them.
    """
    decided: dict[str, Report] = {}
    for info in infos:
        last = {(entry["source"], entry["name"]): entry["after"] for entry in info.get("overrides", ())}
        for (source, name), value in last.items():
            leaves = decided.setdefault(source, {})
            leaves[name] = min(leaves[name], value) if name in leaves else value
    return decided


def _self_test_tokens(manager: TokenizerManager, prompt_len: int) -> int:
    """How many tokens the self-test generates: fewer where pool or context have room for a few only.

    One without any room is refused by its flag.
    """
    limits, needed = manager.limits, prompt_len + 1
    room = min(limits.context_len, limits.pool_tokens)
    if needed > room and not limits.allow_auto_truncate:
        what, flags = "KV cache pool", "--max-total-tokens (or --mem-fraction-static)"
        if limits.context_len < limits.pool_tokens:
            what, flags = "context", "--context-length"
        raise ValueError(
            f"the {what} of {room} tokens is too small for the self-test, which takes {needed}; "
            f"raise {flags} so that it holds at least {needed}, or leave the self-test out with "
            "--skip-server-warmup"
        )
    return max(1, min(_SELF_TEST_TOKENS, room // 2, room - prompt_len))
