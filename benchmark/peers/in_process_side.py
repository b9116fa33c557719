"""A side without a server: a small worker program in the peer's own Python, asked over its pipes.

Owns the pipe: a JSON line with prompts goes in, a JSON line with times comes back. The worker is a script
beside this file that runs where only the peer is installed. Its figures leave out HTTP and tokenizing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from peers.process_tree import ProcessTree
from peers.side import Answer, Label, Prompt, Side


class InProcessSide(Side):
    def __init__(self, label: Label, command: Sequence[str], *, threads: int, log: Path) -> None:
        super().__init__(label)
        self.command, self.threads, self.log = list(command), threads, log
        self.tree: ProcessTree | None = None

    def start(self) -> float:
        begin = time.perf_counter()
        self.tree = ProcessTree(
            self.command,
            threads=self.threads,
            log=self.log,
            environment={"HF_HUB_OFFLINE": "1"},
            pipes=True,
        )
        self._read()
        return time.perf_counter() - begin

    def answer(self, prompts: Sequence[Prompt], new_tokens: int, at_once: int) -> list[Answer]:
        if self.tree is None:
            raise RuntimeError(f"{self.label.name} was not started")
        question = {
            "prompts": [list(prompt.ids) for prompt in prompts],
            "new_tokens": new_tokens,
            "at_once": at_once,
        }
        asked, _ = self.tree.pipes
        asked.write(json.dumps(question) + "\n")
        asked.flush()
        return [Answer(*times) for times in json.loads(self._read())["answers"]]

    def _read(self) -> str:
        """The next line that is JSON; libraries print there too."""
        assert self.tree is not None
        while line := self.tree.pipes[1].readline():
            if line.startswith('{"answers":'):
                return line
        raise EOFError(f"{self.label.name} ended: {self.tree.last_lines()}")

    def memory_bytes(self) -> int:
        return 0 if self.tree is None else self.tree.memory_bytes()

    def stop(self) -> None:
        if self.tree is not None:
            self.tree.stop()
            self.tree = None
