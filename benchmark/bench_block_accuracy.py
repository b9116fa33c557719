"""What does it cost in accuracy that a GGUF file is computed from its blocks?

Usage: python benchmark/bench_block_accuracy.py FILE.gguf ... [--llama-server PROGRAM] [--window 512]
[--prompts 7] [--new-tokens 32]. For each file the numbers that its own weights give in float32 are the
reference: the error of the logits, how often the first choice is the same, both perplexities on a fixed text,
and greedy answers that are the same, with the tokens before the others part. With a llama-server the same is
asked of its answers to the same ids. Needs the compiled kernels (`make kernels`).
"""

from __future__ import annotations

import argparse
import json
import math
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang.srt.batch.logprobs import LogprobRequest
from sglang.srt.configs.gguf.parts import open_gguf
from sglang.srt.configs.model_path import resolve_model_path
from sglang.srt.tokenizer.tokenizer import load_tokenizer
from sglang.test.worker_driver import WorkerDriver, driven_worker

TEXT = Path(__file__).with_name("block_accuracy_text.txt")
#: Seconds that a llama-server may take to load a file.
START_SECONDS = 60
#: A prompt is the beginning of a paragraph.
PROMPT_WORDS = 12


@dataclass(frozen=True)
class Answers:
    """What one way of computing gives: logits [tokens, vocab] of the text, and greedy ids a prompt."""

    logits: torch.Tensor
    greedy: list[list[int]]


def text_logits(driver: WorkerDriver, ids: list[int], window: int) -> torch.Tensor:
    """float32 logits of every token of the text but the last of each window, windows one by one."""
    seen: list[torch.Tensor] = []
    found: list[torch.Tensor] = []
    runner = driver.target.model_runner
    hook = runner.model.lm_head.register_forward_hook(lambda *call: seen.append(call[2].clone()))
    for start in range(0, len(ids), window):
        part = ids[start : start + window]
        seq = driver.add(part)
        runner.forward(driver.batch([(seq, len(part))], asks=[LogprobRequest(targets=part[1:])]))
        driver.drop(seq)
        found += seen[1:]  # the first call scores the row that would be drawn from
        seen.clear()
    hook.remove()
    return torch.cat(found)


def computed(
    file: Path, ids: list[int], prompts: list[list[int]], options: argparse.Namespace, *, blocks: bool
) -> Answers:
    fields = {"quantization": "gguf"} if blocks else {}
    with torch.inference_mode(), driven_worker(file, attention_backend="cpu", **fields) as driver:
        logits = text_logits(driver, ids, options.window)
        greedy = [driver.generate([driver.add(prompt)], options.new_tokens)[0] for prompt in prompts]
        return Answers(logits, greedy)


def perplexity(logits: torch.Tensor, targets: torch.Tensor) -> float:
    losses = [
        torch.nn.functional.cross_entropy(some, wanted, reduction="sum")
        for some, wanted in zip(logits.split(128), targets.split(128), strict=True)
    ]
    return math.exp(float(torch.stack(losses).sum()) / len(targets))


def common(first: list[int], second: list[int]) -> int:
    """How many ids two answers share before they part."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def agreement(answers: list[list[int]], others: list[list[int]]) -> str:
    shared = [common(a, b) for a, b in zip(answers, others, strict=True)]
    same = sum(count == len(answer) for count, answer in zip(shared, answers, strict=True))
    return f"{same} of {len(answers)} ({sum(shared) / len(shared):.0f})"


def post(port: int, fields: dict[str, object]) -> dict[str, object]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/completion",
        json.dumps(fields).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        found: dict[str, object] = json.load(answer)
    return found


def llama_answers(program: str, file: Path, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Greedy ids of llama.cpp for the same prompts, one by one on one thread."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, "-m", str(file), "--host", "127.0.0.1", "--port", str(port), "-t", "1", "-tb", "1"]
    server = subprocess.Popen(
        [*command, "-c", "1024", "-np", "1", "--no-webui"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_until_ready(server, port)
        answers = []
        for prompt in prompts:
            fields = {"prompt": prompt, "n_predict": new_tokens, "temperature": 0, "return_tokens": True}
            tokens = post(port, {**fields, "ignore_eos": True, "cache_prompt": False})["tokens"]
            assert isinstance(tokens, list)
            answers.append(tokens)
        return answers
    finally:
        server.terminate()
        server.wait()


def _wait_until_ready(server: subprocess.Popen[bytes], port: int) -> None:
    for _ in range(10 * START_SECONDS):
        if server.poll() is not None:
            raise RuntimeError(f"llama-server ended with {server.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise RuntimeError(f"llama-server is not ready after {START_SECONDS} s")


def types_of(file: Path) -> str:
    """The types of the matrices in a file, the most frequent first."""
    tensors = open_gguf(file).tensors.values()
    counts = Counter(tensor.type.name for tensor in tensors if len(tensor.shape) > 1)
    return ", ".join(name for name, _ in counts.most_common())


def table_row(file: Path, options: argparse.Namespace) -> str:
    tokenizer = load_tokenizer(file)
    text = TEXT.read_text(encoding="utf-8")
    ids = tokenizer.encode(text)
    prompts = [
        tokenizer.encode(" ".join(part.split()[:PROMPT_WORDS]))
        for part in text.split("\n\n")[: options.prompts]
    ]
    windows = [
        torch.tensor(ids[start : start + options.window]) for start in range(0, len(ids), options.window)
    ]
    targets = torch.cat([part[1:] for part in windows])
    plain = computed(file, ids, prompts, options, blocks=False)
    packed = computed(file, ids, prompts, options, blocks=True)
    error = float((packed.logits - plain.logits).norm() / plain.logits.norm())
    same = float((packed.logits.argmax(-1) == plain.logits.argmax(-1)).float().mean())
    columns = [
        f"{100 * error:.2f} %",
        f"{100 * same:.1f} %",
        f"{perplexity(plain.logits, targets):.3f}",
        f"{perplexity(packed.logits, targets):.3f}",
        agreement(packed.greedy, plain.greedy),
    ]
    if options.llama_server is not None:
        theirs = llama_answers(options.llama_server, file, prompts, options.new_tokens)
        columns += [agreement(theirs, packed.greedy), agreement(theirs, plain.greedy)]
    return f"| {file.name} ({types_of(file)}) | {' | '.join(columns)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="+", help="GGUF files, or names of packaged models")
    parser.add_argument("--llama-server", help="a program of llama.cpp, asked for the same answers")
    parser.add_argument("--window", type=int, default=512, help="tokens of the text that see each other")
    parser.add_argument("--prompts", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=32)
    options = parser.parse_args()
    if min(options.window - 1, options.prompts, options.new_tokens) < 1:
        parser.error("window is at least 2, prompts and new-tokens at least 1")
    columns = ["file", "error of the logits", "same first choice", "perplexity in float32", "from blocks"]
    columns.append("the same greedy answers (tokens before they part)")
    if options.llama_server is not None:
        columns += ["llama.cpp and blocks", "llama.cpp and float32"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    for name in options.files:
        print(table_row(resolve_model_path(name), options), flush=True)


if __name__ == "__main__":
    main()
