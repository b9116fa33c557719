"""Owns the README of a trained draft: data, recipe, times, figures, and how to get it again and serve it.

Written at the end of a run from what the run recorded. It must not hold a figure of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from train_draft.evaluation import Judgement
from train_draft.heldout import committed_hash
from train_draft.settings import Settings
from train_draft.stages import Run, Trained

_TEMPLATE = """\
# EAGLE3 draft for {model}

Proposes tokens for `{model}`, which checks them: greedy answers stay the same, token for token.

    python -m sglang.launch_server --model-path {model} \\
        --speculative-algorithm EAGLE3 --speculative-draft-model-path {folder}

One layer, {millions:.2f} million parameters in bf16, a head of its own over {draft_vocab} of the target's
tokens. It reads the residual stream after layers {layers} of the target (counted from 0). The embedding is
the target's and is not in the file.

## Figures

Greedy, on held-out prompts whose templates, subjects and questions were not trained on; texts that end in
loops are left out. Tokens per round count what a verify round emits, without the token of the prefill: 1.00
would mean that no draft token was ever accepted.

| set | texts | tokens | accuracy at depth 1 / 2 / 3 | chain of 3 | tree 3-4-8 | coverage |
| --- | --- | --- | --- | --- | --- | --- |
{figures}

Accuracy is how often the draft names the target's token when all tokens before it are right. The two lengths
are exact walks over the target's texts: 3 steps with one branch, and 3 steps with 4 branches and 8 nodes.
Coverage is the share of the texts' tokens that are in the draft vocabulary. In the last training steps the
draft named {fit:.2f} of its training texts' tokens at depth 1.

## Data

* The target's own answers, {new_tokens} tokens at most, a fifth of them drawn at temperature 0.8 and the rest
  greedily; its weights as the engine reads them, its chat template with the default system message.
* Prompts: {prompts},
  mixed, until there were {training_tokens} tokens.
* {kept} texts with {tokens} tokens were kept, {dropped} were dropped as loops (a 4-gram for the fifth time).
* Held out: `scripts/train_draft/heldout.jsonl`, sha256 `{hash}`.
  It was committed before training, and the evaluation reads nothing else. Its questions are GSM8K's (MIT
  licence, copyright 2021 OpenAI).

## Recipe

* {start}
* Training-time test of {depth} unrolls with weights 0.8^k, soft cross-entropy to the target over the draft
  vocabulary; {head}.
* AdamW, peak rate {rate}, cosine to 1 %, 4 % warm-up, weight decay 0.01 on matrices, clip 1.0, {rows} rows a
  step, {epochs} epochs, {steps} steps, seed {seed}. The last step is what was written; none was picked.
* Fp32 weights and optimiser, {dtype} matrix products, torch {torch}, {threads} thread(s) of a {cpu}.

| stage | wall s | processor s |
| --- | --- | --- |
{times}

## Again

    python scripts/train_draft/main.py train --model-path {model} \\
        {source_flags} --training-tokens {training_tokens} \\
        --epochs {epochs} --learning-rate {rate} --seed {seed} \\
        --work-folder WORK --output-folder {folder}

With `--resume` it goes on with a run that was killed. The figures alone:

    python scripts/train_draft/main.py evaluate --model-path {model} \\
        --draft-path {folder} --work-folder WORK
"""

_BORROWED = """\
Borrowed start: head rows, output norm and layer are the target's, the fusion is an identity on the latest
  captured layer plus noise."""


def write_card(folder: Path, run: Run, trained: Trained, judgements: Mapping[str, Judgement]) -> None:
    """Write README.md beside the tensors."""
    text = _TEMPLATE.format(
        **_settings(run.settings),
        **_texts(run),
        folder=folder,
        millions=sum(tensor.numel() for tensor in trained.draft.network(run.target).weights.values()) / 1e6,
        layers=", ".join(map(str, run.target.aux_layers)),
        figures="\n".join(_figures(kind, found) for kind, found in judgements.items()),
        fit=trained.log[-1]["accuracy"],
        steps=trained.steps,
        hash=committed_hash(),
        torch=torch.__version__.partition("+")[0],
        threads=torch.get_num_threads(),
        cpu=torch.cpu.get_capabilities().get("cpu_name", "processor"),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def _settings(settings: Settings) -> dict[str, object]:
    prompts = f"{settings.chat_prompts} chat prompts from templates times subjects"
    if settings.file_prompts:
        prompts += f" and {settings.file_prompts} questions of --prompts-file"
    flags = [f"--chat-prompts {settings.chat_prompts}"]
    if settings.file_prompts:
        flags.append(f"--prompts-file QUESTIONS.jsonl --file-prompts {settings.file_prompts}")
    if settings.start_sha256 is not None:
        flags.append("--start-from FIRST")
    return {
        "model": settings.model_path,
        "draft_vocab": settings.draft_vocab_size,
        "new_tokens": settings.new_tokens,
        "prompts": prompts,
        "start": _BORROWED if settings.start_sha256 is None else _further(settings.start_sha256),
        "depth": settings.recipe().depth,
        "head": "the head is trained too" if settings.train_head else "the head stays as it is",
        "rate": settings.learning_rate,
        "rows": settings.rows_per_step,
        "epochs": settings.epochs,
        "seed": settings.seed,
        "dtype": settings.dtype,
        "training_tokens": settings.training_tokens,
        "source_flags": " ".join(flags),
    }


def _further(sha256: str) -> str:
    return f"Started from a draft whose tensors have the sha256\n  `{sha256}`."


def _texts(run: Run) -> dict[str, object]:
    count = run.training_texts.count()
    times = [
        f"| {stage} | {spent['wall']:.0f} | {spent['processor']:.0f} |"
        for stage, spent in run.seconds().items()
    ]
    return {
        "kept": count.kept,
        "tokens": count.tokens,
        "dropped": count.dropped,
        "times": "\n".join(times),
    }


def _figures(kind: str, found: Judgement) -> str:
    accuracy = " / ".join(f"{share:.3f}" for share in found.accuracy)
    return (
        f"| {kind} | {found.texts} | {found.tokens} | {accuracy} | {found.chain_length:.2f} | "
        f"{found.tree_length:.2f} | {found.coverage:.3f} |"
    )
