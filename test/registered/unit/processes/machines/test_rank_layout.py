"""What the door refuses of a layout, and what each rank of this machine is told."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import pathlib
import socket
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from sglang.srt.arg_groups.hooks.parallel import split_address
from sglang.srt.arg_groups.hooks.pipeline import resolve
from sglang.srt.arg_groups.public_values import common_values
from sglang.srt.distributed.meeting_place import address_towards
from sglang.srt.entrypoints.engine_core import decisions_of_ranks, smallest_limits
from sglang.srt.environ import envs
from sglang.srt.processes.machines import rank_layout
from sglang.srt.processes.machines.rank_layout import (
    Machine,
    hold_port,
    layout_line,
    rank_configs,
    refuse_taken_ports,
    refuse_unknown_interface,
)
from sglang.srt.processes.machines.ray_machines import connect_to_ray
from sglang.srt.processes.rank_config import RankConfig
from sglang.srt.processes.sockets import SocketFolder
from sglang.srt.runtime_context import publish, reset_context
from sglang.srt.server_args import ServerArgs
from sglang.test.ports import held_ports, listen_on

TWO_NODES = {"tp_size": 4, "nnodes": 2, "dist_init_addr": "127.0.0.1:5000"}


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> Iterator[SocketFolder]:
    with envs.SGLANG_RUNTIME_DIR.override(str(tmp_path)):
        folder = SocketFolder()
        yield folder
        folder.remove()
    reset_context()


def published(**settings: Any) -> ServerArgs:
    record = ServerArgs.from_kwargs(model_path="some-model", **settings)
    publish(record, role="test")
    return record


def configs(folder: SocketFolder, **settings: Any) -> list[RankConfig]:
    return rank_configs(published(**settings), folder)


# the door


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"tp_size": 2, "attn_dp_size": 4},
            r"tp_size % \(attn_dp_size .*--tp-size 2, --attn-dp-size 4.* asks for 4 parts of 2 ranks",
        ),
        ({"tp_size": 4, "attn_dp_size": 3}, "leaves 1 of 4 ranks over; make --tp-size a multiple of 3$"),
        ({"attn_dp_size": 2}, "asks for 2 parts of 1 rank; make --tp-size a multiple of 2$"),
        ({"dp_size": 0}, "--dp-size must be at least 1, got 0"),
        ({"dp_size": -2}, "--dp-size must be at least 1, got -2"),
        ({"nnodes": 0}, "--nnodes must be at least 1, got 0"),
        ({"node_rank": -1}, "--node-rank must be at least 0, got -1"),
        (
            TWO_NODES | {"tp_size": 3},
            r"\(tp_size \* pp_size\) % nnodes == 0 .*--tp-size 3.*--nnodes 2 leaves 1 of 3 ranks",
        ),
        (
            TWO_NODES | {"nnodes": 8},
            r"--nnodes 8 asks for 8 parts of 4 ranks; make tp_size \* pp_size a multiple of 8$",
        ),
        (TWO_NODES | {"node_rank": 2}, "0 <= node_rank < nnodes must hold: --node-rank 2, --nnodes 2"),
        (TWO_NODES | {"dp_size": 2}, "--dp-size 2, --nnodes 2; .* one server per machine behind a router"),
        ({"tp_size": 4, "nnodes": 2}, "--nnodes 2 needs --dist-init-addr HOST:PORT"),
        (TWO_NODES | {"dist_init_addr": "0.0.0.0:5000"}, "no address that other machines can reach"),
        ({"dist_init_addr": "localhost"}, "'localhost' is not HOST:PORT"),
        ({"dist_init_addr": "localhost:70000"}, "is not HOST:PORT with a port from 1 to 65535"),
        ({"dist_init_addr": "::1:5000"}, r"an IPv6 address stands in brackets"),
        ({"dist_timeout": 10**11}, "--dist-timeout must be at least 1 and at most 86400"),
        ({"dist_init_addr": "localhost:5000", "nccl_port": 5001}, "both say where ranks meet; keep one"),
        (
            {"dp_size": 3, "nccl_port": 65534},
            r"port \+ dp_size - 1 <= 65535 must hold: .* 3 replicas .* 65534",
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_before_the_model_is_opened(
    settings: dict[str, Any], words: str
) -> None:
    record = ServerArgs.from_kwargs(model_path="/no/such/folder", **settings)
    with pytest.raises(ValueError, match=words):
        resolve(record)


@pytest.mark.parametrize(
    "settings", [{"dp_size": 100_000}, {"tp_size": 64}, {"tp_size": 64, "attn_dp_size": 8}]
)
def test_more_ranks_than_memory_holds_are_refused_before_one_is_started(
    folder: SocketFolder, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """A slip of the finger would take the machine down with processes."""
    monkeypatch.setattr(rank_layout, "available_memory_bytes", lambda: 4 << 30)
    count = settings.get("dp_size", 64)
    with pytest.raises(ValueError, match=rf"asks for {count} ranks on this machine.* 4096 MiB are available"):
        configs(folder, **settings)
    assert len(configs(folder, tp_size=8)) == 8
    two_nodes = TWO_NODES | {"tp_size": 64}
    assert len(configs(folder, **two_nodes)) == 32, "only those of this machine count"


def test_the_older_spelling_is_the_same_layout_and_says_so(folder: SocketFolder) -> None:
    with pytest.warns(FutureWarning, match="write --attn-dp-size N"):
        older = configs(folder, tp_size=4, dp_size=2, enable_dp_attention=True)
    newer = configs(folder, tp_size=4, attn_dp_size=2)
    assert [config.listen for config in older] == [config.listen for config in newer]


def test_each_rank_of_a_machine_has_a_gpu_of_its_own(folder: SocketFolder) -> None:
    """Counted over all replicas on the machine; a number left out would put every rank on the first GPU."""
    layout = {"tp_size": 2, "dp_size": 2}
    on_gpus = configs(folder, device="cuda", base_gpu_id=1, gpu_id_step=2, **layout)
    assert [config.gpu_id for config in on_gpus] == [1, 3, 5, 7]
    second = TWO_NODES | {"node_rank": 1, "device": "cuda"}
    assert [config.gpu_id for config in configs(folder, **second)] == [0, 1], "each machine counts its own"
    assert [config.gpu_id for config in configs(folder, device="cpu", **layout)] == [None] * 4


def test_what_a_rank_made_of_the_flags_reaches_the_server() -> None:
    """Replicas may find different room; a request may land on any, so the smallest counts."""

    def info(*overrides: tuple[str, str, Any]) -> dict[str, Any]:
        return {"overrides": [{"source": s, "name": n, "after": a} for s, n, a in overrides]}

    roomy = info(("scheduler", "max_total_tokens", 900), ("prefill_delayer", "enable_prefill_delayer", False))
    tight = info(("scheduler", "max_total_tokens", 4), ("scheduler", "max_total_tokens", 700))
    assert decisions_of_ranks([roomy, tight, {}]) == {
        "scheduler": {"max_total_tokens": 700},
        "prefill_delayer": {"enable_prefill_delayer": False},
    }


@pytest.mark.parametrize(
    ("text", "parts"),
    [("host:1", ("host", 1)), ("10.0.0.1:65535", ("10.0.0.1", 65535)), ("[fe80::1]:80", ("fe80::1", 80))],
)
def test_an_address_is_taken_apart(text: str, parts: tuple[str, int]) -> None:
    assert split_address(text) == parts


def test_machines_compare_all_but_what_is_their_own() -> None:
    one = ServerArgs.from_kwargs(model_path="m", api_key="hunter1", port=1, node_rank=0, page_size=16)
    two = ServerArgs.from_kwargs(model_path="m", api_key="hunter2", port=2, node_rank=1, page_size=16)
    assert common_values(one) == common_values(two)
    assert common_values(one)["page_size"] == 16
    assert "hunter" not in str(common_values(one))


# seats


def test_leaders_have_sockets_and_their_peers_none(folder: SocketFolder) -> None:
    ranks = configs(folder, tp_size=4, attn_dp_size=2)
    assert [rank.world_rank for rank in ranks] == [0, 1, 2, 3]
    assert [rank.listen is not None for rank in ranks] == [True, False, True, False]
    assert [rank.server is not None for rank in ranks] == [True, False, True, False]
    assert {rank.rendezvous for rank in ranks} == {f"file:{folder.path}/meeting0"}
    assert [rank.dp_rank for rank in ranks] == [None] * 4
    assert layout_line(4) == "tp_size=4 attn_dp_size=2 attn_tp_size=2: 4 ranks"


def test_each_replica_is_a_world_of_its_own(folder: SocketFolder) -> None:
    ranks = configs(folder, tp_size=2, dp_size=2)
    assert [(rank.dp_rank, rank.world_rank, rank.world_size) for rank in ranks] == [
        (0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2),
    ]  # fmt: skip
    assert [(rank.local_rank, rank.ranks_on_host) for rank in ranks] == [(r, 4) for r in range(4)]
    assert len({rank.rendezvous for rank in ranks}) == 2
    assert len({rank.heartbeat for rank in ranks}) == 4
    leaders = [rank.listen for rank in ranks if rank.listen]
    assert len(leaders) == len(set(leaders)) == 2
    assert [rank.label for rank in ranks][2:] == ["rank 0 of replica 1", "rank 1 of replica 1"]


def test_replicas_at_a_stated_address_take_ports_of_their_own(folder: SocketFolder) -> None:
    ranks = configs(folder, dp_size=3, dist_init_addr="127.0.0.1:5000")
    assert [rank.rendezvous for rank in ranks] == [f"tcp://127.0.0.1:{port}" for port in (5000, 5001, 5002)]


def test_a_machine_starts_its_block_of_ranks(folder: SocketFolder) -> None:
    record = published(**TWO_NODES, attn_dp_size=2)
    first = rank_configs(record, folder, Machine.of_flags(folder, "tcp://127.0.0.1:6000"))
    assert [rank.world_rank for rank in first] == [0, 1]
    assert [rank.server for rank in first] == ["tcp://127.0.0.1:6000", None]
    second = configs(folder, **TWO_NODES, attn_dp_size=2, node_rank=1)
    assert layout_line(2).endswith(": 4 ranks, 2 of them on machine 1 of 2")
    assert [(rank.world_rank, rank.local_rank, rank.ranks_on_host) for rank in second] == [
        (2, 0, 2),
        (3, 1, 2),
    ]
    # Sockets in a folder cannot be seen from machine 0, and where the server is it must be told.
    assert [rank.listen for rank in second] == ["tcp://127.0.0.1:*", None]
    assert [rank.server for rank in second] == [None, None]
    assert {rank.rendezvous for rank in [*first, *second]} == {"tcp://127.0.0.1:5000"}


# ports


def test_a_taken_port_is_named_with_its_replica(folder: SocketFolder) -> None:
    with held_ports(2) as first:
        port = first + 1
        with listen_on(port):
            published(dp_size=2, dist_init_addr=f"127.0.0.1:{first}")
            with pytest.raises(ValueError, match=rf":{port}: the port is in use.*\(replica 1 of --dp-size"):
                refuse_taken_ports()
            published(tp_size=2, nccl_port=port)
            with pytest.raises(ValueError, match=f"--nccl-port: the ranks cannot meet at 127.0.0.1:{port}"):
                refuse_taken_ports()
            published(**TWO_NODES | {"dist_init_addr": f"127.0.0.1:{port}"}, node_rank=1)
            refuse_taken_ports()  # machine 0 holds it
        published(tp_size=2, nccl_port=port)
        refuse_taken_ports()


def test_a_host_of_another_machine_is_refused_on_machine_0(folder: SocketFolder) -> None:
    published(**TWO_NODES | {"dist_init_addr": "192.0.2.1:5000"})
    with pytest.raises(ValueError, match="no address of this machine"):
        refuse_taken_ports()
    published(**TWO_NODES | {"dist_init_addr": "no-such-host.invalid:5000"})
    with pytest.raises(ValueError, match=r"no-such-host\.invalid"):
        refuse_taken_ports()


def test_the_servers_port_is_held_until_it_is_bound(folder: SocketFolder) -> None:
    published(**TWO_NODES)
    holder, address = hold_port()
    with holder, socket.socket() as listener:
        port = int(address.rpartition(":")[2])
        with socket.socket() as stranger, pytest.raises(OSError):
            stranger.bind(("127.0.0.1", port))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()


def test_a_machine_knows_its_address_on_the_way_to_the_others() -> None:
    assert address_towards("127.0.0.1", 5000) == "127.0.0.1"
    with pytest.raises(ValueError, match=r"no-such-host\.invalid is not known"):
        address_towards("no-such-host.invalid", 5000)


# Ray


def test_ray_chooses_the_place_and_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for stated in ({"dist_init_addr": "127.0.0.1:5000"}, {"nccl_port": 5000}, {"nnodes": 2, "node_rank": 1}):
        record = ServerArgs.from_kwargs(model_path="/no/such", tp_size=2, use_ray=True, **stated)
        with pytest.raises(ValueError, match="--use-ray chooses the machines"):
            resolve(record)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install 'sglang\[ray\]'"):
        connect_to_ray()


def test_ranks_that_ray_placed_listen_where_the_server_reaches_them(folder: SocketFolder) -> None:
    """Even those of machine 0: the server may stand on a third one."""
    record = published(tp_size=2, attn_dp_size=2, nnodes=2, use_ray=True)
    server, meeting = "tcp://10.0.0.9:6000", "tcp://10.0.0.1:5000"
    ranks = [
        *rank_configs(record, folder, Machine(0, "10.0.0.1", server, meeting)),
        *rank_configs(record, folder, Machine(1, "10.0.0.2", server, meeting)),
    ]
    assert [rank.listen for rank in ranks] == ["tcp://10.0.0.1:*", "tcp://10.0.0.2:*"]
    assert [rank.server for rank in ranks] == [server, None]
    assert {rank.rendezvous for rank in ranks} == {meeting}
    assert layout_line(0).endswith(": 2 ranks, placed by Ray on 2 machines")


# what ranks say


def test_the_smallest_rank_bounds_a_request() -> None:
    ready = {"max_total_num_tokens": 100, "context_len": 8, "vocab_size": 5, "startup_time": 1.0}
    assert smallest_limits([ready, ready | {"max_total_num_tokens": 60, "startup_time": 2.0}]) == {
        "max_total_num_tokens": 60,
        "context_len": 8,
        "vocab_size": 5,
        "startup_time": 2.0,
    }


def test_an_interface_that_this_machine_lacks_is_refused_with_those_it_has() -> None:
    """gloo said `ifa != nullptr`, and the cause named was a lost peer."""
    for fine in ("lo", "lo,lo", ""):
        with envs.GLOO_SOCKET_IFNAME.override(fine):
            refuse_unknown_interface()
    with (
        envs.GLOO_SOCKET_IFNAME.override("lo,nope0"),
        pytest.raises(ValueError, match=r"^GLOO_SOCKET_IFNAME=nope0: .* it has (.*, )?lo"),
    ):
        refuse_unknown_interface()
