"""Owns the ranks of a deployment that Ray placed: one actor per machine, which starts that machine's ranks.

Used by the engine with `--use-ray`, in place of `RankProcesses` and with its surface. It must not be needed
without the flag: Ray is imported only then, and only bytes, strings and numbers are handed to it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from sglang.srt.arg_groups.transport import pack_configuration, unpack_configuration
from sglang.srt.distributed.meeting_place import Meeting
from sglang.srt.messages import io_struct
from sglang.srt.processes.machines.rank_layout import Machine, rank_configs
from sglang.srt.processes.rank_processes import RankDied, RankProcesses
from sglang.srt.processes.rank_watch import PRIMARY_CAUSE_WAIT_S
from sglang.srt.processes.sockets import SocketFolder
from sglang.srt.runtime_context import get_device, get_parallel, publish
from sglang.srt.server_args import ServerArgs

#: How long the cluster may take to reserve its machines.
_PLACEMENT_TIMEOUT_S = 60.0
_HEARTBEAT_INTERVAL_S = 1.0
#: Beyond the grace that ranks get to leave, how long their actor may take to say that they have.
_ANSWER_ALLOWANCE_S = 10.0


class RayMachine:
    """The actor: one machine's ranks. Its methods run on threads of their own, beside each other."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._cause: str | None = None
        self._folder: SocketFolder | None = None
        self._ranks: RankProcesses | None = None

    def meeting_place(self) -> tuple[str, int]:
        """An address of this machine and a port that is free on it now."""
        host = _own_address()
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
            return host, probe.getsockname()[1]

    def start(self, configuration: bytes, place: dict[str, Any], module: str) -> list[int]:
        """Start the ranks; their process ids."""
        record = unpack_configuration(configuration, ServerArgs)
        publish(record, role="controller")
        self._folder = SocketFolder()
        machine = Machine(host=_own_address(), **place)
        self._ranks = RankProcesses(
            rank_configs(record, self._folder, machine),
            on_death=self._on_death,
            on_left=self._over.set,
            watchdog_timeout=get_device().watchdog_timeout,
            module=module,
        )
        return self._ranks.pids

    def wait_ready(self) -> list[bytes]:
        """The encoded `RankReady` of all ranks; an empty list when one has died, which `wait_end` tells."""
        assert self._ranks is not None
        try:
            return [io_struct.encode(ready) for ready in self._ranks.wait_ready()]
        except RankDied:
            return []

    def wait_end(self) -> tuple[str | None, bool]:
        """Why the ranks are gone, None when they left in order; and whether a peer elsewhere is to blame."""
        self._over.wait()
        return self._cause, self._ranks is not None and self._ranks.cause_is_secondary

    def heartbeats(self) -> list[tuple[str, float, bool]]:
        """Of each rank its name, the age of its heartbeat and whether a forward runs."""
        assert self._ranks is not None
        return [(name, beat.age(), beat.in_forward) for name, beat in self._ranks.heartbeats]

    def stop(self, grace_s: float) -> None:
        if self._ranks is not None:
            self._ranks.stop(grace_s=grace_s)
        if self._folder is not None:
            self._folder.remove()
        self._over.set()

    def _on_death(self, cause: str) -> None:
        self._cause = cause
        self._over.set()


class RemoteHeartbeat(NamedTuple):
    """A heartbeat as the actor last reported it; it grows older while no answer comes."""

    seen_at: float
    age_then: float
    in_forward: bool

    def age(self) -> float:
        return self.age_then + time.monotonic() - self.seen_at


class RayMachines:
    """All machines of one engine, with the surface of `RankProcesses`."""

    def __init__(
        self, record: ServerArgs, *, server: str, on_death: Callable[[str], None], module: str
    ) -> None:
        self._ray = ray = _import_ray()
        self._on_death = on_death
        self._stopping = False
        self._heartbeats: list[tuple[str, RemoteHeartbeat]] = []
        self.cause: str | None = None
        nodes = get_parallel().nnodes
        cpus = get_parallel().ranks_on_host
        self._group = _reserve(ray, nodes, cpus=cpus)
        try:
            actor = ray.remote(RayMachine)
            self._actors = [
                actor.options(
                    num_cpus=cpus,
                    max_concurrency=8,
                    scheduling_strategy=_bundle(self._group, node),
                ).remote()
                for node in range(nodes)
            ]
            meeting = None
            if nodes > 1:
                host, port = ray.get(self._actors[0].meeting_place.remote())
                meeting = f"tcp://{Meeting(host=host, port=port)}"
            packed = pack_configuration(record)
            places = [{"node_rank": node, "server": server, "meeting": meeting} for node in range(nodes)]
            started = [
                actor.start.remote(packed, place, module) for actor, place in zip(self._actors, places)
            ]
            self.pids = [pid for pids in ray.get(started) for pid in pids]
        except BaseException:
            self._give_back()
            raise
        self._watcher = threading.Thread(target=self._watch, name="ray-watcher", daemon=True)
        self._watcher.start()

    @property
    def heartbeats(self) -> list[tuple[str, RemoteHeartbeat]]:
        return self._heartbeats

    def wait_ready(self) -> list[io_struct.RankReady]:
        ready: list[io_struct.RankReady] = []
        for encoded in self._ray.get([actor.wait_ready.remote() for actor in self._actors]):
            ready += [msgspec.msgpack.decode(one, type=io_struct.RankReady) for one in encoded]
        if len(ready) < len(self.pids):
            self._watcher.join()
            raise RankDied(self.cause or "the engine was shut down while it started")
        return ready

    def stop(self, *, grace_s: float) -> None:
        if self._stopping:
            return
        self._stopping = True
        stopped = [actor.stop.remote(grace_s) for actor in self._actors]
        self._ray.wait(stopped, num_returns=len(stopped), timeout=grace_s + _ANSWER_ALLOWANCE_S)
        self._give_back()

    def _give_back(self) -> None:
        for actor in getattr(self, "_actors", []):
            self._ray.kill(actor)
        self._ray.util.remove_placement_group(self._group)

    def _watch(self) -> None:
        ends = {actor.wait_end.remote(): node for node, actor in enumerate(self._actors)}
        while not self._stopping:
            over, _ = self._ray.wait(list(ends), timeout=_HEARTBEAT_INTERVAL_S)
            if over and not self._stopping:
                self._report(ends)
                return
            self._read_heartbeats()

    def _report(self, ends: dict[Any, int]) -> None:
        """The machine that ended first need not be the one to blame."""
        time.sleep(PRIMARY_CAUSE_WAIT_S)
        over, _ = self._ray.wait(list(ends), num_returns=len(ends), timeout=0)
        causes = [(ends[end], *self._result(end)) for end in over]
        causes.sort(key=lambda entry: (entry[1] is None, entry[2]))
        node, cause, _ = causes[0]
        self.cause = f"machine {node}: {cause or 'its ranks left by themselves'}"
        if not self._stopping:
            self._on_death(self.cause)

    def _result(self, end: Any) -> tuple[str | None, bool]:
        try:
            cause, secondary = self._ray.get(end)
        except self._ray.exceptions.RayActorError as error:
            return f"Ray lost it: {str(error).splitlines()[0]}", False
        return cause, secondary

    def _read_heartbeats(self) -> None:
        asked = [actor.heartbeats.remote() for actor in self._actors]
        answered, _ = self._ray.wait(asked, num_returns=len(asked), timeout=_HEARTBEAT_INTERVAL_S)
        if len(answered) < len(asked):
            return
        now = time.monotonic()
        try:
            answers = self._ray.get(asked)
        except self._ray.exceptions.RayActorError:
            return  # `_watch` is about to see its end
        self._heartbeats = [
            (name, RemoteHeartbeat(now, age, busy)) for beats in answers for name, age, busy in beats
        ]


def connect_to_ray() -> str:
    """Join this machine's Ray cluster if this process is in none; returns our address in it."""
    ray = _import_ray()
    if not ray.is_initialized():
        try:
            ray.init(address="auto")
        except ConnectionError as error:
            raise ValueError(
                f"--use-ray: no Ray cluster is reached from here ({error}); start one with `ray start "
                "--head`, add machines with `ray start --address=...`, or name it with RAY_ADDRESS"
            ) from error
    return _own_address()


def _import_ray() -> Any:
    try:
        import ray
        import ray.util
    except ImportError as error:
        raise ValueError(
            "--use-ray needs the package ray, which is not installed here; install it with "
            "`pip install 'sglang[ray]'`, or start one process per machine with --nnodes and --node-rank"
        ) from error
    return ray


def _own_address() -> str:
    address: str = _import_ray().util.get_node_ip_address()
    return address


def _reserve(ray: Any, nodes: int, cpus: int) -> Any:
    """One bundle per machine, each on a machine of its own."""
    strategy = "STRICT_SPREAD" if nodes > 1 else "STRICT_PACK"
    group = ray.util.placement_group([{"CPU": cpus}] * nodes, strategy=strategy)
    if not group.wait(_PLACEMENT_TIMEOUT_S):
        ray.util.remove_placement_group(group)
        raise ValueError(
            f"--use-ray: the cluster gave no {nodes} machines with {cpus} free CPUs each (one per rank) "
            f"within {_PLACEMENT_TIMEOUT_S:.0f} s; `ray status` shows what it has"
        )
    return group


def _bundle(group: Any, index: int) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
