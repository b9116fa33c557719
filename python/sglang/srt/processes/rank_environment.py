"""Owns the environment a rank process is started with: where it finds modules, its threads, what torch keeps.

Used by whoever starts ranks, benchmarks too. It must not change the environment of this process.
"""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Sequence

from sglang.srt.environ import child_environment
from sglang.srt.platforms import cpu_count
from sglang.srt.processes.cpu_binding import cores_of_rank

#: About 100 us: longer than the gap between two products of a step, so that a thread is not woken for each of
#: them, and short enough to give its core up to whoever else wants it.
SPINS_BEFORE_SLEEP = "10000"

#: What torch's products on a CPU keep, compiled, for each shape that they have seen: at a thousand, which is
#: the default of both, hundreds of megabytes. A step repeats a few dozen.
SHAPES_KEPT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "128"}


def rank_environment(rank: int, num_ranks: int) -> dict[str, str]:
    """The environment of one of `num_ranks` ranks on this host.

    It finds the modules that we find. OpenMP threads share the cores and give them up when they wait, unless
    the user's environment says otherwise.
    """
    main_file = getattr(sys.modules.get("__main__"), "__file__", None)
    environment = _thread_environment(rank, num_ranks)
    # A PYTHONPATH that was set for children after our start is not on our own path.
    stated = environment.get("PYTHONPATH", "").split(os.pathsep)
    found = dict.fromkeys([*module_search_path(sys.path, main_file), *filter(None, stated)])
    return {**SHAPES_KEPT, **environment, "PYTHONPATH": os.pathsep.join(found)}


def working_folder() -> str | None:
    """Where this process works, None when that folder has been deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def module_search_path(path: Sequence[str], main_file: str | None) -> list[str]:
    """Where a rank looks for modules: as its parent does, this package included, the program's folder last.

    So a file beside the program shadows nothing.
    """
    here = working_folder()
    package = str(pathlib.Path(__file__).parents[3])
    program = None if main_file is None else os.path.dirname(os.path.join(here or os.sep, main_file))
    own = {"", here, program} - {package}
    first = [entry for entry in path if entry not in own]
    last = [entry or here for entry in path if entry in own]
    return list(dict.fromkeys(entry for entry in (*first, *last, package) if entry))


def _thread_environment(rank: int, num_ranks: int) -> dict[str, str]:
    bound = cores_of_rank(rank, num_ranks)
    threads = max(1, cpu_count() // num_ranks) if bound is None else len(bound)
    if threads == 1:
        return child_environment(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    return child_environment(
        OMP_NUM_THREADS=str(threads), OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT=SPINS_BEFORE_SLEEP
    )
