"""Trains an EAGLE3 draft for a Llama-architecture target on the target's own generations.

    python scripts/train_draft/main.py train --model-path smollm2-135m-instruct \\
        --prompts-file gsm8k/train.jsonl --work-folder WORK --output-folder DRAFT
    python scripts/train_draft/main.py evaluate --model-path smollm2-135m-instruct \\
        --work-folder WORK --draft-path DRAFT

A run goes from prompts to generation (target, texts), vocabulary, training (network, unroll, loss),
evaluation (draft_tree), checkpoint and model_card; `stages` has the order. `overfit` is the same in seconds,
for tests.
"""
