"""How many tokens a second does the engine make, beside `transformers` on the same model, threads and dtype?

Usage: python benchmark/bench_offline.py [--dtype bfloat16] [--rounds 3] [--batch-sizes 1 16]. Needs the
development requirements and the model package. The two alternate within one run, on prompts that no earlier
round has seen, so that neither a busy moment of the machine nor a cached prefix decides. It also prints how
long a server takes from its start to ready.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODEL = "smollm2-135m-instruct"
Generate = Callable[[list[list[int]]], list[list[int]]]


@dataclass
class Comparison:
    """One batch size: tokens a second of each side, round by round."""

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    same_rows: int = 0
    rows: int = 0

    def ratio(self) -> float:
        """The median of the ratios of each round, whose two sides ran one after the other."""
        return statistics.median(a / b for a, b in zip(self.ours, self.theirs, strict=True))


def hf_folder(cache: Path) -> Path:
    """The model as a Hugging Face folder; made once from the GGUF file, dequantized."""
    folder = cache / f"{MODEL}-hf"
    if (folder / "config.json").exists() and any(folder.glob("*.safetensors")):
        return folder
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from sglang.srt.configs.model_path import resolve_model_path

    gguf = resolve_model_path(MODEL)
    print(f"converting {gguf.name} once into {folder} ...", flush=True)
    named = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **named, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(**named)
    unfinished = folder.with_suffix(".unfinished")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder)
    return folder


def make_theirs(folder: Path, dtype: str, new_tokens: int) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None  # every row runs to its full length, as on our side

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        rows: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return rows

    return generate


def make_ours(engine: Any, new_tokens: int) -> Generate:
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        answers = engine.generate(input_ids=prompts, sampling_params=sampling)
        return [answer["output_ids"] for answer in answers]

    return generate


def timed(generate: Generate, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
    """Tokens a second, prefill included, and the tokens; a row that ended early is an error."""
    start = time.perf_counter()
    rows = generate(prompts)
    seconds = time.perf_counter() - start
    if [len(row) for row in rows] != [new_tokens] * len(prompts):
        raise RuntimeError(f"asked for {new_tokens} tokens a row, got {[len(row) for row in rows]}")
    return len(prompts) * new_tokens / seconds, rows


def compare(ours: Generate, theirs: Generate, batch: int, options: argparse.Namespace) -> Comparison:
    """The first round warms both sides up and is not counted."""
    draw = random.Random(batch)
    comparison = Comparison()
    for number in range(options.rounds + 1):
        prompts = [[draw.randrange(1000, 40000) for _ in range(options.prompt_tokens)] for _ in range(batch)]
        sides = [("ours", ours), ("theirs", theirs)]
        answers = {}
        for name, generate in sides if number % 2 else reversed(sides):
            answers[name] = timed(generate, prompts, options.new_tokens)
        if number == 0:
            continue
        comparison.ours.append(answers["ours"][0])
        comparison.theirs.append(answers["theirs"][0])
        comparison.rows += batch
        comparison.same_rows += sum(
            a == b for a, b in zip(answers["ours"][1], answers["theirs"][1], strict=True)
        )
    return comparison


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start_to_ready(dtype: str, patience: float = 120.0) -> float:
    """Seconds from the start of the command until `/health` says 200."""
    port = free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", MODEL]
    start = time.perf_counter()
    server = subprocess.Popen(
        [*command, "--port", str(port), "--dtype", dtype],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while time.perf_counter() - start < patience:
            if server.poll() is not None:
                raise RuntimeError(f"the server ended with {server.returncode} before it was ready")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                    return time.perf_counter() - start
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.02)
        raise RuntimeError(f"the server was not ready after {patience:.0f} s")
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=1, help="threads of each side")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count, an odd number")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--starts", type=int, default=3, help="how many server starts to time, 0 for none")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "sglang-benchmark")
    return parser.parse_args()


def main() -> None:
    options = parse()
    # Before torch is imported on either side: OpenMP reads these once. The engine's processes inherit them.
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ["GOMP_SPINCOUNT"] = (
        "10000"  # as a rank of several threads has it, so that both sides wait alike
    )
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    transformers.logging.disable_progress_bar()
    options.cache.mkdir(parents=True, exist_ok=True)
    folder = hf_folder(options.cache)

    import torch

    import sglang as sgl

    torch.set_num_threads(options.threads)
    theirs = make_theirs(folder, options.dtype, options.new_tokens)
    with sgl.Engine(model_path=MODEL, dtype=options.dtype) as engine:
        ours = make_ours(engine, options.new_tokens)
        print(
            f"{options.dtype}, {options.threads} thread(s), {options.prompt_tokens} prompt tokens, "
            f"{options.new_tokens} new tokens, median of {options.rounds} rounds"
        )
        print("| batch | sglang tok/s | transformers tok/s | ratio | rows with the same tokens |")
        print("|---|---|---|---|---|")
        for batch in options.batch_sizes:
            comparison = compare(ours, theirs, batch, options)
            rates = [f"{statistics.median(side):.1f}" for side in (comparison.ours, comparison.theirs)]
            same = f"{comparison.same_rows} of {comparison.rows}"
            print("|", " | ".join([str(batch), *rates, f"{comparison.ratio():.2f}", same]), "|", flush=True)
    if options.starts:
        seconds = [start_to_ready(options.dtype) for _ in range(options.starts)]
        print(
            f"start to ready: {statistics.median(seconds):.1f} s (median of {options.starts}, "
            f"{', '.join(f'{s:.1f}' for s in seconds)})"
        )


if __name__ == "__main__":
    main()
