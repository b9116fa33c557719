"""Greedy text of the real model is that of transformers, for twenty prompts in one batch."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=45, suite="server-cpu")

import pytest
import torch

from sglang.srt.configs.model_path import resolve_model_path
from sglang.srt.tokenizer.tokenizer import load_tokenizer
from sglang.test.prompts import PROMPTS
from sglang.test.worker_driver import driven_worker

# Reading the file takes the reference half a minute of computing, more on a busy machine.
pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = "smollm2-135m-instruct"
NEW_TOKENS = 64


@pytest.fixture(scope="module")
def reference():
    """The same file read by transformers' own dequantizer, in float32."""
    transformers = pytest.importorskip("transformers")
    try:
        path = resolve_model_path(MODEL)
    except ValueError as error:
        pytest.skip(str(error))
    named = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **named, dtype=torch.float32, quantization_config=transformers.GgufConfig(dequantize=True)
    )
    return model.eval()


@pytest.fixture(scope="module")
def answers():
    """64 greedy tokens for each prompt, all prompts in one batch of different lengths."""
    tokenizer = load_tokenizer(resolve_model_path(MODEL))
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in PROMPTS]
    with driven_worker(MODEL, max_total_tokens=4096) as driver:
        made = driver.generate([driver.add(ids) for ids in prompts], NEW_TOKENS)
    return list(zip(prompts, made, strict=True))


@torch.inference_mode()
def test_64_greedy_tokens_on_20_prompts_are_those_of_the_reference(reference, answers):
    """Each of our tokens is the reference's best one after the prompt and our tokens before it.

    By induction that is its greedy text. The smallest lead of a best token shows that rounding decides
    nowhere.
    """
    smallest_lead = float("inf")
    for prompt, made in answers:
        logits = reference(torch.tensor([prompt + made[:-1]])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(dim=-1).tolist() == made, f"after {prompt}"
        best = logits.topk(2, dim=-1).values
        smallest_lead = min(smallest_lead, float((best[:, 0] - best[:, 1]).min()))
    assert len(answers) == 20 and smallest_lead > 1e-4


@torch.inference_mode()
def test_the_generate_loop_of_the_reference_gives_the_same_text(reference, answers):
    """One prompt through `generate` itself, so that the induction above is not our only witness."""
    prompt, made = answers[1]
    ids = torch.tensor([prompt])
    out = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert out[0, len(prompt) :].tolist() == made
