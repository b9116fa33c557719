"""A server with `--skip-tokenizer-init` and a key: ids in, ids out, all else is refused with a reason."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="server-cpu")

import json
from collections.abc import Iterator
from typing import Any

import pytest

from sglang.test.server.server_fixture import RunningServer, running_server
from sglang.test.tiny_models import write_tiny_model

KEY = "some-key-1234567"
GREEDY = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = write_tiny_model(tmp_path_factory.mktemp("model"))
    for file in model.glob("tokenizer*"):
        file.unlink()  # it is not even there
    flags = ["--skip-tokenizer-init", "--api-key", KEY, "--dtype", "float32", "--max-total-tokens", "1000"]
    with running_server(model, *flags) as server:
        server.client.headers["Authorization"] = f"Bearer {KEY}"
        yield server


def test_ids_go_in_and_out_in_both_modes(server: RunningServer) -> None:
    body: dict[str, Any] = {"input_ids": [5, 6, 7], "sampling_params": GREEDY, "return_logprob": True}
    whole = server.generate(**body).json()
    assert whole["text"] == ""
    assert len(whole["output_ids"]) == 6
    assert [entry[1] for entry in whole["meta_info"]["output_token_logprobs"]] == whole["output_ids"]
    lines = [line for line in server.generate(**body, stream=True).text.split("\n") if line]
    assert json.loads(lines[-2].removeprefix("data: "))["output_ids"] == whole["output_ids"]
    stop = {**GREEDY, "ignore_eos": False, "stop_token_ids": [whole["output_ids"][2]]}
    stopped = server.generate(input_ids=[5, 6, 7], sampling_params=stop).json()
    assert stopped["output_ids"] == whole["output_ids"][: len(stopped["output_ids"])]
    assert len(stopped["output_ids"]) <= 3
    batch = server.generate(input_ids=[[5, 6, 7], [8]], sampling_params={**GREEDY, "n": 2}).json()
    assert [answer["output_ids"] for answer in batch[:2]] == [whole["output_ids"]] * 2


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/generate", {"text": "a"}, "send input_ids"),
        ("/generate", {"input_ids": [5], "sampling_params": {"stop": "a"}}, "stop_token_ids"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}]},
            "post input_ids to /generate",
        ),
        ("/v1/completions", {"prompt": [5]}, "post input_ids to /generate"),
        ("/v1/completions", {"prompt": "a", "stream": True}, "post input_ids to /generate"),
    ],
)
def test_what_needs_a_tokenizer_is_400_with_what_to_do(
    server: RunningServer, path: str, body: dict[str, Any], word: str
) -> None:
    answer = server.client.post(path, json=body)
    assert answer.status_code == 400
    assert word in answer.json()["message"]


def test_the_information_routes_do_without_one(server: RunningServer) -> None:
    for path in ("/health", "/health_generate", "/model_info", "/server_info", "/v1/models", "/openapi.json"):
        assert server.client.get(path).status_code == 200, path
    assert server.client.get("/tokenizer_info").status_code == 404
    assert KEY not in server.client.get("/server_info").text + server.log()
