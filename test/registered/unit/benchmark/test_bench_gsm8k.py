"""The GSM8K benchmark reads rows and answers rightly, counts verify rounds, and notices other answers."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import contextlib
import json
import threading
from collections.abc import Iterator
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from gsm8k import bench_gsm8k as bench

from sglang.test.ports import held_ports

ROWS = [
    {"question": f"What is {n} plus 1,000?", "answer": f"It is <<{n}+1000={n + 1000}>>so.\n#### 1,00{n}"}
    for n in range(5)
]


def write_rows(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "test.jsonl", ROWS)


# --- the last number ---


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 1,234", "1234"),
        ("#### 1,234,567.", "1234567"),
        ("She pays 3 * 4 = $<<3*4=12>>12", "12"),
        ("so it is -$1,234.50 each.", "-1234.50"),
        ("the loss is -7", "-7"),
        ("(-7)", "-7"),
        ("10-3", "3"),
        ("x)-3", "3"),
        ("about 0.5 or .25", "0.25"),
        ("see step.5", "5"),
        ("1,2345", "2345"),
        ("first 18.\n\n#### 20\n", "20"),
        ("90%", "90"),
    ],
)
def test_the_last_number_of_a_text_is_read_as_people_write_it(text, number):
    assert bench.last_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "no idea", "####", "$,.", "-"])
def test_a_text_without_a_number_has_none(text):
    assert bench.last_number(text) is None


def test_numbers_are_equal_by_value_and_not_by_spelling():
    assert bench.last_number("It is 18.00") == bench.last_number("#### 18")


# --- rows and prompts ---


def test_only_the_rows_that_are_needed_are_read(tmp_path):
    """A run of a few questions must not fail on a row that it never asks."""
    path = write_rows(tmp_path / "test.jsonl", [ROWS[0], ROWS[1], ["planted"]])
    assert [problem.number for problem in bench.read_problems(path, 2)] == [1000, 1001]
    with pytest.raises(ValueError, match=r"test\.jsonl:3: no JSON object on this line, but a list"):
        bench.read_problems(path, 3)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{broken", "no JSON object on this line"),
        ('{"question": "a"}', "question and answer must be texts; the keys are question"),
        ('{"question": "a", "answer": 3}', "must be texts"),
        ('{"question": "a", "answer": "it is 3"}', "must end with '#### ' and a number"),
        ('{"question": "a", "answer": "it is 3\\n#### "}', "must end with '#### ' and a number"),
        ('{"question": "\udce4"}', "no JSON object on this line"),
    ],
)
def test_a_malformed_row_is_named_by_its_line(tmp_path, line, said):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n" + line.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(ValueError, match=said) as caught:
        bench.read_problems(path, 1)
    assert str(caught.value).startswith(f"{path}:2: ")


def test_too_few_rows_and_a_missing_file_say_so(data, tmp_path):
    with pytest.raises(ValueError, match="5 rows, 6 are needed; ask fewer questions"):
        bench.read_problems(data, 6)
    with pytest.raises(ValueError, match=r"nowhere\.jsonl: there is no such file"):
        bench.read_problems(tmp_path / "nowhere.jsonl", 1)


def test_a_prompt_is_the_solved_examples_and_the_open_question(data):
    first, second = bench.read_problems(data, 2)
    assert bench.make_prompt([first], second.question) == (
        "Question: What is 0 plus 1,000?\nAnswer: It is <<0+1000=1000>>so.\n#### 1,000\n\n"
        "Question: What is 1 plus 1,000?\nAnswer:"
    )
    assert bench.make_prompt([], "Why?") == "Question: Why?\nAnswer:"


def test_an_example_is_never_asked(data, tmp_path):
    """A model that is shown the solution of a question that it is asked later scores too high."""
    options = bench.parse(["--data-path", str(data), "--num-shots", "2", "--num-questions", "3"])
    shots, asked = bench.load(options)
    assert [p.number for p in shots] == [1000, 1001] and [p.number for p in asked] == [1002, 1003, 1004]

    train = write_rows(tmp_path / "train.jsonl", [{"question": "Other?", "answer": "#### 7"}])
    options = bench.parse(
        ["--data-path", str(data), "--shots-path", str(train), "--num-shots", "1", "--num-questions", "2"]
    )
    shots, asked = bench.load(options)
    assert [p.number for p in shots] == [7] and [p.number for p in asked] == [1000, 1001]


# --- accept length ---


@pytest.mark.parametrize(
    ("meta_info", "length"),
    [
        ({"completion_tokens": 9, "spec_verify_ct": 4}, 2.0),
        ({"completion_tokens": 9, "spec_verify_ct": 8}, 1.0),
        ({"completion_tokens": 10, "spec_verify_ct": 4, "num_retractions": 1}, 2.0),
        ({"completion_tokens": 1, "spec_verify_ct": 0}, None),
        ({"completion_tokens": 9}, None),
    ],
)
def test_tokens_of_the_prompts_forward_are_not_of_a_verify_round(meta_info, length):
    assert bench.accept_length(meta_info) == length


def test_the_mean_is_over_answers_that_took_part_in_a_round():
    assert bench.mean_accept_length([2.0, None, 3.0]) == 2.5
    assert bench.mean_accept_length([None]) is None


# --- a whole run ---


class _Server(BaseHTTPRequestHandler):
    """Answers the number of the question; `server.reply` may say something else to a request."""

    def do_GET(self) -> None:
        self._send(200, {"served_model_name": "stub"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body | {"key": self.headers["Authorization"]})
        self._send(*self.server.reply(body))

    def _send(self, status: int, answer: object) -> None:
        said = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *args: object) -> None:
        pass


def solved(body: dict) -> tuple[int, dict]:
    """The right answer, which is all that a question of `ROWS` differs by; 5 tokens in 2 verify rounds."""
    words = body["text"].rpartition("What is ")[2]
    meta = {"finish_reason": {"type": "stop"}, "completion_tokens": 5, "spec_verify_ct": 2}
    return 200, {"text": f" It is 100{words[:1]}", "output_ids": [1, 2, 3, 4, 5], "meta_info": meta}


@contextlib.contextmanager
def stub(reply=solved) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    server.asked, server.reply = [], reply
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def run(server: ThreadingHTTPServer, data: Path, *more: str) -> int:
    port = str(server.server_address[1])
    few = ["--num-shots", "1", "--num-questions", "4", "--parallel", "2"]
    return bench.run(bench.parse(["--data-path", str(data), "--port", port, *few, *more]))


def test_a_run_prints_what_it_measured_and_writes_a_line_per_question(data, tmp_path, capsys):
    output = tmp_path / "answers.jsonl"
    with stub() as server:
        assert run(server, data, "--output", str(output), "--api-key", "k") == 0
    printed = capsys.readouterr().out
    assert "stub at http://127.0.0.1:" in printed and "accuracy: 1.000 (4 of 4)" in printed
    assert "invalid: 0.000" in printed and "tokens/s (20 tokens)" in printed
    assert "accept length: 2.00 (mean over the answers, 8 verify rounds in all)" in printed
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(line["index"], line["number"], line["correct"]) for line in lines] == [
        (n, f"100{n + 1}", True) for n in range(4)
    ]
    assert {asked["key"] for asked in server.asked} == {"Bearer k"}
    assert {asked["sampling_params"]["temperature"] for asked in server.asked} == {0}


def test_without_a_draft_there_is_no_accept_length(data, capsys):
    def plain(body: dict) -> tuple[int, dict]:
        status, answer = solved(body)
        del answer["meta_info"]["spec_verify_ct"]
        return status, answer | {"text": " I do not know"}

    with stub(plain) as server:
        assert run(server, data) == 0
    printed = capsys.readouterr().out
    assert "accept length" not in printed
    assert "accuracy: 0.000" in printed and "invalid: 1.000 (4 answers without a number)" in printed


def test_equal_answers_compare_equal_and_one_other_token_is_found(data, tmp_path, capsys):
    """The proof that a draft changes nothing must be able to fail, on a token that the text hides too."""
    output = tmp_path / "answers.jsonl"

    def other(body: dict) -> tuple[int, dict]:
        status, answer = solved(body)
        ids = [1, 2, 3, 9, 5] if "What is 3 plus" in body["text"] else answer["output_ids"]
        return status, answer | {"output_ids": ids}

    with stub() as server:
        run(server, data, "--output", str(output))
        assert run(server, data, "--compare", str(output)) == 0
    assert "0 of 4" in capsys.readouterr().out
    with stub(other) as server:
        assert run(server, data, "--compare", str(output)) == 1
    printed = capsys.readouterr().out
    assert f"answers that differ from {output}: 1 of 4\n  question 2, from token 3 on\n" in printed


@pytest.mark.parametrize("other", [["--num-questions", "3"], ["--num-shots", "0"], ["--max-new-tokens", "9"]])
def test_answers_to_other_prompts_are_not_compared_and_nothing_is_asked(data, tmp_path, other):
    output = tmp_path / "answers.jsonl"
    with stub() as server:
        run(server, data, "--output", str(output))
        server.asked.clear()
        with pytest.raises(ValueError, match="are not to these"):
            run(server, data, "--compare", str(output), *other)
        assert server.asked == []


@pytest.mark.parametrize(
    ("status", "answer", "said"),
    [
        (401, {"error": {"message": "no key"}}, "HTTP 401: .*no key.*--api-key"),
        (400, {"error": {"message": "too long"}}, "HTTP 400: .*too long"),
        (200, b"<html>", "no JSON"),
        (200, [], "a list; is it another server"),
        (200, {"meta_info": {"finish_reason": {"type": "abort", "message": "gone"}}}, "aborted: gone"),
    ],
)
def test_what_a_server_refuses_is_an_error_that_quotes_it(data, status, answer, said):
    with stub(lambda body: (status, answer)) as server, pytest.raises(RuntimeError, match=said):
        run(server, data)


def test_a_failure_in_the_middle_asks_nothing_more(data, tmp_path):
    """The answers before it are kept: a run that fails late has not measured for nothing."""
    output = tmp_path / "answers.jsonl"

    def fails(body: dict) -> tuple[int, dict]:
        return (500, {}) if "What is 2 plus" in body["text"] else solved(body)

    with stub(fails) as server, pytest.raises(RuntimeError, match="HTTP 500"):
        run(server, data, "--output", str(output), "--parallel", "1")
    assert [json.loads(line)["index"] for line in output.read_text().splitlines()] == [0]


def test_without_a_server_the_address_and_the_cure_are_named(data):
    with held_ports() as port, pytest.raises(RuntimeError) as caught:
        bench.run(
            bench.parse(
                ["--data-path", str(data), "--num-questions", "1", "--num-shots", "0", "--port", str(port)]
            )
        )
    assert f"no server answers at http://127.0.0.1:{port}/model_info" in str(caught.value)
    assert "sglang serve" in str(caught.value) and "--base-url" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--num-questions", "0"], "are at least 1"),
        (["--num-shots", "-1"], "at least 0"),
        (["--timeout", "0"], "seconds above 0"),
        (["--base-url", "http://a", "--port", "1"], "stands instead of --host and --port"),
        (["--base-url", "a:1"], "begins with http"),
        (["--output", "/nowhere/a.jsonl"], "there is no folder"),
        (["--output", "a.jsonl", "--compare", "./a.jsonl"], "are the same file"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_is_read(arguments, said, capsys):
    with pytest.raises(SystemExit):
        bench.parse(["--data-path", "nowhere.jsonl", *arguments])
    assert said in capsys.readouterr().err
