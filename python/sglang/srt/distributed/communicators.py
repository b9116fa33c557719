"""Owns the communicators of this process: one for each list of ranks, shared by all groups over that list.

Read by `GroupCoordinator` only. Several groups often have the same ranks (with two tensor ranks the tensor,
attention and expert groups do), and each communicator costs sockets and threads. Must not count calls or
translate errors: that is done in the name of a group, and a communicator may serve several.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed

from sglang.srt.distributed.device_communicators.cpu_shm import CpuShm
from sglang.srt.distributed.device_communicators.gloo_exchange import GlooExchange
from sglang.srt.distributed.device_communicators.torch_dist import TorchDist
from sglang.srt.distributed.errors import transport_errors
from sglang.srt.distributed.marked_barrier import MarkedBarrier
from sglang.srt.distributed.object_channel import ObjectChannel
from sglang.srt.distributed.shared_memory import cpu_transport

__all__ = ["Communicator", "borrow", "forget_all", "give_back"]


class Named(Protocol):
    """A user of a communicator, as an error calls it."""

    group_name: str


class Communicator:
    """Transports, object channel and barrier over one list of ranks.

    Every rank of the world takes part in making it. On a rank outside the list `cpu_group` is None and
    nothing can be sent.

    Calls pair with those of the peers in the order in which they come, whatever group they are made for. Two
    groups in two threads have no common order, and would exchange each other's tensors: `claim` refuses
    that, for as long as both threads live.
    """

    def __init__(self, ranks: Sequence[int], backend: str, timeout_s: float) -> None:
        self.users = 0
        self._lock = threading.Lock()
        #: Thread -> the group that it used last. Written under the lock.
        self._used_for: dict[threading.Thread, Named] = {}
        limit = timedelta(seconds=timeout_s)
        with transport_errors():
            cpu_group = device_group = torch.distributed.new_group(list(ranks), backend="gloo", timeout=limit)
            if backend != "gloo":
                device_group = torch.distributed.new_group(list(ranks), backend=backend, timeout=limit)
        self.cpu_group: torch.distributed.ProcessGroup | None = None
        self.device_group: torch.distributed.ProcessGroup | None = None
        rank, width = torch.distributed.get_rank(), len(ranks)
        if rank not in ranks:
            return
        self.cpu_group, self.device_group = cpu_group, device_group
        rank_in_group = list(ranks).index(rank)
        gloo = GlooExchange(cpu_group, rank_in_group, width)
        self.on_cpu = cpu_transport(gloo, rank_in_group, ranks, timeout_s)
        self.on_device = TorchDist(device_group, rank_in_group, width)
        self.objects = ObjectChannel(self.on_cpu, rank_in_group, width)
        self.barrier = MarkedBarrier(cpu_group, ranks, rank)
        # Without a barrier one member could use its connections and close them while another still opens its
        # own, which would then fail.
        with transport_errors():
            self.barrier.wait(timeout_s)

    def claim(self, group: Named) -> None:
        """Note that this thread is about to use the communicator for `group`.

        `RuntimeError` where another living thread used it last for another group.
        """
        thread = threading.current_thread()
        if self._used_for.get(thread) is not group:
            self._turn_to(group, thread)

    def _turn_to(self, group: Named, thread: threading.Thread) -> None:
        with self._lock:
            for other, used_for in list(self._used_for.items()):
                if other is thread:
                    continue
                if not other.is_alive():
                    del self._used_for[other]
                elif used_for is not group:
                    raise RuntimeError(
                        f"group '{group.group_name}' in thread '{thread.name}' shares its communicator with "
                        f"group '{used_for.group_name}', which thread '{other.name}' uses and may use at the "
                        "same time; they would exchange each other's tensors. Run the collectives of groups "
                        f"over the same ranks in one thread, or end thread '{other.name}' first"
                    )
            self._used_for[thread] = group

    def close(self) -> None:
        """Leave the memory that the ranks share, where they do. torch's groups are not touched."""
        on_cpu = vars(self).get("on_cpu")  # not there on a rank outside the list
        if isinstance(on_cpu, CpuShm):
            on_cpu.close()

    def forget(self, group: Named) -> None:
        """The group is given back, so no thread uses it any more."""
        with self._lock:
            for thread in [thread for thread, used_for in self._used_for.items() if used_for is group]:
                del self._used_for[thread]


#: (ranks, backend, limit in seconds) -> the communicator that exists. All ranks make and destroy groups in
#: the same order, so the table has the same keys on all of them: a communicator is made by all or by none.
_OPEN: dict[tuple[tuple[int, ...], str, float], Communicator] = {}


def borrow(ranks: Sequence[int], backend: str, timeout_s: float) -> Communicator:
    """The communicator over these ranks, made if there is none. Called by every rank of the world."""
    key = (tuple(ranks), backend, timeout_s)
    if key not in _OPEN:
        _OPEN[key] = Communicator(ranks, backend, timeout_s)
    _OPEN[key].users += 1
    return _OPEN[key]


def give_back(communicator: Communicator) -> None:
    """Called once by each borrower; the last one takes the communicator down."""
    communicator.users -= 1
    if communicator.users:
        return
    communicator.close()
    for key in [key for key, one in _OPEN.items() if one is communicator]:
        del _OPEN[key]
        for group in {communicator.cpu_group, communicator.device_group} - {None}:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group(group)


def forget_all() -> None:
    """Called when the world is destroyed: its communicators are of no use in the next one."""
    for communicator in _OPEN.values():
        communicator.close()
    _OPEN.clear()
