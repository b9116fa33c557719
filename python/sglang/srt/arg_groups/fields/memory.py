"""Declared fields of the caches: the prefix tree and the tiers behind it.

Read through `get_memory()`. Declarations only: name, type, default, help and what this build serves.
"""

from sglang.srt.arg_groups.arg_utils import NS, A, Arg, Namespace
from sglang.srt.arg_groups.fields import choices

_NO_TIER = "leave it out: keys and values live in one pool, tiers behind it come later"


class Memory(Namespace, ns=NS("memory")):
    disable_radix_cache: A[bool, Arg(help="No prefix cache.", served=True)] = False
    radix_eviction_policy: A[
        str,
        Arg(
            help="Which cached prefix goes first.",
            choices=choices.RADIX_EVICTION_POLICIES,
            served=("lru",),
            instead="use lru",
        ),
    ] = "lru"
    radix_cache_backend: A[
        str | None, Arg(help="A registered third-party prefix cache.", instead=_NO_TIER)
    ] = None
    enable_hierarchical_cache: A[
        bool, Arg(help="Add a host-memory tier.", aliases=("--enable-hicache",), instead=_NO_TIER)
    ] = False
    hicache_ratio: A[
        float | None, Arg(help="Host pool as a multiple of the device pool.", instead=_NO_TIER)
    ] = None
    hicache_size: A[int, Arg(help="Host pool in GB; wins over the ratio.", instead=_NO_TIER)] = 0
    hicache_write_policy: A[
        str,
        Arg(
            help="When entries are copied to the host.",
            choices=choices.HICACHE_WRITE_POLICIES,
            instead=_NO_TIER,
        ),
    ] = "write_through"
    hicache_storage_backend: A[str | None, Arg(help="Third tier behind the host.", instead=_NO_TIER)] = None
    enable_lmcache: A[bool, Arg(help="Use LMCache as the outer tier.", instead=_NO_TIER)] = False
