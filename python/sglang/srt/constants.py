"""Numbers and names that several floors must agree on.

Read by any floor. Plain values only; must not import, compute or read the environment.
"""

from typing import Final

#: Address and port of the HTTP server by default.
DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 30000

#: Tokens of one prefill chunk on CPU.
CPU_CHUNKED_PREFILL_SIZE: Final = 4096

#: The KV pools of all ranks of a host take this share of the available memory, but no more than the maximum.
CPU_KV_POOL_MAX_BYTES: Final = 2 << 30
CPU_KV_POOL_SHARE: Final = 0.25

#: A linear-attention scan works in blocks of this many tokens; a state is cached at the end of a block.
LINEAR_ATTENTION_CHUNK: Final = 64

#: Largest seed drawn or accepted: every random generator in use takes it.
MAX_SEED: Final = (1 << 31) - 1

#: What a rank takes at least before it has read a weight; torch alone takes more.
RANK_MIN_BYTES: Final = 128 << 20

#: How long a rank waits for its peers in a collective when `--dist-timeout` is not given, so how long a lost
#: rank stays unnoticed. Ranks load at different speeds, so the barrier after loading has a limit of its own.
DIST_TIMEOUT_S: Final = 60.0
LOAD_TIMEOUT_S: Final = 1800.0
