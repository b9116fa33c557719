"""What the command was told: where peers and their models lie, and how much to measure.

Owns the flags. Read by the command and by each peer's file. It must not look for anything.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

MODEL = "smollm2-135m-instruct"
FORMS = ("4-bit", "int8", "bf16", "fp32")


def named_file(text: str) -> tuple[str, Path]:
    """`bf16=FILE` or `4-bit:Q4_0=FILE`: a form, a name where the form alone does not tell, and a file."""
    name, sign, path = text.partition("=")
    form = name.partition(":")[0]
    if not sign or form not in FORMS or not Path(path).exists():
        raise argparse.ArgumentTypeError(
            f"{text!r}: give FORM=PATH or FORM:NAME=PATH; FORM is one of {', '.join(FORMS)}, and PATH exists"
        )
    return name, Path(path)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number above 0")
    return int(text)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Our server beside the peers found on this machine.")
    add = parser.add_argument
    add("--model-path", default=MODEL, help="a .gguf file or its alias; the peers get that very file")
    add("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="forms of our weights")
    add("--threads", type=positive, default=2, help="threads of each side, on the first cores it may use")
    add("--repeat", type=positive, help="rounds of each row; default 5, quick 3")
    add("--quick", action="store_true", help="fewer requests, and without the rows that take minutes")
    add(
        "--only", nargs="+", default=[], metavar="NAME", help="only sides whose name begins with one of these"
    )
    add("--rows", nargs="+", default=[], metavar="NAME", help="only rows whose name begins with one of these")
    add("--json", type=Path, metavar="FILE", help="write all samples there; benchmark/plot_peers.py reads it")
    add("--logs", type=Path, help="folder for what the servers print; default: a temporary one")
    add("--seed", type=int, default=0)
    peers = parser.add_argument_group("peers; what is not found is named and left out")
    add = peers.add_argument
    add("--llama-server", metavar="PROGRAM", help="default: llama-server from PATH")
    add(
        "--gguf", type=named_file, nargs="+", default=[], metavar="FORM[:NAME]=FILE", help="more files for it"
    )
    add("--llama-cpp-python", metavar="PYTHON", default=sys.executable, help="a Python that has it")
    add("--vllm", metavar="PYTHON", default=sys.executable, help="a Python that has it")
    add("--vllm-preload", default="", help="LD_PRELOAD of vLLM")
    add("--openvino", metavar="PYTHON", default=sys.executable, help="a Python that has openvino-genai")
    add("--openvino-model", type=named_file, nargs="+", default=[], metavar="FORM=FOLDER")
    add("--transformers", metavar="PYTHON", default=sys.executable, help="a Python that has it")
    add("--hf-model", type=Path, help="the model as a folder, for vLLM and transformers")
    options = parser.parse_args(arguments)
    options.repeat = options.repeat or (3 if options.quick else 5)
    return options
