"""When a request ends by itself: order of the checks, stop strings over several tokens, end ids, lengths."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit-cpu")

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.batch.req import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.stop_matcher import StopMatcher
from sglang.test.fakes.fake_channel import Answer
from sglang.test.fakes.fake_worker import EOS_ID, SPECIAL_ID, FakeTokenizer
from sglang.test.fakes.scheduler_driver import make_request, run

New = Callable[..., Scheduler]


def generate(scheduler: Scheduler, tokens: list[int], max_new_tokens: int = 50, **fields: object) -> Answer:
    """A request whose model draws `tokens` one after another, then 'z' for ever."""
    scheduler.worker.next_token = lambda ids: tokens[len(ids) - 1] if len(ids) <= len(tokens) else ord("z")
    return run(scheduler, make_request("r", [1], max_new_tokens, **fields))["r"]


def text(words: str) -> list[int]:
    return list(words.encode())


@pytest.mark.parametrize(
    ("words", "stop", "length"),
    [
        ("abcEND more", ["END"], 6),
        ("ENEND", ["END"], 5),
        ("abcdefg", ["bcd", "cd"], 4),
        ("DEFGX DEFGHIJ", ["DEFGHIJ"], 13),
        ("xyz", ["x"], 1),
        ("abcdefghijklmnopqrstuvwxyz", ["cdefghijklmnopqrstu"], 21),
        ("üüüüüüüüüüüü", ["üüüüüüüüüü"], 20),
        ("grüße!", ["üß"], 6),
    ],
)
def test_a_stop_string_ends_a_request_with_the_token_that_completes_it(
    new_scheduler: New, words: str, stop: list[str], length: int
) -> None:
    answer = generate(new_scheduler(), text(words), stop=stop)
    assert answer.finish_reason is not None and answer.finish_reason.type == "stop"
    assert answer.finish_reason.matched == stop[0] and len(answer.ids) == length


def test_a_stop_string_may_begin_in_the_middle_of_a_token_and_end_in_another(new_scheduler: New) -> None:
    # Token 256 + c reads " c".
    answer = generate(
        new_scheduler(), [256 + ord("a"), 256 + ord("b"), 256 + ord("c"), *text("def")], stop=["b cd"]
    )
    assert answer.finish_reason is not None and answer.finish_reason.matched == "b cd"
    assert len(answer.ids) == 4


def test_the_stop_string_that_is_complete_first_wins(new_scheduler: New) -> None:
    answer = generate(new_scheduler(), [700, 701], stop=["0>", "<70", "<700>"])
    assert answer.finish_reason is not None and answer.finish_reason.matched == "<70"
    assert len(answer.ids) == 1


def test_special_tokens_between_do_not_hide_a_stop_string(new_scheduler: New) -> None:
    tokens = [*text("E"), *[SPECIAL_ID] * 30, *text("ND")]
    answer = generate(new_scheduler(), tokens, stop=["END"])
    assert answer.finish_reason is not None and answer.finish_reason.matched == "END"
    answer = generate(new_scheduler(), tokens, stop=["END"], skip_special_tokens=False)
    assert answer.finish_reason is not None and answer.finish_reason.type == "length"


def test_end_ids_end_a_request_and_are_counted(new_scheduler: New) -> None:
    answer = generate(new_scheduler(), [5, EOS_ID])
    assert answer.ids == [5, EOS_ID] and answer.completion_tokens == 2
    assert answer.finish_reason is not None and answer.finish_reason.matched == EOS_ID
    answer = generate(new_scheduler(), [5, 6, 7], stop_token_ids=[6])
    assert answer.ids == [5, 6] and answer.finish_reason is not None and answer.finish_reason.matched == 6


def test_an_end_id_as_the_first_token_is_an_answer_of_one_token(new_scheduler: New) -> None:
    answer = generate(new_scheduler(), [EOS_ID], return_logprob=True)
    assert answer.ids == [EOS_ID] and len(answer.output_logprobs) == 1
    assert answer.finish_reason is not None and answer.finish_reason.type == "stop"


def test_ignore_eos_switches_stop_ids_off_too_and_makes_the_length_exact(new_scheduler: New) -> None:
    answer = generate(new_scheduler(), [5, EOS_ID, 6, 7], 10, ignore_eos=True, stop_token_ids=[6])
    assert len(answer.ids) == 10
    assert answer.finish_reason is not None and answer.finish_reason.type == "length"
    assert answer.finish_reason.length == 10


def test_min_new_tokens_holds_back_end_ids_but_not_stop_text(new_scheduler: New) -> None:
    answer = generate(new_scheduler(), [EOS_ID, 6, 6, EOS_ID], min_new_tokens=3, stop_token_ids=[6])
    assert len(answer.ids) == 4 and answer.ids[-1] == EOS_ID
    answer = generate(new_scheduler(), text("aSTOP"), min_new_tokens=20, stop=["STOP"])
    assert answer.finish_reason is not None and answer.finish_reason.matched == "STOP"


def test_a_stop_string_is_looked_at_before_an_end_id_and_that_before_the_length(new_scheduler: New) -> None:
    answer = generate(new_scheduler(), text("ab"), 2, stop=["b"], stop_token_ids=[ord("b")])
    assert answer.finish_reason is not None and answer.finish_reason.matched == "b"
    answer = generate(new_scheduler(), text("ab"), 2, stop_token_ids=[ord("b")])
    assert answer.finish_reason is not None and answer.finish_reason.matched == ord("b")


def test_a_stop_string_without_a_tokenizer_is_refused_with_the_cure(new_scheduler: New) -> None:
    scheduler = new_scheduler()
    scheduler = Scheduler(scheduler.worker, tokenizer=None, channel=scheduler.channel)
    got = run(scheduler, make_request("bad", [1], 4, stop=["x"]), make_request("ok", [1], 4))
    assert got["bad"].finish_reason is not None and got["bad"].finish_reason.status_code == 400
    assert "stop_token_ids" in (got["bad"].finish_reason.message or "") and len(got["ok"].ids) == 4


@settings(max_examples=200)
@given(
    tokens=st.lists(
        st.sampled_from([*b"ab\xc3\xbc", 256 + ord("a"), 256 + ord("b"), 700, SPECIAL_ID]), max_size=40
    ),
    stop=st.lists(st.text("abü 7<", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_the_tail_finds_exactly_what_the_whole_text_shows(tokens: list[int], stop: list[str]) -> None:
    """Token by token: a request ends at the first token after which the full text holds a stop string."""
    tokenizer = FakeTokenizer()
    matcher = StopMatcher(tokenizer, eos_token_ids=(), vocab_size=1000, context_len=1000)
    message = make_request("r", [1], 1000, stop=stop)
    from sglang.srt.batch.sampling_state import SamplingState

    req = Req(message, SamplingState(message.sampling_params, 0, ()), 1000, 0)
    for token in tokens:
        req.output_ids.append(token)
        shown = tokenizer.decode(req.output_ids)
        reason = matcher.check(req)
        assert (reason is not None) == any(one in shown for one in stop)
        if reason is not None:
            assert reason.matched in [one for one in stop if one in shown]
            return


STOP_WORD = "<998>"  # how the tokenizer of these tests writes SPECIAL_ID


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_a_stop_string_that_is_a_special_token_ends_a_request_at_that_token(
    new_scheduler: New, skip: bool, ignore_eos: bool
) -> None:
    """The text skips it, so it is known by its id; in all else it is a stop string."""
    answer = generate(
        new_scheduler(),
        [*text("ab"), SPECIAL_ID, *text("cd")],
        stop=["no", STOP_WORD],
        special_stops={SPECIAL_ID: STOP_WORD},
        skip_special_tokens=skip,
        ignore_eos=ignore_eos,
        min_new_tokens=10,
    )
    assert answer.finish_reason is not None and answer.finish_reason.type == "stop"
    assert answer.finish_reason.matched == STOP_WORD and answer.ids == [*text("ab"), SPECIAL_ID]


def test_without_its_id_a_special_stop_string_is_never_found(new_scheduler: New) -> None:
    """The fault that the id is for: the request runs to its limit."""
    answer = generate(new_scheduler(), [*text("ab"), SPECIAL_ID], 10, stop=[STOP_WORD])
    assert answer.finish_reason is not None and answer.finish_reason.type == "length"


def test_a_special_stop_string_written_in_letters_ends_a_request_too(new_scheduler: New) -> None:
    answer = generate(
        new_scheduler(), text("a<998>b"), stop=[STOP_WORD], special_stops={SPECIAL_ID: STOP_WORD}
    )
    assert answer.finish_reason is not None and answer.finish_reason.matched == STOP_WORD
    assert len(answer.ids) == 6


def test_a_longer_stop_string_around_a_special_token_is_found_where_the_text_shows_it(
    new_scheduler: New,
) -> None:
    tokens, fields = [*text("ab"), SPECIAL_ID, *text("cd")], {"stop": ["b<998>", STOP_WORD]}
    shown = generate(
        new_scheduler(), tokens, special_stops={SPECIAL_ID: STOP_WORD}, skip_special_tokens=False, **fields
    )
    assert shown.finish_reason is not None and shown.finish_reason.matched == "b<998>"
    hidden = generate(new_scheduler(), tokens, 10, stop=["b<998>", "<998>c"])
    assert hidden.finish_reason is not None and hidden.finish_reason.type == "length"


def test_tokens_that_cannot_be_read_end_their_own_request_and_no_other(new_scheduler: New) -> None:
    """The scheduler's loop is everybody's: an exception in it ends the rank, and the engine with it."""
    scheduler = new_scheduler()

    class Poisoned(FakeTokenizer):
        def decode(self, ids: object, *flags: bool, **named: bool) -> str:
            raise RuntimeError("poison")

    scheduler = Scheduler(scheduler.worker, tokenizer=Poisoned(), channel=scheduler.channel)
    got = run(scheduler, make_request("bad", [1], 4, stop=["x"]), make_request("ok", [1], 4))
    assert got["bad"].finish_reason is not None and got["bad"].finish_reason.status_code == 500
    assert got["bad"].finish_reason.type == "abort" and len(got["ok"].ids) == 4


def test_a_stop_string_is_looked_for_behind_the_prompt(new_scheduler: New) -> None:
    """The first word of an answer has its space there, and the text of the prompt is not searched."""

    class FirstWordBare(FakeTokenizer):
        """As SentencePiece decodes: no space before the first word of a text."""

        def context_of(self, ids: list[int], skip_special_tokens: bool = True) -> list[int]:
            return ids[-1:]

        def decode(self, ids: list[int], *flags: bool, **named: bool) -> str:  # type: ignore[override]
            return super().decode(ids, *flags, **named).removeprefix(" ")

    base = new_scheduler()
    scheduler = Scheduler(base.worker, tokenizer=FirstWordBare(), channel=base.channel)
    base.worker.next_token = lambda ids: 256 + ord("w")
    got = run(
        scheduler,
        make_request("spaced", [256 + ord("p")], 9, stop=[" w"]),
        make_request("prompt", [256 + ord("p")], 9, stop=["p"]),
        make_request("border", [256 + ord("p")], 9, stop=["p w"]),
    )
    assert len(got["spaced"].ids) == 1
    assert len(got["prompt"].ids) == len(got["border"].ids) == 9
