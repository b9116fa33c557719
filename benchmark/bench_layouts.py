"""How many tokens a second does each layout make beside one rank, and how much of that time are collectives?

Usage: python benchmark/bench_layouts.py [--model NAME] [--rounds 5] [--batch-sizes 1 16]. The ranks of all
layouts are loaded at once and run one after the other, in another order every round, on prompts that no
earlier round has seen. Each rank runs the engine's scheduler and worker without a server, with the threads
that a served rank would get: the cores of the machine divided by the ranks of its layout.

Time in collectives is the time a rank spends inside the methods of its groups, waiting for slower ranks
included. On one machine all layouts share the same cores, so the table shows what a layout costs.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from sglang.test.lab.arithmetic import Layout

MODEL = "smollm2-135m-instruct"
POOL_TOKENS = 8192


ONE_RANK = "one rank"
LAYOUTS = {
    "tp 2": Layout(tp_size=2),
    "tp 2, attn-dp 2": Layout(tp_size=2, attn_dp_size=2),
    "2 replicas": Layout(num_worlds=2),
    "tp 4": Layout(tp_size=4),
    "tp 4, attn-dp 2": Layout(tp_size=4, attn_dp_size=2),
}


class CollectiveClock:
    """Seconds inside the methods of groups; a method that calls another counts once."""

    METHODS = (
        "all_reduce",
        "all_gather",
        "all_gatherv",
        "reduce_scatter",
        "reduce_scatterv",
        "all_to_all",
        "broadcast",
        "broadcast_object",
        "all_gather_object",
        "barrier",
    )

    def __init__(self, group_class: type) -> None:
        self.seconds = 0.0
        self._inside = False
        for name in self.METHODS:
            setattr(group_class, name, self._timed(getattr(group_class, name)))

    def _timed(self, method: Any) -> Any:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return method(*args, **kwargs)
            self._inside, start = True, time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self._inside = False
                self.seconds += time.perf_counter() - start

        return timed


def run_rank(spec: dict[str, Any]) -> None:
    """Load once; then read a line of JSON (the prompts of this rank's replica), write one, until the end."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    import torch.distributed

    from sglang.srt.arg_groups.hooks.pipeline import resolve
    from sglang.srt.distributed import parallel_state
    from sglang.srt.distributed.group_coordinator import GroupCoordinator
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.tp_worker import TpModelWorker
    from sglang.srt.processes.model_files import published_model_config, published_tokenizer
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs
    from sglang.test.fakes.fake_channel import FakeChannel

    record = ServerArgs(**spec["fields"])
    resolve(record)
    publish(record, role="scheduler", ranks=SpawnRanks(world_rank=spec["rank"], dp_rank=spec["dp_rank"]))
    store = torch.distributed.FileStore(spec["meeting"], spec["world_size"])
    parallel_state.init_distributed_environment(
        world_size=spec["world_size"], rank=spec["rank"], local_rank=spec["rank"], store=store, timeout_s=600
    )
    parallel_state.initialize_model_parallel()
    model_config = published_model_config()
    worker = TpModelWorker(model_config)
    channel = FakeChannel() if spec["is_attn_tp_leader"] else None
    scheduler = Scheduler(worker, tokenizer=published_tokenizer(model_config), channel=channel)
    clock = CollectiveClock(GroupCoordinator)
    print(json.dumps({"vocab_size": worker.vocab_size}), file=answers)
    for line in sys.stdin:
        print(json.dumps(_round(scheduler, channel, clock, json.loads(line))), file=answers)
    parallel_state.destroy_distributed_environment()


def _round(scheduler: Any, channel: Any, clock: CollectiveClock, order: dict[str, Any]) -> dict[str, Any]:
    """Run all prompts of this replica, together with the other ranks."""
    from sglang.test.fakes.fake_channel import answers
    from sglang.test.fakes.scheduler_driver import make_request

    prompts = order["prompts"]
    if channel is not None:
        channel.sent.clear()
        channel.inbox.extend(
            make_request(str(i), ids, order["new_tokens"], ignore_eos=True) for i, ids in enumerate(prompts)
        )
    before, start = clock.seconds, time.perf_counter()
    while scheduler.step():
        pass
    elapsed = time.perf_counter() - start
    made = {} if channel is None else answers(channel)
    return {
        "share": (clock.seconds - before) / elapsed,
        "rows": [made[str(i)].ids for i in range(len(prompts))] if channel is not None else [],
    }


@dataclass
class Rank:
    process: subprocess.Popen[str]
    is_attn_tp_leader: bool
    replica_rank: int

    def ask(self, order: dict[str, Any]) -> None:
        _pipe(self.process.stdin).write(json.dumps(order) + "\n")
        _pipe(self.process.stdin).flush()

    def answer(self) -> dict[str, Any]:
        line = _pipe(self.process.stdout).readline()
        if not line:
            raise RuntimeError(f"a rank of the benchmark ended with code {self.process.wait()}; see above")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Deployment:
    """The loaded ranks of one layout, and what they measured by batch size."""

    def __init__(self, name: str, layout: Layout, options: argparse.Namespace, folder: Path) -> None:
        self.name = name
        self.layout = layout
        self.num_ranks = layout.tp_size * layout.num_worlds
        self.ranks: list[Rank] = []
        self.rates: dict[int, list[float]] = {}
        self.shares: dict[int, list[float]] = {}
        for number in range(self.num_ranks):
            world, rank = divmod(number, layout.tp_size)
            spec = {
                "fields": _fields(layout, options),
                "rank": rank,
                "dp_rank": world if layout.num_worlds > 1 else None,
                "world_size": layout.tp_size,
                "is_attn_tp_leader": layout.is_attn_tp_leader(rank),
                "meeting": str(folder / f"{name}-{world}".replace(" ", "-")),
            }
            process = subprocess.Popen(
                [sys.executable, os.path.abspath(__file__), "--rank", json.dumps(spec)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=_environment(number, self.num_ranks),
                text=True,
            )
            self.ranks.append(Rank(process, layout.is_attn_tp_leader(rank), layout.replica_rank(world, rank)))
        loaded = [rank.answer() for rank in self.ranks]
        self.vocab_size: int = loaded[0]["vocab_size"]

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, float, list[list[int]]]:
        """Seconds, mean share of collectives, and the rows in the order of the prompts."""
        replicas = self.layout.num_replicas
        start = time.perf_counter()
        for rank in self.ranks:
            mine = prompts[rank.replica_rank :: replicas] if rank.is_attn_tp_leader else []
            rank.ask({"prompts": mine, "new_tokens": new_tokens})
        answers = [rank.answer() for rank in self.ranks]
        seconds = time.perf_counter() - start
        rows: list[list[int]] = [[] for _ in prompts]
        for rank, answer in zip(self.ranks, answers, strict=True):
            if rank.is_attn_tp_leader:
                rows[rank.replica_rank :: replicas] = answer["rows"]
        if any(len(row) != new_tokens for row in rows):
            raise RuntimeError(f"{self.name}: rows of {[len(row) for row in rows]} tokens")
        return seconds, statistics.mean(answer["share"] for answer in answers), rows

    def close(self) -> None:
        for rank in self.ranks:
            _pipe(rank.process.stdin).close()
        for rank in self.ranks:
            try:
                rank.process.wait(20)
            except subprocess.TimeoutExpired:
                rank.process.kill()


def _pipe(end: IO[str] | None) -> IO[str]:
    assert end is not None
    return end


def _fields(layout: Layout, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "model_path": options.model,
        "dtype": options.dtype,
        "device": "cpu",
        "max_total_tokens": POOL_TOKENS,
        "tp_size": layout.tp_size,
        "dp_size": layout.num_replicas,
        "enable_dp_attention": layout.attn_dp_size > 1,
        "decode_log_interval": 1 << 30,
    }


def _environment(rank: int, ranks: int) -> dict[str, str]:
    """The environment that the engine gives to a rank, whatever this process was started with."""
    from sglang.srt.environ import envs
    from sglang.srt.processes.rank_environment import rank_environment

    with envs.OMP_NUM_THREADS.override(None), envs.OMP_WAIT_POLICY.override(None):
        return rank_environment(rank, ranks)


@dataclass
class Comparison:
    """All layouts on the same prompts."""

    deployments: list[Deployment]
    options: argparse.Namespace
    same_rows: dict[str, int] = field(default_factory=dict)

    def run(self, batch: int) -> None:
        """The first round warms up and does not count."""
        draw = random.Random(batch)
        vocab, new = self.deployments[0].vocab_size, self.options.new_tokens
        for number in range(self.options.rounds + 1):
            prompts = [
                [draw.randrange(min(1000, vocab // 2), vocab - 1) for _ in range(self.options.prompt_tokens)]
                for _ in range(batch)
            ]
            first = number % len(self.deployments)
            rows = {}
            for deployment in (*self.deployments[first:], *self.deployments[:first]):
                seconds, share, rows[deployment.name] = deployment.generate(prompts, new)
                if number:
                    deployment.rates.setdefault(batch, []).append(batch * new / seconds)
                    deployment.shares.setdefault(batch, []).append(share)
            reference = rows[ONE_RANK]
            for name, made in rows.items():
                same = sum(a == b for a, b in zip(made, reference, strict=True))
                self.same_rows[name] = self.same_rows.get(name, 0) + same

    def print_table(self, batch: int) -> None:
        alone = self.deployments[0].rates[batch]
        for deployment in self.deployments:
            rates = deployment.rates[batch]
            ratio = statistics.median(a / b for a, b in zip(rates, alone, strict=True))
            cells = [
                deployment.name,
                str(batch),
                _environment(0, deployment.num_ranks)["OMP_NUM_THREADS"],
                f"{statistics.median(rates):.1f}",
                f"{ratio:.2f}",
                f"{100 * statistics.median(deployment.shares[batch]):.0f} %",
            ]
            print("|", " | ".join(cells), "|", flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=MODEL, help="a folder, a GGUF file or an alias")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, after one that warms up")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument(
        "--layouts",
        nargs="+",
        default=["tp 2", "tp 2, attn-dp 2", "2 replicas"],
        choices=list(LAYOUTS),
        metavar="NAME",
        help=f"beside one rank: {'; '.join(LAYOUTS)}",
    )
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min(options.rounds, *options.batch_sizes, options.prompt_tokens, options.new_tokens) < 1:
        parser.error("rounds, batch sizes and token counts are at least 1")
    return options


def main() -> None:
    options = parse_options()
    if options.rank is not None:
        run_rank(json.loads(options.rank))
        return
    chosen = {name: layout for name, layout in LAYOUTS.items() if name in options.layouts}
    deployments: list[Deployment] = []
    with tempfile.TemporaryDirectory(prefix="bench-layouts-") as folder:
        try:
            for name, layout in {ONE_RANK: Layout(), **chosen}.items():
                print(f"loading {name} ...", file=sys.stderr, flush=True)
                deployments.append(Deployment(name, layout, options, Path(folder)))
            comparison = Comparison(deployments, options)
            cores = len(os.sched_getaffinity(0))
            print(
                f"{options.model}, {options.dtype}, {options.prompt_tokens} prompt and {options.new_tokens} "
                f"new tokens, median of {options.rounds} rounds, {cores} cores. All layouts share them: none "
                f"has more to compute with than one rank of {cores} threads. A ratio below 1 is what a "
                "layout costs, one above 1 says that one rank does not use its threads fully."
            )
            print("| layout | batch | threads a rank | tok/s | beside one rank | time in collectives |")
            print("|---|---|---|---|---|---|")
            for batch in options.batch_sizes:
                comparison.run(batch)
                comparison.print_table(batch)
            rows = (options.rounds + 1) * sum(options.batch_sizes)
            same = ", ".join(f"{name} {count}" for name, count in comparison.same_rows.items())
            print(f"rows with the tokens of one rank, of {rows}: {same}")
        finally:
            for deployment in deployments:
                deployment.close()


if __name__ == "__main__":
    main()
