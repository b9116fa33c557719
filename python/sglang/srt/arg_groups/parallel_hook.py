"""Refuses a layout whose widths do not fit together, with the rule and the numbers.

Run before a model file is opened. The arithmetic of quotients and ranks is the context's; only divisibility
is checked here, so that the operator reads flags and not names of quotients.
"""

import logging

from sglang.srt.arg_groups.model_override_base import ResolvingView

logger = logging.getLogger(__name__)


def _divides(rule: str, width: int, factor: int, numbers: str) -> None:
    if width % factor:
        raise ValueError(f"{rule} must hold: {numbers} leaves {width % factor} of {width} ranks over")


def resolve_parallel(view: ResolvingView) -> None:
    if view.enable_dp_attention and view.dp_size == 1:
        logger.warning("--enable-dp-attention has no effect with --dp-size 1; write --attn-dp-size N instead")
        view.declare("parallel_hook", enable_dp_attention=False)
    attn_dp = view.dp_size if view.enable_dp_attention else 1
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
    _divides("attn_tp_size % dcp_size == 0", attn_tp, dcp, f"attention-TP width {attn_tp}, --dcp-size {dcp}")
    if view.node_rank >= view.nnodes:
        raise ValueError(
            f"0 <= node_rank < nnodes must hold: --node-rank {view.node_rank}, --nnodes {view.nnodes}"
        )
