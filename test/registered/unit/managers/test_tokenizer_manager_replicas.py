"""The tokenizer manager in front of several replicas: all of them are asked, each is named, a stated one is
kept.
"""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit-cpu")

import asyncio
import pathlib

import pytest

from sglang.srt.managers.tokenizer_components import control as request_control
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.messages import io_struct
from sglang.srt.messages.errors import RequestRejected
from sglang.srt.tokenizer.tokenizer import Tokenizer, load_tokenizer
from sglang.test.fakes.fake_scheduler import LENGTH, VOCAB, FakeScheduler, play, whole
from sglang.test.tiny_models import write_tiny_tokenizer
from sglang.test.waiting import until

TWO_REPLICAS = {"dp_size": 2}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: pathlib.Path = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder, vocab_size=VOCAB)
    return load_tokenizer(folder)


def test_a_question_waits_for_every_replica_and_answers_in_their_order(tokenizer: Tokenizer) -> None:
    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        question = asyncio.create_task(manager.get_internal_state())
        await until(lambda: channel.sent)
        call_id = channel.sent[0].call_id
        answers = [
            io_struct.GetInternalStateReqOutput(call_id=call_id, state={"dp_rank": rank}, dp_rank=rank)
            for rank in range(2)
        ]
        channel.say(answers[1])
        await channel.handled()
        assert not question.done()
        channel.say(answers[0])
        assert await question == [{"dp_rank": 0}, {"dp_rank": 1}]

    play(scenario, tokenizer, **TWO_REPLICAS)


def test_a_replica_that_does_not_answer_is_named(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_control, "ANSWER_TIMEOUT_S", 0.1)

    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        # Said before the wait begins, so that it is heard before the wait is over.
        channel.answer = lambda asked: io_struct.GetInternalStateReqOutput(
            call_id=asked.call_id, state={}, dp_rank=0
        )
        with pytest.raises(RequestRejected, match="from replica 1") as caught:
            await manager.get_internal_state()
        assert caught.value.status_code == 503

    play(scenario, tokenizer, **TWO_REPLICAS)


def test_two_answers_of_one_replica_are_a_failure_and_not_the_answer_of_two(tokenizer: Tokenizer) -> None:
    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        question = asyncio.create_task(manager.get_internal_state())
        await until(lambda: channel.sent)
        call_id = channel.sent[0].call_id
        for _ in range(2):
            channel.say(io_struct.GetInternalStateReqOutput(call_id=call_id, state={}))
        with pytest.raises(RequestRejected, match="replica 0 answered call 0 twice"):
            await question

    play(scenario, tokenizer, **TWO_REPLICAS)


def test_a_flush_succeeds_when_all_replicas_flushed_and_names_those_that_refused(
    tokenizer: Tokenizer,
) -> None:
    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        async def flushed(*successes: bool) -> io_struct.FlushCacheReqOutput:
            before = len(channel.sent)
            task = asyncio.create_task(manager.flush_cache())
            await until(lambda: len(channel.sent) > before)
            for rank, success in enumerate(successes):
                channel.say(
                    io_struct.FlushCacheReqOutput(
                        call_id=channel.sent[-1].call_id,
                        success=success,
                        message="" if success else "2 requests run",
                        dp_rank=rank,
                    )
                )
            return await task

        assert (await flushed(True, True)).success
        refused = await flushed(True, False)
        assert (refused.success, refused.message) == (False, "replica 1: 2 requests run")
        refused = await flushed(False, False)
        assert refused.message == "replica 0: 2 requests run; replica 1: 2 requests run"

    play(scenario, tokenizer, **TWO_REPLICAS)


def test_the_placement_of_all_replicas_is_sorted_by_replica_and_rank(tokenizer: Tokenizer) -> None:
    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        question = asyncio.create_task(manager.get_placement())
        await until(lambda: channel.sent)
        for dp_rank in (1, 0):
            seats = [{"world_rank": rank, "dp_rank": dp_rank} for rank in (1, 0)]
            overrides = [{**seats[0], "source": word} for word in ("first", "second")]
            channel.say(
                io_struct.GetPlacementReqOutput(
                    call_id=channel.sent[0].call_id, ranks=seats, overrides=overrides, dp_rank=dp_rank
                )
            )
        answer = await question
        assert [(r["dp_rank"], r["world_rank"]) for r in answer["ranks"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert [(o["dp_rank"], o["source"]) for o in answer["overrides"]] == [
            (0, "first"), (0, "second"), (1, "first"), (1, "second")
        ]  # fmt: skip

    play(scenario, tokenizer, **TWO_REPLICAS)


def test_a_request_goes_where_it_says_and_tells_where_it_ran(tokenizer: Tokenizer) -> None:
    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        with pytest.raises(RequestRejected, match=r"0 <= routed_dp_rank < 2 .*, got 2"):
            await whole(manager, text=["a", "b"], routed_dp_rank=[0, 2])
        assert channel.sent == []
        task = asyncio.create_task(whole(manager, text=["a", "b"], rid=["x", "y"], routed_dp_rank=[1, None]))
        await until(lambda: len(channel.requests) == 2)
        assert [message.routed_dp_rank for message in channel.requests] == [1, None]
        for rank, rid in ((1, "x"), (0, "y")):
            output = io_struct.TokenOutput(
                rid=rid,
                new_ids=[70],
                finish_reason=LENGTH,
                prompt_tokens=1,
                completion_tokens=1,
                cached_tokens=0,
                num_retractions=0,
            )
            channel.say(io_struct.BatchTokenIDOutput(outputs=[output], dp_rank=rank))
        assert [answer["meta_info"]["dp_rank"] for answer in await task] == [1, 0]

    play(scenario, tokenizer, **TWO_REPLICAS)


def test_attention_replicas_count_like_replicas(tokenizer: Tokenizer) -> None:
    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        assert manager.limits.replicas == 2

    play(scenario, tokenizer, tp_size=4, dp_size=2, enable_dp_attention=True)
