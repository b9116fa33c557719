"""The command line: spellings, prefixes, values, and errors that name the cure."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="unit-cpu")

import subprocess
import sys

import pytest

from sglang.srt.arg_groups.fields import LEAVES
from sglang.srt.arg_groups.parsing.cli import build_parser
from sglang.srt.arg_groups.parsing.human_int import parse_human_int
from sglang.srt.server_args import ServerArgs, prepare_server_args


def parsed(*argv: str) -> ServerArgs:
    return prepare_server_args(["--model-path", "m", *argv])


def refused(capsys: pytest.CaptureFixture[str], *argv: str, model: bool = True) -> str:
    with pytest.raises(SystemExit) as caught:
        prepare_server_args([*(["--model-path", "m"] if model else []), *argv])
    assert caught.value.code == 2
    return capsys.readouterr().err


#: Prefixes that people type. A new flag must not make one of them ambiguous, nor lead it elsewhere.
PREFIXES = {
    "--tp": "tp_size",
    "--dp": "dp_size",
    "--pp": "pp_size",
    "--ep": "ep_size",
    "--model": "model_path",
    "--mem-fraction": "mem_fraction_static",
    "--served": "served_model_name",
    "--speculative-algo": "speculative_algorithm",
    "--host": "host",
    "--chunked": "chunked_prefill_size",
    "--max-running": "max_running_requests",
    "--max-total": "max_total_tokens",
    "--context": "context_length",
    "--attention-backend": "attention_backend",
    "--sampling-back": "sampling_backend",
    "--kv-cache": "kv_cache_dtype",
    "--load-format": "load_format",
    "--dtype": "dtype",
    "--schedule-pol": "schedule_policy",
    "--random": "random_seed",
    "--watchdog": "watchdog_timeout",
    "--dist-init": "dist_init_addr",
    "--disaggregation-mode": "disaggregation_mode",
    "--log-level": "log_level",
    "--api": "api_key",
    "--chat-temp": "chat_template",
    "--page-size": "page_size",
    "--json-model": "json_model_override_args",
    "--nnodes": "nnodes",
    "--node": "node_rank",
    "--device": "device",
    "--trust-remote": "trust_remote_code",
    "--reasoning": "reasoning_parser",
    "--tool-call": "tool_call_parser",
}
EXAMPLES = {"str": "7", "int": "7", "float": "7", "list": "7"}


@pytest.mark.parametrize(("prefix", "field"), PREFIXES.items())
def test_a_prefix_that_people_type_stays_unique(prefix, field):
    leaf = LEAVES[field]
    argv = [prefix]
    if leaf.kind != "switch":
        argv.append(str(leaf.arg.choices[-1]) if leaf.arg.choices else EXAMPLES[leaf.kind])
    namespace, rest = build_parser().parse_known_args(argv)
    assert rest == []
    assert [name for name in vars(namespace) if name != "config"] == [field]


def test_an_ambiguous_prefix_is_refused(capsys):
    """The twin of the list above: argparse does say so when a prefix fits two flags."""
    message = refused(capsys, "--speculative", "EAGLE")
    assert "ambiguous option: --speculative" in message


def test_every_flag_is_taken_by_the_parser():
    options = set(build_parser()._option_string_actions)
    for leaf in LEAVES.values():
        assert set(leaf.flags) <= options, leaf.name


def test_every_default_of_the_parser_is_the_default_of_the_record():
    record = parsed()
    for leaf in LEAVES.values():
        if not leaf.required:
            assert getattr(record, leaf.name) == leaf.default


def test_values_take_their_declared_type():
    record = parsed(
        *["--port", "8000", "--mem-fraction-static", "0.5", "--dtype", "float32", "--enable-cache-report"],
        *["--log-requests-target", "stdout", "/logs", "--bucket-time-to-first-token", "0.1", "1"],
        *["--default-chat-template-kwargs", '{"enable_thinking": false}', "--no-enable-lora"],
    )
    assert (record.port, record.mem_fraction_static, record.dtype) == (8000, 0.5, "float32")
    assert record.enable_cache_report is True
    assert record.log_requests_target == ["stdout", "/logs"]
    assert record.bucket_time_to_first_token == [0.1, 1.0]
    assert record.default_chat_template_kwargs == {"enable_thinking": False}
    assert record.enable_lora is False


def test_a_graph_config_is_json_of_its_own_shape(capsys):
    record = parsed("--cuda-graph-config", '{"decode": {"max_bs": 64}}')
    assert record.cuda_graph_config.decode.max_bs == 64
    assert "--cuda-graph-config" in refused(capsys, "--cuda-graph-config", '{"decode": {"max": 64}}')


def test_a_minus_is_a_value_and_not_a_flag():
    assert parsed("--chunked-prefill-size", "-1").chunked_prefill_size == -1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("1k", 1000),
        ("25.6k", 25600),
        ("1M", 1_000_000),
        ("1Ki", 1024),
        ("2Mi", 2 << 20),
        (" 4k ", 4000),
        ("1e3", 1000),
    ],
)
def test_numbers_as_people_write_them(text, value):
    assert parse_human_int(text) == value


@pytest.mark.parametrize(
    "text", ["", "k", "1K", "1ki", "1.5Ki", "1.0005k", "1kk", "many", "nan", "inf", "Ki"]
)
def test_numbers_nobody_means_are_refused_with_examples(text):
    with pytest.raises(ValueError, match="write it as 4096, 4k"):
        parse_human_int(text)


def test_human_numbers_are_taken_where_the_declaration_says_so(capsys):
    assert parsed("--context-length", "4Ki", "--max-total-tokens", "2k").max_total_tokens == 2000
    assert "invalid int value" in refused(capsys, "--page-size", "1k")
    assert "write it as 4096" in refused(capsys, "--context-length", "4q")


def test_an_unknown_flag_names_the_three_nearest(capsys):
    message = refused(capsys, "--tensor-paralel-sizes", "2")
    assert "unknown flag --tensor-paralel-sizes; the nearest are --tensor-parallel-size, " in message
    assert message.count("--", message.index("nearest are"), message.index("\n")) == 3


def test_an_unknown_flag_with_an_equals_sign_is_named_without_its_value(capsys):
    assert "unknown flag --prot;" in refused(capsys, "--prot=8000")


def test_a_stray_word_is_refused(capsys):
    assert "unexpected argument: other" in refused(capsys, "other")


def test_a_wrong_choice_lists_the_right_ones(capsys):
    message = refused(capsys, "--schedule-policy", "fifo")
    assert "fcfs" in message
    assert "lpm" in message


def test_the_model_must_be_given(capsys):
    assert "--model-path must be given" in refused(capsys, model=False)


def test_the_model_may_stand_alone_where_the_door_says_so(capsys):
    record = prepare_server_args(["some/model", "--tp", "2"], positional_model=True)
    assert (record.model_path, record.tp_size) == ("some/model", 2)
    assert prepare_server_args(["--tp", "2", "some/model"], positional_model=True).model_path == "some/model"
    with pytest.raises(SystemExit):
        prepare_server_args(["some/model"])
    with pytest.raises(SystemExit):
        prepare_server_args(["one", "--model-path", "two"], positional_model=True)
    assert "unexpected argument: one" in capsys.readouterr().err


def test_an_error_does_not_print_two_hundred_flags(capsys):
    assert len(refused(capsys, "--nope").splitlines()) == 2


def test_help_prints_every_flag(capsys):
    with pytest.raises(SystemExit) as caught:
        prepare_server_args(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(flag in text for leaf in LEAVES.values() for flag in leaf.flags)
    assert "Not served yet." in text


def test_attention_dp_is_one_flag():
    record = parsed("--tp", "4", "--attn-dp-size", "2")
    assert (record.dp_size, record.enable_dp_attention) == (2, True)
    record = parsed("--tp", "4", "--attention-data-parallel-size", "1", "--dp-size", "2")
    assert (record.dp_size, record.enable_dp_attention) == (2, False)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--attn-dp-size", "0"], ["must be at least 1", "got 0"]),
        (["--attn-dp-size", "2", "--dp-size", "0"], ["--dp-size must be at least 1", "got 0"]),
        (["--attn-dp-size", "-2"], ["must be at least 1", "got -2"]),
        (["--attn-dp-size", "2", "--dp-size", "4"], ["attn_dp_size == 1 or dp_size == 1", "got 2 and 4"]),
        (["--attn-dp-size", "2", "--enable-dp-attention"], ["remove --enable-dp-attention"]),
    ],
)
def test_a_contradiction_about_attention_dp_is_refused_with_rule_and_numbers(capsys, argv, words):
    message = refused(capsys, "--tp", "4", *argv)
    assert all(word in message for word in words)


def warned(capsys) -> list[str]:
    """Lines of standard error; an operator must not be shown a line of our source."""
    shown = capsys.readouterr()
    assert shown.out == "" and "Warning" not in shown.err
    return shown.err.splitlines()


@pytest.mark.filterwarnings("error")
def test_the_old_spelling_of_attention_dp_works_and_names_the_new_one(capsys):
    record = parsed("--tp", "4", "--dp-size", "2", "--enable-dp-attention")
    (line,) = warned(capsys)
    assert line.endswith(
        ": warning: --enable-dp-attention is deprecated: "
        "write --attn-dp-size N in place of --enable-dp-attention --dp-size N"
    )
    assert (record.dp_size, record.enable_dp_attention) == (2, True)


@pytest.mark.filterwarnings("error")
def test_the_old_graph_switch_turns_both_phases_off(capsys):
    record = parsed("--disable-cuda-graph")
    (line,) = warned(capsys)
    assert "warning: --disable-cuda-graph is deprecated" in line
    assert (record.cuda_graph_backend_decode, record.cuda_graph_backend_prefill) == ("disabled", "disabled")


def test_the_old_graph_switch_does_not_silently_beat_the_new_one(capsys):
    message = refused(capsys, "--disable-cuda-graph", "--cuda-graph-backend-decode", "full")
    assert "--disable-cuda-graph and --cuda-graph-backend-decode full contradict" in message


def test_reading_a_command_line_does_not_load_torch():
    """The server process never loads it; a heavy import here would be paid at every start."""
    code = (
        "import sys; from sglang.srt.server_args import prepare_server_args;"
        "prepare_server_args(['--model-path', 'm']); import sglang.srt.arg_groups.hooks.pipeline;"
        "sys.exit('torch' in sys.modules or 'yaml' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
