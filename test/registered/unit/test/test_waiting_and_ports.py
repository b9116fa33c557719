"""What other tests stand on: a wait that gives up with a reason, and ports that nobody else is given."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="unit-cpu")

import asyncio
import socket

import pytest

from sglang.test import waiting
from sglang.test.ports import HOST, held_ports, listen_on, port_is_free
from sglang.test.waiting import until, wait_until


def test_a_wait_ends_when_its_condition_holds() -> None:
    looks = iter([False, False, True])
    wait_until(lambda: next(looks))
    looks = iter([False, False, True])
    asyncio.run(until(lambda: next(looks)))


def test_a_wait_for_what_never_comes_fails_and_describes_what_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hanging test is ended by pytest without a word about what it waited for."""
    monkeypatch.setattr(waiting, "HANG_GUARD_S", 0.0)
    with pytest.raises(AssertionError, match="not within 0 s:\nstill 3 requests"):
        wait_until(lambda: False, lambda: "still 3 requests")
    with pytest.raises(AssertionError, match="not within 0 s:\nstill 3 requests"):
        asyncio.run(until(lambda: False, lambda: "still 3 requests"))


def test_a_held_port_is_given_to_nobody_and_lets_its_listener_in() -> None:
    """A port that is only looked up may be a client's own, in another run of the suite, when it is bound."""
    with held_ports(3) as first:
        for port in range(first, first + 3):
            with socket.socket() as stranger, pytest.raises(OSError):
                stranger.bind((HOST, port))
            assert port_is_free(port)
            with listen_on(port):
                assert not port_is_free(port)
                with pytest.raises(OSError):
                    listen_on(port)
            assert port_is_free(port)
