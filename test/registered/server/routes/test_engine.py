"""`sgl.Engine` in the user's own process: whole, streamed, batched, beside event loops, and its ends."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=40, suite="server-cpu")

import asyncio
import concurrent.futures
import itertools
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

import sglang as sgl
from sglang.srt.environ import child_environment, envs
from sglang.test.fakes.fake_rank import FAKE_RANK
from sglang.test.server.server_fixture import process_is_gone
from sglang.test.tiny_models import write_tiny_model
from sglang.test.waiting import HANG_GUARD_S, until, wait_until

#: Longer than any wait: a test that waited for its end would fail.
ENDLESS = {"max_new_tokens": 30_000, "ignore_eos": True}
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=32_768)


@pytest.fixture(scope="module")
def engine(model: pathlib.Path) -> Iterator[sgl.Engine]:
    """One engine over the real rank for all tests that do not end it."""
    with sgl.Engine(model_path=str(model), max_total_tokens=2048, dtype="float32") as engine:
        yield engine


@pytest.fixture
def fake(model: pathlib.Path) -> Iterator[sgl.Engine]:
    with sgl.Engine(model_path=str(model), _rank_module=FAKE_RANK) as engine:
        yield engine


def num_running(engine: sgl.Engine) -> int:
    count: int = engine.get_server_info()["internal_states"][0]["num_running_reqs"]
    return count


def ids_of(answer: Any) -> list[int]:
    ids: list[int] = answer["output_ids"]
    return ids


def test_a_prompt_gives_a_dict_and_a_list_of_prompts_gives_a_list(engine: sgl.Engine) -> None:
    one = engine.generate("hello there", GREEDY)
    many = engine.generate(["hello there", "another thing"], GREEDY)
    assert isinstance(one, dict) and isinstance(many, list)
    assert ids_of(many[0]) == ids_of(one)
    assert one["meta_info"]["completion_tokens"] == len(ids_of(one)) == 8
    assert many[1]["text"] != one["text"]


def test_a_stream_ends_with_the_whole_answer(engine: sgl.Engine) -> None:
    whole = engine.generate("hello there", GREEDY)
    pieces = list(engine.generate("hello there", GREEDY, stream=True))
    # How many there are is the reader's pace: whoever comes late finds several tokens in one piece.
    assert all(later["text"].startswith(earlier["text"]) for earlier, later in itertools.pairwise(pieces))
    assert pieces[-1]["text"] == whole["text"]  # type: ignore[call-overload]
    assert [p["meta_info"]["finish_reason"] for p in pieces[:-1]] == [None] * (len(pieces) - 1)


def test_token_ids_go_in_and_out(engine: sgl.Engine) -> None:
    by_text = engine.generate("hello there", {**GREEDY}, return_prompt_token_ids=True)
    prompt_ids = by_text["prompt_token_ids"]  # type: ignore[call-overload]
    by_ids = engine.generate(input_ids=prompt_ids, sampling_params=GREEDY)
    assert ids_of(by_ids) == ids_of(by_text)


def test_samples_of_one_seed_differ_and_repeat(engine: sgl.Engine) -> None:
    params = {"temperature": 1.0, "n": 4, "sampling_seed": 5, "max_new_tokens": 12, "ignore_eos": True}
    first, second = (engine.generate("hello", params) for _ in range(2))
    assert isinstance(first, list) and isinstance(second, list)
    assert [ids_of(a) for a in first] == [ids_of(a) for a in second]
    assert len({tuple(ids_of(a)) for a in first}) == 4


def test_it_works_inside_a_running_event_loop(engine: sgl.Engine) -> None:
    whole = engine.generate("hello there", GREEDY)

    async def main() -> None:
        both = await asyncio.gather(*(engine.async_generate("hello there", GREEDY) for _ in range(2)))
        assert [ids_of(answer) for answer in both] == [ids_of(whole)] * 2
        texts = [
            item["text"] async for item in await engine.async_generate("hello there", GREEDY, stream=True)
        ]
        assert texts[-1] == whole["text"]  # type: ignore[call-overload]
        assert ids_of(engine.generate("hello there", GREEDY)) == ids_of(whole)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"prompt": "a", "sampling_params": {"temperature": -1}}, "temperature"),
        ({"prompt": "a", "input_ids": [1]}, "exactly one of text and input_ids"),
        ({"prompt": ""}, "empty"),
        ({"prompt": "a", "image_data": "x.png"}, "image_data: this model reads text only"),
        ({"prompt": "a", "no_such_field": 1}, "no_such_field: unknown key"),
        ({"input_ids": [1] * 40_000}, "longer than the model's context length"),
    ],
)
def test_a_mistake_in_a_call_is_a_value_error(engine: sgl.Engine, call: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.generate(**call)


def test_the_engine_tells_about_itself(engine: sgl.Engine, model: pathlib.Path) -> None:
    info = engine.get_server_info()
    assert info["max_total_num_tokens"] == 2048
    assert info["internal_states"][0]["num_running_reqs"] == 0
    assert engine.get_model_info()["model_path"] == str(model)
    assert engine.flush_cache() is True


def test_a_stream_left_early_is_aborted(fake: sgl.Engine) -> None:
    stream = fake.generate("a", ENDLESS, stream=True)
    assert not isinstance(stream, dict | list)
    first = next(stream)
    assert first["meta_info"]["finish_reason"] is None and first["output_ids"]
    stream.close()  # type: ignore[attr-defined]
    wait_until(lambda: num_running(fake) == 0)


def test_a_cancelled_call_is_aborted(fake: sgl.Engine) -> None:
    async def main() -> None:
        task = asyncio.create_task(fake.async_generate("a", ENDLESS))
        await until(lambda: num_running(fake) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    wait_until(lambda: num_running(fake) == 0)


def test_abort_ends_a_request_with_what_it_has(fake: sgl.Engine) -> None:
    stream = fake.generate("a", ENDLESS, stream=True, rid="mine")
    assert not isinstance(stream, dict | list)
    next(stream)
    fake.abort_request("mi")
    *_, last = stream
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(last["output_ids"]) < ENDLESS["max_new_tokens"]


def test_a_dead_rank_raises_with_its_cause_and_the_process_lives_on(fake: sgl.Engine) -> None:
    stream = fake.generate("a", ENDLESS, stream=True)
    assert not isinstance(stream, dict | list)
    next(stream)
    os.kill(fake.get_all_child_pids()[0], signal.SIGKILL)
    with pytest.raises(RuntimeError, match="SIGKILL"):
        list(stream)
    with pytest.raises(RuntimeError, match="SIGKILL"):
        fake.generate("a")
    with pytest.raises(RuntimeError, match="SIGKILL"):
        fake.get_server_info()


def test_shutdown_leaves_no_process_and_no_folder(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with envs.SGLANG_RUNTIME_DIR.override(str(tmp_path)):
        engine = sgl.Engine(model_path=str(model), _rank_module=FAKE_RANK)
        ranks = engine.get_all_child_pids()
        assert len(list(tmp_path.iterdir())) == 1
        engine.shutdown()
        engine.shutdown()
    assert all(map(process_is_gone, ranks))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeError, match="shut down"):
        engine.generate("a")


def test_no_signal_handler_is_installed(fake: sgl.Engine) -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_two_engines_keep_their_own_settings(model: pathlib.Path) -> None:
    with (
        sgl.Engine(model_path=str(model), _rank_module=FAKE_RANK, max_total_tokens=300) as first,
        sgl.Engine(model_path=str(model), _rank_module=FAKE_RANK, weight_version="second") as second,
    ):
        a, b = first.generate("a", {"max_new_tokens": 2}), second.generate("a", {"max_new_tokens": 2})
        assert isinstance(a, dict) and isinstance(b, dict)
        assert (a["meta_info"]["weight_version"], b["meta_info"]["weight_version"]) == ("default", "second")
        assert first.get_server_info()["max_total_num_tokens"] == 300


def test_a_start_that_fails_raises_the_cause_and_leaves_nothing(
    model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    with envs.SGLANG_RUNTIME_DIR.override(str(tmp_path)):
        with pytest.raises(ValueError, match="nowhere"):
            sgl.Engine(model_path="/nowhere/at/all")
        with pytest.raises(RuntimeError, match="rank 0"):
            sgl.Engine(model_path=str(model), _rank_module="sglang.test.no_such_rank")
    assert list(tmp_path.iterdir()) == []


FORK = """
    import os, signal, sys, sglang as sgl
    engine = sgl.Engine(model_path={model!r}, _rank_module={rank!r})
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a child that hangs is killed
        for use in (engine.generate, engine.flush_cache, lambda _=0: next(engine.generate("a", stream=True))):
            try:
                use(*(["a"] if use == engine.generate else []))
            except RuntimeError as error:
                assert "belongs to process" in str(error)
            else:
                sys.exit("the fork used the engine")
        engine.shutdown()
        sys.exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(status, engine.generate("a", {{"max_new_tokens": 3}})["text"])
"""


def test_a_fork_cannot_use_the_engine_and_does_not_end_it(
    model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    script = tmp_path / "fork.py"
    script.write_text(textwrap.dedent(FORK).format(model=str(model), rank=FAKE_RANK))
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=HANG_GUARD_S,
        env=child_environment(),
    )
    assert (done.stdout, done.stderr) == ("0 bcd\n", "")


@pytest.mark.parametrize(
    "call",
    [
        {"prompt": "half \ud800"},
        {"prompt": "a", "rid": "half \ud800"},
        {"prompt": "a", "cache_salt": "half \ud800"},
        {"prompt": "a", "sampling_params": {"stop": ["half \ud800"]}},
    ],
)
def test_half_a_surrogate_pair_is_a_value_error_and_leaves_nothing(
    engine: sgl.Engine, call: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="surrogate") as caught:
        engine.generate(**call)
    assert type(caught.value) is ValueError
    assert engine.tokenizer_manager.num_open == 0


def test_the_engines_own_thread_never_waits_for_itself(model: pathlib.Path) -> None:
    """The collector may find a forgotten Engine on any thread, on the engine's own too."""
    engine = sgl.Engine(model_path=str(model), _rank_module=FAKE_RANK)
    runtime, pids = engine._runtime, engine.get_all_child_pids()

    async def ask() -> Any:
        return engine.generate("a")

    with pytest.raises(RuntimeError, match="own thread"):
        asyncio.run_coroutine_threadsafe(ask(), runtime._loop).result(HANG_GUARD_S)
    finalizer = engine._finalizer
    runtime._loop.call_soon_threadsafe(finalizer)
    wait_until(lambda: all(map(process_is_gone, pids)))
    wait_until(lambda: not runtime._thread.is_alive())


SCRIPT = """
    import sglang as sgl
    engine = sgl.Engine(model_path={model!r}, _rank_module={rank!r})
    print(engine.get_all_child_pids()[0], engine.generate("a", {{"max_new_tokens": 3}})["text"], flush=True)
    {ending}
"""


@pytest.mark.parametrize("ending", ["", "raise SystemExit(0)", "del engine"])
def test_a_plain_script_needs_no_main_guard_and_no_shutdown(
    model: pathlib.Path, tmp_path: pathlib.Path, ending: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).format(model=str(model), rank=FAKE_RANK, ending=ending))
    run_dir = tmp_path / "r"
    run_dir.mkdir()
    with envs.SGLANG_RUNTIME_DIR.override(str(run_dir)):
        done = subprocess.run(
            [sys.executable, str(script)],
            capture_output=True,
            text=True,
            timeout=HANG_GUARD_S,
            env=child_environment(),
        )
    assert (done.returncode, done.stderr) == (0, "")
    pid, text = done.stdout.split()
    assert text == "bcd"
    assert process_is_gone(int(pid))
    assert list(run_dir.iterdir()) == []


def test_engines_that_start_at_the_same_time_keep_their_layouts(model: pathlib.Path) -> None:
    """Settings are published for the whole process: a start must not read those of its neighbour."""
    layouts: list[dict[str, int]] = [{}, {"dp_size": 2}, {"tp_size": 2, "attn_dp_size": 2}]

    def start(layout: dict[str, int]) -> sgl.Engine:
        return sgl.Engine(model_path=str(model), _rank_module=FAKE_RANK, **layout)

    with concurrent.futures.ThreadPoolExecutor(len(layouts)) as pool:
        engines = list(pool.map(start, layouts))
    for engine, replicas in zip(engines, [[0], [0, 1], [0, 1]], strict=True):
        with engine:
            answers = engine.generate(input_ids=[[5]] * len(replicas), sampling_params=GREEDY)
            assert [answer["meta_info"]["dp_rank"] for answer in answers] == replicas  # type: ignore[index]
            assert [rank["dp_rank"] for rank in engine.placement()["ranks"]] == replicas
