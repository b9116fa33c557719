"""Owns the command line: `train` runs all stages, `evaluate` judges a draft on the held-out prompts.

Run by `main.py`. It must not compute anything itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from train_draft.checkpoint import WEIGHTS_FILE, Draft
from train_draft.heldout import read_held_out
from train_draft.model_card import write_card
from train_draft.settings import Settings, enter_work_folder, file_hash, fitting_dtype, torch_dtype
from train_draft.stages import Run, as_json, as_lines, held_out_texts, judge_kinds, training_prompts
from train_draft.target import PlainTarget


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 2 for what the caller can correct."""
    args = _parser().parse_args(arguments)
    torch.set_num_threads(args.threads)
    try:
        # A held-out file that was touched spoils the figures: better to know before the hours of work.
        read_held_out()
        return _train(args) if args.command == "train" else _evaluate(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _say(line: str) -> None:
    print(line, flush=True)


def _settings(args: argparse.Namespace) -> Settings:
    return Settings(
        model_path=args.model_path,
        prompts_sha256=file_hash(args.prompts_file),
        chat_prompts=args.chat_prompts,
        file_prompts=args.file_prompts if args.prompts_file else 0,
        training_tokens=args.training_tokens,
        new_tokens=args.new_tokens,
        draft_vocab_size=args.draft_vocab_size,
        epochs=args.epochs,
        rows_per_step=args.rows_per_step,
        learning_rate=args.learning_rate,
        train_head=args.train_head,
        seed=args.seed,
        dtype=fitting_dtype(args.dtype),
        start_sha256=file_hash(args.start_from and args.start_from / WEIGHTS_FILE),
    )


def _train(args: argparse.Namespace) -> int:
    settings = _settings(args)
    prompts = training_prompts(settings, args.prompts_file)
    enter_work_folder(args.work_folder, settings, resume=args.resume)
    run = Run(settings, args.work_folder, _say)
    run.generate(prompts)
    trained = run.train(args.start_from and Draft.read(args.start_from))
    trained.draft.save(args.output_folder)
    # What is judged is what was written, read back.
    judgements = run.judge(Draft.read(args.output_folder))
    for line in as_lines(judgements):
        _say(f"evaluation: {line}")
    write_card(args.output_folder, run, trained, judgements)
    _say(f"the draft lies in {args.output_folder}")
    return 0


def _evaluate(args: argparse.Namespace) -> int:
    draft = Draft.read(args.draft_path)
    target = PlainTarget.from_path(args.model_path, torch_dtype(fitting_dtype(args.dtype)))
    texts = held_out_texts(target, args.work_folder, args.new_tokens, _say)
    judgements = judge_kinds(draft, target, texts)
    for line in as_lines(judgements):
        _say(f"evaluation: {line}")
    if args.report is not None:
        args.report.write_text(as_json(judgements) + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train_draft", description="Train an EAGLE3 draft on the target's own texts, or judge one."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="generate texts, train, judge, write the draft's folder")
    evaluate = commands.add_parser("evaluate", help="judge a draft on the held-out prompts")
    for command in (train, evaluate):
        _add_shared(command)
    _add_recipe(train)
    train.add_argument("--output-folder", type=Path, required=True, help="where the draft is written")
    train.add_argument("--resume", action="store_true", help="go on with the run in the work folder")
    evaluate.add_argument("--draft-path", type=Path, required=True, help="folder of the draft")
    evaluate.add_argument("--report", type=Path, help="also write the figures here, as JSON")
    return parser


def _add_shared(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model-path", required=True, help="the target: an alias, a folder or a GGUF file")
    add("--work-folder", type=Path, required=True, help="texts, captures (5 KB a token) and the state")
    add("--new-tokens", type=int, default=128, help="longest continuation")
    add("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="of matrix products")
    add("--threads", type=int, default=1, help="threads of torch")


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompts-file", type=Path, help='JSONL with a "question" a line, e.g. GSM8K train.jsonl')
    add("--chat-prompts", type=int, default=1050, help="chat prompts to draw from templates and subjects")
    add("--file-prompts", type=int, default=500, help="prompts to draw from --prompts-file")
    add("--training-tokens", type=int, default=130_000, help="tokens of kept texts that are enough")
    add("--draft-vocab-size", type=int, default=8192, help="tokens that the draft can propose")
    add("--epochs", type=int, default=4)
    add("--rows-per-step", type=int, default=512, help="loss rows of an optimiser step")
    add("--learning-rate", type=float, default=3e-3, help="peak of the cosine")
    add("--train-head", action="store_true", help="train the draft's head too, at a quarter more time")
    add("--seed", type=int, default=1)
    add("--start-from", type=Path, help="folder of a draft that is trained on, instead of a new one")
