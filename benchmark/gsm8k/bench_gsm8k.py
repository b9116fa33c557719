"""How many GSM8K questions does a running server solve, how fast, and does it answer as it did before?

Usage: python benchmark/gsm8k/bench_gsm8k.py --data-path test.jsonl [--num-questions 50] [--output FILE]
[--compare FILE]. Each question is sent to `/generate` at temperature 0 behind the same solved examples, which
are the first rows of the data file (they are not asked) or of `--shots-path`. The last number of an answer
counts. `--compare` reads the `--output` of an earlier run and says which answers differ: in float32 a server
with a draft answers like one without.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import http.client
import itertools
import json
import re
import statistics
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from tqdm import tqdm

#: What the model would write next after its answer, since the examples in front of it go on like that.
STOP = "Question:"
#: Longer than 99 of 100 reference answers, counted with a vocabulary of 49 thousand tokens.
MAX_NEW_TOKENS = 320
#: A minus belongs to a number unless it stands right behind a word, a number or a bracket, as in "5-3".
_NUMBER = re.compile(
    r"((?<![\w.)])-)?\$?((?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<!\w)\.[0-9]+)"
)


@dataclass(frozen=True)
class Problem:
    """One row of the data file; `solution` ends with `#### ` and the number."""

    question: str
    solution: str
    number: Decimal


@dataclass(frozen=True)
class Answer:
    """What the server answered to one question: one line of `--output`."""

    index: int
    question: str
    prompt: str  # its `digest`
    max_new_tokens: int
    text: str
    output_ids: list[int]
    finish_reason: str
    number: str | None
    correct: bool
    seconds: float
    accept_length: float | None
    spec_verify_ct: int


# --- the data ---


def last_number(text: str) -> Decimal | None:
    """The last number of a text, None without one: "so -$1,234.50 each." is -1234.50."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    sign, digits = found[-1]
    return Decimal(sign + digits.replace(",", ""))


def read_problems(path: Path, count: int) -> list[Problem]:
    """The first `count` rows of a file with one JSON object a line: the texts `question` and `answer`."""
    problems: list[Problem] = []
    for where, row in itertools.islice(json_lines(path), count):
        question, solution = row.get("question"), row.get("answer")
        if not isinstance(question, str) or not isinstance(solution, str):
            raise ValueError(f"{where}: question and answer must be texts; the keys are {', '.join(row)}")
        number = last_number(solution.rpartition("####")[2]) if "####" in solution else None
        if number is None:
            raise ValueError(f"{where}: the answer must end with '#### ' and a number: {solution[-40:]!r}")
        problems.append(Problem(question, solution, number))
    if len(problems) < count:
        raise ValueError(f"{path}: {len(problems)} rows, {count} are needed; ask fewer questions")
    return problems


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """`FILE:line` and the object of every line that is not empty."""
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file; it should hold one JSON object a line")
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: no JSON object on this line: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: no JSON object on this line, but a {type(row).__name__}")
        yield f"{path}:{number}", row


def make_prompt(shots: Sequence[Problem], question: str) -> str:
    """The solved examples, then the question, up to where its answer begins."""
    solved = [f"Question: {shot.question}\nAnswer: {shot.solution}\n\n" for shot in shots]
    return f"{''.join(solved)}Question: {question}\nAnswer:"


# --- what an answer says ---


def accept_length(meta_info: Mapping[str, Any]) -> float | None:
    """Tokens that a verify round brought this answer, on average; None without a verify round.

    The prompt's forward emits the first token, and once more after each retraction; all others come from
    verify rounds. What a round emitted behind the end of the answer does not count.
    """
    rounds = int(meta_info.get("spec_verify_ct", 0))
    if not rounds:
        return None
    of_prompts = 1 + int(meta_info.get("num_retractions", 0))
    return (int(meta_info["completion_tokens"]) - of_prompts) / rounds


def mean_accept_length(lengths: Sequence[float | None]) -> float | None:
    """The mean over the answers that took part in a verify round, None when there was none."""
    known = [length for length in lengths if length is not None]
    return statistics.mean(known) if known else None


def digest(prompt: str) -> str:
    """What a file of answers says of a prompt."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:16]


def read_earlier(path: Path, prompts: Sequence[str], max_new_tokens: int) -> list[dict[str, Any]]:
    """The answers of an earlier run, in the order of the prompts; refused if it asked anything else."""
    rows = [row for _, row in json_lines(path)]
    theirs = [(row.get("prompt"), row.get("max_new_tokens")) for row in rows]
    if theirs != [(digest(prompt), max_new_tokens) for prompt in prompts]:
        raise ValueError(
            f"{path}: its {len(rows)} answers are not to these {len(prompts)} prompts with --max-new-tokens "
            f"{max_new_tokens}; run both with the same data, number of questions and of shots, and limit"
        )
    return rows


def differences(ours: Sequence[Answer], theirs: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """The questions whose answers differ, each with the first token that does; both have the same order."""
    found: dict[int, int] = {}
    for answer, row in zip(ours, theirs, strict=True):
        ids = row.get("output_ids") or []
        if (ids, row.get("text")) != (answer.output_ids, answer.text):
            same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(answer.output_ids, ids))
            found[answer.index] = sum(1 for _ in same)
    return found


# --- the server ---


class Server:
    """A running server; every failure is a `RuntimeError` that says what to do."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s

    def model(self) -> str:
        """The name of the served model."""
        return str(self._ask("/model_info").get("served_model_name"))

    def generate(self, prompt: str, max_new_tokens: int) -> dict[str, Any]:
        """The whole answer of `/generate`: text, output_ids, meta_info."""
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "stop": [STOP]}
        answer = self._ask("/generate", {"text": prompt, "sampling_params": sampling})
        reason = answer["meta_info"]["finish_reason"]
        if reason["type"] == "abort":
            raise RuntimeError(f"{self.url}/generate: aborted: {reason.get('message')}")
        return answer

    def _ask(self, route: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + route, data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                answer = json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                said = error.read().decode("utf-8", "replace")[:500]
            cure = "; state the server's key as --api-key" if error.code == 401 else ""
            raise RuntimeError(f"{self.url}{route}: HTTP {error.code}: {said}{cure}") from None
        except TimeoutError:
            raise RuntimeError(
                f"{self.url}{route}: no answer within --timeout {self._timeout_s:g} s"
            ) from None
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError) as error:
            raise RuntimeError(
                f"no server answers at {self.url}{route} ({getattr(error, 'reason', error) or repr(error)}); "
                "start one with `sglang serve`, or name it with --base-url"
            ) from None
        except ValueError as error:
            raise RuntimeError(
                f"{self.url}{route}: the answer is no JSON ({error}); is it another server?"
            ) from None
        if not isinstance(answer, dict):
            raise RuntimeError(
                f"{self.url}{route}: the answer is a {type(answer).__name__}; is it another server?"
            )
        return answer


def ask_question(server: Server, index: int, problem: Problem, prompt: str, max_new_tokens: int) -> Answer:
    """Ask one question and read the number that it was answered with."""
    start = time.perf_counter()
    said = server.generate(prompt, max_new_tokens)
    seconds = time.perf_counter() - start
    meta, number = said["meta_info"], last_number(said["text"])
    return Answer(
        index=index,
        question=problem.question,
        prompt=digest(prompt),
        max_new_tokens=max_new_tokens,
        text=said["text"],
        output_ids=said["output_ids"],
        finish_reason=meta["finish_reason"]["type"],
        number=None if number is None else str(number),
        correct=number == problem.number,
        seconds=seconds,
        accept_length=accept_length(meta),
        spec_verify_ct=meta.get("spec_verify_ct", 0),
    )


@contextlib.contextmanager
def answers(
    server: Server, asked: Sequence[Problem], prompts: Sequence[str], options: argparse.Namespace
) -> Iterator[Iterator[Answer]]:
    """The answers in the order of the questions, while `--parallel` of them are under way.

    Leaving the block early drops the questions that have not been asked yet.
    """
    pool = ThreadPoolExecutor(max_workers=options.parallel)
    try:
        futures = [
            pool.submit(ask_question, server, index, problem, prompt, options.max_new_tokens)
            for index, (problem, prompt) in enumerate(zip(asked, prompts, strict=True))
        ]
        yield (future.result() for future in futures)
    finally:
        pool.shutdown(cancel_futures=True)


def report(found: Sequence[Answer], seconds: float) -> Iterator[str]:
    """The lines that the benchmark prints."""
    correct = sum(answer.correct for answer in found)
    invalid = sum(answer.number is None for answer in found)
    tokens = sum(len(answer.output_ids) for answer in found)
    median = statistics.median(answer.seconds for answer in found)
    yield f"accuracy: {correct / len(found):.3f} ({correct} of {len(found)})"
    yield f"invalid: {invalid / len(found):.3f} ({invalid} answers without a number)"
    yield f"latency: {seconds:.2f} s for all, {median:.2f} s an answer (median)"
    yield f"output: {tokens / seconds:.1f} tokens/s ({tokens} tokens)"
    mean = mean_accept_length([answer.accept_length for answer in found])
    if mean is not None:
        rounds = sum(answer.spec_verify_ct for answer in found)
        yield f"accept length: {mean:.2f} (mean over the answers, {rounds} verify rounds in all)"


# --- the command ---


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--data-path", type=Path, required=True, help="GSM8K rows, one JSON object a line")
    add("--shots-path", type=Path, help="where the solved examples are from; default: --data-path")
    add("--num-questions", type=int, default=50)
    add("--num-shots", type=int, default=5, help="solved examples in front of each question")
    add("--parallel", type=int, default=4, help="questions under way at a time")
    add("--max-new-tokens", type=int, default=MAX_NEW_TOKENS)
    add("--host", help="default 127.0.0.1")
    add("--port", type=int, help="default 30000")
    add("--base-url", help="instead of host and port, e.g. https://example.org:8443")
    add("--api-key", help="key of the server")
    add("--timeout", type=float, default=600.0, help="seconds to wait for one answer")
    add("--output", type=Path, help="write one JSON line per question")
    add("--compare", type=Path, help="the --output of an earlier run; exit status 1 when answers differ")
    options = parser.parse_args(arguments)
    if min(options.num_questions, options.parallel, options.max_new_tokens) < 1 or options.num_shots < 0:
        parser.error(
            "--num-questions, --parallel and --max-new-tokens are at least 1, --num-shots is at least 0"
        )
    if options.timeout <= 0:
        parser.error(f"--timeout {options.timeout:g}: seconds above 0")
    if options.base_url is None:
        options.base_url = f"http://{options.host or '127.0.0.1'}:{options.port or 30000}"
    elif options.host is not None or options.port is not None:
        parser.error("--base-url stands instead of --host and --port; leave one of them out")
    if not options.base_url.startswith(("http://", "https://")):
        parser.error(f"--base-url {options.base_url}: it begins with http:// or https://")
    if options.output is not None and not options.output.parent.is_dir():
        parser.error(f"--output {options.output}: there is no folder {options.output.parent}")
    if options.output is not None and options.compare is not None:
        same = options.output.resolve() == options.compare.resolve()
        if same:
            parser.error("--output and --compare are the same file; write the answers to another one")
    return options


def load(options: argparse.Namespace) -> tuple[list[Problem], list[Problem]]:
    """The solved examples and the questions to ask; an example is never asked."""
    if options.shots_path is not None:
        shots = read_problems(options.shots_path, options.num_shots)
        return shots, read_problems(options.data_path, options.num_questions)
    rows = read_problems(options.data_path, options.num_shots + options.num_questions)
    return rows[: options.num_shots], rows[options.num_shots :]


def collect(
    server: Server, asked: Sequence[Problem], prompts: Sequence[str], options: argparse.Namespace
) -> tuple[list[Answer], float]:
    """All answers and the seconds they took; each is written to `--output` as it comes."""
    found: list[Answer] = []
    with contextlib.ExitStack() as stack:
        file = None
        if options.output is not None:
            file = stack.enter_context(options.output.open("w", encoding="utf-8"))
        start = time.perf_counter()
        coming = stack.enter_context(answers(server, asked, prompts, options))
        for answer in tqdm(coming, total=len(asked), unit="question"):
            found.append(answer)
            if file is not None:
                print(json.dumps(asdict(answer)), file=file, flush=True)
        return found, time.perf_counter() - start


def run(options: argparse.Namespace) -> int:
    """Ask, print, compare; the exit status is 1 when answers differ from `--compare`."""
    shots, asked = load(options)
    prompts = [make_prompt(shots, problem.question) for problem in asked]
    earlier = None
    if options.compare is not None:
        earlier = read_earlier(options.compare, prompts, options.max_new_tokens)
    server = Server(options.base_url, options.api_key, options.timeout)
    print(
        f"{server.model()} at {server.url}: {len(asked)} questions behind {len(shots)} solved examples, "
        f"{options.parallel} at a time, at most {options.max_new_tokens} new tokens, temperature 0",
        flush=True,
    )
    # The examples are read before the clock starts: every question finds them in the prefix cache.
    server.generate(make_prompt(shots, ""), 1)
    found, seconds = collect(server, asked, prompts, options)
    for line in report(found, seconds):
        print(line)
    if earlier is None:
        return 0
    differ = differences(found, earlier)
    print(f"answers that differ from {options.compare}: {len(differ)} of {len(found)}")
    for index, token in differ.items():
        print(f"  question {index}, from token {token} on")
    return 1 if differ else 0


def main() -> None:
    options = parse()
    try:
        sys.exit(run(options))
    except (ValueError, RuntimeError, OSError) as error:
        sys.exit(f"bench_gsm8k: {error}")
    except KeyboardInterrupt:
        sys.exit("bench_gsm8k: interrupted")


if __name__ == "__main__":
    main()
