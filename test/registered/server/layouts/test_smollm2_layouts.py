"""The real model over two ranks, in every layout that is served: each answer is that of one rank."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=60, suite="server-cpu")

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang.srt.configs.model_path import resolve_model_path
from sglang.test.prompts import PROMPTS
from sglang.test.server.server_fixture import RunningServer, running_server

# Four starts of the model; a busy machine takes several times as long as a quiet one.
pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = "smollm2-135m-instruct"
#: Float32: rounding decides nowhere which token is the best one.
FLAGS = ("--dtype", "float32", "--max-total-tokens", "4096")
GREEDY = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}


def answers(server: RunningServer) -> list[dict[str, Any]]:
    """Every prompt's answer, four at a time: rows of a batch are of different lengths."""

    def ask(prompt: str) -> dict[str, Any]:
        return server.answer(text=prompt, sampling_params=GREEDY)

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(ask, PROMPTS))


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    try:
        resolve_model_path(MODEL)
    except ValueError as error:
        pytest.skip(str(error))
    with running_server(MODEL, *FLAGS) as server:
        assert len(server.rank_pids()) == 1
        return [answer["output_ids"] for answer in answers(server)]


@pytest.mark.parametrize(
    ("flags", "width", "replicas"),
    [
        (["--tp-size", "2", "--attn-dp-size", "2"], 2, 2),
        (["--tp-size", "2"], 2, 1),  # 9 query and 3 key/value heads: padded
        (["--dp-size", "2"], 1, 2),
    ],
    ids=["T2A2", "T2", "D2"],
)
def test_twenty_greedy_answers_are_those_of_one_rank(
    expected: list[list[int]], flags: list[str], width: int, replicas: int
) -> None:
    with running_server(MODEL, *FLAGS, *flags) as server:
        placement = server.client.get("/placement").json()["ranks"]
        assert len(server.rank_pids()) == len(placement) == 2
        assert {len(rank["names"]["tp_group"][0]) for rank in placement} == {width}
        found = answers(server)
        assert [answer["output_ids"] for answer in found] == expected
        served = {answer["meta_info"]["dp_rank"] for answer in found}
        assert served == set(range(replicas)), "a replica that served nothing proves nothing"
    assert len({tuple(ids) for ids in expected}) == 20, "twenty answers, none like another"
