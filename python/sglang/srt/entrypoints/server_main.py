"""Owns the life of a server process: resolve, listen, start, self-test, ready, drain, end, exit code.

Called by `launch_server` and `sglang serve`. It is the only place that handles signals. It must not import
the web framework before the ranks are starting, so that both load at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.entrypoints.engine_core import EngineCore, resolve_and_check
from sglang.srt.entrypoints.http.auth import AccessPolicy
from sglang.srt.entrypoints.http.listen_socket import listen, url_of
from sglang.srt.entrypoints.http.status import Phase, ServerStatus
from sglang.srt.entrypoints.process_start import signals_noted
from sglang.srt.environ import envs
from sglang.srt.processes.machines.node_main import run_node
from sglang.srt.processes.rank_processes import RANK_MODULE, RankDied
from sglang.srt.runtime_context import get_serving
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.log_format import configure_logging
from sglang.srt.utils.os_errors import cure_of, with_cure
from sglang.srt.utils.stop_signals import STOP_SIGNALS

if TYPE_CHECKING:
    from sglang.srt.entrypoints.http_server import HttpServer

logger = logging.getLogger(__name__)

READY_LINE = "The server is fired up and ready to roll!"
#: How long answers of failed requests may take to leave after a rank has died.
_DEATH_GRACE_S = 1.0
_DRAIN_LOG_INTERVAL_S = 5.0
OPEN_FILES = 65_536


def run_server(record: ServerArgs, *, rank_module: str | None = None, noted: list[int] | None = None) -> int:
    """Serve until the end; returns the exit code, 0 after a signal and 1 after a failure.

    `noted` holds the signals that came before, where the caller has begun to record them.
    """
    # A crash in native code prints the stacks of all threads, and so does SIGUSR1.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    allow_many_connections()
    with contextlib.ExitStack() as stack:
        if noted is None:
            noted = stack.enter_context(signals_noted())
        try:
            return _serve(record, rank_module or RANK_MODULE, noted)
        except (ValueError, OSError) as error:
            print(f"error: {with_cure(error)}", file=sys.stderr)
            logger.debug("it failed here", exc_info=True)
            return 1


def _serve(record: ServerArgs, rank_module: str, noted: list[int]) -> int:
    leave_deleted_folder()
    resolve_and_check(record)
    if record.node_rank > 0:
        configure_logging(record.log_level)
        return run_node(record, noted, rank_module=rank_module)
    sock = listen(record.host, record.port)
    configure_logging(record.log_level)
    core = EngineCore(record, role="tokenizer", rank_module=rank_module)
    try:
        return asyncio.run(ServerLife(core, sock, noted).run())
    finally:
        core.stop_ranks()


def leave_deleted_folder() -> None:
    """Leave a working folder that has been deleted: libraries that look it up would fail."""
    try:
        os.getcwd()
    except FileNotFoundError:
        print("the working folder has been deleted; the server works in / instead", file=sys.stderr)
        os.chdir("/")


def allow_many_connections() -> None:
    """Raise the limit of open files, which is often 1024: every client is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def why_no_start(error: Exception, *, testing: bool) -> str:
    """One line about a start that fails in this process.

    Before the self-test (`testing` is False) an error that the operator can mend is its sentence alone.
    """
    named = f"{type(error).__name__}: {with_cure(error)}"
    if testing:
        return f"Initialization failed. warmup error: {named}"
    plain = type(error) is ValueError or cure_of(error) is not None
    return f"Initialization failed: {with_cure(error) if plain else named}"


class ServerLife:
    """One server from its start to its exit code."""

    def __init__(self, core: EngineCore, sock: socket.socket, noted: list[int]) -> None:
        self._core = core
        self._noted = noted
        self._sock = sock
        self._status = ServerStatus(core)
        self._stop = asyncio.Event()
        self._exit_code = 0
        self._http: HttpServer | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal, number)
        for early in self._noted:
            self._on_signal(early)
        self._core.notify_death(self._on_death)
        # The web framework is imported now, while the ranks load.
        from sglang.srt.entrypoints.http_server import HttpServer, add_openai_routes, build_app

        serving = get_serving()
        address = self._sock.getsockname()
        if serving.port != address[1]:  # --port 0: the system has chosen one
            self._core.note_decision("listen_socket", port=address[1])
        policy = AccessPolicy(
            host=serving.host,
            port=address[1],
            api_key=serving.api_key,
            admin_api_key=serving.admin_api_key,
        )
        app = build_app(self._status, policy)
        self._http = http = HttpServer(app, self._sock)
        serving_http = asyncio.create_task(http.run_until_stopped(), name="http")
        serving_http.add_done_callback(self._on_http_end)
        starting = asyncio.create_task(
            self._start(lambda: add_openai_routes(app, self._status)), name="start"
        )
        await self._stop.wait()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        http.should_exit = True
        await asyncio.gather(serving_http, return_exceptions=True)
        await self._core.close()
        return self._exit_code

    async def _start(self, add_routes: Callable[[], None]) -> None:
        """Connect, add the routes that need the engine, run the self-test, and print the ready line."""
        testing = False
        try:
            await self._core.connect()
            add_routes()
            if not get_serving().skip_server_warmup:
                testing = True
                await self._core.self_test()
        except RankDied as error:
            # The watcher reports it too, but not where the rank died before this loop ran.
            self._on_death(str(error))
            return
        except Exception as error:
            self._fail(why_no_start(error, testing=testing))
            logger.debug("the start failed here", exc_info=True)
            return
        self._status.become(Phase.UP)
        logger.info(READY_LINE)
        logger.info("Try it:\n%s", self._example(), extra={"many_lines": True})

    def _example(self) -> str:
        """A command to paste; where a key is set it stands there as `$KEY`."""
        serving = get_serving()
        url = url_of(serving.host, self._sock.getsockname()[1], tls=serving.ssl_certfile is not None)
        key = ' -H "Authorization: Bearer $KEY"' if serving.api_key else ""
        question = '[{"role": "user", "content": "What is the capital of France?"}]'
        # Greedy and short: a small model may otherwise go on until its context is full.
        limits = '"temperature": 0, "max_tokens": 64'
        body = f'{{"messages": {question}, {limits}}}'
        route = "/v1/chat/completions"
        manager = self._status.manager
        if manager.tokenizer is None:
            route, body = "/generate", '{"input_ids": [1, 2, 3]}'
        elif manager.tokenizer.chat_template is None:
            route, body = "/v1/completions", f'{{"prompt": "The capital of France is", {limits}}}'
        return f"  curl {url}{route} -H 'Content-Type: application/json'{key} -d '{body}'"

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGTERM:
            self._on_sigterm()
            return
        logger.info("%s received; shutting down", signal.Signals(number).name)
        self._end_at_once()

    def _on_sigterm(self) -> None:
        if self._status.phase is Phase.DRAINING or envs.SGLANG_FORCE_SHUTDOWN.get():
            logger.info("SIGTERM received; ending at once")
            self._end_at_once()
            return
        logger.info("SIGTERM received; finishing the requests under way")
        asyncio.get_running_loop().create_task(self._drain(), name="drain")

    def _end_at_once(self) -> None:
        self._status.become(Phase.DRAINING)
        manager = self._core.manager
        if manager is not None:
            manager.fail_all("the server was shut down")
        if self._http is not None:
            self._http.force_exit = True
        self._stop.set()

    async def _drain(self) -> None:
        """`/health` turns 503 at once, new requests are refused, the ones under way end normally."""
        self._status.become(Phase.DRAINING)
        manager = self._core.manager
        if manager is not None:
            manager.stop_accepting("the server is shutting down and takes no new requests")
            since_log = _DRAIN_LOG_INTERVAL_S
            while manager.num_open and not self._stop.is_set():
                if since_log >= _DRAIN_LOG_INTERVAL_S:
                    logger.info("Gracefully exiting... Remaining number of requests %d", manager.num_open)
                    since_log = 0.0
                await asyncio.sleep(0.05)
                since_log += 0.05
        self._stop.set()

    def _on_http_end(self, task: asyncio.Task[None]) -> None:
        """Without its HTTP side a server is of no use, even if its ranks are well."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(f"the HTTP server failed: {type(error).__name__}: {error}")
        elif not self._stop.is_set():
            self._fail("the HTTP server ended by itself")

    def _on_death(self, cause: str) -> None:
        self._fail(f"a scheduler process has died: {cause}")

    def _fail(self, cause: str) -> None:
        """The engine cannot go on: say why, let the answers of failed requests leave, end with code 1."""
        if self._stop.is_set() or self._status.phase is Phase.DEAD:
            return
        logger.error(cause)
        self._status.become(Phase.DEAD, cause)
        self._exit_code = 1
        manager = self._core.manager
        if manager is not None:
            manager.fail_all(cause)
        asyncio.get_running_loop().call_later(_DEATH_GRACE_S if manager is not None else 0.0, self._stop.set)
