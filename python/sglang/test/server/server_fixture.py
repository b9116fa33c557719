"""Owns a real server process for tests, on a free port and with a socket folder of its own.

Used by the server lane. `python -m sglang.test.server.server_fixture RANK_MODULE ARGS` is the server over
ranks of another module. It must not leave a process or a file behind, whatever a test does.
"""

from __future__ import annotations

import contextlib
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import psutil

from sglang.srt.entrypoints.process_start import serve
from sglang.srt.entrypoints.server_main import READY_LINE
from sglang.srt.environ import child_environment
from sglang.test.fakes.fake_rank import FAKE_RANK
from sglang.test.ports import held_ports
from sglang.test.waiting import HANG_GUARD_S, wait_until


class RunningServer:
    """One server process and what a test asks of it."""

    def __init__(
        self,
        arguments: list[str],
        *,
        port: int,
        rank_module: str | None,
        environment: dict[str, str],
        folder: pathlib.Path,
        wrapper: Sequence[str],
    ) -> None:
        self.runtime_dir = folder / "run"
        self.runtime_dir.mkdir(exist_ok=True)
        self.port = port
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = folder / f"server-{self.port}.log"
        command = (
            ["sglang.test.server.server_fixture", rank_module] if rank_module else ["sglang.launch_server"]
        )
        defaults = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*wrapper, sys.executable, "-m", *command, "--port", str(self.port), *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **child_environment(**defaults),
                    "SGLANG_RUNTIME_DIR": str(self.runtime_dir),
                    **environment,
                },
            )
        self.client = httpx.Client(base_url=self.url, timeout=HANG_GUARD_S)

    def log(self) -> str:
        """Everything the server and its ranks have written."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait_ready(self) -> None:
        def ready() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log()}")
            return READY_LINE in self.log()

        wait_until(ready, self.log)

    def rank_pids(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait_exit(self) -> int:
        """The exit code; an assertion with the log when it never comes."""
        wait_until(lambda: self.process.poll() is not None, self.log)
        return self.process.returncode

    def leftovers(self) -> list[str]:
        """Socket folders that are still there."""
        return [path.name for path in self.runtime_dir.iterdir()]

    def generate(self, **body: Any) -> httpx.Response:
        return self.client.post("/generate", json=body)

    def answer(self, **body: Any) -> dict[str, Any]:
        """The whole answer of a `/generate` call that must succeed."""
        response = self.generate(**body)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def kill_all(self) -> None:
        """Kill every process of the server that still runs."""
        processes = []
        with contextlib.suppress(psutil.NoSuchProcess):
            main = psutil.Process(self.process.pid)
            processes = [*main.children(recursive=True), main]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        self.client.close()


class StreamingClient(threading.Thread):
    """One client of `/generate` that streams; `lines` are its events, `error` is what broke it."""

    def __init__(self, server: RunningServer, **body: Any) -> None:
        super().__init__(daemon=True)
        self.lines: list[str] = []
        self.error: httpx.HTTPError | None = None
        self.status = 0
        self._url = server.url + "/generate"
        self._body = {"stream": True, **body}
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=HANG_GUARD_S) as response:
                self.status = response.status_code
                self.lines.extend(filter(None, response.iter_lines()))
        except httpx.HTTPError as error:
            self.error = error

    def wait_for_events(self, count: int = 1) -> None:
        wait_until(lambda: len(self.lines) >= count or self.error)


def serve_to_the_end(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `sglang serve` until it ends by itself, as a start does that is refused."""
    return subprocess.run(
        [sys.executable, "-m", "sglang.cli", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=HANG_GUARD_S,
        env=child_environment(OMP_NUM_THREADS="1"),
    )


@contextlib.contextmanager
def running_server(
    model: str | pathlib.Path,
    *flags: str,
    fake: bool = False,
    rank_module: str | None = None,
    wait: bool = True,
    folder: pathlib.Path | None = None,
    wrapper: Sequence[str] = (),
    **environment: str,
) -> Iterator[RunningServer]:
    """A server for the length of a block, over real ranks, fake ones or those of `rank_module`.

    `environment` is set for it; `folder` keeps its sockets and its log; `wrapper` is a command that runs the
    server in its place (it must replace itself, so that signals arrive).
    """
    module = FAKE_RANK if fake else rank_module
    with contextlib.ExitStack() as stack:
        if folder is None:
            # Short: the path of a unix socket holds 107 bytes.
            folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sgl-")))
        server = RunningServer(
            ["--model-path", str(model), *flags],
            port=stack.enter_context(held_ports()),
            rank_module=module,
            environment=environment,
            folder=folder,
            wrapper=wrapper,
        )
        stack.callback(server.kill_all)
        if wait:
            server.wait_ready()
        yield server


def process_is_gone(pid: int) -> bool:
    """True also for a zombie, which holds no resource any more."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


if __name__ == "__main__":
    sys.exit(serve(sys.argv[2:], rank_module=sys.argv[1]))
