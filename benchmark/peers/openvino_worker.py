"""The worker of `openvino_local`: python openvino_worker.py MODEL THREADS, one JSON question a line.

It drives the continuous batching pipeline step by step, so that the times of every request are seen here.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

BATCH, CACHE_GB, STEP_TOKENS = 16, 2, 512


def open_pipeline(model: str, threads: int) -> Any:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs = CACHE_GB, BATCH
    scheduler.max_num_batched_tokens, scheduler.dynamic_split_fuse = STEP_TOKENS, True
    scheduler.enable_prefix_caching = True
    return genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads})


def generation(new_tokens: int) -> Any:
    config = genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = new_tokens
    config.ignore_eos, config.do_sample = True, False
    return config


def answer(pipeline: Any, numbers: itertools.count, question: dict[str, Any]) -> list[list[float]]:
    """A row for each prompt: sent, first, last (seconds since the burst began), tokens."""
    config, begin = generation(question["new_tokens"]), time.perf_counter()
    waiting = list(enumerate(question["prompts"]))[::-1]
    rows: dict[int, list[float]] = {}
    handles: dict[int, Any] = {}
    while waiting or handles:
        while waiting and len(handles) < question["at_once"]:
            index, prompt = waiting.pop()
            rows[index] = [time.perf_counter() - begin, 0.0, 0.0, 0]
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            handles[index] = pipeline.add_request(next(numbers), ids, config)
        pipeline.step()
        now = time.perf_counter() - begin
        for index in list(handles):
            row = rows[index]
            while handles[index].can_read():
                for output in handles[index].read().values():
                    if output.generated_ids:
                        row[1], row[2] = row[1] or now, now
                        row[3] += len(output.generated_ids)
            if row[3] >= question["new_tokens"]:
                del handles[index]
    return [rows[index] for index in sorted(rows)]


def main() -> None:
    pipeline, numbers = open_pipeline(sys.argv[1], int(sys.argv[2])), itertools.count()
    print(json.dumps({"answers": []}), flush=True)
    for line in sys.stdin:
        answers = answer(pipeline, numbers, json.loads(line))
        print(json.dumps({"answers": answers}), flush=True)


if __name__ == "__main__":
    main()
