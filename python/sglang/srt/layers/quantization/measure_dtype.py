"""Owns the measurement of how long linear layers take in each type of computation, as a program of its own.

Started by `platforms/dtype_speed.py`, which must not load torch. Prints one JSON object: seconds by type.
"""

from __future__ import annotations

import json
import sys
import time

import torch

from sglang.srt.layers.quantization.stored_forms import fastest_form

#: Together more than a cache holds in either type, so that a single row is bound by memory as in a step.
_WEIGHTS, _OUTPUTS, _INPUTS = 24, 2048, 1024
#: What is weighed against each other: a prompt, computed at once, and its answer, row by row.
PROMPT_ROWS, ANSWER_ROWS = 256, 64
#: Weights that the prompt is multiplied with; the rest is extrapolated.
_WEIGHTS_OF_PROMPT = 2
_TURNS = 3


def seconds_of_a_request(dtypes: list[torch.dtype]) -> dict[str, float]:
    """For each type the least seconds of some turns, which the types take one after another."""
    cpu = torch.device("cpu")
    weight = torch.randn(_OUTPUTS, _INPUTS)
    rows, prompt = torch.randn(1, _INPUTS), torch.randn(PROMPT_ROWS, _INPUTS)
    least: dict[str, float] = {}
    forms = {dtype: [fastest_form(dtype, cpu)(weight.to(dtype)) for _ in range(_WEIGHTS)] for dtype in dtypes}
    for _ in range(_TURNS):
        for dtype, stored in forms.items():
            row, many = rows.to(dtype), prompt.to(dtype)
            start = time.perf_counter()
            for form in stored:
                form.apply(row, None)
            middle = time.perf_counter()
            for form in stored[:_WEIGHTS_OF_PROMPT]:
                form.apply(many, None)
            end = time.perf_counter()
            once = ANSWER_ROWS * (middle - start) + (end - middle) * _WEIGHTS / _WEIGHTS_OF_PROMPT
            name = str(dtype).removeprefix("torch.")
            least[name] = min(once, least.get(name, once))
    return least


def main() -> int:
    with torch.inference_mode():
        print(json.dumps(seconds_of_a_request([torch.bfloat16, torch.float32])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
