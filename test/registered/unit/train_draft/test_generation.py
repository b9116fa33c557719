"""Texts are the target's own, with what it left at each position; loops are dropped."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="unit-cpu")

import pytest
import torch
from transformers import AutoModelForCausalLM

from sglang.test.tiny_models import write_tiny_model
from train_draft.generation import Plan, Question, best_tokens, generate
from train_draft.target import PlainTarget, default_aux_layers
from train_draft.texts import LoopFilter, TextStore


def silent(line):
    pass


def test_greedy_texts_and_captures_are_those_of_an_independent_model(tiny_folder, texts):
    """A capture that is one layer or one position off costs too few accepted tokens to be noticed."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()
    for text in texts[:5]:
        with torch.inference_mode():
            out = model(text.ids[None], output_hidden_states=True)
        streams = torch.cat([out.hidden_states[layer + 1][0] for layer in (0, 1, 2)], dim=-1)
        torch.testing.assert_close(text.features, streams[:-1], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(text.final, out.hidden_states[-1][0, :-1], atol=1e-4, rtol=1e-4)
        assert torch.equal(out.logits[0, text.prompt_len - 1 : -1].argmax(-1), text.ids[text.prompt_len :])


def test_a_text_does_not_depend_on_what_was_decoded_beside_it(target, prompts):
    """Rows are refilled while others go on: a row must not see what its place held before."""
    questions = [Question(index, "chat", ids) for index, ids in enumerate(prompts)]

    def answers(rows):
        texts = []
        plan = Plan(new_tokens=8, rows=rows, keep_loops=True, sampled_share=0.5, seed=5)
        generate(target, questions, plan, lambda some, dropped: texts.extend(some), silent)
        return {text.index: text for text in texts}

    few, many = answers(3), answers(16)
    assert few.keys() == many.keys() == set(range(len(prompts)))
    for index, text in few.items():
        assert text.ids.tolist() == many[index].ids.tolist()
        torch.testing.assert_close(text.features, many[index].features, atol=1e-4, rtol=1e-4)


def test_generation_ends_when_it_has_enough(target, prompts):
    texts = []
    plan = Plan(new_tokens=8, rows=4, keep_loops=True, enough=30)
    questions = [Question(index, "chat", ids) for index, ids in enumerate(prompts)]
    generate(target, questions, plan, lambda some, dropped: texts.extend(some), silent)
    assert 30 <= sum(text.num_new for text in texts) < 8 * len(prompts)


def test_a_loop_is_noticed_at_the_fifth_time_and_not_before():
    loop = LoopFilter()
    # The gram 1 2 3 4 ends at every fourth token.
    found = [loop.is_loop(token) for token in [1, 2, 3, 4] * 5]
    assert found.index(True) == 19
    calm = LoopFilter()
    assert not any(calm.is_loop(token) for token in [1, 2, 3, 4] * 4 + [9, 1, 2, 3])
    same = LoopFilter()
    assert [same.is_loop(7) for _ in range(8)] == [False] * 7 + [True]


def test_loops_are_dropped_by_name_and_the_rest_is_kept(target, prompts, tmp_path, monkeypatch):
    # The tiny target hardly loops, so here a token that comes back is a loop already.
    monkeypatch.setattr("train_draft.texts.LOOP_GRAM", 1)
    monkeypatch.setattr("train_draft.texts.LOOP_LIMIT", 1)
    store = TextStore(tmp_path)
    questions = [Question(index, "gsm8k", ids) for index, ids in enumerate(prompts)]
    generate(target, questions, Plan(new_tokens=12, rows=8, shard_size=2), store.write, silent)
    kept, dropped = store.done()
    assert kept and dropped and kept | dropped == set(range(len(prompts))) and not kept & dropped
    count = store.count()
    assert (count.kept, count.dropped) == (len(kept), len(dropped))
    for text in store.read():
        continuation = text.ids[text.prompt_len :].tolist()
        assert len(set(continuation)) == len(continuation)
        assert text.kind == "gsm8k" and len(text.features) == len(text.ids) - 1


def test_a_half_written_shard_does_not_count(texts, tmp_path):
    store = TextStore(tmp_path)
    store.write(texts[:2], [9])
    (tmp_path / "shard-00001.part").write_bytes(b"half")
    assert store.done() == ({0, 1}, {9})
    store.write(texts[2:3], [])
    assert [text.index for text in store.read()] == [0, 1, 2]


def test_the_best_token_is_told_apart_where_bf16_rounds_two_logits_to_one():
    head = torch.zeros(6, 2, dtype=torch.bfloat16)
    head[2], head[4] = torch.tensor([8.0, 0.0]), torch.tensor([8.0, 0.015625])
    final = torch.tensor([[2.0, 1.0]], dtype=torch.bfloat16)
    logits = final @ head.T
    assert logits[0, 2] == logits[0, 4]
    assert best_tokens(final, logits, head).tolist() == [4]


def test_a_target_that_is_no_plain_llama_is_refused(tmp_path):
    other = write_tiny_model(tmp_path / "qwen3", architecture="Qwen3ForCausalLM")
    with pytest.raises(ValueError, match="Qwen3ForCausalLM"):
        PlainTarget.from_path(other, torch.float32, (0, 1))


def test_aux_layers_have_a_default_only_where_three_layers_are_different():
    assert default_aux_layers(30) == (1, 14, 26)
    with pytest.raises(ValueError, match="a target of 4 layers"):
        default_aux_layers(4)
