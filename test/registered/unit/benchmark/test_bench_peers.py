"""The comparison with peers takes turns, names what is missing, marks short rows and leaves no process."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="unit-cpu")

import dataclasses
import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import bench_peers
import psutil
import pytest
from peers import (
    installed,
    llama_cpp_python,
    llama_server,
    openvino_local,
    options,
    our_server,
    table,
    transformers_local,
    turns,
    vllm_server,
    workloads,
)
from peers.in_process_side import InProcessSide
from peers.openai_side import OpenAISide, Server
from peers.openai_stream import read_answer
from peers.process_tree import ProcessTree
from peers.side import Answer, Label, Side
from peers.turns import Measured
from peers.workloads import Prompts, Row, Sample

from sglang.test.waiting import wait_until


class FakeSide(Side):
    """Answers in `seconds` a token and logs the first token of each prompt."""

    def __init__(
        self, name: str, log: list[str], *, form: str = "bf16", seconds: float = 0.5, **label
    ) -> None:
        super().__init__(Label(name, form, **label))
        self.log, self.seconds, self.lost = log, seconds, 0

    def start(self) -> float:
        self.log.append(f"start {self.label.name}")
        return 1.5

    def answer(self, prompts, new_tokens, at_once):
        self.log.append(f"{self.label.name} {len(prompts)} {hash(prompts[0].ids)}")
        last = self.seconds * new_tokens
        return [Answer(0.0, self.seconds, last, new_tokens - self.lost) for _ in prompts]

    def memory_bytes(self) -> int:
        return 10**9

    def stop(self) -> None:
        self.log.append(f"stop {self.label.name}")


def prompts() -> Prompts:
    return Prompts(lambda text: [len(text) * 1000 + ord(text[1])])


def measured(sides, rows, **more):
    lines: list[str] = []
    results = turns.measure(sides, rows, prompts(), repeat=3, seed=1, say=lines.append, **more)
    return results, lines


def test_the_sides_take_turns_and_who_goes_first_changes_every_round():
    """Without it a machine that slows down during a row would always hit the same side."""
    log: list[str] = []
    measured([FakeSide("A", log), FakeSide("B", log)], [workloads.decode(128, is_quick=True)])
    asked = [line.split() for line in log if line[:2] in ("A ", "B ")][2:]
    assert [who for who, *_ in asked] == ["A", "B", "B", "A", "A", "B"]
    seen = [prompt for _, _, prompt in asked]
    assert [seen[0], seen[2], seen[4]] == [seen[1], seen[3], seen[5]]
    assert len(set(seen)) == 3, "a prompt that comes back is found in a prefix cache"


def test_a_side_is_stopped_whatever_happens():
    log: list[str] = []

    def fail():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured(
            [FakeSide("A", log), FakeSide("B", log)], [workloads.prefill(512, is_quick=True)], between=fail
        )
    assert log[-2:] == ["stop B", "stop A"]


def test_a_run_that_is_ended_early_keeps_the_rows_that_were_finished():
    log: list[str] = []

    def ends(*_):
        raise SystemExit(143)

    whole = workloads.prefill(512, is_quick=True)
    results, lines = measured([FakeSide("A", log)], [whole, Row(("cut",), "tok/s", 1, True, ends)])
    assert list(results["A"].samples) == ["prefill 512"] and len(results["A"].samples["prefill 512"]) == 3
    assert lines[-1] == "ended early; the rows that were finished follow"
    assert log[-1] == "stop A"


def test_a_side_that_does_not_start_is_stopped_and_left_out():
    log: list[str] = []
    broken = FakeSide("A", log)
    broken.start = lambda: (_ for _ in ()).throw(RuntimeError("no such file"))
    results, lines = measured([broken, FakeSide("B", log)], [workloads.prefill(512, is_quick=True)])
    assert list(results) == ["B"]
    assert "stop A" in log
    assert lines[0] == "A: left out, it did not start: no such file"


def test_a_side_that_fails_in_a_row_goes_on_with_the_next():
    log: list[str] = []
    side = FakeSide("A", log)
    whole = workloads.decode(128, is_quick=True)

    def breaks(*_):
        raise RuntimeError("out of slots")

    results, _ = measured([side], [Row(("bad",), "tok/s", 1, True, breaks), whole])
    found = results["A"].samples
    assert str(table.cell(found["bad"])) == "INVALID: out of slots"
    assert not any(sample.fault for sample in found["decode, context 128"])


def test_each_row_makes_its_figure_from_the_times():
    side, draw = FakeSide("A", []), random.Random(1)
    figures = {
        name: sample
        for row in workloads.rows(quick=False)
        for name, sample in zip(row.names, row.measure(side, prompts(), draw), strict=True)
    }
    assert figures["decode, context 1024"].value == pytest.approx(2.0)
    assert figures["prefill 512"].value == pytest.approx(1024)
    # 32 answers of 64 tokens, the last one after 32 seconds.
    assert figures["served, 16 at once"].value == pytest.approx(64)
    assert figures["served, 16 at once"].more == pytest.approx({"TTFT ms": 500, "TPOT ms": 500})
    assert figures["shared 1,024 tokens, warm"].value == pytest.approx(32)
    assert not any(sample.fault for sample in figures.values())


def test_the_cold_and_the_warm_burst_share_a_beginning_and_nothing_more():
    asked = []

    class Listening(FakeSide):
        def answer(self, prompts, new_tokens, at_once):
            asked.append([prompt.ids for prompt in prompts])
            return super().answer(prompts, new_tokens, at_once)

    workloads.shared_prefix().measure(Listening("A", []), prompts(), random.Random(1))
    every = [ids for burst in asked for ids in burst]
    assert len(every) == 32 and {len(ids) for ids in every} == {1056}
    assert len({ids[:1024] for ids in every}) == 1 and len({ids[1024:] for ids in every}) == 32


def test_a_row_that_came_back_short_is_invalid_and_has_no_ratio():
    side = FakeSide("A", [], is_ours=True)
    side.lost = 2
    row = workloads.served(4, 8, is_quick=True)
    results, _ = measured([side, FakeSide("P", [])], [row])
    found = table.cells(results, "served, 4 at once")
    assert str(found["A"]) == "INVALID: 8 of 8 answers had 62, not 64 tokens"
    assert not found["P"].fault
    labels = {"A": side.label, "P": Label("P", "bf16")}
    assert table.ratios(results, labels) == []
    side.lost = 0
    results, _ = measured([side, FakeSide("P", [])], [row])
    assert [ratio.values for ratio in table.ratios(results, labels)] == [(1.0, 1.0, 1.0)]


def canned(**rates: list[float]) -> dict[str, Measured]:
    row = "decode, context 128"
    return {
        name: Measured(0.5, 10**9, 2 * 10**9, {row: [Sample(value) for value in values]})
        for name, values in rates.items()
    }


def test_a_ratio_is_the_median_of_rounds_beside_the_best_peer_of_the_form_and_of_all():
    results = canned(ours=[10.0, 30.0, 20.0], slow=[5.0, 5.0, 5.0], good=[10.0, 10.0, 10.0], other=[40.0] * 3)
    labels = {
        "ours": Label("ours", "bf16", is_ours=True),
        "slow": Label("slow", "bf16"),
        "good": Label("good", "bf16"),
        "other": Label("other", "4-bit"),
    }
    assert table.ratio_lines(table.ratios(results, labels))[2:] == [
        "| decode, context 128 | ours | good | 2.00 [1.00..3.00] | 1.2 |",
        "| decode, context 128 | ours | other (another form) | 0.50 [0.25..0.75] | - |",
    ]


def test_a_draft_is_compared_with_the_same_form_without_one():
    results = canned(plain=[10.0], draft=[30.0])
    labels = {
        "plain": Label("plain", "bf16", is_ours=True),
        "draft": Label("draft", "bf16", is_ours=True, speculates=True),
    }
    assert [(it.ours, it.peer, it.values) for it in table.ratios(results, labels)] == [
        ("draft", "plain", (3.0,))
    ]


def test_the_table_has_medians_ranges_ready_and_memory():
    results = canned(ours=[10.0, 30.0, 20.0], peer=[100.0, 120.0, 110.0])
    results["peer"].samples["served, 16 at once"] = [Sample(200.0, {"TTFT ms": 9.0, "TPOT ms": 3.0})]
    assert table.figures(results, {"decode, context 128": "tok/s", "served, 16 at once": "output tok/s"}) == [
        "| row | ours | peer |",
        "|---|---|---|",
        "| decode, context 128 (tok/s) | 20.0 [10.0..30.0] | 110 [100..120] |",
        "| served, 16 at once (output tok/s) | - | 200, 9 / 3 ms |",
        "| ready after | 0.5 s | 0.5 s |",
        "| memory, start / end | 1.00 / 2.00 GB | 1.00 / 2.00 GB |",
    ]


def test_a_peer_that_is_missing_is_named_with_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.which", lambda program: None if "llama-server" in program else program)
    for file in (llama_cpp_python, vllm_server, openvino_local, transformers_local):
        monkeypatch.setattr(file, "has_module", lambda python, module: False)
    chosen = options.parse(["--quick"])
    found = [
        llama_server.find(chosen, tmp_path, Path("m.gguf")),
        llama_cpp_python.find(chosen, tmp_path, Path("m.gguf")),
        vllm_server.find(chosen, tmp_path, 1),
        openvino_local.find(chosen, tmp_path),
        transformers_local.find(chosen, tmp_path, {}),
    ]
    assert not any(part.sides for part in found)
    assert all(len(part.missing) == 1 and "\n" not in part.missing[0] for part in found)
    assert [part.missing[0].partition(":")[0] for part in found] == [
        "llama.cpp",
        "llama-cpp-python",
        "vLLM",
        "OpenVINO GenAI",
        "transformers",
    ]


def test_an_installed_peer_makes_its_sides(monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.which", lambda program: f"/bin/{program}")
    for file in (llama_cpp_python, vllm_server, openvino_local, transformers_local):
        monkeypatch.setattr(file, "has_module", lambda python, module: True)
    model = tmp_path / "SmolLM2.Q4_1.gguf"
    model.write_bytes(b"weights")
    more = ["--gguf", f"bf16={model}", f"4-bit:Q4_0={model}", "--hf-model", str(tmp_path)]
    chosen = options.parse([*more, "--openvino-model", f"int8={tmp_path}"])
    found = [
        our_server.find(chosen, tmp_path, {}),
        llama_server.find(chosen, tmp_path, model),
        llama_cpp_python.find(chosen, tmp_path, model),
        vllm_server.find(chosen, tmp_path, 1),
        openvino_local.find(chosen, tmp_path),
        transformers_local.find(chosen, tmp_path, {}),
    ]
    sides = {side.label.name: side.label for part in found for side in part.sides}
    assert list(sides) == [
        *("ours 4-bit", "ours int8", "ours bf16", "ours fp32", "ours bf16, NGRAM"),
        *("llama.cpp Q4_1", "llama.cpp bf16", "llama.cpp Q4_0", "llama-cpp-python"),
        *("vLLM bf16", "OpenVINO int8", "transformers bf16", "transformers fp32"),
    ]
    assert sides["llama.cpp Q4_0"].form == "4-bit" and sides["llama.cpp Q4_1"].weight_bytes == 7
    assert not workloads.served(4, 8, is_quick=True).admits(sides["transformers bf16"])
    assert not workloads.decode(128, is_quick=True).admits(sides["ours bf16, NGRAM"])
    assert workloads.repeated_text().admits(sides["ours bf16, NGRAM"])


def test_a_module_is_looked_for_in_the_python_that_was_named():
    assert installed.has_module(sys.executable, "json.tool")
    assert not installed.has_module(sys.executable, "no_such_module.server")
    with pytest.raises(ValueError, match="/no/python: there is no such program"):
        installed.has_module("/no/python", "json")


def test_a_wrong_form_or_file_is_refused_by_name(capsys, tmp_path):
    for wrong in ("q4=FILE", f"bf16={tmp_path / 'none'}", "bf16"):
        with pytest.raises(SystemExit):
            options.parse(["--gguf", wrong])
        assert "give FORM=PATH or FORM:NAME=PATH" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        options.parse(["--repeat", "0"])
    with pytest.raises(ValueError, match="names no row"):
        bench_peers.chosen_rows(options.parse(["--rows", "nothing"]))
    assert [
        row.names[0] for row in bench_peers.chosen_rows(options.parse(["--quick", "--rows", "shared"]))
    ] == ["shared 1,024 tokens, cold"]


def event(**fields) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def test_a_stream_is_timed_by_its_text_and_counted_by_its_usage():
    half = event(choices=[{"text": "b"}])
    arrivals = [
        (1.0, event(choices=[{"text": ""}])),
        (2.0, event(choices=[{"text": "a"}]) + half[:9]),
        (3.0, half[9:]),
        (4.0, event(choices=[], usage={"completion_tokens": 7}) + b"data: [DONE]\n\n"),
    ]
    assert read_answer(0.5, arrivals) == Answer(0.5, 2.0, 3.0, 7)
    assert read_answer(0.5, arrivals[:3]).tokens == 2, "without usage the pieces of text count"
    with pytest.raises(RuntimeError, match="error in the stream: broken"):
        read_answer(0.0, [(1.0, event(error="broken"))])


SERVER = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["prompt"][0] == 0:
            self.send_error(400); return
        self.send_response(200); self.end_headers()
        for _ in range(body["max_tokens"]):
            self.wfile.write(b'data: {"choices": [{"text": "x"}]}\\n\\n')
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_is_started_asked_weighed_and_stopped(tmp_path):
    def command(port: int) -> list[str]:
        return [sys.executable, "-c", SERVER, str(port)]

    side = OpenAISide(Label("S", "bf16"), Server(command, 1, tmp_path / "log"))
    try:
        assert side.start() > 0
        one = prompts().make(4, random.Random(1))
        answers = side.answer([one] * 3, 5, 2)
        assert [answer.tokens for answer in answers] == [5, 5, 5]
        assert side.memory_bytes() > 10**6
        with pytest.raises(RuntimeError, match=r"the server answered HTTP/1\.0 400"):
            side.answer([one._replace(ids=(0,))], 5, 1)
        members = side.tree.members()
    finally:
        side.stop()
    assert not any(member.is_running() for member in members)
    side.stop()


def test_a_server_that_ends_early_is_an_error_with_its_last_lines(tmp_path):
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    side = OpenAISide(Label("S", "bf16"), Server(lambda port: command, 1, tmp_path / "log"))
    try:
        with pytest.raises(RuntimeError, match="S ended before it was ready: no such model"):
            side.start()
    finally:
        side.stop()


WORKER = """
import json, sys
print("a library says hello")
print(json.dumps({"answers": []}), flush=True)
for line in sys.stdin:
    question = json.loads(line)
    if question["new_tokens"] == 9: sys.exit("broken")
    answers = [[0, 1, 2, question["new_tokens"]] for _ in question["prompts"]]
    print(json.dumps({"answers": answers}), flush=True)
"""


def test_a_worker_answers_over_its_pipes_and_its_end_is_an_error(tmp_path):
    side = InProcessSide(Label("W", "bf16"), [sys.executable, "-c", WORKER], threads=1, log=tmp_path / "log")
    try:
        side.start()
        one = prompts().make(4, random.Random(1))
        assert side.answer([one, one], 5, 2) == [Answer(0, 1, 2, 5)] * 2
        with pytest.raises(EOFError, match="W ended"):
            side.answer([one], 9, 1)
    finally:
        side.stop()


def test_children_of_a_program_are_weighed_and_end_with_it(tmp_path):
    """A child that ignores the polite signal would otherwise hold its port and cores for the next run."""
    ignores = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    deaf = f"{ignores}; print('up', flush=True); time.sleep(600)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {deaf!r}])"
    log = tmp_path / "log"
    tree = ProcessTree([sys.executable, "-c", parent], threads=1, log=log)
    try:
        wait_until(lambda: "up" in log.read_text())
        members = tree.members()
        assert len(members) == 2
        assert tree.memory_bytes() > psutil.Process(tree.process.pid).memory_info().rss
    finally:
        tree.stop(patience_s=0.2)
    assert not any(member.is_running() for member in members)


def test_a_request_to_end_stops_the_sides_on_the_way_out():
    with pytest.raises(SystemExit) as raised:
        bench_peers.end_in_order(signal.SIGTERM, None)
    assert raised.value.code == 143


def test_prompts_are_as_long_as_asked_and_a_vocabulary_without_the_words_is_refused():
    one = prompts().make(40, random.Random(3))
    assert len(one.ids) == 40 and len(one.text.split()) == 40
    assert one == prompts().make(40, random.Random(3))
    with pytest.raises(ValueError, match="has only 0 common words as one token"):
        Prompts(lambda text: [1, 2])


def test_the_command_says_what_it_takes():
    script = Path(bench_peers.__file__)
    shown = subprocess.run(
        [sys.executable, str(script), "--help"], capture_output=True, text=True, check=True
    )
    assert "--llama-server" in shown.stdout


def test_the_labels_go_into_the_json_file():
    label = Label("ours", "bf16", is_ours=True)
    written = bench_peers.as_json(canned(ours=[1.0]), {"ours": label}, {"decode, context 128": "tok/s"}, [])
    assert written["labels"]["ours"] == dataclasses.asdict(label)
    assert (
        json.loads(json.dumps(written))["sides"]["ours"]["samples"]["decode, context 128"][0]["value"] == 1.0
    )
