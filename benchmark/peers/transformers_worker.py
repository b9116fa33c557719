"""The worker of `transformers_local`: python transformers_worker.py FOLDER DTYPE, a JSON question a line."""

from __future__ import annotations

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer


class Times(BaseStreamer):
    """Notes when a token comes; the first call hands over the prompt."""

    def __init__(self) -> None:
        self.calls: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.calls.append(time.perf_counter())

    def end(self) -> None:
        pass


def main() -> None:
    folder, dtype = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None
    print(json.dumps({"answers": []}), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        begin = time.perf_counter()
        answers = []
        for prompt in question["prompts"]:
            ids, times, sent = torch.tensor([prompt]), Times(), time.perf_counter()
            with torch.inference_mode():
                out = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=question["new_tokens"],
                    do_sample=False,
                    pad_token_id=0,
                    streamer=times,
                )
            came = times.calls[1:]
            answers.append((sent - begin, came[0] - begin, came[-1] - begin, out.shape[1] - len(prompt)))
        print(json.dumps({"answers": answers}), flush=True)


if __name__ == "__main__":
    main()
