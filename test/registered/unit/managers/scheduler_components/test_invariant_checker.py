"""The guard of the books fires: each test plants one fault, and the error must carry the numbers."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

from collections.abc import Callable

import numpy as np
import pytest

from sglang.srt.managers.scheduler import Scheduler
from sglang.test.fakes.scheduler_driver import make_request, run

New = Callable[..., Scheduler]
PROMPT = list(range(40))


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_leaked_slot_is_found_when_the_scheduler_falls_idle(new_scheduler: New, page_size: int) -> None:
    scheduler = new_scheduler(page_size=page_size)
    scheduler.kv.allocator.alloc_extend(0, 1, 0)
    with pytest.raises(RuntimeError, match=rf"free \d+ \+ cached \d+ \+ owned 0 = {4096 - page_size}.*4096"):
        run(scheduler, make_request("r", PROMPT, 4), check=False)


def test_a_lock_that_stays_is_found(new_scheduler: New) -> None:
    scheduler = new_scheduler()
    run(scheduler, make_request("r", PROMPT, 4))
    scheduler.kv.prefix_cache.lock(scheduler.kv.prefix_cache.match_prefix(None, np.array(PROMPT)).node)
    with pytest.raises(RuntimeError, match="40 cached tokens are still locked"):
        scheduler.step()


def test_a_row_that_stays_is_found(new_scheduler: New) -> None:
    scheduler = new_scheduler()
    scheduler.kv.req_to_token_pool.alloc()
    with pytest.raises(RuntimeError, match="1 of 64 rows"):
        scheduler.step()


def test_a_running_request_that_lost_a_slot_is_found(new_scheduler: New) -> None:
    scheduler = new_scheduler()
    scheduler.channel.inbox.append(make_request("r", PROMPT, 20))
    scheduler.step()
    scheduler.queues.running[0].reserved_len += 1
    with pytest.raises(RuntimeError, match="owned 1"):
        scheduler.invariants.check_sum()


def test_a_running_request_whose_cached_tokens_are_miscounted_is_found(new_scheduler: New) -> None:
    scheduler = new_scheduler()
    scheduler.channel.inbox.append(make_request("r", PROMPT, 20))
    scheduler.step()
    scheduler.invariants.check_lengths()
    scheduler.queues.running[0].kv_len -= 1
    with pytest.raises(RuntimeError, match=r"'r' has 41 tokens, of which 39 .* \(40 shared\), in 40 slots"):
        scheduler.invariants.check_lengths()


def test_a_slot_that_two_hold_is_found(new_scheduler: New) -> None:
    scheduler = new_scheduler()
    scheduler.channel.inbox.extend(make_request(f"r{i}", [i, *PROMPT], 20) for i in range(2))
    for _ in range(3):
        scheduler.step()
    scheduler.invariants.check_slots()
    first, second = scheduler.queues.running
    scheduler.kv.req_to_token_pool.host[first.req_pool_idx, 41] = scheduler.kv.req_to_token_pool.host[
        second.req_pool_idx, 41
    ]
    with pytest.raises(RuntimeError, match="held twice"):
        scheduler.invariants.check_slots()


def test_a_shared_slot_outside_the_cache_is_found(new_scheduler: New) -> None:
    scheduler = new_scheduler()
    scheduler.channel.inbox.append(make_request("r", PROMPT, 20))
    scheduler.step()
    scheduler.kv.req_to_token_pool.host[scheduler.queues.running[0].req_pool_idx, 3] = 4000
    with pytest.raises(RuntimeError, match="does not hold"):
        scheduler.invariants.check_slots()


def test_the_fake_worker_notices_a_wrong_slot(new_scheduler: New) -> None:
    """The other guard of these tests: reading a neighbour's slot gives other tokens or an assertion."""
    scheduler = new_scheduler()
    scheduler.channel.inbox.extend(make_request(f"r{i}", [i, *PROMPT], 20) for i in range(2))
    scheduler.step()
    first, second = scheduler.queues.running
    scheduler.kv.req_to_token_pool.host[first.req_pool_idx, 10] = scheduler.kv.req_to_token_pool.host[
        second.req_pool_idx, 12
    ]
    with pytest.raises(AssertionError, match="another position"):
        scheduler.step()
