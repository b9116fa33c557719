"""One deployment over two machines: two processes on this host, and two network namespaces if they work."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=50, suite="server-cpu")

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from sglang.test.ports import held_ports
from sglang.test.server.server_fixture import RunningServer, process_is_gone, running_server
from sglang.test.waiting import HANG_GUARD_S, wait_until

PROMPTS = [[5], [7, 9, 11], [3, 30, 300, 17, 4]]
SMALL = ("--max-total-tokens", "1024", "--dtype", "float32")
#: A lost connection is seen at once: a test that waited for this limit would have failed long before.
PATIENT = ("--dist-timeout", "3600")
GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def expected(model: pathlib.Path) -> list[list[int]]:
    with running_server(model, *SMALL) as server:
        return answers(server)


def answers(server: RunningServer) -> list[list[int]]:
    return [server.answer(input_ids=prompt, sampling_params=GREEDY)["output_ids"] for prompt in PROMPTS]


@contextlib.contextmanager
def two_machines(
    model: pathlib.Path, *flags: str, other: tuple[str, ...] | None = None
) -> Iterator[tuple[RunningServer, RunningServer]]:
    """Machine 0 and machine 1 on this host; `other` are the flags of machine 1 where they differ."""
    with held_ports() as port:
        flags_of_all = (*SMALL, *PATIENT, "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{port}")
        first = running_server(model, *flags_of_all, *flags, wait=False)
        second = running_server(
            model, *flags_of_all, *(flags if other is None else other), "--node-rank", "1", wait=False
        )
        with first as zero, second as one:
            yield zero, one


def assert_left(machine: RunningServer, code: int, ranks: list[int]) -> None:
    assert machine.wait_exit() == code, machine.log()
    wait_until(lambda: all(map(process_is_gone, ranks)))
    assert machine.leftovers() == []


@pytest.mark.parametrize(
    "flags", [["--tp-size", "2"], ["--tp-size", "2", "--attn-dp-size", "2"]], ids=["T2", "T2A2"]
)
def test_two_machines_answer_as_one_rank_and_end_together(
    model: pathlib.Path, expected: list[list[int]], flags: list[str]
) -> None:
    with two_machines(model, *flags) as (zero, one):
        zero.wait_ready()
        assert answers(zero) == expected
        ranks = zero.rank_pids(), one.rank_pids()
        assert [len(pids) for pids in ranks] == [1, 1]
        wait_until(lambda: "the server is on machine 0" in one.log(), one.log)
        zero.signal(signal.SIGTERM)
        assert_left(zero, 0, ranks[0])
        assert_left(one, 0, ranks[1])
        assert "Traceback" not in zero.log() + one.log()


def test_a_rank_killed_on_one_machine_ends_both_with_the_cause(model: pathlib.Path) -> None:
    with two_machines(model, "--tp-size", "2") as (zero, one):
        zero.wait_ready()
        (ranks_of_zero, ranks_of_one) = zero.rank_pids(), one.rank_pids()
        os.kill(ranks_of_one[0], signal.SIGKILL)
        assert_left(one, 1, ranks_of_one)
        assert_left(zero, 1, ranks_of_zero)
        assert "was killed by signal 9 (SIGKILL)" in one.log()
        assert "CollectiveError" in zero.log()


def test_a_signal_on_a_machine_of_ranks_ends_the_deployment(model: pathlib.Path) -> None:
    with two_machines(model, "--tp-size", "2") as (zero, one):
        zero.wait_ready()
        (ranks_of_zero, ranks_of_one) = zero.rank_pids(), one.rank_pids()
        one.signal(signal.SIGINT)
        assert_left(one, 0, ranks_of_one)
        assert "SIGINT received; machine 1 of 2 leaves the deployment" in one.log()
        assert_left(zero, 1, ranks_of_zero)


def test_machines_started_with_other_flags_are_refused_with_the_difference(model: pathlib.Path) -> None:
    flags = ("--tp-size", "2", "--api-key", "first")
    other = ("--tp-size", "2", "--api-key", "second", "--page-size", "16")
    with two_machines(model, *flags, other=other) as (zero, one):
        for machine in (zero, one):
            assert machine.wait_exit() == 1
            assert "page_size is 16 there and 1 on world rank 0" in machine.log()
            assert "second" not in machine.log()


@pytest.mark.parametrize("present", [0, 1])
def test_a_machine_that_does_not_come_is_named_with_the_timeout(model: pathlib.Path, present: int) -> None:
    flags = (*SMALL, "--tp-size", "2", "--dist-timeout", "2", "--nnodes", "2", "--node-rank", str(present))
    with (
        held_ports() as port,
        running_server(model, *flags, "--dist-init-addr", f"127.0.0.1:{port}", wait=False) as machine,
    ):
        assert machine.wait_exit() == 1
        missing = "world ranks [1] of 2" if present == 0 else "world rank 0"
        assert f"{missing} did not come to 127.0.0.1:{port} within 2 s" in machine.log()
        assert "--dist-timeout" in machine.log()
        assert machine.leftovers() == []


# two namespaces: other addresses, no common loopback

HOSTS = ("10.213.77.1", "10.213.77.2")
ASK = """
import json, sys, urllib.request
for prompt in json.loads(sys.argv[2]):
    body = {"input_ids": prompt, "sampling_params": json.loads(sys.argv[3])}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(sys.argv[1], json.dumps(body).encode(), headers)
    print(json.dumps(json.load(urllib.request.urlopen(request, timeout=180))["output_ids"]))
"""


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}")


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two namespaces joined by one cable; removed whatever happens, and skipped where they cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("no `ip` command (iproute2) on this machine")
    names = (f"sgl{os.getpid()}a", f"sgl{os.getpid()}b")
    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
            ip("-n", names[0], "link", "add", "cable0", "type", "veth", "peer", "cable1", "netns", names[1])
            for name, link, host in zip(names, ("cable0", "cable1"), HOSTS):
                ip("-n", name, "addr", "add", f"{host}/24", "dev", link)
                ip("-n", name, "link", "set", link, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except OSError as error:
            stack.close()
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield names


def test_machines_with_networks_of_their_own_serve_together(
    model: pathlib.Path, expected: list[list[int]], namespaces: tuple[str, str]
) -> None:
    """On one host everything is reachable at 127.0.0.1; here only what is bound to the right address is."""
    flags = (*SMALL, "--tp-size", "2", "--attn-dp-size", "2", "--nnodes", "2")
    place = ("--dist-init-addr", f"{HOSTS[0]}:29610")
    inside = [("ip", "netns", "exec", name) for name in namespaces]
    first = running_server(model, *flags, *place, wait=False, wrapper=inside[0])
    second = running_server(model, *flags, *place, "--node-rank", "1", wait=False, wrapper=inside[1])
    with first as zero, second as one:
        zero.wait_ready()
        done = subprocess.run(
            [*inside[0], sys.executable, "-c", ASK, f"http://127.0.0.1:{zero.port}/generate",
             json.dumps(PROMPTS), json.dumps(GREEDY)],
            capture_output=True, text=True, timeout=HANG_GUARD_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert [json.loads(line) for line in done.stdout.splitlines()] == expected
        ranks = zero.rank_pids(), one.rank_pids()
        zero.signal(signal.SIGTERM)
        assert_left(zero, 0, ranks[0])
        assert_left(one, 0, ranks[1])
