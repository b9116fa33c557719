"""How long does a running stream wait for its next token while prompts arrive, and what does it cost?

Usage: python benchmark/bench_stall.py [--dtype bfloat16] [--rounds 5]. Needs the model package. Engines that
cut prompts differently take turns on prompts that no earlier turn has seen. In a turn one stream runs, then
`--prompts` prompts of `--prompt-tokens` tokens arrive together. Throughput is every token computed from their
arrival until the last answer ends, a second, so what the stream gains in between counts.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

MODEL = "smollm2-135m-instruct"
#: What each side is started with; the first is what the others are compared with.
SIDES: dict[str, dict[str, Any]] = {
    "pieces of 4096": {"chunked_prefill_size": 4096},
    "by time, in turns": {"chunked_prefill_size": 4096, "enable_dynamic_chunking": True},
    "by time, mixed": {},  # what a CPU does by default
}
#: Tokens that the stream has before the prompts arrive; their gaps say how long a decode step takes.
WARM = 24


@dataclass
class Turns:
    """One side, turn by turn; gaps and steps are in seconds."""

    longest_gap: list[float] = field(default_factory=list)
    decode_step: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)

    def median(self, name: str) -> float:
        return statistics.median(getattr(self, name))


def plain_read() -> float:
    """GB/s at which one thread reads a large buffer now."""
    import numpy as np

    buffer = np.ones(32 << 20, dtype=np.float32)
    start = time.perf_counter()
    for _ in range(3):
        buffer.sum()
    return 3 * buffer.nbytes / (time.perf_counter() - start) / 1e9


async def turn(engine: Any, options: argparse.Namespace, draw: random.Random, turns: Turns | None) -> None:
    """One stream, and the prompts that arrive while it runs; counted in `turns` unless that is None."""
    arrivals: list[float] = []
    warm = asyncio.Event()

    async def stream() -> None:
        prompt = [draw.randrange(1000, 40000) for _ in range(32)]
        answers = await engine.async_generate(
            input_ids=prompt, sampling_params=sampling(options.stream_tokens), stream=True
        )
        async for _ in answers:
            arrivals.append(time.perf_counter())
            if len(arrivals) == WARM:
                warm.set()

    async def answer(prompt: list[int]) -> float:
        answers = await engine.async_generate(
            input_ids=prompt, sampling_params=sampling(options.new_tokens), stream=True
        )
        first = 0.0
        async for _ in answers:
            first = first or time.perf_counter()
        return first

    running = asyncio.create_task(stream())
    await warm.wait()
    prompts = [
        [draw.randrange(1000, 40000) for _ in range(options.prompt_tokens)] for _ in range(options.prompts)
    ]
    start, before = time.perf_counter(), len(arrivals)
    firsts = await asyncio.gather(*map(answer, prompts))
    end = time.perf_counter()
    await running
    if turns is None:
        return
    during = [at for at in arrivals[before - 1 :] if at <= end]
    if arrivals[-1] < max(firsts):
        raise RuntimeError("the stream ended before the last prompt was computed; raise --stream-tokens")
    gaps = [late - early for early, late in itertools.pairwise(arrivals)]
    turns.decode_step.append(statistics.median(gaps[2 : WARM - 1]))
    turns.longest_gap.append(max(late - early for early, late in itertools.pairwise(during)))
    answers_tokens = options.prompts * (options.prompt_tokens + options.new_tokens)
    turns.rate.append((answers_tokens + len(during) - 1) / (end - start))
    turns.first_token.append(statistics.median(first - start for first in firsts))


def sampling(new_tokens: int) -> dict[str, object]:
    return {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side that count, an odd number")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--new-tokens", type=int, default=32, help="of each answer to a prompt")
    parser.add_argument("--stream-tokens", type=int, default=160, help="of the stream that runs")
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=list(SIDES))
    return parser.parse_args()


def main() -> None:
    options = parse()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # before torch is imported, which reads it once
    os.environ["HF_HUB_OFFLINE"] = "1"
    import sglang as sgl

    draw = random.Random(0)
    engines = {
        name: sgl.Engine(model_path=MODEL, dtype=options.dtype, **SIDES[name]) for name in options.sides
    }
    table = {name: Turns() for name in engines}
    reads = []
    try:
        for number in range(options.rounds + 1):  # the first warms up
            reads.append(plain_read())
            for name, engine in engines.items():
                asyncio.run(turn(engine, options, draw, table[name] if number else None))
    finally:
        for engine in engines.values():
            engine.shutdown()
    print(
        f"{options.dtype}, {options.threads} thread(s), {options.prompts} prompts of {options.prompt_tokens} "
        f"tokens and {options.new_tokens} new ones, medians of {options.rounds} turns; "
        f"a plain read at {statistics.median(reads):.1f} GB/s"
    )
    print("| prompts | longest gap s | decode step s | allowed gap s | tok/s | ratio | first token s |")
    print("|---|---|---|---|---|---|---|")
    first = table[options.sides[0]]
    for name, turns in table.items():
        step = turns.median("decode_step")
        ratio = statistics.median(a / b for a, b in zip(turns.rate, first.rate, strict=True))
        print(
            f"| {name} | {turns.median('longest_gap'):.3f} | {step:.4f} | {3 * step + 0.3:.3f} "
            f"| {turns.median('rate'):.0f} | {ratio:.3f} | {turns.median('first_token'):.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
