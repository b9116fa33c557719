"""Declared fields of images, audio and video.

Read through `get_mm()`. Declarations only: name, type, default, help and what this build serves.
"""

from typing import Any

from sglang.srt.arg_groups.arg_utils import NS, A, Arg, Namespace

_TEXT_ONLY = "leave it out: this build serves text models"


class Mm(Namespace, ns=NS("mm")):
    enable_multimodal: A[
        bool | None, Arg(help="Force media input on or off.", served=(False,), instead=_TEXT_ONLY)
    ] = None
    mm_attention_backend: A[
        str | None, Arg(help="Attention kernels of the vision part.", instead=_TEXT_ONLY)
    ] = None
    limit_mm_data_per_request: A[
        dict[str, Any] | None, Arg(help="JSON: media allowed in a request, per kind.", instead=_TEXT_ONLY)
    ] = None
    allowed_media_domains: A[
        list[str], Arg(help="Hosts remote media may come from.", instead=_TEXT_ONLY)
    ] = []
