"""Owns which ranks this machine starts and the configuration of each: its seat, sockets and meeting place.

Used by the engine and by a machine that runs ranks only. It must not start anything; seats are arithmetic,
because no process group exists yet.
"""

from __future__ import annotations

import dataclasses
import os
import socket

from sglang.srt.arg_groups.hooks.parallel import split_address
from sglang.srt.arg_groups.transport import pack_configuration
from sglang.srt.constants import RANK_MIN_BYTES
from sglang.srt.distributed.meeting_place import Meeting, address_towards, bracketed, listen_at, look_up
from sglang.srt.environ import envs
from sglang.srt.platforms import available_memory_bytes
from sglang.srt.processes.rank_config import RankConfig
from sglang.srt.processes.sockets import SocketFolder
from sglang.srt.runtime_context import get_device, get_parallel
from sglang.srt.runtime_context.widths import (
    derive_attention_ranks,
    derive_stage_ranks,
    leads_attn_tp,
    ranks_of_node,
)
from sglang.srt.server_args import ServerArgs


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where a machine stands in the deployment.

    `host` is its address, for leaders that the server does not find in its own folder; `server` is the
    server's address, known on machine 0 only; `meeting` is where its ranks meet when the flags do not say it.
    """

    node_rank: int = 0
    host: str | None = None
    server: str | None = None
    meeting: str | None = None

    @classmethod
    def of_flags(cls, folder: SocketFolder, server: str | None = None) -> Machine:
        """This machine, as the operator started it."""
        node_rank = get_parallel().node_rank
        host = None if node_rank == 0 else bracketed(address_towards(*_needed_address()))
        return cls(node_rank, host, server)


def rank_configs(
    record: ServerArgs, folder: SocketFolder, machine: Machine | None = None
) -> list[RankConfig]:
    """The ranks of this machine, replica by replica, in world order."""
    machine = machine or Machine.of_flags(folder)
    parallel, device = get_parallel(), get_device()
    world_size = parallel.tp_size * parallel.pp_size
    here = ranks_of_node(world_size, parallel.nnodes, machine.node_rank)
    _refuse_more_than_fit(parallel.ranks_on_host)
    packed = pack_configuration(record)
    configs: list[RankConfig] = []
    for replica in range(parallel.num_worlds):
        for world_rank in here:
            local_rank = len(configs)
            is_leader = _is_attn_tp_leader(world_rank)
            # The server cannot see this machine's folder: its leaders take any free port and announce it.
            listen = f"tcp://{machine.host}:*" if machine.host else folder.rank_address(local_rank)
            knows_server = is_leader and machine.node_rank == 0
            configs.append(
                RankConfig(
                    configuration=packed,
                    world_rank=world_rank,
                    world_size=world_size,
                    local_rank=local_rank,
                    ranks_on_host=parallel.ranks_on_host,
                    rendezvous=machine.meeting or meeting_place_of(folder, replica),
                    dp_rank=replica if parallel.num_worlds > 1 else None,
                    gpu_id=gpu_of_rank(
                        device.device, local_rank, first=device.base_gpu_id, step=device.gpu_id_step
                    ),
                    folder=str(folder.path),
                    listen=listen if is_leader else None,
                    server=(machine.server or folder.server_address) if knows_server else None,
                    heartbeat=str(folder.heartbeat_path(local_rank)),
                    parent_pid=os.getpid(),
                )
            )
    return configs


def gpu_of_rank(device: str | None, local_rank: int, *, first: int, step: int) -> int | None:
    """The GPU of one of this machine's ranks; None where ranks run on the CPU.

    >>> [gpu_of_rank("cuda", local_rank, first=2, step=2) for local_rank in range(3)]
    [2, 4, 6]
    """
    return None if device in (None, "cpu") else first + step * local_rank


def _is_attn_tp_leader(world_rank: int) -> bool:
    """What the context of that rank will answer under this name."""
    parallel = get_parallel()
    _, tp_rank = derive_stage_ranks(world_rank=world_rank, tp_size=parallel.tp_size, pp_size=parallel.pp_size)
    seat = derive_attention_ranks(
        tp_rank=tp_rank, attn_tp_size=parallel.attn_tp_size, attn_cp_size=parallel.attn_cp_size
    )
    return leads_attn_tp(seat.attn_tp_rank)


def _refuse_more_than_fit(count: int) -> None:
    """A mistake like --dp-size 1000 must not bring the machine down with processes."""
    available = available_memory_bytes()
    if count > 1 and count * RANK_MIN_BYTES > available:
        raise ValueError(
            f"the layout asks for {count} ranks on this machine, and each takes at least "
            f"{RANK_MIN_BYTES >> 20} MiB before it has read a weight: {available >> 20} MiB are available; "
            "lower --dp-size or --tp-size, or spread the ranks with --nnodes"
        )


def meeting_place_of(folder: SocketFolder, replica: int) -> str:
    """Where a replica's ranks meet: a file of this machine, or a port of the address in the flags."""
    stated = stated_address()
    if stated is None:
        return f"file:{folder.path / f'meeting{replica}'}"
    host, port = stated
    return f"tcp://{Meeting(host=host, port=port + replica)}"


def stated_address() -> tuple[str, int] | None:
    """Host and first port of --dist-init-addr or --nccl-port."""
    parallel = get_parallel()
    if parallel.dist_init_addr is not None:
        return split_address(parallel.dist_init_addr)
    return None if parallel.nccl_port is None else ("127.0.0.1", parallel.nccl_port)


def _needed_address() -> tuple[str, int]:
    stated = stated_address()
    assert stated is not None, "the door asks for --dist-init-addr with several machines"
    return stated


def refuse_taken_ports() -> None:
    """`ValueError` naming the first port in the flags that ranks of this machine could not bind."""
    stated, parallel = stated_address(), get_parallel()
    if stated is None or parallel.node_rank != 0:
        return
    host, first = stated
    for replica in range(parallel.num_worlds):
        try:
            os.close(listen_at(Meeting(host=host, port=first + replica)))
        except OSError as error:
            raise ValueError(_refusal(replica, error)) from error


def refuse_unknown_interface() -> None:
    """`ValueError` when `GLOO_SOCKET_IFNAME` names an interface that this machine does not have."""
    known = [name for _, name in socket.if_nameindex()]
    for name in (envs.GLOO_SOCKET_IFNAME.get() or "").split(","):
        if name and name not in known:
            raise ValueError(
                f"GLOO_SOCKET_IFNAME={name}: this machine has no such network interface; it has "
                f"{', '.join(known)}; without the variable one is chosen"
            )


def hold_port(host: str | None = None) -> tuple[socket.socket, str]:
    """A free port of this host (or the given one) for the server to receive on: `(holder, address)`.

    The holder is bound and does not listen: nobody else is given the port, and a listener with the same
    option may still bind it.
    """
    family, (own, *_) = look_up(_needed_address()[0] if host is None else host)
    holder = socket.socket(family, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((own, 0))
    return holder, f"tcp://{bracketed(own)}:{holder.getsockname()[1]}"


def _refusal(replica: int, error: OSError) -> str:
    flag = "--dist-init-addr" if get_parallel().dist_init_addr is not None else "--nccl-port"
    whose = f" (replica {replica} of --dp-size meets there)" if get_parallel().num_worlds > 1 else ""
    return f"{flag}: {error.strerror}{whose}; on one machine the flag may be left out"


def layout_line(num_here: int) -> str:
    """The layout in one line, for the log."""
    parallel = get_parallel()
    parts = [f"tp_size={parallel.tp_size}"]
    if parallel.attn_dp_size > 1:
        parts += [f"attn_dp_size={parallel.attn_dp_size}", f"attn_tp_size={parallel.attn_tp_size}"]
    if parallel.num_worlds > 1:
        parts.append(f"dp_size={parallel.num_worlds}")
    ranks = parallel.num_worlds * parallel.pp_size * parallel.tp_size
    where = ""
    if parallel.nnodes > 1:
        where = f", {num_here} of them on machine {parallel.node_rank} of {parallel.nnodes}"
    if parallel.use_ray:
        where = f", placed by Ray on {parallel.nnodes} machine{'s' if parallel.nnodes > 1 else ''}"
    return f"{' '.join(parts)}: {ranks} rank{'s' if ranks > 1 else ''}{where}"
