"""Ranks that meet: equal ones build a world, different ones all report the difference, none waits in vain."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="multi-rank-cpu")

from pathlib import Path
from typing import Any

import pytest

from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.rendezvous import join_world
from sglang.srt.distributed.utils import get_global_tcp_store
from sglang.srt.environ import envs
from sglang.test.multi_rank import come_together, run_ranks
from sglang.test.ports import held_ports
from sglang.test.waiting import HANG_GUARD_S

PUBLIC = {"tp_size": 3, "dtype": "float32", "model_path": "dummy", "list": [1, 2], "none": None}


def check_meetings(rank: int, folder: str, places: dict[str, str]) -> dict[str, Any]:
    """On three ranks."""

    def join(place: str, timeout_s: float = HANG_GUARD_S, seat: int = rank, **configuration: Any) -> None:
        join_world(
            rendezvous=places[place],
            world_rank=seat,
            world_size=configuration.pop("world_size", 3),
            local_rank=rank,
            timeout_s=timeout_s,
            configuration=PUBLIC | configuration,
        )

    def refused(kind: type[Exception], *arguments: Any, **named: Any) -> str:
        with pytest.raises(kind) as caught:
            join(*arguments, **named)
        return str(caught.value)

    errors: dict[str, Any] = {}
    # Nothing is built before all said the same, so a refusal needs no world to go first.
    one_off = {"tp_size": 4, "extra": "x"} if rank == 2 else {}
    errors["file differs"] = refused(ValueError, "file differs", **one_off)
    errors["port differs"] = refused(ValueError, "port differs", **one_off)
    size = 2 if rank == 1 else 3
    errors["world differs"] = refused(ValueError, "world differs", world_size=size)
    if rank != 1:
        come_together(folder, "absent-begins", rank, (0, 2))
        errors["absent"] = refused(RuntimeError, "absent", 2.0)
    if rank == 1:
        errors["late"] = refused(RuntimeError, "nobody", 0.5)
    errors["twice"] = ""
    if rank == 0:
        errors["twice"] = refused(RuntimeError, "twice", 0.3, seat=2) and refused(
            ValueError, "twice", 0.3, seat=2
        )
    for place in ("file", "port"):
        parallel_state.destroy_distributed_environment()
        with envs.GLOO_SOCKET_IFNAME.override(None):
            join(place)
            errors[place] = envs.GLOO_SOCKET_IFNAME.get()
        assert parallel_state.get_world_group().all_gather_object(rank) == [0, 1, 2]
        assert get_global_tcp_store().check(["meeting/verdict/2"])
    return errors


def test_ranks_build_a_world_when_all_were_started_alike_and_refuse_otherwise(tmp_path: Path) -> None:
    files = {
        name: f"file:{tmp_path / name}"
        for name in ("file", "file differs", "world differs", "absent", "twice")
    }
    with held_ports(3) as first:
        names = ("port", "port differs", "nobody")
        ports = {name: f"tcp://127.0.0.1:{first + i}" for i, name in enumerate(names)}
        answers = run_ranks(check_meetings, world_size=3, folder=str(tmp_path), places=ports | files)
    difference = (
        "world rank 2 was started with other settings than world rank 0: extra is 'x' there and not known on "
        "world rank 0; tp_size is 4 there and 3 on world rank 0."
    )
    for rank, errors in enumerate(answers):
        assert errors["file"] == errors["port"] == "lo"
        for case in ("file differs", "port differs"):
            assert errors[case].splitlines() == [difference, "Start every machine with the same flags."], rank
        assert "world rank 1 was started with" in errors["world differs"]
        assert "world_size is 2 there and 3 on world rank 0" in errors["world differs"]
    for rank in (0, 2):
        assert "world ranks [1] of 3 did not come to file:" in answers[rank]["absent"]
        assert "within 2 s" in answers[rank]["absent"]
    assert "world rank 0 did not come to 127.0.0.1:" in answers[1]["late"]
    assert "world rank 2 came to" in answers[0]["twice"] and "--node-rank" in answers[0]["twice"]
