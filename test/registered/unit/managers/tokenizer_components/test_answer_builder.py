"""The native answers of one call: cumulative or only what is new, at a cost that does not grow."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit-cpu")

from typing import Any

import pytest

from sglang.srt.managers.tokenizer_components.answer import AnswerBuilder
from sglang.srt.managers.tokenizer_components.state import CallState, SampleState
from sglang.srt.messages import io_struct
from sglang.srt.sampling.sampling_params import SamplingParams

STEPS = 40


class CountedTexts:
    """Texts of tokens, and how often one was asked for."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, token_id: int) -> str:
        self.count += 1
        return f"<{token_id}>"


def new_sample(index: int = 0) -> SampleState:
    message = io_struct.TokenizedGenerateReqInput(
        rid="r",
        input_ids=[1, 2],
        sampling_params=SamplingParams(),
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=1,
        token_ids_logprob=[9],
    )
    return SampleState(CallState(), message, index)


def logprob(token_id: int) -> io_struct.TokenLogprob:
    return io_struct.TokenLogprob(
        logprob=-float(token_id), token_id=token_id, top=[(-1.0, token_id)], chosen=[(-2.0, 9)]
    )


def take(sample: SampleState, step: int) -> None:
    """One token, whose text is one more letter; the prompt's logprobs come with the first."""
    sample.take(
        io_struct.TokenOutput(
            rid="r",
            new_ids=[step],
            finish_reason=None,
            prompt_tokens=2,
            completion_tokens=step,
            cached_tokens=0,
            num_retractions=0,
            output_logprobs=[logprob(step)],
            input_logprobs=[logprob(1), logprob(2)] if step == 1 else None,
        ),
        "x" * step,
        dp_rank=0,
    )


def answers(builder: AnswerBuilder, *samples: SampleState) -> list[dict[str, Any]]:
    told = []
    for step in range(1, STEPS + 1):
        for sample in samples:
            take(sample, step)
            told.append(builder.answer(sample, with_index=len(samples) > 1))
    return told


def new_builder(texts: CountedTexts | None, *, incremental: bool) -> AnswerBuilder:
    return AnswerBuilder(
        weight_version="v", return_prompt_token_ids=False, token_text=texts, incremental=incremental
    )


def joined(told: list[dict[str, Any]], name: str) -> list[Any]:
    return [entry for answer in told for entry in answer["meta_info"][name]]


OUTPUT_LISTS = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
INPUT_LISTS = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")


def test_incremental_answers_join_to_the_last_cumulative_one() -> None:
    news = answers(new_builder(None, incremental=True), new_sample())
    last = answers(new_builder(None, incremental=False), new_sample())[-1]
    assert "".join(answer["text"] for answer in news) == last["text"] == "x" * STEPS
    assert [i for answer in news for i in answer["output_ids"]] == last["output_ids"]
    for name in OUTPUT_LISTS:
        assert [len(answer["meta_info"][name]) for answer in news] == [1] * STEPS
        assert joined(news, name) == last["meta_info"][name]
    for name in INPUT_LISTS:
        assert news[0]["meta_info"][name] == news[-1]["meta_info"][name] == last["meta_info"][name]
    assert news[-1]["meta_info"]["output_token_logprobs_length"] == STEPS
    assert news[-1]["meta_info"]["completion_tokens"] == STEPS


@pytest.mark.parametrize("incremental", [False, True])
def test_each_entry_is_built_once_however_long_the_stream(incremental: bool) -> None:
    texts = CountedTexts()
    answers(new_builder(texts, incremental=incremental), new_sample())
    # The token, one alternative and one chosen id for each position, two of them in the prompt.
    assert texts.count == 3 * (STEPS + 2)


def test_samples_of_a_call_are_counted_apart() -> None:
    news = answers(new_builder(None, incremental=True), new_sample(0), new_sample(1))
    for index in (0, 1):
        mine = [answer for answer in news if answer["index"] == index]
        assert [i for answer in mine for i in answer["output_ids"]] == list(range(1, STEPS + 1))
        assert len(joined(mine, "output_token_logprobs")) == STEPS


def test_an_answer_does_not_change_once_it_is_told() -> None:
    """A reader may keep the pieces of a stream, on another thread even."""
    told = answers(new_builder(None, incremental=False), new_sample())
    assert [len(answer["output_ids"]) for answer in told] == list(range(1, STEPS + 1))
    for name in OUTPUT_LISTS:
        assert [len(answer["meta_info"][name]) for answer in told] == list(range(1, STEPS + 1))


def meta_with(spec: io_struct.SpecCounts | None, *, completion_tokens: int) -> dict[str, Any]:
    sample = new_sample()
    take(sample, 1)
    sample.spec, sample.completion_tokens = spec, completion_tokens
    return new_builder(None, incremental=False).answer(sample, with_index=False)["meta_info"]


def test_the_counts_of_a_draft_are_told_under_sglangs_names() -> None:
    """Its accept length divides all tokens of the answer, the prompt's own among them."""
    spec = io_struct.SpecCounts()
    for correct in (3, 0, 1, 3):
        spec.add_round(correct, 3)
    told = {name: value for name, value in meta_with(spec, completion_tokens=12).items() if "spec" in name}
    assert told == {
        "spec_verify_ct": 4,
        "spec_num_correct_drafts": 7,
        "spec_num_proposed_drafts": 12,
        "spec_correct_drafts_histogram": [1, 1, 0, 2],
        "spec_accept_length": 3.0,
        "spec_accept_rate": 7 / 12,
    }


def test_ratios_of_nothing_are_left_out() -> None:
    """One token needs no round; the rounds of a full pool propose nothing."""
    assert "spec_accept_length" not in (meta := meta_with(io_struct.SpecCounts(), completion_tokens=1))
    assert meta["spec_verify_ct"] == 0 and meta["spec_correct_drafts_histogram"] == []
    narrow = io_struct.SpecCounts()
    narrow.add_round(0, 0)
    meta = meta_with(narrow, completion_tokens=2)
    assert meta["spec_accept_length"] == 2.0 and "spec_accept_rate" not in meta


def test_without_a_draft_nothing_of_one_is_told() -> None:
    assert not [name for name in meta_with(None, completion_tokens=1) if "spec" in name]


def test_the_counts_of_an_output_survive_the_wire() -> None:
    sample, counts = new_sample(), io_struct.SpecCounts(2, 3, 6, [1, 0, 0, 1])
    output = io_struct.TokenOutput(
        rid="r",
        new_ids=[5],
        finish_reason=None,
        prompt_tokens=2,
        completion_tokens=1,
        cached_tokens=0,
        num_retractions=0,
        spec=counts,
    )
    sent = io_struct.decode(io_struct.encode(io_struct.BatchTokenIDOutput(outputs=[output])))
    assert isinstance(sent, io_struct.BatchTokenIDOutput)
    sample.take(sent.outputs[0], "x", dp_rank=0)
    assert sample.spec == counts
