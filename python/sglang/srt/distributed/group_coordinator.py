"""Owns one process group as seen by one rank: its ranks, this rank's position, its collectives.

Built by `parallel_state` and read through `get_parallel().<name>_group`. Must not know which kind of
parallelism it serves and must not read the context. Over one rank every collective is the identity and no
communicator exists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed

from sglang.srt.constants import DIST_TIMEOUT_S
from sglang.srt.distributed import communicators, frames
from sglang.srt.distributed.communicators import Communicator
from sglang.srt.distributed.device_communicators.cpu_shm import CpuShm
from sglang.srt.distributed.device_communicators.gloo_exchange import GlooExchange
from sglang.srt.distributed.device_communicators.torch_dist import TorchDist
from sglang.srt.distributed.errors import CollectiveError, TransportError
from sglang.srt.platforms.device import accelerator_device

__all__ = ["GroupCoordinator", "counted_collectives"]

_OPS = ("sum", "max", "min")
#: What counts the collectives of all groups at the moment.
_listeners: list[Counter[tuple[GroupCoordinator, str]]] = []


class GroupCoordinator:
    """The group of this rank out of a partition of the world.

    `ranks` lists world ranks in group order; `src` and `dst` are ranks in the group. `device_group` runs on
    the accelerator's backend, `cpu_group` is always gloo; with backend gloo they are the same. Tensors are
    sent by the device that they are on; objects and barriers use `cpu_group`. `calls` counts collectives that
    really ran, by the name of the method; whoever repeats recorded ones adds them.
    """

    world_size: int
    rank_in_group: int
    ranks: list[int]
    local_rank: int
    device_group: torch.distributed.ProcessGroup | None
    cpu_group: torch.distributed.ProcessGroup | None
    group_name: str
    timeout_s: float
    calls: Counter[str]

    def __init__(
        self,
        group_ranks: Sequence[Sequence[int]],
        local_rank: int,
        backend: str,
        *,
        group_name: str,
        timeout_s: float = DIST_TIMEOUT_S,
    ) -> None:
        _check_order(group_name, group_ranks)
        rank = torch.distributed.get_rank()
        mine = [list(ranks) for ranks in group_ranks if rank in ranks]
        if len(mine) != 1:
            raise ValueError(
                f"group '{group_name}' must hold rank {rank} exactly once, "
                f"found it in {len(mine)} of {list(group_ranks)}"
            )
        self.group_name = group_name
        self.local_rank = local_rank
        self.ranks = mine[0]
        self.world_size = len(self.ranks)
        self.rank_in_group = self.ranks.index(rank)
        self.timeout_s = timeout_s
        self.calls = Counter()
        self.device_group = self.cpu_group = None
        self._borrowed: list[Communicator] = []
        # Every rank of the world takes part in making every group, also of those that it is no member of.
        try:
            with self.translated_errors("building the group", kind=TransportError):
                for ranks in group_ranks:
                    if len(ranks) > 1:
                        self._borrow(ranks, backend)
        except BaseException:
            self.destroy()
            raise

    def _borrow(self, ranks: Sequence[int], backend: str) -> None:
        communicator = communicators.borrow(ranks, backend, self.timeout_s)
        self._borrowed.append(communicator)
        if communicator.cpu_group is not None:
            self.device_group, self.cpu_group = communicator.device_group, communicator.cpu_group
            self._communicator = communicator

    def __repr__(self) -> str:
        return f"GroupCoordinator({self.group_name}, ranks={self.ranks}, rank_in_group={self.rank_in_group})"

    def destroy(self) -> None:
        """Give the communicators back; a second call does nothing.

        The coordinator is of no use afterwards, even where another one keeps its communicators in use.
        """
        self.device_group = self.cpu_group = None
        vars(self).pop("_communicator", None)
        for communicator in vars(self).pop("_borrowed", ()):
            communicator.forget(self)
            communicators.give_back(communicator)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Sum, maximum or minimum over the group. May work in place: use what is returned."""
        if op not in _OPS:
            raise ValueError(f"all_reduce op must be one of {', '.join(_OPS)}, got {op!r}")
        if self.world_size == 1:
            return tensor
        with self._collective("all_reduce"):
            return self._transport_for(tensor).all_reduce(tensor, op) if tensor.numel() else tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Concatenate the members' equally shaped tensors along `dim` in group order."""
        if self.world_size == 1:
            return tensor
        with self._collective("all_gather"):
            if not tensor.numel():
                return torch.cat([tensor] * self.world_size, dim)
            # [ranks, *shape]; moving `dim` to the front would cost two transposing copies
            stacked = self._transport_for(tensor).all_gather(tensor.unsqueeze(0), [1] * self.world_size)
        return stacked.flatten(0, 1) if dim in (0, -tensor.dim()) else torch.cat(stacked.unbind(0), dim)

    def all_gatherv(self, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Concatenate along dim 0: `sizes[i]` rows of rank `i`. Every rank passes all sizes."""
        _check_rows(self, "all_gatherv", sizes, sizes[self.rank_in_group], tensor)
        if self.world_size == 1:
            return tensor
        with self._collective("all_gatherv"):
            if _is_empty(tensor, sizes):
                return tensor.new_empty(sum(sizes), *tensor.shape[1:])
            return self._transport_for(tensor).all_gather(tensor, sizes)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Sum over the group, keep this rank's equal slice of `dim`."""
        if tensor.shape[dim] % self.world_size:
            raise ValueError(
                f"reduce_scatter over {self.world_size} ranks needs an extent that they divide: "
                f"dim {dim} of {list(tensor.shape)}; use reduce_scatterv with the sizes"
            )
        if self.world_size == 1:
            return tensor
        rows = tensor.movedim(dim, 0)
        sizes = [rows.shape[0] // self.world_size] * self.world_size
        with self._collective("reduce_scatter"):
            if tensor.numel():
                kept = self._transport_for(tensor).reduce_scatter(rows, sizes, "sum")
            else:
                kept = rows.new_empty(sizes[0], *rows.shape[1:])
        return kept.movedim(0, dim).contiguous()

    def reduce_scatterv(self, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Sum over the group, split along dim 0; rank `i` keeps `sizes[i]` rows."""
        _check_rows(self, "reduce_scatterv", sizes, sum(sizes), tensor)
        if self.world_size == 1:
            return tensor
        with self._collective("reduce_scatterv"):
            if _is_empty(tensor, sizes):
                return tensor.new_empty(sizes[self.rank_in_group], *tensor.shape[1:])
            return self._transport_for(tensor).reduce_scatter(tensor, sizes, "sum")

    def all_to_all(
        self,
        tensor: torch.Tensor,
        out_sizes: Sequence[int] | None = None,
        in_sizes: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Send `in_sizes[i]` rows of `tensor` to rank `i`, return `out_sizes[i]` rows from it.

        Without sizes dim 0 is cut evenly.
        """
        if out_sizes is None or in_sizes is None:
            if out_sizes is not in_sizes or tensor.shape[0] % self.world_size:
                raise ValueError(
                    f"all_to_all over {self.world_size} ranks needs both out_sizes and in_sizes, or neither "
                    f"and rows that the ranks divide; got {tensor.shape[0]} rows"
                )
            in_sizes = out_sizes = [tensor.shape[0] // self.world_size] * self.world_size
        _check_rows(self, "all_to_all", in_sizes, sum(in_sizes), tensor)
        if len(out_sizes) != self.world_size:
            raise ValueError(f"all_to_all needs {self.world_size} out_sizes, got {list(out_sizes)}")
        if self.world_size == 1:
            return tensor
        with self._collective("all_to_all"):
            return self._transport_for(tensor).all_to_all(tensor, out_sizes, in_sizes)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """The tensor of rank `src`; the others pass one of the same shape and dtype, which is overwritten."""
        _check_src(self, src)
        if self.world_size == 1:
            return tensor
        with self._collective("broadcast"):
            return self._transport_for(tensor).broadcast(tensor, src) if tensor.numel() else tensor

    def broadcast_object(self, value: object = None, src: int = 0) -> Any:
        """The plain value of rank `src`, sent as msgpack, so that tuples arrive as lists."""
        _check_src(self, src)
        if self.world_size == 1:
            return value
        with self._collective("broadcast_object"):
            return self._communicator.objects.broadcast(value, src)

    def all_gather_object(self, value: object) -> list[Any]:
        """Every rank's plain value, in group order."""
        if self.world_size == 1:
            return [value]
        payload = frames.encode(value)
        with self._collective("all_gather_object"):
            return self._communicator.objects.all_gather(payload)

    def send_object(self, value: object, dst: int) -> None:
        """Send a plain value to rank `dst`, which receives it with `recv_object`."""
        _check_peer(self, "send_object", dst)
        payload = frames.encode(value)
        with self._collective("send_object"):
            self._communicator.objects.send(payload, dst)

    def recv_object(self, src: int) -> Any:
        """What rank `src` sends with `send_object`."""
        _check_peer(self, "recv_object", src)
        with self._collective("recv_object"):
            return self._communicator.objects.recv(src)

    def broadcast_tensor_dict(
        self, tensors: dict[str, Any] | None = None, src: int = 0
    ) -> dict[str, Any] | None:
        """The dict of rank `src`: tensors and plain values by name. None stays None."""
        _check_src(self, src)
        if self.world_size == 1:
            return tensors
        own = self.rank_in_group == src
        with self._collective("broadcast_tensor_dict"):
            table = self._communicator.objects.broadcast(frames.describe(tensors) if own else None, src)
            found = tensors if own else frames.unfold(table, self._empty_tensor)
            for tensor in frames.tensors_of(found):
                self._transport_for(tensor).broadcast(tensor, src)
            return found

    def send_tensor_dict(self, tensors: dict[str, Any] | None, dst: int) -> None:
        """Send such a dict to rank `dst`, which receives it with `recv_tensor_dict`."""
        _check_peer(self, "send_tensor_dict", dst)
        payload = frames.encode(frames.describe(tensors))
        with self._collective("send_tensor_dict"):
            self._communicator.objects.send(payload, dst)
            for tensor in frames.tensors_of(tensors):
                self._transport_for(tensor).send(tensor, dst)

    def recv_tensor_dict(self, src: int) -> dict[str, Any] | None:
        """What rank `src` sends with `send_tensor_dict`; tensors arrive on this rank's device."""
        _check_peer(self, "recv_tensor_dict", src)
        with self._collective("recv_tensor_dict"):
            found = frames.unfold(self._communicator.objects.recv(src), self._empty_tensor)
            for tensor in frames.tensors_of(found):
                self._transport_for(tensor).recv(tensor, src)
            return found

    def barrier(self, timeout_s: float | None = None) -> None:
        """Wait until every member called this; the error names those that did not."""
        if self.world_size == 1:
            return
        limit = self.timeout_s if timeout_s is None else timeout_s
        with self._collective("barrier", limit, lambda: self._communicator.barrier.missing()):
            self._communicator.barrier.wait(limit)

    def _transport_for(self, tensor: torch.Tensor) -> CpuShm | GlooExchange | TorchDist:
        return self._communicator.on_cpu if tensor.device.type == "cpu" else self._communicator.on_device

    def _empty_tensor(self, shape: list[int], dtype: torch.dtype, on_cpu: bool) -> torch.Tensor:
        here = on_cpu or self.device_group is self.cpu_group
        device = torch.device("cpu") if here else accelerator_device(self.local_rank)
        return torch.empty(shape, dtype=dtype, device=device)

    @contextmanager
    def _collective(
        self, operation: str, timeout_s: float | None = None, reason: Callable[[], str] | None = None
    ) -> Iterator[None]:
        """Count a collective, and turn errors of the transport into a `CollectiveError`."""
        if getattr(self, "cpu_group", None) is None:
            raise RuntimeError(
                f"{operation} over {self.world_size} ranks: this group has no communicator; it was "
                "destroyed, or made without initialize_model_parallel()"
            )
        self._communicator.claim(self)
        self.calls[operation] += 1
        for heard in _listeners:
            heard[self, operation] += 1
        with self.translated_errors(operation, timeout_s, reason):
            yield

    @contextmanager
    def translated_errors(
        self,
        operation: str,
        timeout_s: float | None = None,
        reason: Callable[[], str] | None = None,
        kind: type[RuntimeError] = RuntimeError,
    ) -> Iterator[None]:
        """Turn what the transport raises in the block, of `kind`, into a `CollectiveError` of this group.

        Where more is done than to call the transport, `kind` tells its errors from those of this rank.
        """
        try:
            yield
        except kind as error:
            try:
                cause = str(error) if reason is None else reason()
            except RuntimeError:  # the rank that holds the store is gone
                cause = str(error)
            raise CollectiveError(
                operation,
                group_name=self.group_name,
                ranks=self.ranks,
                rank=self.ranks[self.rank_in_group],
                timeout_s=self.timeout_s if timeout_s is None else timeout_s,
                cause=cause,
            ) from error


@contextmanager
def counted_collectives() -> Iterator[Counter[tuple[GroupCoordinator, str]]]:
    """Count the collectives of a block by group and method; they count in their groups as well."""
    heard: Counter[tuple[GroupCoordinator, str]] = Counter()
    _listeners.append(heard)
    try:
        yield heard
    finally:
        _listeners[:] = [other for other in _listeners if other is not heard]


def _check_order(group_name: str, group_ranks: Sequence[Sequence[int]]) -> None:
    for ranks in group_ranks:
        if list(ranks) != sorted(set(ranks)):
            raise ValueError(
                f"group '{group_name}': the ranks of a group must ascend, got {list(ranks)}. The transport "
                f"sorts them, so a rank would take another seat than listed; pass {sorted(set(ranks))}"
            )


def _is_empty(tensor: torch.Tensor, sizes: Sequence[int]) -> bool:
    """Whether no rank sends an element; every rank comes to the same answer."""
    return not sum(sizes) or 0 in tensor.shape[1:]


def _check_rows(
    group: GroupCoordinator, operation: str, sizes: Sequence[int], rows: int, tensor: torch.Tensor
) -> None:
    if len(sizes) != group.world_size or tensor.shape[0] != rows:
        raise ValueError(
            f"{operation} over {group.world_size} ranks (group '{group.group_name}', rank "
            f"{group.rank_in_group}): sizes {list(sizes)} do not fit a tensor of {tensor.shape[0]} rows"
        )


def _check_src(group: GroupCoordinator, src: int) -> None:
    if not 0 <= src < group.world_size:
        raise ValueError(
            f"src must be a rank of group '{group.group_name}', 0..{group.world_size - 1}, got {src}"
        )


def _check_peer(group: GroupCoordinator, operation: str, peer: int) -> None:
    if not 0 <= peer < group.world_size or peer == group.rank_in_group:
        raise ValueError(
            f"{operation}: rank {peer} is no other rank of group '{group.group_name}', which has ranks "
            f"0..{group.world_size - 1}, this one being {group.rank_in_group}"
        )
