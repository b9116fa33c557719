"""How long is the way from logits to token ids and log-probabilities on a CPU, with the Python round it?

Usage: python benchmark/bench_sampling.py [--rows 1 16] [--vocab 49152] [--repeat 40]
Each line is the sampler of the engine over rows of one kind, until the ids are in lists; beside it the
compiled operator alone. Kinds take turns; the medians are printed in microseconds of the thread's own
processor time, and the rate of a plain read taken in the same turns. SGLANG_USE_CPU_KERNELS=0 measures torch.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang.kernels.compiled import compiled_kernels
from sglang.srt.batch.logprobs import LogprobRequest
from sglang.srt.batch.sampling_state import SamplingState
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.sampling_params import SamplingParams

USUAL = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.05}
GREEDY = {"temperature": 0.0}
#: Of a plain read: far more than any cache holds.
_READ_BYTES = 256 << 20


@dataclass(frozen=True)
class Kind:
    """Rows alike: their parameters, taken in turn, how wide their logits spread, and the top they ask for."""

    name: str
    params: tuple[dict[str, float], ...]
    spread: float = 2.5
    top_num: int | None = None


KINDS = (
    Kind("greedy", (GREEDY,)),
    Kind("temperature 0.8, top_k 50, top_p 0.95, min_p 0.05", (USUAL,)),
    Kind("the same beside greedy rows", (USUAL, GREEDY)),
    Kind("temperature 1", ({"temperature": 1.0},)),
    Kind("temperature 0.8, top_p 0.95", ({"temperature": 0.8, "top_p": 0.95},)),
    Kind("flat, top_p 0.95", ({"top_p": 0.95},), spread=0.5),
    Kind("flat, top_k 4000", ({"top_k": 4000},), spread=0.5),
    Kind("greedy, 5 top_logprobs", (GREEDY,), top_num=5),
    Kind("temperature 0.8, top_p 0.95, 20 top_logprobs", ({"temperature": 0.8, "top_p": 0.95},), top_num=20),
)


class Case:
    """Some rows of one kind, as a decode step has them."""

    def __init__(self, kind: Kind, rows: int, vocab: int) -> None:
        drawn = torch.Generator().manual_seed(rows)
        self.logits = torch.randn(rows, vocab, generator=drawn) * kind.spread
        self.states = [
            SamplingState(SamplingParams(**kind.params[at % len(kind.params)]), at, [0]) for at in range(rows)
        ]
        self.requests = None if kind.top_num is None else [LogprobRequest(top_num=kind.top_num)] * rows
        self.sampler = Sampler()
        kernels = compiled_kernels()
        self.kernel: Callable[[], object] | None = None
        if kernels is not None and kind.top_num is None:
            params = [
                (p.temperature or 1.0, 1 if p.is_greedy else p.top_k, p.top_p, p.min_p)
                for p in self._params()
            ]
            limits = torch.tensor(params, dtype=torch.float64)
            streams = torch.zeros(2, rows, dtype=torch.int64)
            self.kernel = lambda: kernels.sampling.sample_rows(self.logits, limits, streams)

    def _params(self) -> list[SamplingParams]:
        return [state.params for state in self.states]

    def step(self) -> None:
        """What a step does behind its logits: ids and failures in lists, and each request's own state."""
        ids, _ = self.sampler(self.logits, self.states, self.requests).read()
        for state, token_id in zip(self.states, ids, strict=True):
            state.append(token_id)


def microseconds(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return (time.thread_time() - start) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--repeat", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [(kind, rows, Case(kind, rows, options.vocab)) for kind in KINDS for rows in options.rows]
    large = torch.ones(_READ_BYTES // 4)
    steps: list[list[float]] = [[] for _ in cases]
    kernels: list[list[float]] = [[] for _ in cases]
    reads = []
    for _ in range(options.repeat):
        reads.append(_READ_BYTES / microseconds(large.sum) / 1e3)
        for at, (_, _, case) in enumerate(cases):
            case.step()  # the caches are its own
            steps[at].append(microseconds(case.step))
            if case.kernel is not None:
                kernels[at].append(microseconds(case.kernel))
    print(f"{'rows':>4}  {'sampler':>9}  {'kernel':>9}  of {options.vocab} logits, microseconds")
    for (kind, rows, _), step, kernel in zip(cases, steps, kernels, strict=True):
        alone = f"{statistics.median(kernel):9.1f}" if kernel else f"{'-':>9}"
        print(f"{rows:>4}  {statistics.median(step):9.1f}  {alone}  {kind.name}")
    print(f"plain read: {statistics.median(reads):.1f} GB/s")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
