"""Declared fields of splitting prefill from decode.

Read through `get_disagg()`. Declarations only: name, type, default, help and what this build serves.
"""

from sglang.srt.arg_groups.arg_utils import NS, A, Arg, Namespace
from sglang.srt.arg_groups.fields import choices

_NO_SPLIT = "leave it out: one server does both prefill and decode"


class Disagg(Namespace, ns=NS("disagg")):
    disaggregation_mode: A[
        str, Arg(help="Role of this server.", choices=choices.DISAGGREGATION_MODES, instead=_NO_SPLIT)
    ] = "null"
    disaggregation_transfer_backend: A[str, Arg(help="Transport of keys and values.", instead=_NO_SPLIT)] = (
        "mooncake"
    )
    disaggregation_bootstrap_port: A[
        int, Arg(help="Port of the bootstrap server on the prefill side.", instead=_NO_SPLIT)
    ] = 8998
    disaggregation_ib_device: A[str | None, Arg(help="RDMA devices.", instead=_NO_SPLIT)] = None
    num_reserved_decode_tokens: A[
        int, Arg(help="Room kept per request on the decode side.", at_least=0, instead=_NO_SPLIT)
    ] = 512
    language_only: A[
        bool, Arg(help="Serve only the language half of an encoder split.", instead=_NO_SPLIT)
    ] = False
    encoder_only: A[bool, Arg(help="Serve only the encoder half.", instead=_NO_SPLIT)] = False
