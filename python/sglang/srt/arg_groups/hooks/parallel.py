"""Refuses a layout whose widths do not fit together, with the rule and the numbers.

Runs before a model file is opened. The arithmetic of widths and ranks is the context's; here only
divisibility is checked, so that errors name the flags and not what follows from them.
"""

import logging

from sglang.srt.arg_groups.fields.parallel import attn_dp_size_of, num_worlds_of
from sglang.srt.arg_groups.model_override_base import ResolvingView

logger = logging.getLogger(__name__)

_LAST_PORT = 65535
#: Addresses one can listen on but not connect to.
_EVERY_ADDRESS = ("0.0.0.0", "::", "*")


def resolve_parallel(view: ResolvingView) -> None:
    if view.enable_dp_attention and view.dp_size == 1:
        logger.warning("--enable-dp-attention has no effect with --dp-size 1; write --attn-dp-size N instead")
        view.declare("parallel_hook", enable_dp_attention=False)
    if view.enable_dp_lm_head and not view.enable_dp_attention:
        logger.warning(
            "--enable-dp-lm-head has no effect without attention data parallelism; add --attn-dp-size N or "
            "leave it out"
        )
        view.declare("parallel_hook", enable_dp_lm_head=False)
    _check_widths(view)
    _check_machines(view)


def _divides(rule: str, width: int, factor: int, numbers: str, *, name: str = "--tp-size") -> None:
    if width % factor == 0:
        return
    found = f"leaves {width % factor} of {width} ranks over"
    if factor > width:
        found = f"asks for {factor} parts of {width} rank{'s' if width > 1 else ''}"
    raise ValueError(f"{rule} must hold: {numbers} {found}; make {name} a multiple of {factor}")


def _check_widths(view: ResolvingView) -> None:
    attn_dp = attn_dp_size_of(view.enable_dp_attention, view.dp_size)
    tp, cp, ep, moe_dp, dcp = view.tp_size, view.attn_cp_size, view.ep_size, view.moe_dp_size, view.dcp_size
    _divides(
        "tp_size % (attn_dp_size * attn_cp_size) == 0",
        tp,
        attn_dp * cp,
        f"--tp-size {tp}, --attn-dp-size {attn_dp}, --attn-cp-size {cp}",
    )
    _divides("tp_size % moe_dp_size == 0", tp, moe_dp, f"--tp-size {tp}, --moe-dp-size {moe_dp}")
    if ep * moe_dp > tp:
        raise ValueError(
            f"ep_size * moe_dp_size <= tp_size must hold: --ep-size {ep} times --moe-dp-size {moe_dp} "
            f"is above --tp-size {tp}"
        )
    _divides(
        "tp_size % (ep_size * moe_dp_size) == 0",
        tp,
        ep * moe_dp,
        f"--tp-size {tp}, --ep-size {ep}, --moe-dp-size {moe_dp}",
    )
    attn_tp = tp // (attn_dp * cp)
    _divides(
        "attn_tp_size % dcp_size == 0",
        attn_tp,
        dcp,
        f"attention-TP width {attn_tp}, --dcp-size {dcp}",
        name="that width",
    )


def _check_machines(view: ResolvingView) -> None:
    nodes, replicas = view.nnodes, num_worlds_of(view.enable_dp_attention, view.dp_size)
    if view.node_rank >= nodes:
        raise ValueError(f"0 <= node_rank < nnodes must hold: --node-rank {view.node_rank}, --nnodes {nodes}")
    if nodes == 1:
        return
    if replicas > 1:
        raise ValueError(
            f"dp_size == 1 or nnodes == 1 must hold: --dp-size {replicas}, --nnodes {nodes}; replicas share "
            "nothing, so start one server per machine behind a router (attention data parallelism, "
            "--attn-dp-size, may span machines)"
        )
    ranks = view.tp_size * view.pp_size
    _divides(
        "(tp_size * pp_size) % nnodes == 0",
        ranks,
        nodes,
        f"--tp-size {view.tp_size}, --pp-size {view.pp_size}, --nnodes {nodes}",
        name="tp_size * pp_size",
    )


def check_meeting_place(view: ResolvingView) -> None:
    """Check that the ranks of all machines have one address where they meet."""
    if view.use_ray and (view.node_rank or view.dist_init_addr or view.nccl_port):
        raise ValueError(
            "--use-ray chooses the machines and the place where ranks meet; leave --node-rank, "
            "--dist-init-addr and --nccl-port out"
        )
    if view.nnodes > 1 and view.dist_init_addr is None and not view.use_ray:
        raise ValueError(
            f"--nnodes {view.nnodes} needs --dist-init-addr HOST:PORT, the same on every machine: an address "
            "of machine 0 that the others reach, and a port that is free there"
        )
    if view.dist_init_addr is not None and view.nccl_port is not None:
        raise ValueError(
            f"--dist-init-addr {view.dist_init_addr} and --nccl-port {view.nccl_port} both say where ranks "
            "meet; keep one of them"
        )
    port = view.nccl_port
    if view.dist_init_addr is not None:
        host, port = split_address(view.dist_init_addr)
        if view.nnodes > 1 and host in _EVERY_ADDRESS:
            raise ValueError(
                f"--dist-init-addr {view.dist_init_addr} is no address that other machines can reach; name "
                "one of machine 0"
            )
    replicas = num_worlds_of(view.enable_dp_attention, view.dp_size)
    if port is not None and port + replicas - 1 > _LAST_PORT:
        raise ValueError(
            f"port + dp_size - 1 <= {_LAST_PORT} must hold: each of --dp-size {replicas} replicas takes a "
            f"port of its own, from {port} up"
        )


def split_address(address: str) -> tuple[str, int]:
    """`"host:port"` or `"[v6]:port"` -> its parts."""
    written, colon, port = address.rpartition(":")
    host = written.removeprefix("[").removesuffix("]")
    # Without brackets the port cannot be told from the last part of an IPv6 address.
    bare = ":" in host and written != f"[{host}]"
    if (
        bare
        or not colon
        or not host
        or not (port.isascii() and port.isdecimal())
        or not 0 < int(port) <= _LAST_PORT
    ):
        raise ValueError(
            f"--dist-init-addr {address!r} is not HOST:PORT with a port from 1 to {_LAST_PORT} "
            "(an IPv6 address stands in brackets)"
        )
    return host, int(port)
