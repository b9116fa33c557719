"""A side that is an OpenAI server on this machine: ours, llama-server, llama-cpp-python's, vLLM.

Owns the start of such a server on a free port, its health check and its requests. Each server's own file says
its command and what its requests need.
"""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.openai_stream import answer_burst
from peers.process_tree import ProcessTree
from peers.side import Answer, Label, Prompt, Side


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class Server:
    """How to start one: `command(port)`, its `environment`, and the `health` path that says 200 when ready.

    `takes_ids` servers get prompts as token ids, others as text. `extra` goes into each request.
    """

    command: Callable[[int], Sequence[str]]
    threads: int
    log: Path
    health: str = "/health"
    environment: Mapping[str, str] = field(default_factory=dict)
    takes_ids: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    patience_s: float = 180.0
    #: Seconds that one burst may take.
    answer_patience_s: float = 600.0


class OpenAISide(Side):
    def __init__(self, label: Label, server: Server) -> None:
        super().__init__(label)
        self.server = server
        self.port = 0
        self.tree: ProcessTree | None = None

    def start(self) -> float:
        server = self.server
        self.port = free_port()
        begin = time.perf_counter()
        self.tree = ProcessTree(
            server.command(self.port),
            threads=server.threads,
            log=server.log,
            environment=server.environment,
        )
        while not self._is_healthy():
            if self.tree.has_ended():
                raise RuntimeError(f"{self.label.name} ended before it was ready: {self.tree.last_lines()}")
            if time.perf_counter() - begin > server.patience_s:
                waited = f"{self.label.name} was not ready after {server.patience_s:.0f} s"
                raise RuntimeError(f"{waited}: {self.tree.last_lines()}")
            time.sleep(0.02)
        return time.perf_counter() - begin

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{self.server.health}", timeout=2):
                return True
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def body(self, prompt: Prompt, new_tokens: int) -> dict[str, Any]:
        return {
            "model": "m",
            "prompt": list(prompt.ids) if self.server.takes_ids else prompt.text,
            "max_tokens": new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.server.extra,
        }

    def answer(self, prompts: Sequence[Prompt], new_tokens: int, at_once: int) -> list[Answer]:
        bodies = [self.body(prompt, new_tokens) for prompt in prompts]
        return answer_burst(self.port, bodies, at_once, self.server.answer_patience_s)

    def memory_bytes(self) -> int:
        return 0 if self.tree is None else self.tree.memory_bytes()

    def stop(self) -> None:
        if self.tree is not None:
            self.tree.stop()
            self.tree = None
