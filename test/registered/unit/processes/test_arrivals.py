"""A crowd of requests waits at a rank's door; what is no request goes past it, and nothing is mixed up."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit-cpu")

import random

import pytest

from sglang.srt.messages.io_struct import (
    AbortReq,
    DispatchedReq,
    FlushCacheReqInput,
    GetInternalStateReq,
    GetPlacementReq,
    Message,
    RequestHead,
    ShutdownReq,
    TokenizedGenerateReqInput,
    decode,
    decode_head,
    encode,
)
from sglang.srt.processes.arrivals import Arrivals
from sglang.srt.sampling.sampling_params import SamplingParams

CONTROL: list[Message] = [
    AbortReq(rid="nobody"),
    DispatchedReq(counts=[1, 2]),
    FlushCacheReqInput(call_id=1),
    GetInternalStateReq(call_id=2),
    GetPlacementReq(call_id=3),
    ShutdownReq(),
]


def request(rid: str) -> TokenizedGenerateReqInput:
    return TokenizedGenerateReqInput(
        rid=rid, input_ids=[1, 2, 300, 70000], sampling_params=SamplingParams(stop=["a"]), extra_key="k"
    )


def names(messages: list[Message]) -> list[str]:
    """Requests by rid, other messages by their kind."""
    return [m.rid if isinstance(m, TokenizedGenerateReqInput) else type(m).__name__ for m in messages]


class Door:
    """`Arrivals` behind a socket that was sent some messages."""

    def __init__(self) -> None:
        self.arrivals = Arrivals(decode, decode_head)
        self.socket: list[bytes] = []

    def send(self, *messages: Message) -> None:
        self.socket += [encode(message) for message in messages]

    def take(self, most: int | None = None) -> list[Message]:
        return self.arrivals.take(iter(lambda: self.socket.pop(0) if self.socket else None, None), most)


@pytest.fixture
def door() -> Door:
    return Door()


@pytest.mark.parametrize("message", CONTROL, ids=lambda message: type(message).__name__)
def test_every_message_but_a_request_goes_past_a_crowd(door: Door, message: Message) -> None:
    door.send(*(request(f"r{i}") for i in range(10_000)), message)
    taken = door.take(256)
    assert names(taken[:256]) == [f"r{i}" for i in range(256)]
    assert taken[256:] == [message]
    assert door.arrivals.has_waiting


def test_in_order_of_arrival_it_would_stand_behind_it(door: Door) -> None:
    """The mistake that the test above would see: a socket that is read no further than the first ones."""
    door.send(*(request(f"r{i}") for i in range(1000)), ShutdownReq())
    socket, door.socket = door.socket, []
    steps = 0
    while "ShutdownReq" not in names(door.take(256)):
        door.socket, socket = socket[:256], socket[256:]
        steps += 1
    assert steps > 3


def test_requests_keep_their_order_and_come_whole(door: Door) -> None:
    sent = [request(f"r{i}") for i in range(1000)]
    door.send(*sent[:600])
    got = door.take(256)
    door.send(*sent[600:])
    while door.arrivals.has_waiting or door.socket:
        step = door.take(256)
        assert 0 < len(step) <= 256
        got += step
    assert got == sent


def test_where_all_fits_the_order_is_that_of_arrival(door: Door) -> None:
    door.send(request("a"), AbortReq(rid="a"), request("a"), FlushCacheReqInput(call_id=0), request("b"))
    assert names(door.take(256)) == ["a", "AbortReq", "a", "FlushCacheReqInput", "b"]
    door.send(*(request(f"r{i}") for i in range(1000)), ShutdownReq())
    assert names(door.take())[-1] == "ShutdownReq" and not door.arrivals.has_waiting


@pytest.mark.parametrize(
    "abort, named",
    [
        (AbortReq(rid="r30", exact=True), ["r30"]),
        (AbortReq(rid="r3"), ["r3", *(f"r{i}" for i in range(30, 40))]),
        (AbortReq(abort_all=True), [f"r{i}" for i in range(2, 50)]),
        (AbortReq(rid=""), []),
        (AbortReq(rid="", exact=True), []),
        (AbortReq(rid="r0", exact=True), []),  # handed out already
    ],
)
def test_an_abort_brings_along_the_waiting_requests_that_it_names(
    door: Door, abort: AbortReq, named: list[str]
) -> None:
    """It would find nothing otherwise, and they would run later."""
    door.send(*(request(f"r{i}") for i in range(50)), abort)
    assert names(door.take(2)) == ["r0", "r1", *named, "AbortReq"]
    rest = []
    while door.arrivals.has_waiting:
        rest += names(door.take(2))
    assert rest == [f"r{i}" for i in range(2, 50) if f"r{i}" not in named]


def test_an_abort_does_not_name_a_request_that_came_after_it(door: Door) -> None:
    door.send(
        *(request(f"r{i}") for i in range(4)), request("x"), AbortReq(rid="x", exact=True), request("x")
    )
    assert names(door.take(4)) == ["r0", "r1", "r2", "r3", "x", "AbortReq"]
    assert names(door.take(4)) == ["x"]


def test_a_step_brings_along_a_bounded_number_of_aborted_requests(door: Door) -> None:
    door.send(
        *(request(f"r{i}") for i in range(1000)), *(AbortReq(rid=f"r{i}", exact=True) for i in range(1000))
    )
    steps = []
    while door.arrivals.has_waiting or door.socket:
        steps.append(names(door.take(100)))
    assert max(sum(name != "AbortReq" for name in step) for step in steps) <= 100 + 100
    flat = [name for step in steps for name in step]
    assert flat.count("AbortReq") == 1000 and len(set(flat)) == 1001


def test_random_traffic_is_handed_out_once_and_each_abort_behind_what_it_names(door: Door) -> None:
    """What came before an abort and is named by it is handed out before it, what came after it after it."""
    rng = random.Random(0)
    sent: list[tuple[int, Message]] = []
    got: list[Message] = []
    for _ in range(300):
        for _ in range(rng.randrange(30)):
            kind = rng.random()
            rid = f"{rng.choice('ab')}{rng.randrange(30)}"
            message: Message = request(rid)
            if kind < 0.1:
                message = AbortReq(rid=rid, exact=rng.random() < 0.5)
            elif kind < 0.15:
                message = GetInternalStateReq(call_id=len(sent))
            sent.append((len(sent), message))
            door.send(message)
        got += door.take(10)
    while door.arrivals.has_waiting or door.socket:
        got += door.take(10)
    assert sorted(map(encode, got)) == sorted(encode(message) for _, message in sent)
    # What an abort finds when messages are handled in turn is the same in both orders.
    assert ends(got) == ends([message for _, message in sent])
    control = [m for m in got if not isinstance(m, TokenizedGenerateReqInput)]
    assert control == [m for _, m in sent if not isinstance(m, TokenizedGenerateReqInput)]


def ends(messages: list[Message]) -> dict[str, list[bool]]:
    """For each rid, of its requests in their order, whether an abort ended it."""
    open_ones: dict[str, list[int]] = {}
    ended: dict[str, list[bool]] = {}
    for message in messages:
        if isinstance(message, TokenizedGenerateReqInput):
            ended.setdefault(message.rid, []).append(False)
            open_ones.setdefault(message.rid, []).append(len(ended[message.rid]) - 1)
        elif isinstance(message, AbortReq):
            for rid in [rid for rid in open_ones if message.names(rid)]:
                for place in open_ones.pop(rid):
                    ended[rid][place] = True
    return ended


def test_a_head_is_read_from_the_bytes_of_a_request_and_of_nothing_else() -> None:
    for rid in ("", "r7", "ü" * 15, "r" * 31, "r" * 32, "ü" * 100, "r" * 255, "r" * 256, "r" * 70_000):
        assert decode_head(encode(request(rid))) == RequestHead(rid=rid)
    for message in CONTROL:
        assert decode_head(encode(message)) == message
    with pytest.raises(ValueError, match="rid"):
        decode_head(encode(request("r7")).replace(b"\xa3rid", b"\xa3dir"))
    whole = encode(request("r7"))
    begin = whole.index(b"r7")
    for torn in (whole[: begin - 1], whole[:begin], whole.replace(b"\xa2r7", b"\xa2\xff\xff")):
        with pytest.raises(ValueError):
            decode_head(torn)


def test_what_is_dropped_counts_as_nothing() -> None:
    heads = Arrivals(lambda data: None, lambda data: None)
    assert heads.take([b"nonsense"] * 10, 2) == [] and not heads.has_waiting
