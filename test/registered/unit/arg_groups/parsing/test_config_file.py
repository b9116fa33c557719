"""--config: the same names as the command line, weaker than it, and nothing unknown."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import pytest

from sglang.srt.server_args import prepare_server_args


@pytest.fixture
def write(tmp_path):
    def to_file(text: str, name: str = "server.yaml") -> str:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return to_file


def refused(capsys, *argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        prepare_server_args(list(argv))
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_the_command_line_beats_the_file_and_the_file_beats_the_default(write):
    path = write("model-path: m\nport: 1111\nstream-interval: 5\n")
    record = prepare_server_args(["--config", path, "--port", "2222"])
    assert (record.port, record.stream_interval, record.schedule_policy) == (2222, 5, "fcfs")


def test_the_order_of_words_on_the_command_line_does_not_matter(write):
    path = write("model-path: m\nport: 1111\n")
    assert prepare_server_args(["--port", "2222", "--config", path]).port == 2222


def test_keys_take_dashes_underscores_and_aliases(write):
    record = prepare_server_args(
        ["--config", write("model: m\ntensor-parallel-size: 2\nschedule_policy: lpm\nenable-hicache: true\n")]
    )
    assert (record.model_path, record.tp_size, record.schedule_policy) == ("m", 2, "lpm")
    assert record.enable_hierarchical_cache is True


def test_values_take_their_declared_type(write):
    record = prepare_server_args(
        [
            "--config",
            write(
                "model-path: m\ncontext-length: 4Ki\nlog-requests-target: [stdout]\nwatchdog-timeout: 10\n"
                "default-chat-template-kwargs: {enable_thinking: false}\n"
                "json-model-override-args: {num_hidden_layers: 2}\n"
            ),
        ]
    )
    assert (record.context_length, record.log_requests_target) == (4096, ["stdout"])
    assert (record.watchdog_timeout, type(record.watchdog_timeout)) == (10.0, float)
    assert record.default_chat_template_kwargs == {"enable_thinking": False}
    assert record.json_model_override_args == '{"num_hidden_layers": 2}'


def test_a_spelling_that_sets_other_fields_works_in_a_file(write):
    record = prepare_server_args(["--config", write("model-path: m\ntp-size: 4\nattn_dp_size: 2\n")])
    assert (record.dp_size, record.enable_dp_attention) == (2, True)


def test_a_contradiction_between_file_and_command_line_is_refused(write, capsys):
    """The two say different layouts; guessing which part of which was meant would be wrong either way."""
    path = write("model-path: m\nattn-dp-size: 2\n")
    assert "attn_dp_size == 1 or dp_size == 1" in refused(capsys, "--config", path, "--dp-size", "4")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model-path: m\nprot: 1\n", ["no setting is called 'prot'", "nearest are"]),
        ("model-path: m\nconfig: other.yaml\n", ["no setting is called 'config'"]),
        ("model-path: m\nport: many\n", ["--port got 'many'"]),
        ("model-path: m\ntp: 2\ntp-size: 2\n", ["'tp' and 'tp-size' are the same setting"]),
        ("model-path: m\ntp: 2\ntp: 1\n", ["'tp' is there twice"]),
        ("model-path: m\nmax-total-tokens: many\n", ["--config", "--max-total-tokens: 'many'"]),
        ("model-path: m\npreferred-sampling-params: '{'\n", ["--preferred-sampling-params: '{'"]),
        ("model-path: m\napi-key: {a: 1}\n", ["--api-key got {'a': 1}"]),
        ("- a\n- b\n", ["must hold `setting: value` lines"]),
        ("a: [1\n", ["is not YAML"]),
        ("port: 3\n", ["--model-path must be given"]),
    ],
)
def test_a_file_with_a_mistake_is_refused_by_name(write, capsys, text, words):
    message = refused(capsys, "--config", write(text))
    assert all(word in message for word in words)


def test_a_missing_file_is_refused(tmp_path, capsys):
    assert "cannot be read" in refused(capsys, "--config", str(tmp_path / "nope.yaml"))


def test_two_files_are_refused(write, capsys):
    path = write("model-path: m\n")
    assert "--config was given twice" in refused(capsys, "--config", path, "--config", path)


def test_an_empty_file_states_nothing(write):
    assert prepare_server_args(["--config", write(""), "--model", "m"]).model_path == "m"


def test_a_file_runs_no_code(write, capsys):
    message = refused(capsys, "--config", write("model-path: !!python/object/apply:os.getcwd []\n"))
    assert "is not YAML" in message


def test_a_file_that_is_no_text_is_refused(tmp_path, capsys):
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in refused(capsys, "--config", str(tmp_path / "c.yaml"))
