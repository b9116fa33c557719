"""Our own server, once for each form of its weights, and once more with NGRAM."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from peers.openai_side import OpenAISide, Server
from peers.side import Found, Label

#: How each form is asked for, and bytes a weight (4-bit: the file says).
FLAGS = {
    "4-bit": ["--quantization", "gguf"],
    "int8": ["--quantization", "w8a8_int8", "--dtype", "bfloat16"],
    "bf16": ["--dtype", "bfloat16"],
    "fp32": ["--dtype", "float32"],
}
NGRAM = ["--speculative-algorithm", "NGRAM"]


def find(options: argparse.Namespace, logs: Path, weight_bytes: dict[str, int]) -> Found:
    def side(name: str, form: str, flags: list[str]) -> OpenAISide:
        label = Label(
            name, form, is_ours=True, speculates=flags[-2:] == NGRAM, weight_bytes=weight_bytes.get(form, 0)
        )
        base = [sys.executable, "-m", "sglang.launch_server", "--model-path", options.model_path]

        def command(port: int) -> list[str]:
            return [*base, "--host", "127.0.0.1", "--port", str(port), *flags]

        return OpenAISide(label, Server(command, options.threads, logs / f"{name}.log".replace(" ", "-")))

    sides = [side(f"ours {form}", form, FLAGS[form]) for form in options.forms]
    if "bf16" in options.forms:
        sides.append(side("ours bf16, NGRAM", "bf16", FLAGS["bf16"] + NGRAM))
    return Found(list(sides))
