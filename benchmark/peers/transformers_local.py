"""transformers in its own process, in bfloat16 and float32, one request at a time."""

from __future__ import annotations

import argparse
from pathlib import Path

from peers.in_process_side import InProcessSide
from peers.installed import has_module
from peers.side import Found, Label

INSTALL = (
    "transformers: not installed; pip install transformers, or give a Python that has it as --transformers"
)
NEEDS_MODEL = "transformers: needs the model as a folder; give it as --hf-model"
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def find(options: argparse.Namespace, logs: Path, weight_bytes: dict[str, int]) -> Found:
    python = options.transformers
    if not has_module(python, "transformers"):
        return Found(missing=[INSTALL])
    if options.hf_model is None:
        return Found(missing=[NEEDS_MODEL])
    worker = str(Path(__file__).with_name("transformers_worker.py"))
    return Found(
        [
            InProcessSide(
                Label(f"transformers {form}", form, at_most=1, weight_bytes=weight_bytes.get(form, 0)),
                [python, worker, str(options.hf_model), dtype],
                threads=options.threads,
                log=logs / f"transformers-{form}.log",
            )
            for form, dtype in DTYPES.items()
        ]
    )
