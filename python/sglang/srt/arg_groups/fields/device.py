"""Declared fields of the device: which one, the seed, the watchdogs.

Read through `get_device()`. Declarations only: name, type, default, help and what this build serves.
"""

from sglang.srt.arg_groups.arg_utils import NS, A, Arg, Namespace
from sglang.srt.constants import MAX_SEED


class Device(Namespace, ns=NS("device")):
    device: A[
        str | None,
        Arg(
            help="Where the model runs; the best served device of this machine when not given.",
            resolvable=True,
            served=("cpu",),
            instead="use --device cpu: the GPU path is not served yet",
        ),
    ] = None
    base_gpu_id: A[int, Arg(help="Index of the first GPU.", at_least=0)] = 0
    gpu_id_step: A[int, Arg(help="Stride between GPU indices.", at_least=1)] = 1
    random_seed: A[
        int | None,
        Arg(
            help="Seed of the engine; drawn once when not given.",
            resolvable=True,
            served=True,
            at_least=0,
            at_most=MAX_SEED,
        ),
    ] = None
    watchdog_timeout: A[
        float,
        Arg(help="Seconds without progress before a rank counts as stuck and the server ends.", served=True),
    ] = 300.0
    soft_watchdog_timeout: A[
        float | None, Arg(help="The same, but only the state is written to the log.")
    ] = None
    sleep_on_idle: A[
        bool, Arg(help="Wait on the sockets instead of spinning when idle.", resolvable=True, served=(True,))
    ] = False
    numa_node: A[list[int] | None, Arg(help="NUMA node of each rank.")] = None
