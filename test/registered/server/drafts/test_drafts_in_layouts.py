"""Served layouts draft as one rank does: same answers, same acceptance, idle replicas beside busy ones."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=60, suite="server-cpu")

import pathlib
import signal
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from sglang.test.server.server_fixture import RunningServer, running_server
from sglang.test.tiny_drafts import write_random_draft
from sglang.test.tiny_models import write_tiny_model

SMALL = ("--max-total-tokens", "2048", "--dtype", "float32")
T2 = ("--tp-size", "2")
T2A2 = ("--tp-size", "2", "--attn-dp-size", "2")
D2 = ("--dp-size", "2")
GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
#: Odd lengths, so that no width divides them.
PROMPTS = [[5], [7, 9, 11], [3, 30, 300, 17, 4], list(range(20, 60))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Six layers, since an EAGLE3 draft reads three of them."""
    return write_tiny_model(tmp_path_factory.mktemp("model"), num_layers=6)


@pytest.fixture(scope="module")
def expected(model: pathlib.Path) -> Iterator[list[list[int]]]:
    with running_server(model, *SMALL) as server:
        yield [ids_of(ask(server, prompt)) for prompt in PROMPTS]


def ask(server: RunningServer, prompt: list[int], **fields: Any) -> dict[str, Any]:
    return server.answer(input_ids=prompt, sampling_params=GREEDY, **fields)


def ids_of(found: dict[str, Any]) -> list[int]:
    ids: list[int] = found["output_ids"]
    return ids


def states(server: RunningServer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.client.get("/server_info").json()["internal_states"]
    return found


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_replicas_that_take_turns_leave_each_other_idle_without_harm(
    model: pathlib.Path, expected: list[list[int]], tmp_path: pathlib.Path, kind: Literal["eagle3", "eagle"]
) -> None:
    """One request at a time, to one replica and then to the other: the idle one has nothing to draft from.

    An EAGLE3 draft works inside its replica; an EAGLE draft exchanges rows with the other one in each of its
    forwards. A reduction over an empty list, or a collective that the idle one leaves out, ends or hangs the
    whole server.
    """
    draft = write_random_draft(tmp_path, model, kind)
    flags = ("--speculative-algorithm", kind.upper(), "--speculative-draft-model-path", str(draft))
    with running_server(model, *SMALL, *T2A2, *flags) as server:
        for turn in range(50):
            found = ask(server, PROMPTS[turn // 2 % 4], routed_dp_rank=turn % 2)
            assert ids_of(found) == expected[turn // 2 % 4]
            meta = found["meta_info"]
            assert meta["dp_rank"] == turn % 2 and meta["spec_verify_ct"] >= 1
        both = server.answer(input_ids=PROMPTS, sampling_params=GREEDY)
        assert [ids_of(item) for item in both] == expected
        assert all(one["forward_ct_idle"] > 0 and one["spec_verify_ct"] > 0 for one in states(server))
        server.signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert "Traceback" not in server.log()


@pytest.mark.parametrize(("layout", "num_replicas"), [(T2, 1), (T2A2, 2), (D2, 2)], ids=["T2", "T2A2", "D2"])
def test_a_perfect_draft_is_perfect_in_every_layout(
    model: pathlib.Path, expected: list[list[int]], layout: tuple[str, ...], num_replicas: int
) -> None:
    """An acceptance that falls with the layout changes no text, so nobody would notice it.

    Of the twelve tokens one comes with the prompt, the others in rounds of four.
    """
    flags = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(model))
    with running_server(model, *SMALL, *layout, *flags) as server:
        for prompt, ids in zip(PROMPTS, expected, strict=True):
            for replica in range(num_replicas):
                found = ask(server, prompt, routed_dp_rank=replica)
                assert ids_of(found) == ids
                meta = found["meta_info"]
                assert (meta["spec_verify_ct"], meta["spec_correct_drafts_histogram"]) == (3, [0, 0, 0, 3])
        both = server.answer(input_ids=PROMPTS, sampling_params=GREEDY)
        assert [ids_of(item) for item in both] == expected
        assert [one["avg_spec_accept_length"] for one in states(server)] == [4.0] * num_replicas
        assert "Traceback" not in server.log()
