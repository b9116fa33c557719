"""OpenVINO GenAI in its own process; its packages have no server of the OpenAI kind."""

from __future__ import annotations

import argparse
from pathlib import Path

from peers.in_process_side import InProcessSide
from peers.installed import has_module
from peers.side import Found, Label

INSTALL = (
    "OpenVINO GenAI: not installed; pip install openvino-genai in an environment of its own, then give its "
    "Python as --openvino"
)
NEEDS_MODEL = "OpenVINO GenAI: needs a converted model; give it as --openvino-model FORM=FOLDER"


def find(options: argparse.Namespace, logs: Path) -> Found:
    python = options.openvino
    if not has_module(python, "openvino_genai"):
        return Found(missing=[INSTALL])
    if not options.openvino_model:
        return Found(missing=[NEEDS_MODEL])
    worker = str(Path(__file__).with_name("openvino_worker.py"))
    return Found(
        [
            InProcessSide(
                Label(f"OpenVINO {name.replace(':', ' ')}", name.partition(":")[0]),
                [python, worker, str(folder), str(options.threads)],
                threads=options.threads,
                log=logs / f"openvino-{name}.log",
            )
            for name, folder in options.openvino_model
        ]
    )
