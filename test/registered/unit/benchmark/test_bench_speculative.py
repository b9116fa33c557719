"""The comparison of drafts takes turns, repeats no prompt, counts rightly and knows what it leaves out."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit-cpu")

import json
from pathlib import Path

import bench_speculative as bench
import pytest
from bench_speculative import Comparison, Run


class FakeEngine:
    """Answers every prompt with its first token twice, and logs who was asked."""

    def __init__(self, name: str, log: list[str], *, rounds: int | None = None) -> None:
        self.name, self.log, self.rounds = name, log, rounds
        self.is_idle = True

    def flush_cache(self, timeout_s: float) -> bool:
        self.log.append(f"flush {self.name}")
        return self.is_idle

    def generate(self, *, input_ids: list[list[int]], sampling_params: dict[str, int]) -> list[dict]:
        assert sampling_params == {"temperature": 0, "max_new_tokens": 3}
        self.log.append(f"{self.name} {input_ids}")
        spec = {} if self.rounds is None else {"spec_verify_ct": self.rounds}
        return [
            {"output_ids": [ids[0]] * 3, "meta_info": {"completion_tokens": 3, **spec}} for ids in input_ids
        ]


def test_both_sides_take_turns_and_the_first_round_is_not_counted():
    log: list[str] = []
    plain, drafted = FakeEngine("plain", log), FakeEngine("drafted", log, rounds=1)
    comparison = bench.compare(plain, drafted, [[[1]], [[2]], [[3]]], new_tokens=3)
    assert [line for line in log if "flush" not in line] == [
        "drafted [[1]]",
        "plain [[1]]",
        "plain [[2]]",
        "drafted [[2]]",
        "drafted [[3]]",
        "plain [[3]]",
    ]
    assert [run.rows for run in comparison.plain] == [[[2, 2, 2]], [[3, 3, 3]]]
    assert [run.verify_rounds for run in comparison.drafted] == [1, 1]
    assert [run.accept_lengths for run in comparison.drafted] == [[2.0], [2.0]]


def test_each_run_begins_with_an_empty_prefix_cache():
    """The engine without a draft sees the prompts again with every algorithm, and would find them cached."""
    log: list[str] = []
    engine = FakeEngine("plain", log)
    bench.generate(engine, [[1], [2]], 3)
    assert log == ["flush plain", "plain [[1], [2]]"]
    engine.is_idle = False
    with pytest.raises(RuntimeError, match="was not flushed"):
        bench.generate(engine, [[1]], 3)


def test_a_line_has_medians_of_rates_and_the_median_ratio_of_a_round():
    rows = [[7] * 10]
    comparison = Comparison(
        plain=[Run(1.0, rows, [None], 0), Run(2.0, rows, [None], 0), Run(4.0, [[7] * 10], [None], 0)],
        drafted=[Run(0.5, rows, [3.0], 3), Run(0.5, rows, [1.5], 6), Run(4.0, [[8] * 10], [1.5], 6)],
    )
    # Rates 10, 5, 2.5 and 20, 20, 2.5: ratios 2, 4, 1.
    assert comparison.cells() == ["5.0", "20.0", "2.00", "2.00", "15", "2 of 3"]


def test_without_a_verify_round_there_is_no_accept_length():
    run = Run(1.0, [[7]], [None], 0)
    assert Comparison([run], [run]).cells()[3:] == ["none", "0", "1 of 1"]


def options(*arguments: str):
    return bench.parse(arguments)


def test_an_algorithm_whose_draft_is_missing_is_left_out_with_the_flag_that_brings_it(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "EAGLE3_DRAFT", tmp_path / "none")
    found, left_out = bench.candidates(options())
    assert [it.name for it in found] == ["NGRAM", "STANDALONE"]
    assert [line.partition(" ")[0] for line in left_out] == ["EAGLE3", "EAGLE"]
    assert "--eagle-draft-path" in left_out[1]
    with pytest.raises(ValueError, match="EAGLE3 has no draft; give its folder as --eagle3-draft-path"):
        bench.candidates(options("--algorithms", "NGRAM", "EAGLE3"))


def test_drafts_are_found_or_stated(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "EAGLE3_DRAFT", tmp_path)
    found, left_out = bench.candidates(options("--model-path", "m", "--eagle-draft-path", "e"))
    drafts = {it.name: it.settings.get("speculative_draft_model_path") for it in found}
    assert drafts == {"NGRAM": None, "STANDALONE": "m", "EAGLE3": str(tmp_path), "EAGLE": "e"}
    assert left_out == []
    (only,) = bench.candidates(options("--algorithms", "STANDALONE", "--draft-model-path", "d"))[0]
    assert only.settings["speculative_draft_model_path"] == "d"


def test_each_draft_model_is_measured_with_each_shape_and_ngram_once():
    found, _ = bench.candidates(options("--algorithms", "NGRAM", "STANDALONE", "--shapes", "auto", "3,1,4"))
    assert [(it.name, it.settings.get("speculative_num_steps")) for it in found] == [
        ("NGRAM", None),
        ("STANDALONE", None),
        ("STANDALONE", 3),
    ]
    assert bench.shape("3,4,8") == {
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 4,
        "speculative_num_draft_tokens": 8,
    }


@pytest.mark.parametrize("text", ["3,1", "3,1,4,1", "a,b,c", ""])
def test_a_shape_that_is_no_three_numbers_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        options("--shapes", text)
    assert "neither auto nor three numbers" in capsys.readouterr().err


def test_no_prompt_comes_twice():
    """An n-gram draft would know the answer to a prompt that it has answered before."""
    some = options("--rounds", "5", "--batch-sizes", "1", "8")
    prompts = bench.make_prompts(some)
    assert len(set(prompts)) == len(prompts) == 6 * 9
    rows = [[number] for number in range(len(prompts))]
    dealt = list(bench.rounds_of(rows, some.batch_sizes, some.rounds + 1))
    assert [(batch, [len(prompts) for prompts in rounds]) for batch, rounds in dealt] == [
        (1, [1] * 6),
        (8, [8] * 6),
    ]
    assert [row for _, rounds in dealt for prompts in rounds for row in prompts] == rows


def test_prompts_come_from_a_file_where_the_built_in_ones_are_too_few(tmp_path: Path):
    with pytest.raises(ValueError, match="give more with --data-path"):
        bench.make_prompts(options("--batch-sizes", "100"))
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"q{n}", "answer": "#### 1"}) + "\n" for n in range(9)))
    few = options("--rounds", "1", "--batch-sizes", "2", "--data-path", str(path))
    assert bench.make_prompts(few) == ["q0", "q1", "q2", "q3"]


class _Tokenizer:
    def apply_chat_template(self, messages: list[dict]) -> str:
        return f"<{messages[0]['role']}>{messages[0]['content']}"

    def encode_chat(self, prompt: str) -> list[int]:
        return [ord(letter) for letter in prompt]


def test_prompts_that_do_not_fit_into_the_pool_together_are_refused():
    """They would be retracted or wait for each other, and the round would be measured as a slow one."""

    class Engine:
        class tokenizer_manager:
            tokenizer = _Tokenizer()

    fitting = options("--batch-sizes", "2", "--new-tokens", "10", "--max-total-tokens", "292")
    assert bench.encode(Engine, ["ab", "a"], fitting) == [
        [ord(c) for c in "<user>ab"],
        [ord(c) for c in "<user>a"],
    ]
    fitting.max_total_tokens = 291
    with pytest.raises(ValueError, match="--max-total-tokens 291: a batch takes up to 292 tokens"):
        bench.encode(Engine, ["ab", "a"], fitting)


def test_the_processor_is_named_where_the_system_names_it():
    assert bench.processor_name("processor : 0\nmodel name\t: Some CPU: 3 GHz\n") == "Some CPU: 3 GHz"
    assert bench.processor_name("processor : 0\nFeatures : bf16\n") == "unknown processor"


@pytest.mark.parametrize("wrong", [["--rounds", "0"], ["--batch-sizes", "1", "0"], ["--threads", "-1"]])
def test_a_count_below_one_is_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        options(*wrong)
    assert "at least 1" in capsys.readouterr().err
