"""Numbers and names that several floors must agree on.

Read by any floor. Plain values only: nothing here imports, computes or reads the environment.
"""

from typing import Final

#: Loopback bind and port of the HTTP server when nothing else is said.
DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 30000

#: Prefill piece on a device whose memory is unknown (CPU).
CPU_CHUNKED_PREFILL_SIZE: Final = 4096

#: Ceiling and share of available memory of the key/value pool on CPU, over all ranks of the host.
CPU_KV_POOL_MAX_BYTES: Final = 2 << 30
CPU_KV_POOL_SHARE: Final = 0.25

#: A linear-attention scan works in blocks of this many tokens; a cached state sits on such an edge.
LINEAR_ATTENTION_CHUNK: Final = 64

#: Largest seed drawn or accepted: what every random generator in use takes.
MAX_SEED: Final = (1 << 31) - 1

#: What a rank takes before it has read a weight, at least: torch alone is more.
RANK_MIN_BYTES: Final = 128 << 20

#: How long a rank waits for its peers in a collective when `--dist-timeout` is not given: a lost rank is an
#: error in this time. Loading takes ranks differently long, so the barrier after it has a limit of its own.
DIST_TIMEOUT_S: Final = 60.0
LOAD_TIMEOUT_S: Final = 1800.0
