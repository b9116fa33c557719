"""Where ranks meet: how it is written, who may hold the port, which interface leads there."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit-cpu")

import logging
import socket
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch.distributed

from sglang.srt.distributed import meeting_place, parallel_state, rendezvous
from sglang.srt.distributed.errors import CollectiveError
from sglang.srt.distributed.meeting_place import Meeting, interface_towards, listen_at, parse_meeting
from sglang.srt.distributed.utils import get_global_tcp_store
from sglang.srt.environ import envs
from sglang.test.ports import held_ports
from sglang.test.waiting import HANG_GUARD_S, wait_until


@pytest.mark.parametrize(
    "text, meeting, shown",
    [
        ("file:/tmp/a b", Meeting(path="/tmp/a b"), "file:/tmp/a b"),
        ("tcp://10.0.0.7:29500", Meeting(host="10.0.0.7", port=29500), "10.0.0.7:29500"),
        ("tcp://node-0:1", Meeting(host="node-0", port=1), "node-0:1"),
        ("tcp://[::1]:29500", Meeting(host="::1", port=29500), "[::1]:29500"),
    ],
)
def test_a_place_reads_as_written(text: str, meeting: Meeting, shown: str) -> None:
    assert parse_meeting(text) == meeting and str(meeting) == shown


@pytest.mark.parametrize(
    "text", ["", "file:", "10.0.0.7:29500", "tcp://:29500", "tcp://a", "tcp://a:0", "tcp://a:x"]
)
def test_another_way_to_write_a_place_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"file:PATH or tcp://HOST:PORT with a port in 1\.\.65535"):
        parse_meeting(text)


def test_the_port_is_held_on_that_address_only_and_a_second_holder_is_told_what_to_do() -> None:
    with held_ports() as port:
        place = Meeting(host="127.0.0.1", port=port)
        with socket.socket(fileno=listen_at(place)) as listener:
            assert listener.getsockname() == ("127.0.0.1", port)
            with pytest.raises(
                OSError, match=rf"127\.0\.0\.1:{port}: the port is in use.*--dist-init-addr or"
            ):
                listen_at(place)


def test_an_address_of_another_machine_cannot_be_held() -> None:
    with pytest.raises(
        OSError, match=r"192\.0\.2\.1:29500: that is no address of this machine.*--node-rank 0"
    ):
        listen_at(Meeting(host="192.0.2.1", port=29500))


def test_a_name_that_nobody_knows_is_the_users_fault() -> None:
    with (
        patch("socket.getaddrinfo", side_effect=socket.gaierror(-2, "Name or service not known")),
        pytest.raises(ValueError, match="--dist-init-addr: the host nowhere is not known here"),
    ):
        interface_towards(Meeting(host="nowhere", port=1))


def test_the_interface_is_the_one_that_leads_to_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interface_towards(Meeting(path="/tmp/x")) == "lo"
    assert interface_towards(Meeting(host="127.0.0.1", port=1)) == "lo"
    address = namedtuple("address", "address")

    class _Probe:
        """Stands for the route to another machine, which the tests' machine need not have."""

        def __init__(self, *kind: Any) -> None: ...
        def __enter__(self) -> "_Probe":
            return self

        def __exit__(self, *error: Any) -> None: ...
        def connect(self, where: Any) -> None:
            assert where == ("10.1.2.3", 29500)

        def getsockname(self) -> tuple[str, int]:
            return ("10.1.2.9", 4711)

    table = {"lo": [address("127.0.0.1")], "eth0": [address("192.168.0.4")], "ib0": [address("10.1.2.9")]}
    monkeypatch.setattr(meeting_place.socket, "socket", _Probe)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: table)
    assert interface_towards(Meeting(host="10.1.2.3", port=29500)) == "ib0"
    del table["ib0"]
    with pytest.raises(ValueError, match=r"has the address 10\.1\.2\.9.*set GLOO_SOCKET_IFNAME"):
        interface_towards(Meeting(host="10.1.2.3", port=29500))


def test_one_rank_meets_nobody(tmp_path: Path) -> None:
    """No port, no file, no route, whatever place is stated."""
    with envs.GLOO_SOCKET_IFNAME.override(None):
        rendezvous.join_world(
            rendezvous="tcp://192.0.2.1:29500",
            world_rank=0,
            world_size=1,
            local_rank=0,
            timeout_s=None,
            configuration={"tp_size": 1},
        )
        assert envs.GLOO_SOCKET_IFNAME.get() == "lo"
    assert parallel_state.get_world_group().world_size == 1
    assert isinstance(get_global_tcp_store(), torch.distributed.HashStore)


def test_what_the_operator_set_for_gloo_stays(tmp_path: Path) -> None:
    with envs.GLOO_SOCKET_IFNAME.override("lo"), patch.object(rendezvous, "interface_towards") as asked:
        with pytest.raises(
            RuntimeError, match=r"world ranks \[0\] of 2 did not come to file:.* within 0.01 s"
        ):
            rendezvous.join_world(
                rendezvous=f"file:{tmp_path / 'place'}",
                world_rank=1,
                world_size=2,
                local_rank=1,
                timeout_s=0.01,
                configuration={},
            )
        asked.assert_not_called()


def test_a_rank_that_comes_twice_ends_the_wait_of_all(tmp_path: Path) -> None:
    """The others wait for the rank that the second one should have been, and nobody else tells them."""
    store = torch.distributed.HashStore()

    def check_of(rank: int) -> rendezvous._ConfigurationCheck:
        return rendezvous._ConfigurationCheck(store, Meeting(path="place"), rank, 3, HANG_GUARD_S)

    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(check_of(rank).compare, {}) for rank in (0, 1)]
        wait_until(lambda: store.check(["meeting/arrivals/1"]))
        for refused in (*waiting, pool.submit(check_of(1).compare, {})):
            with pytest.raises(ValueError, match="world rank 1 came to file:place twice: two machines have"):
                refused.result(HANG_GUARD_S)


def test_a_rank_says_for_whom_it_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
    monkeypatch.setattr(rendezvous, "time", clock)
    check = rendezvous._ConfigurationCheck(torch.distributed.HashStore(), Meeting(path="place"), 0, 3, 50.0)
    with caplog.at_level(logging.INFO), pytest.raises(RuntimeError, match=r"world ranks \[1, 2\] of 3 did"):
        check.compare({})
    words = "world rank 0 waits at file:place for world ranks [1, 2]: {} s so far, at most 50 s"
    assert caplog.messages == [words.format(20), words.format(40)]


@pytest.mark.parametrize(
    "mine, first, words",
    [
        ({"a": 1, "b": [1]}, {"b": [1], "a": 1}, ""),
        ({"a": None}, {}, "a is None there and not known on world rank 0."),
        (
            {"a": 1, "b": "x"},
            {"a": 2, "b": "y"},
            "a is 1 there and 2 on world rank 0; b is 'x' there and 'y' on",
        ),
    ],
)
def test_a_difference_names_each_setting_with_both_values(
    mine: dict[str, Any], first: dict[str, Any], words: str
) -> None:
    said = rendezvous._difference(3, mine, first)
    assert words in said and bool(said) == bool(words)
    if said:
        assert said.startswith("world rank 3 was started with other settings than world rank 0: ")


def test_a_world_that_cannot_be_joined_names_the_limit() -> None:
    store = torch.distributed.HashStore()  # nobody else can be in it
    with pytest.raises(CollectiveError, match=r"joining the world over group 'world'.*\(now 0.2 s\)"):
        parallel_state.init_distributed_environment(world_size=2, rank=1, store=store, timeout_s=0.2)
