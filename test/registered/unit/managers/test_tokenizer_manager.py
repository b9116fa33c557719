"""Requests between door and scheduler, with the scheduler's side played by the test."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import asyncio
import pathlib
from typing import Any

import pytest

from sglang.srt.environ import envs
from sglang.srt.managers.tokenizer_components import splitting
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.messages import io_struct
from sglang.srt.messages.errors import RequestRejected
from sglang.srt.messages.generate_input import GenerateReqInput
from sglang.srt.tokenizer.tokenizer import Tokenizer, load_tokenizer
from sglang.test.fakes.fake_scheduler import LENGTH, VOCAB, FakeScheduler, play, whole
from sglang.test.tiny_models import write_tiny_tokenizer
from sglang.test.waiting import until


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: pathlib.Path = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder, vocab_size=VOCAB)
    return load_tokenizer(folder)


def test_an_answer_carries_text_ids_and_counts(tokenizer: Tokenizer) -> None:
    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        task = asyncio.create_task(whole(manager, text="hello", rid="r", return_prompt_token_ids=True))
        await until(lambda: channel.requests)
        ids = tokenizer.encode("ok")
        channel.tokens("r", ids[:1], 1)
        channel.tokens("r", ids[1:], len(ids), LENGTH)
        answer = await task
        meta = answer["meta_info"]
        assert (answer["text"], answer["output_ids"]) == ("ok", ids)
        assert answer["prompt_token_ids"] == channel.requests[0].input_ids == tokenizer.encode("hello")
        assert meta["finish_reason"] == {"type": "length", "length": 2}
        assert (meta["id"], meta["prompt_tokens"], meta["cached_tokens"]) == ("r", 3, 1)
        assert meta["e2e_latency"] >= 0
        assert {"reasoning_tokens", "weight_version", "num_retractions", "dp_rank"} <= meta.keys()
        assert manager.num_open == 0

    play(scenario, tokenizer)


def test_a_stream_is_cumulative_and_ends_once(tokenizer: Tokenizer) -> None:
    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        items = manager.generate_request(GenerateReqInput(text="a", rid="r", stream=True))
        first = asyncio.ensure_future(anext(items))
        await until(lambda: channel.requests)
        ids = tokenizer.encode("xyz")
        for count, token_id in enumerate(ids, start=1):
            channel.tokens("r", [token_id], count, LENGTH if count == len(ids) else None)
            item = await (first if count == 1 else anext(items))
            assert item["output_ids"] == ids[:count]
            assert (item["meta_info"]["finish_reason"] is None) == (count < len(ids))
            assert ("e2e_latency" in item["meta_info"]) == (count == len(ids))
        with pytest.raises(StopAsyncIteration):
            await anext(items)
        assert channel.aborts == []

    play(scenario, tokenizer)


def test_a_slow_reader_gets_the_news_of_several_steps_as_one_event(tokenizer: Tokenizer) -> None:
    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        items = manager.generate_request(GenerateReqInput(input_ids=[5], rid="r", stream=True))
        first = asyncio.ensure_future(anext(items))
        await until(lambda: channel.requests)
        channel.tokens("r", [70], 1)
        assert (await first)["output_ids"] == [70]
        for count in range(2, 5):
            channel.tokens("r", [70], count)
        await channel.handled()
        assert (await anext(items))["output_ids"] == [70] * 4
        await items.aclose()

    play(scenario, tokenizer)


@pytest.mark.parametrize(
    "fields",
    [
        {"text": ["fine", ""]},
        {"text": ["fine", "x" * 500]},
        {"input_ids": [[1], [VOCAB]]},
        {"text": "a", "sampling_params": {"temperature": float("nan")}},
        {"text": ["a", "b"], "sampling_params": [{}, {"top_k": 0}]},
        {"text": ["a", "b"], "rid": ["r", "r"]},
        {"text": "a", "top_logprobs_num": 1_000_000, "return_logprob": True},
    ],
)
def test_nothing_is_sent_of_a_request_that_is_refused(tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    """A batch with one bad prompt must not leave the good ones running."""

    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        with pytest.raises(RequestRejected) as caught:
            await whole(manager, **fields)
        assert caught.value.status_code == 400
        assert channel.sent == []
        assert manager.num_open == 0

    play(scenario, tokenizer)


def test_samples_have_own_rids_and_seeds_and_share_the_prompt(tokenizer: Tokenizer) -> None:
    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        sampling = {"n": 3, "sampling_seed": 7}
        task = asyncio.create_task(whole(manager, text="a", rid="r", sampling_params=sampling))
        await until(lambda: len(channel.requests) == 3)
        assert [m.rid for m in channel.requests] == ["r_0", "r_1", "r_2"]
        assert len({m.sampling_params.sampling_seed for m in channel.requests}) == 3
        assert channel.requests[0].sampling_params.sampling_seed == 7
        for message in reversed(channel.requests):
            channel.tokens(message.rid, [70], 1, LENGTH)
        answer = await task
        assert [item["meta_info"]["id"] for item in answer] == ["r_0", "r_1", "r_2"]

    play(scenario, tokenizer)


def test_without_a_seed_two_calls_draw_differently_and_a_restart_repeats_them(tokenizer: Tokenizer) -> None:
    drawn: list[list[int | None]] = []

    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        tasks = [asyncio.create_task(whole(manager, text="a")) for _ in range(2)]
        await until(lambda: len(channel.requests) == 2)
        drawn.append([m.sampling_params.sampling_seed for m in channel.requests])
        for message in channel.requests:
            channel.tokens(message.rid, [70], 1, LENGTH)
        await asyncio.gather(*tasks)

    play(scenario, tokenizer)
    play(scenario, tokenizer)
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1]


def test_streamed_samples_carry_the_index_of_prompt_and_sample(tokenizer: Tokenizer) -> None:
    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        seen = {}

        async def read() -> None:
            obj = GenerateReqInput(text=["a", "b"], rid="r", stream=True, sampling_params={"n": 2})
            async for item in manager.generate_request(obj):
                seen[item["index"]] = item["meta_info"]["id"]

        task = asyncio.create_task(read())
        await until(lambda: len(channel.requests) == 4)
        for message in reversed(channel.requests):
            channel.tokens(message.rid, [70], 1, LENGTH)
        await task
        assert seen == {0: "r_0_0", 1: "r_0_1", 2: "r_1_0", 3: "r_1_1"}

    play(scenario, tokenizer)


def test_a_call_that_cannot_be_sent_whole_leaves_nothing_behind(tokenizer: Tokenizer) -> None:
    """A drain waits for open calls: one that stays would keep the server for ever."""

    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        send = channel.send

        def breaks(message: io_struct.Message) -> None:
            if isinstance(message, io_struct.TokenizedGenerateReqInput) and message.rid == "r_1":
                raise OSError("no wire")
            send(message)

        channel.send = breaks  # type: ignore[method-assign]
        for _ in range(2):
            with pytest.raises(RequestRejected, match="OSError") as caught:
                await whole(manager, text="a", rid="r", sampling_params={"n": 3})
            assert caught.value.status_code == 500
            assert manager.num_open == 0
            assert channel.aborts.pop() == io_struct.AbortReq(rid="r_0", exact=True)
            channel.tokens("r_0", [], 0, io_struct.FinishReason(type="abort"))
            await channel.handled()  # the end of what was sent frees its rid

    play(scenario, tokenizer)


@pytest.mark.parametrize("bias", [{"5": 1e9}, {"9999": 1}, {"x": 1}])
def test_a_refused_bias_names_its_parameter(tokenizer: Tokenizer, bias: dict[str, float]) -> None:
    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        with pytest.raises(RequestRejected) as caught:
            await whole(manager, text="a", sampling_params={"logit_bias": bias})
        assert caught.value.param == "logit_bias"

    play(scenario, tokenizer)


def test_a_rid_in_flight_cannot_be_used_again_until_its_end_is_confirmed(tokenizer: Tokenizer) -> None:
    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        first = asyncio.create_task(whole(manager, text="a", rid="r"))
        await until(lambda: channel.requests)
        with pytest.raises(RequestRejected, match="rid: 'r' is in use"):
            await whole(manager, text="b", rid="r")
        assert len(channel.requests) == 1, "the refused one was sent"
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert channel.aborts == [io_struct.AbortReq(rid="r", exact=True)]
        with pytest.raises(RequestRejected, match="rid: 'r' is in use"):
            await whole(manager, text="b", rid="r")
        channel.tokens("r", [], 0, io_struct.FinishReason(type="abort"))
        await channel.handled()
        again = asyncio.create_task(whole(manager, text="b", rid="r"))
        await until(lambda: len(channel.requests) == 2)
        channel.tokens("r", [70], 1, LENGTH)
        assert (await again)["output_ids"] == [70]

    play(scenario, tokenizer)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_ends_its_own_sequences_and_no_others(
    tokenizer: Tokenizer, stream: bool
) -> None:
    """One exact abort for each sequence: a prefix would also hit the neighbour whose rid begins the same."""

    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        gone = False
        asked = 0

        async def is_disconnected() -> bool:
            nonlocal asked
            asked += 1
            return gone

        async def read() -> None:
            obj = GenerateReqInput(text="a", rid="a1", stream=stream, sampling_params={"n": 2})
            async for _ in manager.generate_request(obj, is_disconnected):
                pass

        with envs.SGLANG_REQUEST_STATE_WAIT_TIMEOUT.override(0.02):
            task = asyncio.create_task(read())
            neighbour = asyncio.create_task(whole(manager, text="a", rid="a10"))
            await until(lambda: len(channel.requests) == 3)
            channel.tokens("a1_0", [70], 1, LENGTH)
            await channel.handled()
            before = asked
            await until(lambda: asked > before + 1)
            assert channel.aborts == []
            gone = True
            with pytest.raises(RequestRejected):
                await task
        assert channel.aborts == [io_struct.AbortReq(rid="a1_1", exact=True)], "only what still ran, once"
        channel.tokens("a10", [70], 1, LENGTH)
        assert (await neighbour)["output_ids"] == [70]

    # The ticker reads its interval once a round; a short first round keeps the test quick.
    with envs.SGLANG_REQUEST_STATE_WAIT_TIMEOUT.override(0.02):
        play(scenario, tokenizer)


def test_closing_a_stream_early_aborts_it(tokenizer: Tokenizer) -> None:
    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        items = manager.generate_request(GenerateReqInput(text="a", rid="r", stream=True))
        first = asyncio.ensure_future(anext(items))
        await until(lambda: channel.requests)
        channel.tokens("r", [70], 1)
        await first
        await items.aclose()
        assert channel.aborts == [io_struct.AbortReq(rid="r", exact=True)]
        assert manager.num_open == 0

    play(scenario, tokenizer)


def test_an_abort_with_a_status_is_an_error_and_takes_the_other_samples_along(tokenizer: Tokenizer) -> None:
    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        task = asyncio.create_task(whole(manager, text="a", rid="r", sampling_params={"n": 2}))
        await until(lambda: len(channel.requests) == 2)
        end = io_struct.FinishReason(type="abort", message="The request queue is full.", status_code=503)
        channel.tokens("r_0", [], 0, end)
        with pytest.raises(RequestRejected, match="queue is full") as caught:
            await task
        assert caught.value.status_code == 503
        assert channel.aborts == [io_struct.AbortReq(rid="r_1", exact=True)]

    play(scenario, tokenizer)


def test_an_abort_by_the_user_is_an_ordinary_answer_with_what_there_is(tokenizer: Tokenizer) -> None:
    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        task = asyncio.create_task(whole(manager, text="a", rid="r"))
        await until(lambda: channel.requests)
        channel.tokens("r", [70], 1)
        manager.abort_request("")
        manager.abort_request("r")
        assert channel.aborts == [io_struct.AbortReq(rid="r")], "an empty rid must abort nothing"
        channel.tokens("r", [], 1, io_struct.FinishReason(type="abort"))
        answer = await task
        assert answer["output_ids"] == [70]
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"

    play(scenario, tokenizer)


def test_logprobs_are_triples_with_text_only_when_asked(tokenizer: Tokenizer) -> None:
    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        for with_text in (False, True):
            task = asyncio.create_task(
                whole(
                    manager,
                    input_ids=[5, 6],
                    rid="r",
                    return_logprob=True,
                    logprob_start_len=0,
                    top_logprobs_num=1,
                    token_ids_logprob=[9],
                    return_text_in_logprobs=with_text,
                )
            )
            await until(lambda: channel.requests and channel.requests[-1].rid == "r" and manager.num_open)
            entry = io_struct.TokenLogprob(logprob=-0.5, token_id=70, top=[(-0.5, 70)], chosen=[(-3.0, 9)])
            first = io_struct.TokenLogprob(logprob=None, token_id=5)
            second = io_struct.TokenLogprob(logprob=-1.0, token_id=6, top=[(-1.0, 6)], chosen=[(-2.0, 9)])
            channel.tokens("r", [70], 1, output_logprobs=[entry], input_logprobs=[first, second])
            channel.tokens("r", [70], 2, LENGTH, output_logprobs=[entry])
            meta = (await task)["meta_info"]
            text = tokenizer.decode([70]) if with_text else None
            assert meta["output_token_logprobs"] == [(-0.5, 70, text)] * 2
            assert meta["output_token_logprobs_length"] == 2
            assert meta["output_top_logprobs"][0] == [(-0.5, 70, text)]
            assert meta["output_token_ids_logprobs"][0][0][:2] == (-3.0, 9)
            assert [item[:2] for item in meta["input_token_logprobs"]] == [(None, 5), (-1.0, 6)]
            assert meta["input_top_logprobs"][0] is None
            assert meta["input_token_ids_logprobs"][1][0][:2] == (-2.0, 9)

    play(scenario, tokenizer)


def test_a_dead_engine_fails_open_and_later_calls_with_its_cause(tokenizer: Tokenizer) -> None:
    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        task = asyncio.create_task(whole(manager, text="a"))
        question = asyncio.create_task(manager.get_internal_state())
        await until(lambda: len(channel.sent) == 2)
        manager.fail_all("rank 0 was killed")
        for waiting in (task, question, whole(manager, text="b"), manager.flush_cache()):
            with pytest.raises(RequestRejected, match="rank 0 was killed") as caught:
                await waiting
            assert caught.value.status_code >= 500

    play(scenario, tokenizer)


def test_a_draining_engine_takes_nothing_new_and_finishes_what_runs(tokenizer: Tokenizer) -> None:
    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        task = asyncio.create_task(whole(manager, text="a", rid="r"))
        await until(lambda: channel.requests)
        manager.stop_accepting("the server is shutting down")
        with pytest.raises(RequestRejected, match="shutting down") as caught:
            await whole(manager, text="b")
        assert caught.value.status_code == 503
        channel.tokens("r", [70], 1, LENGTH)
        assert (await task)["output_ids"] == [70]

    play(scenario, tokenizer)


def test_control_answers_go_to_their_own_questions(tokenizer: Tokenizer) -> None:
    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        tasks = [asyncio.create_task(manager.get_internal_state()) for _ in range(2)]
        await until(lambda: len(channel.sent) == 2)
        for question in reversed(channel.sent):
            state = {"number": question.call_id}
            channel.say(io_struct.GetInternalStateReqOutput(call_id=question.call_id, state=state))
        assert [(await task)[0]["number"] for task in tasks] == [m.call_id for m in channel.sent]

    play(scenario, tokenizer)


def test_flushing_waits_for_running_requests_only_as_long_as_asked(tokenizer: Tokenizer) -> None:
    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        answered: set[int] = set()

        async def answer(*successes: bool) -> None:
            for success in successes:
                await until(lambda: channel.sent and channel.sent[-1].call_id not in answered)
                call_id = channel.sent[-1].call_id
                answered.add(call_id)
                channel.say(io_struct.FlushCacheReqOutput(call_id=call_id, success=success, message="busy"))

        refused, _ = await asyncio.gather(manager.flush_cache(), answer(False))
        flushed, _ = await asyncio.gather(manager.flush_cache(5.0), answer(False, True))
        assert (refused.success, refused.message, flushed.success) == (False, "busy", True)

    play(scenario, tokenizer)


@pytest.mark.parametrize(
    "fields",
    [
        {"text": ["a"] * 11},
        {"input_ids": [[5]] * 11},
        {"text": "a", "sampling_params": {"n": 11}},
        {"text": ["a"] * 6, "sampling_params": {"n": 2}},
        {"text": ["a"] * 6, "sampling_params": [{"n": 2}] * 6},
    ],
    ids=str,
)
def test_a_batch_over_the_limit_is_refused_before_it_is_taken_apart(
    tokenizer: Tokenizer, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a million prompts fit into a body; taking them apart would hold up everybody for seconds."""
    monkeypatch.setattr(splitting, "_prompts", pytest.fail)
    monkeypatch.setattr(splitting, "SinglePrompt", pytest.fail)

    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        with pytest.raises(RequestRejected, match="at most 10 sequences") as caught:
            await whole(manager, **fields)
        assert caught.value.status_code == 503

    with envs.SGLANG_DETOKENIZER_MAX_STATES.override(10):
        play(scenario, tokenizer)


@pytest.mark.parametrize("n", [0, -1, 129, 10**9, True, "3"])
def test_an_illegal_number_of_samples_is_400_and_not_a_full_server(tokenizer: Tokenizer, n: Any) -> None:
    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        with pytest.raises(RequestRejected, match="n: must") as caught:
            await whole(manager, text="a", sampling_params={"n": n})
        assert (caught.value.status_code, caught.value.param) == (400, "n")

    with envs.SGLANG_DETOKENIZER_MAX_STATES.override(10):
        play(scenario, tokenizer)


def test_without_a_tokenizer_ids_go_in_and_out(tokenizer: Tokenizer) -> None:
    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        with pytest.raises(RequestRejected, match="send input_ids"):
            await whole(manager, text="a")
        task = asyncio.create_task(whole(manager, input_ids=[5], rid="r"))
        await until(lambda: channel.requests)
        channel.tokens("r", [70], 1, LENGTH)
        answer = await task
        assert (answer["text"], answer["output_ids"]) == ("", [70])

    play(scenario, None, skip_tokenizer_init=True)


@pytest.mark.parametrize(("defaults", "expected"), [("model", 0.25), ("openai", 1.0)])
def test_unsaid_sampling_values_come_from_where_the_operator_said(
    tokenizer: Tokenizer, defaults: str, expected: float
) -> None:
    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        task = asyncio.create_task(whole(manager, text="a", rid="r"))
        await until(lambda: channel.requests)
        assert channel.requests[0].sampling_params.temperature == expected
        channel.tokens("r", [70], 1, LENGTH)
        await task

    play(scenario, tokenizer, sampling_defaults=defaults)


def test_a_message_that_cannot_be_handled_fails_the_calls_instead_of_hanging_them(
    tokenizer: Tokenizer,
) -> None:
    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        task = asyncio.create_task(whole(manager, text="a"))
        await until(lambda: channel.requests)
        channel.say(io_struct.ShutdownReq())
        with pytest.raises(RequestRejected, match="not meant for"):
            await task

    play(scenario, tokenizer)


def test_the_limit_on_sequences_in_flight_is_a_503(tokenizer: Tokenizer) -> None:
    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        with envs.SGLANG_DETOKENIZER_MAX_STATES.override(1), pytest.raises(RequestRejected) as caught:
            await whole(manager, text="a", sampling_params={"n": 2})
        assert caught.value.status_code == 503
        assert channel.sent == []

    play(scenario, tokenizer)


# --- text that cannot be made

#: A token that the tokenizer below fails on, as a library or a file may.
POISON = 300


class Poisoned(Tokenizer):
    """A real tokenizer, but for one token."""

    def __init__(self, sound: Tokenizer) -> None:
        self.__dict__.update(sound.__dict__)

    def decode(self, ids: Any, *flags: Any, **named: Any) -> str:
        if POISON in ids:
            raise ValueError("poison at /a/path/of/this/machine")
        return super().decode(ids, *flags, **named)

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ends", [False, True])
def test_tokens_without_text_end_their_own_answer_and_no_other(
    tokenizer: Tokenizer, stream: bool, ends: bool
) -> None:
    """What one model draws for one client must not end the server for all of them."""

    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        bad = asyncio.create_task(whole(manager, text="a", rid="bad", stream=stream))
        good = asyncio.create_task(whole(manager, text="a", rid="good", stream=stream))
        await until(lambda: len(channel.requests) == 2)
        ids = tokenizer.encode("ok")
        channel.tokens("good", ids[:1], 1)
        channel.tokens("bad", [POISON], 1, LENGTH if ends else None)
        channel.tokens("bad", [POISON], 2)  # already on its way
        channel.tokens("good", ids[1:], len(ids), LENGTH)
        with pytest.raises(RequestRejected) as caught:
            await bad
        assert caught.value.status_code == 500 and "failed to make this answer" in caught.value.message
        assert "/a/path" not in caught.value.message
        assert (await good)["text"] == "ok"
        # Told to the scheduler unless it has already ended there; then its name is free at once.
        assert channel.aborts == ([] if ends else [io_struct.AbortReq(rid="bad", exact=True)])
        assert manager.num_open == 0
        again = asyncio.create_task(whole(manager, text="a", rid="bad" if ends else "next"))
        await until(lambda: len(channel.requests) == 3)
        channel.tokens(channel.requests[-1].rid, ids, 2, LENGTH)
        assert (await again)["text"] == "ok"

    play(scenario, Poisoned(tokenizer))


def test_a_prompt_without_text_is_refused_and_leaves_nothing_behind(tokenizer: Tokenizer) -> None:
    """What stands before the answer is decoded when it begins; a failure there must not keep the call."""

    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        for _ in range(2):
            with pytest.raises(RequestRejected, match="ValueError") as caught:
                await whole(manager, input_ids=[POISON], rid="r", sampling_params={"n": 2})
            assert caught.value.status_code == 500 and manager.num_open == 0 and not channel.sent

    poisoned = Poisoned(tokenizer)
    poisoned.context_of = lambda ids, skip_special_tokens=True: list(ids)  # type: ignore[method-assign]
    play(scenario, poisoned)


def test_a_logprob_text_that_cannot_be_made_is_the_servers_failure(tokenizer: Tokenizer) -> None:
    """It is not the client's mistake: a ValueError of the tokenizer read as 400."""

    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        fields = {"return_logprob": True, "return_text_in_logprobs": True, "top_logprobs_num": 1}
        task = asyncio.create_task(whole(manager, text="a", rid="r", **fields))
        await until(lambda: channel.requests)
        entry = io_struct.TokenLogprob(logprob=-1.0, token_id=5, top=[(-2.0, POISON)])
        channel.tokens("r", [5], 1, LENGTH, output_logprobs=[entry])
        with pytest.raises(RequestRejected) as caught:
            await task
        assert caught.value.status_code == 500 and manager.num_open == 0

    play(scenario, Poisoned(tokenizer))


def test_a_stop_string_that_is_a_special_token_is_sent_with_its_id(tokenizer: Tokenizer) -> None:
    """Ranks look for it by id: their text skips special tokens. What is more than one token is text only."""

    async def scenario(manager: TokenizerManager, channel: FakeScheduler) -> None:
        stop = ["<|im_start|>", "x", " <|im_start|>", "<|im_end|>\n", "<|im", "<|im_end|>"]
        task = asyncio.create_task(whole(manager, text="a", rid="r", sampling_params={"stop": stop, "n": 2}))
        await until(lambda: len(channel.requests) == 2)
        for request in channel.requests:
            assert request.special_stops == {1: "<|im_start|>", 2: "<|im_end|>"}
            assert request.sampling_params.stop == stop, "it may also be written in letters"
        for rid in ("r_0", "r_1"):
            end = io_struct.FinishReason(type="stop", matched="<|im_start|>")
            channel.tokens(rid, [*tokenizer.encode("ok<"), 1], 3, end)
        answers = await task
        assert [answer["text"] for answer in answers] == ["ok<", "ok<"], "held text comes with the end"

    play(scenario, tokenizer)
