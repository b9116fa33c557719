"""llama-cpp-python's own server. It answers one request at a time and takes no token ids."""

from __future__ import annotations

import argparse
from pathlib import Path

from peers.installed import has_module
from peers.openai_side import OpenAISide, Server
from peers.side import Found, Label

INSTALL = (
    "llama-cpp-python: not installed; pip install 'llama-cpp-python[server]' in an environment of its own, "
    "then give its Python as --llama-cpp-python"
)


def find(options: argparse.Namespace, logs: Path, served_file: Path) -> Found:
    python = options.llama_cpp_python
    if not has_module(python, "llama_cpp.server"):
        return Found(missing=[INSTALL])
    threads = str(options.threads)

    def command(port: int) -> list[str]:
        where = ["--host", "127.0.0.1", "--port", str(port), "--model", str(served_file), "--n_ctx", "4096"]
        # By default a new request interrupts the one under way, and both come back short.
        rest = ["--n_threads", threads, "--n_threads_batch", threads, "--interrupt_requests", "false"]
        return [python, "-m", "llama_cpp.server", *where, *rest]

    label = Label("llama-cpp-python", "4-bit", at_most=1)
    server = Server(
        command, options.threads, logs / "llama-cpp-python.log", health="/v1/models", takes_ids=False
    )
    return Found([OpenAISide(label, server)])
