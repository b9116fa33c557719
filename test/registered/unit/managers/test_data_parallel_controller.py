"""Which replica a request runs on, what the controller knows of each, and what it says to whom."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import asyncio
from typing import Any

import pytest

from sglang.srt.arg_groups.fields import LEAVES
from sglang.srt.arg_groups.fields.choices import LOAD_BALANCE_METHODS
from sglang.srt.managers.data_parallel_controller import _MEASURES, DataParallelController
from sglang.srt.messages import io_struct
from sglang.srt.processes import wire
from sglang.srt.processes.sockets import SocketFolder
from sglang.srt.processes.wire import RankChannel, ServerChannel, open_wire
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ports import held_ports
from sglang.test.test_utils import published_topology
from sglang.test.waiting import HANG_GUARD_S


class FakeLeaders:
    """The channel under the controller: what each leader got, and what they say."""

    def __init__(self, replicas: int) -> None:
        self.got: list[list[Any]] = [[] for _ in range(replicas)]
        self.order: list[tuple[int, Any]] = []
        self.dead: set[int] = set()
        self.said: list[io_struct.Message] = []
        self.closed = False

    def send(self, message: io_struct.Message, leader: int) -> None:
        if leader in self.dead:
            raise RuntimeError(f"leader {leader} is gone")
        message = io_struct.decode(io_struct.encode(message))
        self.got[leader].append(message)
        self.order.append((leader, message))

    async def recv(self) -> io_struct.Message:
        return self.said.pop(0)

    def close(self) -> None:
        self.closed = True

    def rids(self, leader: int) -> list[str]:
        return [m.rid for m in self.got[leader] if isinstance(m, io_struct.TokenizedGenerateReqInput)]

    def notes(self) -> list[list[int]]:
        return [m.counts for m in self.got[0] if isinstance(m, io_struct.DispatchedReq)]


def controller_over(
    replicas: int, method: str = "auto", *, attention_dp: bool = False
) -> tuple[DataParallelController, FakeLeaders]:
    leaders = FakeLeaders(replicas)
    controller = DataParallelController(leaders, replicas=replicas, attention_dp=attention_dp, method=method)
    return controller, leaders


def request(rid: str, *, prompt: int = 4, new: int = 8, **more: Any) -> io_struct.TokenizedGenerateReqInput:
    params = SamplingParams(max_new_tokens=new)
    return io_struct.TokenizedGenerateReqInput(
        rid=rid, input_ids=[1] * prompt, sampling_params=params, **more
    )


def end(controller: DataParallelController, leaders: FakeLeaders, rid: str, **reason: Any) -> Any:
    """The replica says that `rid` has ended."""
    fields: dict[str, Any] = {"type": "length", "length": 1} | reason
    output = io_struct.TokenOutput(
        rid=rid,
        new_ids=[],
        finish_reason=io_struct.FinishReason(**fields),
        prompt_tokens=1,
        completion_tokens=1,
        cached_tokens=0,
        num_retractions=0,
    )
    leaders.said.append(io_struct.BatchTokenIDOutput(outputs=[output]))
    return asyncio.run(controller.recv())


# routing


@pytest.mark.parametrize("method", ["auto", "round_robin"])
def test_round_robin_gives_each_replica_its_turn_whatever_has_ended(method: str) -> None:
    controller, leaders = controller_over(3, method)
    for number in range(7):
        controller.send(request(f"r{number}"))
        end(controller, leaders, f"r{number}")
    assert [leaders.rids(i) for i in range(3)] == [["r0", "r3", "r6"], ["r1", "r4"], ["r2", "r5"]]


def test_total_requests_picks_the_replica_with_the_fewest_open_ones() -> None:
    controller, leaders = controller_over(2, "total_requests")
    for rid in ("a", "b", "c", "d"):
        controller.send(request(rid, prompt=1000 if rid == "a" else 1))
    assert controller.loads.requests == [2, 2]
    end(controller, leaders, "b")
    end(controller, leaders, "d")
    controller.send(request("e"))
    controller.send(request("f"))
    assert leaders.rids(1) == ["b", "d", "e", "f"]


def test_total_tokens_counts_prompt_and_expected_tokens() -> None:
    controller, leaders = controller_over(2, "total_tokens")
    controller.send(request("long", prompt=100, new=100))
    for number in range(4):
        controller.send(request(f"short{number}", prompt=10, new=30))
    assert (controller.loads.tokens, controller.loads.requests) == ([200, 160], [1, 4])
    controller.send(request("fifth", prompt=10, new=31))
    controller.send(request("sixth"))
    assert (leaders.rids(0), leaders.rids(1)[-1]) == (["long", "sixth"], "fifth")


def test_equal_loads_go_round_and_do_not_pile_up_on_the_first() -> None:
    controller, leaders = controller_over(3, "total_requests")
    for number in range(6):
        controller.send(request(f"r{number}"))
        end(controller, leaders, f"r{number}")
    assert [len(leaders.rids(i)) for i in range(3)] == [2, 2, 2]


def test_a_stated_rank_wins_and_takes_no_turn() -> None:
    controller, leaders = controller_over(2)
    controller.send(request("a"))
    for number in range(3):
        controller.send(request(f"stated{number}", routed_dp_rank=0))
    controller.send(request("b"))
    assert leaders.rids(0) == ["a", "stated0", "stated1", "stated2"]
    assert leaders.rids(1) == ["b"]


def test_stated_requests_are_load_for_the_others() -> None:
    controller, leaders = controller_over(2, "total_requests")
    for number in range(3):
        controller.send(request(f"stated{number}", routed_dp_rank=0))
    for number in range(3):
        controller.send(request(f"r{number}"))
    assert leaders.rids(1) == ["r0", "r1", "r2"]


@pytest.mark.parametrize("rank", [2, -1])
def test_a_rank_that_does_not_exist_is_refused_with_the_range(rank: int) -> None:
    controller, leaders = controller_over(2)
    with pytest.raises(ValueError, match=r"routed_dp_rank: must satisfy 0 <= routed_dp_rank < 2, got"):
        controller.send(request("a", routed_dp_rank=rank))
    assert leaders.order == []


@pytest.mark.parametrize("method", ["round_robin", "total_requests", "total_tokens"])
def test_the_samples_of_one_prompt_stay_together(method: str) -> None:
    controller, leaders = controller_over(2, method)
    for sample in range(3):
        controller.send(request(f"p_{sample}", parent_rid="p"))
    controller.send(request("other"))
    assert (leaders.rids(0), leaders.rids(1)) == (["p_0", "p_1", "p_2"], ["other"])
    for sample in range(3):
        end(controller, leaders, f"p_{sample}")
    # The same name again later is a new prompt with a turn of its own.
    controller.send(request("next"))
    controller.send(request("p_0", parent_rid="p"))
    controller.send(request("p_1", parent_rid="p"))
    assert leaders.rids(1)[-2:] == ["p_0", "p_1"]
    assert controller.loads.requests[1] == 3


# loads


@pytest.mark.parametrize(
    "reason",
    [
        {"type": "stop", "matched": 3},
        {"type": "abort", "message": "Aborted"},
        {"type": "abort", "message": "too long", "status_code": 400},
    ],
    ids=["finished", "aborted", "failed"],
)
def test_whatever_ends_leaves_the_load(reason: dict[str, Any]) -> None:
    controller, leaders = controller_over(2, "total_tokens")
    controller.send(request("a"))
    controller.send(request("b"))
    assert (controller.loads.requests, controller.loads.tokens) == ([1, 1], [12, 12])
    end(controller, leaders, "a", **reason)
    assert (controller.loads.requests, controller.loads.tokens) == ([0, 1], [0, 12])
    end(controller, leaders, "a", **reason)  # said twice, or never sent: counts once
    end(controller, leaders, "stranger")
    assert (controller.loads.requests, controller.loads.tokens) == ([0, 1], [0, 12])


def test_news_without_an_end_keep_the_load_and_pass_through() -> None:
    controller, leaders = controller_over(2)
    controller.send(request("a"))
    said = io_struct.BatchTokenIDOutput(
        outputs=[
            io_struct.TokenOutput(
                rid="a",
                new_ids=[5],
                finish_reason=None,
                prompt_tokens=4,
                completion_tokens=1,
                cached_tokens=0,
                num_retractions=0,
            )
        ],
        dp_rank=0,
    )
    leaders.said.append(said)
    assert asyncio.run(controller.recv()) is said
    assert controller.loads.requests == [1, 0]


def test_a_request_that_could_not_be_sent_is_no_load_and_takes_no_turn() -> None:
    controller, leaders = controller_over(2)
    controller.send(request("a"))
    leaders.dead.add(1)
    for number in range(2):
        with pytest.raises(RuntimeError, match="leader 1 is gone"):
            controller.send(request(f"lost{number}"))
    assert (controller.loads.requests, controller.loads.tokens) == ([1, 0], [12, 0])
    assert controller.loads.replica_of("lost0") is None


def test_loads_are_zero_after_much_traffic() -> None:
    controller, leaders = controller_over(3, "total_tokens")
    for number in range(200):
        parent = f"p{number // 4}" if number % 8 < 4 else None
        controller.send(request(f"r{number}", prompt=1 + number % 17, parent_rid=parent))
        if number % 3:
            end(controller, leaders, f"r{number}")
    for number in range(0, 200, 3):
        end(controller, leaders, f"r{number}", type="abort")
    assert (controller.loads.requests, controller.loads.tokens) == ([0, 0, 0], [0, 0, 0])
    assert not controller.loads._placed and not controller.loads._parents


# control


def test_an_abort_of_one_sequence_goes_to_its_holder_and_others_to_all() -> None:
    controller, leaders = controller_over(2)
    controller.send(request("a"))
    controller.send(request("b"))
    for abort in (
        io_struct.AbortReq(rid="b", exact=True),
        io_struct.AbortReq(rid="prefix"),
        io_struct.AbortReq(abort_all=True),
        io_struct.AbortReq(rid="unknown", exact=True),
    ):
        controller.send(abort)
    aborts = [[m for m in got if isinstance(m, io_struct.AbortReq)] for got in leaders.got]
    assert [[m.rid or m.abort_all for m in of_one] for of_one in aborts] == [
        ["prefix", True, "unknown"],
        ["b", "prefix", True, "unknown"],
    ]


@pytest.mark.parametrize(
    "message",
    [
        io_struct.FlushCacheReqInput(call_id=1),
        io_struct.GetInternalStateReq(call_id=2),
        io_struct.GetPlacementReq(call_id=3),
        io_struct.ShutdownReq(),
    ],
    ids=lambda m: type(m).__name__,
)
def test_control_messages_go_to_every_replica(message: io_struct.Message) -> None:
    controller, leaders = controller_over(3)
    controller.send(message)
    assert [[type(m) for m in got] for got in leaders.got] == [[type(message)]] * 3


def test_replica_0_is_told_what_the_others_were_sent() -> None:
    controller, leaders = controller_over(2, attention_dp=True)
    controller.send(request("a"))
    assert leaders.notes() == []
    controller.send(request("b"))
    assert leaders.notes() == [[1, 1]]
    controller.send(io_struct.FlushCacheReqInput(call_id=1))
    controller.send(io_struct.AbortReq(rid="b", exact=True))
    controller.send(io_struct.ShutdownReq())
    assert leaders.notes() == [[1, 1], [2, 2], [2, 3], [3, 4]]
    # The note comes after the message it speaks of, and only replica 0 gets one.
    assert [type(m).__name__ for _, m in leaders.order[-3:]] == [
        "ShutdownReq",
        "ShutdownReq",
        "DispatchedReq",
    ]
    assert not any(isinstance(m, io_struct.DispatchedReq) for m in leaders.got[1])


def test_separate_worlds_get_no_such_notes() -> None:
    controller, leaders = controller_over(2, attention_dp=False)
    for number in range(4):
        controller.send(request(f"r{number}"))
    controller.send(io_struct.ShutdownReq())
    assert leaders.notes() == []


def test_close_closes_the_channel() -> None:
    controller, leaders = controller_over(2)
    controller.close()
    assert leaders.closed


# built from the published layout


@pytest.mark.parametrize(
    ("fields", "count", "attention_dp"),
    [
        ({"dp_size": 3}, 3, False),
        ({"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}, 2, True),
    ],
)
def test_the_wire_to_several_leaders_is_a_controller(
    fields: dict[str, Any], count: int, attention_dp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def played(folder: Any, leaders: list[str], *, bind: str | None) -> FakeLeaders:
        made.append((folder, leaders, bind))
        return FakeLeaders(len(leaders))

    monkeypatch.setattr(wire, "ServerChannel", played)
    with published_topology(**fields, load_balance_method="total_requests"):
        assert get_parallel().num_replicas == count
        opened = open_wire("folder", ["x"] * count)  # type: ignore[arg-type]
        assert isinstance(opened, DataParallelController)
        assert (opened._attention_dp, opened._measure) == (attention_dp, _MEASURES["total_requests"])
        assert made == [("folder", ["x"] * count, None)]
        with pytest.raises(ValueError, match=f"one per replica, so {count}, got 1"):
            open_wire("folder", ["x"])  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", [{}, {"tp_size": 2}])
def test_one_replica_gets_the_plain_channel(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = FakeLeaders(1)
    monkeypatch.setattr(wire, "ServerChannel", lambda *args, **kwargs: plain)
    with published_topology(**fields):
        assert get_parallel().num_replicas == 1
        assert open_wire("folder", ["x"]) is plain  # type: ignore[arg-type, comparison-overlap]


def test_the_methods_are_those_that_the_flag_serves() -> None:
    served = LEAVES["load_balance_method"].arg.served
    assert isinstance(served, tuple)
    assert set(_MEASURES) == {"auto", *served} <= set(LOAD_BALANCE_METHODS)
    with pytest.raises(ValueError, match="--load-balance-method follow_bootstrap_room is not served"):
        controller_over(2, "follow_bootstrap_room")


# the channel to several leaders


def test_a_channel_reaches_leaders_here_and_on_other_hosts_and_hears_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("SGLANG_RUNTIME_DIR", str(tmp_path))

    async def main(there: str, home: str) -> None:
        folder = SocketFolder()
        here = folder.rank_address(0)
        server = ServerChannel(folder, [here, there], bind=home)
        ranks = [
            RankChannel(listen=here, server=folder.server_address),
            RankChannel(listen=there, server=home),
        ]
        try:
            for leader, rank in enumerate(ranks):
                server.send(io_struct.GetInternalStateReq(call_id=leader), leader)
                assert rank.wait(HANG_GUARD_S)
                assert rank.recv_all() == [io_struct.GetInternalStateReq(call_id=leader)]
                rank.send(io_struct.FlushCacheReqOutput(call_id=leader, success=True, dp_rank=leader))
                answer = await asyncio.wait_for(server.recv(), HANG_GUARD_S)
                assert isinstance(answer, io_struct.FlushCacheReqOutput) and answer.dp_rank == leader
        finally:
            server.close()
            for rank in ranks:
                rank.close()
            folder.remove()

    with held_ports(2) as first:
        asyncio.run(main(f"tcp://127.0.0.1:{first}", f"tcp://127.0.0.1:{first + 1}"))


def test_an_address_that_is_taken_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("SGLANG_RUNTIME_DIR", str(tmp_path))

    async def main(address: str) -> None:
        folder = SocketFolder()
        first = ServerChannel(folder, [folder.rank_address(0)], bind=address)
        other = SocketFolder()
        try:
            with pytest.raises(ValueError, match=f"cannot receive on {address}: "):
                ServerChannel(other, [other.rank_address(0)], bind=address)
        finally:
            first.close()
            folder.remove()
            other.remove()

    with held_ports() as port:
        asyncio.run(main(f"tcp://127.0.0.1:{port}"))
