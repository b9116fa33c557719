"""How many tokens a second does the engine make with each kind of draft, beside itself without one?

Usage: python benchmark/bench_speculative.py [--dtype float32] [--algorithms NGRAM EAGLE3] [--rounds 3]
[--batch-sizes 1 16] [--shapes auto 3,1,4] [--text repeat]. An engine without a draft stays loaded; the
engines with one are loaded beside it one after the other. Each round both answer the same prompts, one after
the other, and the one that goes first changes every round, so a busy moment of the machine meets both. All
algorithms get the same prompts, no prompt comes twice in an engine, and both forget their cached prefixes
before each round. `--text chat` asks questions that the shipped draft was not trained on; `--text repeat`
gives a text that has begun to repeat itself, which the answer goes on with.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gsm8k.bench_gsm8k import accept_length, mean_accept_length, read_problems

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine

MODEL = "smollm2-135m-instruct"
EAGLE3_DRAFT = Path(__file__).resolve().parents[1] / "examples" / "drafts" / "smollm2-135m-eagle3"
#: Prompts that the shipped draft was not trained on.
HELD_OUT = Path(__file__).resolve().parents[1] / "scripts" / "train_draft" / "heldout.jsonl"
ALGORITHMS = ("NGRAM", "STANDALONE", "EAGLE3", "EAGLE")
#: What a shape says: depth of a draft, branches a step, tokens of a verify round.
SHAPE = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")

#: A text that repeats itself: sentences of what is repeated, and how many times the prompt has it.
SENTENCES, TIMES = 8, 3

#: More than a verify round takes of the pool for one request beside its text, for any draft.
RESERVED_TOKENS = 128

FORMS = (
    "Explain in simple words what {} is.",
    "Write a short story about {}.",
    "Give me five tips about {}.",
    "What are the advantages and disadvantages of {}?",
    "Write a poem of eight lines about {}.",
    "How would you explain {} to a child?",
    "Write a letter to a friend who wants to learn about {}.",
    "What is the history of {}?",
    "Make a plan for a lesson about {}.",
    "Which mistakes do people make with {}?",
)
TOPICS = (
    "photosynthesis",
    "the stock market",
    "growing tomatoes",
    "a lighthouse",
    "learning the piano",
    "public transport",
    "the water cycle",
    "baking bread",
    "chess",
    "the Roman Empire",
    "sleep",
    "bicycles",
    "volcanoes",
    "saving money",
    "bees",
    "the printing press",
    "hiking in the mountains",
    "electric cars",
    "time zones",
    "friendship",
    "vaccines",
    "libraries",
    "the moon",
    "recycling",
)


@dataclass(frozen=True)
class Candidate:
    """An engine with a draft, as keywords of `Engine`."""

    name: str
    settings: dict[str, object]


@dataclass(frozen=True)
class Run:
    """What one engine did with the prompts of one round."""

    seconds: float
    rows: list[list[int]]
    accept_lengths: list[float | None]
    verify_rounds: int

    def rate(self) -> float:
        """Tokens a second, the forward of the prompts included."""
        return sum(len(row) for row in self.rows) / self.seconds


@dataclass
class Comparison:
    """One algorithm at one batch size, round by round."""

    plain: list[Run] = field(default_factory=list)
    drafted: list[Run] = field(default_factory=list)

    def ratio(self) -> float:
        """The median of the ratios of each round, whose two sides ran one after the other."""
        return statistics.median(b.rate() / a.rate() for a, b in zip(self.plain, self.drafted, strict=True))

    def cells(self) -> list[str]:
        """Rates of both sides, their ratio, accept length, verify rounds, rows that are the same."""
        rates = [
            f"{statistics.median(run.rate() for run in side):.1f}" for side in (self.plain, self.drafted)
        ]
        mean = mean_accept_length([length for run in self.drafted for length in run.accept_lengths])
        pairs = [
            pair
            for a, b in zip(self.plain, self.drafted, strict=True)
            for pair in zip(a.rows, b.rows, strict=True)
        ]
        same = sum(ours == theirs for ours, theirs in pairs)
        return [
            *rates,
            f"{self.ratio():.2f}",
            "none" if mean is None else f"{mean:.2f}",
            str(sum(run.verify_rounds for run in self.drafted)),
            f"{same} of {len(pairs)}",
        ]


# --- what is compared ---


def candidates(options: argparse.Namespace) -> tuple[list[Candidate], list[str]]:
    """The engines to measure, and a sentence for each algorithm that is left out.

    An algorithm that was asked for by name and has no draft is a `ValueError`.
    """
    eagle3 = options.eagle3_draft_path or (str(EAGLE3_DRAFT) if EAGLE3_DRAFT.is_dir() else None)
    drafts = {
        "NGRAM": None,
        "STANDALONE": options.draft_model_path or options.model_path,
        "EAGLE3": eagle3,
        "EAGLE": options.eagle_draft_path,
    }
    found, left_out = [], []
    for name in options.algorithms or ALGORITHMS:
        settings: dict[str, object] = {"speculative_algorithm": name}
        if name == "NGRAM":  # its trees have no depth or breadth of their own to state
            found.append(Candidate(name, settings))
            continue
        if drafts[name] is None:
            flag = f"--{name.lower()}-draft-path"
            if options.algorithms:
                raise ValueError(f"{name} has no draft; give its folder as {flag}")
            left_out.append(f"{name} is left out: no draft was given as {flag}.")
            continue
        settings["speculative_draft_model_path"] = drafts[name]
        found.extend(Candidate(name, settings | shape) for shape in options.shapes)
    return found, left_out


def make_prompts(options: argparse.Namespace) -> list[str]:
    """As many user messages as all rounds take, none twice, in a fixed random order."""
    count = (options.rounds + 1) * sum(options.batch_sizes)
    if options.data_path is not None:
        return [problem.question for problem in read_problems(options.data_path, count)]
    asked = [form.format(topic) for form in FORMS for topic in TOPICS]
    if options.text == "repeat":
        draw = random.Random(0)
        return [" ".join(draw.sample(asked, SENTENCES)) for _ in range(count)]
    rows = [json.loads(line) for line in HELD_OUT.read_text(encoding="utf-8").splitlines()]
    messages = [row["prompt"] for row in rows if row["kind"] == "chat"]
    random.Random(0).shuffle(messages)
    random.Random(0).shuffle(asked)
    messages += asked  # of forms and topics that training may have met
    if len(messages) < count:
        raise ValueError(
            f"{count} prompts are needed and {len(messages)} are built in; give more with --data-path, or "
            "run fewer rounds"
        )
    return messages[:count]


def rounds_of(prompts: Sequence[list[int]], batch_sizes: Sequence[int], num_rounds: int) -> Iterator[Any]:
    """`(batch size, its rounds)`, where a round is the prompts of one batch; all prompts are used once."""
    left = iter(prompts)
    for batch in batch_sizes:
        yield batch, [[next(left) for _ in range(batch)] for _ in range(num_rounds)]


def processor_name(cpuinfo: str) -> str:
    """The name in the text of /proc/cpuinfo; "unknown processor" where it has none, as on Arm."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip().lower() == "model name":
            return value.strip()
    return "unknown processor"


# --- measuring ---


def generate(engine: Engine, prompts: list[list[int]], new_tokens: int) -> Run:
    """Answer one batch greedily; each answer ends where the model ends it."""
    if not engine.flush_cache(timeout_s=10.0):
        raise RuntimeError("the engine still runs requests of an earlier round; its cache was not flushed")
    start = time.perf_counter()
    sampling = {"temperature": 0, "max_new_tokens": new_tokens}
    answers: Any = engine.generate(input_ids=prompts, sampling_params=sampling)
    seconds = time.perf_counter() - start
    metas = [answer["meta_info"] for answer in answers]
    return Run(
        seconds,
        [answer["output_ids"] for answer in answers],
        [accept_length(meta) for meta in metas],
        sum(meta.get("spec_verify_ct", 0) for meta in metas),
    )


def compare(plain: Engine, drafted: Engine, rounds: list[list[list[int]]], new_tokens: int) -> Comparison:
    """The first round warms both sides up and is not counted."""
    comparison = Comparison()
    sides = [(plain, comparison.plain), (drafted, comparison.drafted)]
    for number, prompts in enumerate(rounds):
        for engine, runs in sides if number % 2 else reversed(sides):
            run = generate(engine, prompts, new_tokens)
            if number:
                runs.append(run)
    return comparison


def encode(engine: Engine, messages: Sequence[str], options: argparse.Namespace) -> list[list[int]]:
    """Each message as the user's turn of a chat, or a text that repeats it, in token ids."""
    tokenizer = engine.tokenizer_manager.tokenizer
    if tokenizer is None:
        raise RuntimeError("the engine has no tokenizer; start it without skip_tokenizer_init")
    if options.text == "repeat":
        rows = [tokenizer.encode("\n".join([message] * TIMES)) for message in messages]
    else:
        rows = [
            tokenizer.encode_chat(tokenizer.apply_chat_template([{"role": "user", "content": message}]))
            for message in messages
        ]
    # Requests that do not fit together would be retracted, and measured as a slow round.
    needed = max(options.batch_sizes) * (max(map(len, rows)) + options.new_tokens + RESERVED_TOKENS)
    if needed > options.max_total_tokens:
        raise ValueError(
            f"--max-total-tokens {options.max_total_tokens}: a batch takes up to {needed} tokens; state that"
        )
    return rows


def describe(engine: Engine, options: argparse.Namespace) -> str:
    from sglang.srt.platforms import cpu_count, cpu_has_bf16
    from sglang.srt.processes.rank_environment import rank_environment

    cpuinfo = Path("/proc/cpuinfo")
    name = processor_name(cpuinfo.read_text(errors="replace") if cpuinfo.exists() else "")
    bf16 = "with" if cpu_has_bf16() else "without"
    threads = rank_environment(0, 1)["OMP_NUM_THREADS"]
    dtype = engine.get_server_info()["dtype"]
    return (
        f"{options.model_path}, {dtype}, {cpu_count()} cores of {name} ({bf16} bf16 instructions), {threads} "
        f"threads an engine. Greedy, at most {options.new_tokens} new tokens, {options.rounds} rounds that "
        "count. An engine without a draft and one with it take turns on the same prompts. Rates are medians "
        "of rounds, their ratio is the median ratio of a round; verify rounds are summed over all answers. "
        f"Text: {options.text}."
    )


def measure(options: argparse.Namespace) -> None:
    """Load, alternate, print; each line as soon as it is known."""
    import sglang as sgl
    from sglang.srt.entrypoints.engine_core import resolve_and_check
    from sglang.srt.server_args import ServerArgs

    chosen, left_out = candidates(options)
    messages = make_prompts(options)
    common: dict[str, object] = {
        "model_path": options.model_path,
        "dtype": options.dtype,
        "max_total_tokens": options.max_total_tokens,
        "log_level": "error",
    }
    for candidate in chosen:  # a setting that is refused is refused before anything is measured
        resolve_and_check(ServerArgs.from_kwargs(**common, **candidate.settings))
    print("loading the engine without a draft ...", file=sys.stderr, flush=True)
    with sgl.Engine(**common) as plain:
        prompts = encode(plain, messages, options)
        for line in (describe(plain, options), *left_out):
            print(line)
        print(
            "| algorithm | steps, topk, tokens | batch | plain tok/s | speculative tok/s | ratio "
            "| accept length | verify rounds | same rows |"
        )
        print("|---|---|---|---|---|---|---|---|---|", flush=True)
        for candidate in chosen:
            print(f"loading {candidate.name} ...", file=sys.stderr, flush=True)
            with sgl.Engine(**common, **candidate.settings) as drafted:
                info = drafted.get_server_info()
                resolved = ", ".join("-" if info[key] is None else str(info[key]) for key in SHAPE)
                for batch, rounds in rounds_of(prompts, options.batch_sizes, options.rounds + 1):
                    cells = compare(plain, drafted, rounds, options.new_tokens).cells()
                    print("|", " | ".join([candidate.name, resolved, str(batch), *cells]), "|", flush=True)


# --- the command ---


def shape(text: str) -> dict[str, int]:
    """The settings that `3,1,4` stands for: steps, branches, tokens; none for `auto`."""
    if text == "auto":
        return {}
    try:
        return dict(zip(SHAPE, map(int, text.split(",")), strict=True))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor three numbers like 3,1,4") from None


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model-path", default=MODEL, help="a folder, a GGUF file or an alias")
    add("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    add("--algorithms", nargs="+", choices=ALGORITHMS, help="default: all whose draft is there")
    add("--draft-model-path", help="draft of STANDALONE; default: the model itself, which costs the most")
    add("--eagle3-draft-path", help="draft of EAGLE3; default: the one under examples/, if it is there")
    add("--eagle-draft-path", help="draft of EAGLE; without one EAGLE is left out")
    add(
        "--shapes",
        type=shape,
        nargs="+",
        default=[{}],
        metavar="STEPS,TOPK,TOKENS",
        help="each draft model is measured with each of them; auto (the default): as the engine chooses",
    )
    add(
        "--threads",
        type=int,
        help="threads of each engine; default: what the engine takes (OMP_NUM_THREADS, or one per core)",
    )
    add("--text", choices=["chat", "repeat"], default="chat", help="what the prompts are")
    add("--rounds", type=int, default=3, help="rounds that count, after one that warms up; an odd number")
    add("--batch-sizes", type=int, nargs="+", default=[1, 16])
    add("--new-tokens", type=int, default=128, help="an answer ends earlier where the model ends it")
    add("--data-path", type=Path, help="GSM8K rows whose questions are the prompts; default: chat prompts")
    add("--max-total-tokens", type=int, default=8192, help="tokens in the KV pool of each engine")
    options = parser.parse_args(arguments)
    if min(options.rounds, *options.batch_sizes, options.new_tokens, options.threads or 1) < 1:
        parser.error("rounds, batch sizes, new tokens and threads are at least 1")
    if options.rounds % 2 == 0:
        parser.error(f"rounds is an odd number, so that a median is a round; got {options.rounds}")
    return options


def main() -> None:
    options = parse()
    os.environ["HF_HUB_OFFLINE"] = "1"
    if options.threads is not None:
        # Before torch is imported; the engine's processes inherit it.
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
    try:
        measure(options)
    except (ValueError, RuntimeError, OSError) as error:
        sys.exit(f"bench_speculative: {error}")
    except KeyboardInterrupt:
        sys.exit("bench_speculative: interrupted")


if __name__ == "__main__":
    main()
