"""The entry of a rank: what is in force before any part is built; parts refuse to be built without it."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest

from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.moe.utils import MoeRunnerBackend, get_moe_runner_backend
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor import model_runner as model_runner_module
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.processes import rank_main
from sglang.srt.processes.rank_config import RankConfig
from sglang.srt.runtime_context import SpawnRanks, get_context, get_parallel, publish, reset_context
from sglang.srt.server_args import ServerArgs, pack_server_args


@pytest.fixture(autouse=True)
def empty_process() -> Iterator[None]:
    reset_context()
    yield
    reset_context()


#: Whatever reads the context while it is built: where its assertion is looked up, and how it is built.
CONSTRUCTORS: dict[str, tuple[Any, Callable[[], Any]]] = {
    "model runner": (model_runner_module, lambda: ModelRunner(MagicMock())),
    "scheduler": (scheduler_module, lambda: Scheduler(MagicMock(), tokenizer=None, channel=None)),
    "attention back end": (
        attention_registry,
        lambda: attention_registry.published_attention_backend(),
    ),
}


def _refusal(build: Callable[[], Any]) -> str | None:
    """What the context has to say against building it; None where something else, or nothing, stops it."""
    try:
        build()
    except RuntimeError as error:
        return str(error) if "the process entry calls publish(" in str(error) else None
    except Exception:  # noqa: BLE001 - a stand-in was asked for more than it has
        return None
    return None


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_parts_of_a_rank_are_built_after_its_record_is_published_and_as_a_rank(name: str) -> None:
    """In the server's process, or before the record is there, they would be built from what lies around."""
    _, build = CONSTRUCTORS[name]
    assert "nothing is published in this process" in (_refusal(build) or "")
    record = ServerArgs(model_path="dummy")
    publish(record, role="tokenizer")
    assert "published under role 'tokenizer', not 'scheduler'" in (_refusal(build) or "")
    for role in ("scheduler", "test"):
        publish(record, role=role, ranks=SpawnRanks())
        assert _refusal(build) is None


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_a_part_that_does_not_assert_is_noticed(name: str) -> None:
    """The twin: with the assertion taken out of its module nothing refuses in the context's name."""
    module, build = CONSTRUCTORS[name]
    with patch.object(module, "assert_role", lambda role: None):
        assert _refusal(build) is None


def _config(**told: Any) -> RankConfig:
    record = ServerArgs(model_path="dummy", device="cpu", moe_runner_backend="native")
    return RankConfig(
        configuration=pack_server_args(record), world_rank=0, world_size=1, local_rank=0, ranks_on_host=1,
        rendezvous="file:nowhere", folder="nowhere", heartbeat="nowhere", parent_pid=1, **told,
    )  # fmt: skip


def test_the_spawned_device_is_the_one_that_the_context_names() -> None:
    config = _config(gpu_id=3, dp_rank=1)
    with (
        patch.object(rank_main, "RankLife") as life,
        patch.object(rank_main, "configure_logging"),
        patch.object(rank_main, "setproctitle"),
        patch.object(rank_main, "cores_of_rank", side_effect=ValueError("far enough")),
        patch.object(rank_main, "report_failure"),
    ):
        life.begin.return_value = (MagicMock(), config)
        assert rank_main.main([]) == 1
    assert (get_parallel().gpu_id, get_parallel().dp_rank) == (3, 1)


def test_what_a_start_made_is_left_out_of_collections_while_the_loop_runs() -> None:
    before = gc.get_freeze_count()
    frozen: list[int] = []
    scheduler = MagicMock()
    scheduler.run_event_loop.side_effect = lambda: frozen.append(gc.get_freeze_count())
    try:
        with (
            patch.object(rank_main, "RankLife") as life,
            patch.object(rank_main, "configure_logging"),
            patch.object(rank_main, "setproctitle"),
            patch.object(rank_main, "cores_of_rank", return_value=None),
            patch.object(rank_main, "join", return_value=(None, [])),
            patch.object(rank_main, "build_scheduler", return_value=(scheduler, {})),
        ):
            life.begin.return_value = (MagicMock(), _config())
            assert rank_main.main([]) == 0
    finally:
        gc.unfreeze()
    assert frozen[0] > before + 10_000


def test_expert_back_ends_are_in_force_before_the_first_layer_is_built(tmp_path: Path) -> None:
    """A layer that asked earlier would take the default for the operator's choice."""
    publish(ServerArgs(model_path="dummy", moe_runner_backend="native"), role="scheduler", ranks=SpawnRanks())
    asked: list[MoeRunnerBackend] = []

    def built(*args: Any, **named: Any) -> Any:
        asked.append(get_moe_runner_backend())
        get_context().override("worker", max_prefill_tokens=7)
        return MagicMock()

    with (
        patch("sglang.srt.speculative.spec_registry.TpModelWorker", side_effect=built),
        patch("sglang.srt.managers.scheduler.Scheduler"),
        patch.object(rank_main, "published_model_config"),
        patch.object(rank_main, "published_tokenizer"),
        patch.object(rank_main, "Heartbeat"),
    ):
        assert get_moe_runner_backend() is MoeRunnerBackend.AUTO
        _, info = rank_main.build_scheduler(_config(), None)
    assert asked == [MoeRunnerBackend.NATIVE]
    # And what the rank decided while it was built goes to the server with its first word.
    assert [(entry["source"], entry["name"], entry["after"]) for entry in info["overrides"]] == [
        ("worker", "max_prefill_tokens", 7)
    ]
