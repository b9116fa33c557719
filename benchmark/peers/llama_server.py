"""llama.cpp through its own server, on the very GGUF file that we serve and on further files."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from peers.openai_side import OpenAISide, Server
from peers.side import Found, Label

INSTALL = (
    "llama.cpp: no llama-server in PATH; build its targets llama-server and llama-quantize with cmake, "
    "then give the program as --llama-server"
)
#: Requests at once; llama-server divides its context among them.
SLOTS, CONTEXT = 16, 4096


def find(options: argparse.Namespace, logs: Path, served_file: Path) -> Found:
    program = shutil.which(options.llama_server or "llama-server")
    if program is None:
        return Found(missing=[INSTALL])
    files = [("4-bit", served_file), *options.gguf]
    return Found([_side(program, name, file, options.threads, logs) for name, file in files])


def _side(program: str, name: str, file: Path, threads: int, logs: Path) -> OpenAISide:
    form, _, nickname = name.partition(":")
    title = f"llama.cpp {nickname or (file.stem.rpartition('.')[2] if form == '4-bit' else form)}"
    label = Label(title, form, weight_bytes=os.path.getsize(file))

    def command(port: int) -> list[str]:
        where = ["--host", "127.0.0.1", "--port", str(port)]
        size = ["-t", str(threads), "-tb", str(threads), "-np", str(SLOTS), "-c", str(SLOTS * CONTEXT)]
        return [program, "-m", str(file), *where, *size, "-fa", "on", "--no-webui"]

    return OpenAISide(label, Server(command, threads, logs / f"{title}.log".replace(" ", "-")))
