"""Bytes of strangers on the ports of a deployment over several machines: dropped with a word, never fatal."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import asyncio
import contextlib
import logging
import pathlib
import random
import socket
from collections.abc import Iterator

import pytest
import zmq

from sglang.srt.environ import envs
from sglang.srt.messages import io_struct
from sglang.srt.processes.sockets import SocketFolder
from sglang.srt.processes.wire import RankChannel, ServerChannel
from sglang.test.ports import held_ports
from sglang.test.waiting import HANG_GUARD_S

#: Some of the last two reach the application: the transport takes them for the greeting of an old version.
RAW = (b"GET / HTTP/1.1\r\n\r\n", random.Random(1).randbytes(4096), b"\x00" * 64, b"\xff" * 64, b"\x01")
MESSAGES = (
    b"",
    b"hello",
    b"\x81\xa4type\xa5Bogus",
    b"\x82\xa4type\xa8AbortReq\xa3rid\xa2\xff\xfe",
    b"\x91" * 9999,
)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> Iterator[SocketFolder]:
    with envs.SGLANG_RUNTIME_DIR.override(str(tmp_path)):
        folder = SocketFolder()
        yield folder
        folder.remove()


#: What a stranger says after all its nonsense: where this has arrived, so has the nonsense.
LAST = io_struct.FlushCacheReqOutput(call_id=8, success=True)


@contextlib.contextmanager
def pestered(address: str) -> Iterator[None]:
    """Send raw bytes, undecodable messages and silent connections to a tcp address, then `LAST`."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with contextlib.ExitStack() as stack, zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        for raw in (*RAW, b""):
            connection = stack.enter_context(socket.create_connection((host, int(port))))
            connection.sendall(raw)
        stranger.connect(address)
        for message in (*MESSAGES, io_struct.encode(LAST)):
            stranger.send(message)
        yield
        stranger.close(linger=0)


def test_a_leader_drops_what_is_no_message(folder: SocketFolder, caplog: pytest.LogCaptureFixture) -> None:
    rank = RankChannel(listen="tcp://127.0.0.1:*", server=folder.server_address)

    async def main() -> None:
        server = ServerChannel(folder, [rank.address])
        with pestered(rank.address):
            server.send(io_struct.ShutdownReq())
            seen: list[io_struct.Message] = []
            while len(seen) < 2:
                assert await asyncio.to_thread(rank.wait, HANG_GUARD_S)
                seen += rank.recv_all()
            assert LAST in seen and io_struct.ShutdownReq() in seen
        server.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    rank.close()
    assert f"received on {rank.address} that are no message of this engine" in caplog.text
    assert len(caplog.records) < len(RAW) + len(MESSAGES), "a flood fills the log"


def test_the_server_drops_what_is_no_message(folder: SocketFolder, caplog: pytest.LogCaptureFixture) -> None:
    async def main(address: str) -> None:
        server = ServerChannel(folder, [folder.rank_address(0)], bind=address)
        rank = RankChannel(listen=folder.rank_address(0), server=address)
        with pestered(address):
            ours = io_struct.FlushCacheReqOutput(call_id=7, success=True)
            rank.send(ours)
            async with asyncio.timeout(HANG_GUARD_S):
                seen = [await server.recv() for _ in range(2)]
            assert ours in seen and LAST in seen
        rank.close()
        server.close()

    with caplog.at_level(logging.WARNING), held_ports() as port:
        asyncio.run(main(f"tcp://127.0.0.1:{port}"))
    assert f"received on tcp://127.0.0.1:{port}" in caplog.text


def test_nonsense_in_the_socket_folder_is_our_own_fault_and_raises(folder: SocketFolder) -> None:
    rank = RankChannel(listen=folder.rank_address(0), server=folder.server_address)
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.connect(folder.rank_address(0))
        stranger.send(b"hello")
        assert rank.wait(HANG_GUARD_S)
        with pytest.raises(ValueError):
            rank.recv_all()
    rank.close()
