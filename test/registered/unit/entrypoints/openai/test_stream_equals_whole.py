"""However an answer is cut into outputs, its stream and its whole answer say the same."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="unit-cpu")

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.test.fakes.fake_manager import EOS, FakeAnswer, FakeManager
from sglang.test.server.openai_calls import CHAT, COMPLETIONS, choices_of, events, post


@st.composite
def answers(draw):
    """A text cut into groups of tokens anywhere, ended in any of the ways there are."""
    ids = list(draw(st.text(alphabet="aé漢🙂 \n", max_size=8)).encode())
    reason = draw(
        st.sampled_from(
            [
                {"type": "stop", "matched": EOS},
                {"type": "stop", "matched": "END"},
                {"type": "length", "length": 5},
                {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None},
            ]
        )
    )
    if reason.get("matched") == EOS:
        ids.append(EOS)
    groups = []
    while ids:
        size = draw(st.integers(1, len(ids)))
        groups.append(ids[:size])
        ids = ids[size:]
    return FakeAnswer(groups=groups or [[]], finish_reason=reason)


def joined(parts, empty):
    total = dict(empty)
    for part in parts:
        for key, values in (part or {}).items():
            total[key] = total[key] + values
    return total


@settings(max_examples=60)
@given(st.lists(answers(), min_size=1, max_size=3), st.integers(0, 3), st.booleans())
def test_a_chat_stream_adds_up_to_the_whole_answer(scripts, tops, with_logprobs):
    body = {"n": len(scripts), "return_token_ids": True, "stream_options": {"include_usage": True}}
    if with_logprobs:
        body |= {"logprobs": True, "top_logprobs": tops}
    whole = post(FakeManager(*scripts), CHAT, **body).json()
    chunks = events(post(FakeManager(*scripts), CHAT, stream=True, **body))
    assert chunks[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = choices_of(chunks, choice["index"])
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(p["delta"]["content"] for p in parts) == choice["message"]["content"]
        assert [i for p in parts for i in p.get("token_ids", [])] == choice["token_ids"]
        assert [p["finish_reason"] for p in parts].count(None) == len(parts) - 1
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert parts[-1]["matched_stop"] == choice["matched_stop"]
        total = joined([p["logprobs"] for p in parts], {"content": []})
        assert total == (choice["logprobs"] or {"content": []})


@settings(max_examples=60)
@given(st.lists(answers(), min_size=1, max_size=3), st.booleans(), st.sampled_from([None, 0, 2]))
def test_a_completion_stream_adds_up_to_the_whole_answer(scripts, echo, logprobs):
    body = {"prompt": ["né", "b"], "n": len(scripts), "echo": echo, "logprobs": logprobs}
    body |= {"stream_options": {"include_usage": True}}
    whole = post(FakeManager(*scripts), COMPLETIONS, **body).json()
    chunks = events(post(FakeManager(*scripts), COMPLETIONS, stream=True, **body))
    assert chunks[-1]["usage"] == whole["usage"]
    assert len(whole["choices"]) == 2 * len(scripts)
    for choice in whole["choices"]:
        parts = choices_of(chunks, choice["index"])
        assert "".join(p["text"] for p in parts) == choice["text"]
        assert [p["finish_reason"] for p in parts].count(None) == len(parts) - 1
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        empty = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        assert joined([p["logprobs"] for p in parts], empty) == (choice["logprobs"] or empty)
