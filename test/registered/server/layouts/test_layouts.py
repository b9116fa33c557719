"""Served layouts of several ranks on one machine give the answers of one rank, however prompts come."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=35, suite="server-cpu")

import pathlib
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang.test.ports import held_ports
from sglang.test.server.server_fixture import RunningServer, running_server

#: Odd lengths, so that no width divides them; 40 tokens take the second page of everything.
PROMPTS = [[5], [7, 9, 11], [3, 30, 300, 17, 4], list(range(20, 60))]
SMALL = ("--max-total-tokens", "1024", "--dtype", "float32")
GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}


def ask(server: RunningServer, prompt: list[int], **fields: Any) -> list[int]:
    ids: list[int] = server.answer(input_ids=prompt, sampling_params=GREEDY, **fields)["output_ids"]
    return ids


def two_at_once(server: RunningServer) -> list[list[int]]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda prompt: ask(server, prompt), PROMPTS))


@pytest.fixture(scope="module")
def expected(model: pathlib.Path) -> list[list[int]]:
    with running_server(model, *SMALL) as server:
        return [ask(server, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("flags", "ranks", "replicas"),
    [
        (["--tp-size", "2"], 2, 1),
        (["--tp-size", "2", "--attn-dp-size", "2"], 2, 2),
        (["--dp-size", "2"], 2, 2),
        (["--tp-size", "4", "--attn-dp-size", "2"], 4, 2),
    ],
    ids=["T2", "T2A2", "D2", "T4A2"],
)
def test_a_layout_serves_what_one_rank_serves(
    model: pathlib.Path, expected: list[list[int]], flags: list[str], ranks: int, replicas: int
) -> None:
    """Odd prompts show a count that is not padded to the width, or a padding row that reaches an answer.

    When one runs alone, the other attention-DP replica is idle beside it.
    """
    with running_server(model, *SMALL, *flags) as server:
        assert len(server.rank_pids()) == ranks
        assert [ask(server, prompt) for prompt in PROMPTS] == expected
        assert two_at_once(server) == expected
        for replica in range(replicas):
            assert ask(server, PROMPTS[1], routed_dp_rank=replica) == expected[1]
        assert "layout: tp_size=" in server.log()
        server.signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert server.leftovers() == []
        assert "Traceback" not in server.log()


def test_replicas_do_not_wait_for_each_other(model: pathlib.Path) -> None:
    """One replica has no work long before the other; each request must still end, again and again.

    Each replica meets at a port of its own; a second server beside them needs none.
    """
    lengths = [3, 60, 7, 45, 12, 30, 21]
    node = ("--nnodes", "1", "--node-rank", "0", "--dist-init-addr")
    with (
        held_ports(2) as first,
        running_server(model, *SMALL, "--dp-size", "2", *node, f"127.0.0.1:{first}") as server,
        running_server(model, *SMALL, "--tp-size", "2", wait=False) as beside,
        ThreadPoolExecutor(len(lengths)) as pool,
    ):
        for _ in range(5):
            answers = pool.map(
                lambda length: server.generate(
                    input_ids=[length, 8, 9], sampling_params={**GREEDY, "max_new_tokens": length}
                ),
                lengths,
            )
            assert [len(answer.json()["output_ids"]) for answer in answers] == lengths
        beside.wait_ready()
