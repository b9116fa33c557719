"""Owns the stages of a run: texts, draft vocabulary, training, judgement. Each goes on where it was.

Run by the command. It must not parse flags or format a model card.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang.srt.tokenizer.tokenizer import Tokenizer, load_tokenizer
from train_draft.checkpoint import Draft, make_draft
from train_draft.evaluation import Judgement, judge
from train_draft.generation import Plan, Progress, Question, generate
from train_draft.heldout import read_held_out
from train_draft.initial import borrowed_weights, shape_for
from train_draft.loss import Lesson
from train_draft.prompts import KINDS, Prompt, draw_prompts
from train_draft.settings import Settings, torch_dtype
from train_draft.target import PlainTarget
from train_draft.texts import Text, TextStore
from train_draft.training import Frozen, Trainer
from train_draft.vocabulary import DraftVocabulary, choose_vocabulary, read_opinions

# Ids that end a text in this family besides the end ids that the model itself names.
_FIRST_SPECIALS = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Trained:
    """The draft of the last step, in bf16, and how the run went."""

    draft: Draft
    steps: int
    log: list[dict[str, float]]


class Run:
    """One run in its work folder."""

    def __init__(self, settings: Settings, folder: Path, progress: Progress) -> None:
        self.settings = settings
        self.folder = folder
        self.progress = progress
        self.target = PlainTarget.from_path(settings.model_path, torch_dtype(settings.dtype))
        self.training_texts = TextStore(folder / "training_texts")

    def generate(self, prompts: Sequence[Prompt]) -> None:
        """The training texts."""
        with self._timed("generation"):
            plan = self.settings.training_plan(self.training_texts.count().tokens)
            answer(self.target, prompts, self.training_texts, plan, self.progress)

    def train(self, start: Draft | None = None) -> Trained:
        """Train to the last step; no checkpoint is picked by what the held-out texts say.

        With `start` its weights and its vocabulary are trained on, else the target lends the first weights.
        """
        texts = self.training_texts.read()
        with self._timed("vocabulary"):
            vocabulary, lessons = self._lessons(texts, start)
        shape = shape_for(self.target, len(vocabulary.tokens))
        weights = borrowed_weights(self.target, vocabulary, self.settings.seed)
        trainer = Trainer(
            shape,
            weights if start is None else dict(start.network(self.target).weights),
            Frozen(self.target.embedding, self.target.head, vocabulary, torch_dtype(self.settings.dtype)),
            lessons,
            self.settings.recipe(),
        )
        state = self.folder / "state.pt"
        if state.is_file():
            trainer.load(state)
        with self._timed("training"):
            trainer.run(self.progress, state=state)
        draft = make_draft(self.target, shape, trainer.weights, vocabulary)
        return Trained(draft, len(trainer.schedule), trainer.log)

    def _lessons(self, texts: Sequence[Text], start: Draft | None) -> tuple[DraftVocabulary, list[Lesson]]:
        """The draft vocabulary and what each text teaches in it.

        A greedy text is the target's opinion itself; only of the sampled ones the head has to be asked.
        """
        plan = self.settings.training_plan()
        sampled = [text for text in texts if not plan.is_greedy(text.index)] or list(texts)
        opinions = read_opinions(self.target, sampled)
        if start is not None:
            vocabulary = start.vocabulary()
        else:
            vocabulary = choose_vocabulary(
                texts,
                opinions.chances,
                size=self.settings.draft_vocab_size,
                forced={*_FIRST_SPECIALS, *self.target.config.eos_token_ids},
            )
        best = {text.index: ids for text, ids in zip(sampled, opinions.best)}
        draft_ids = vocabulary.draft_ids()
        return vocabulary, [
            Lesson(text, draft_ids[best.get(text.index, text.ids[text.prompt_len + 1 :])]) for text in texts
        ]

    def judge(self, draft: Draft) -> dict[str, Judgement]:
        """Figures of a draft on the held-out texts, for each kind."""
        with self._timed("held-out generation"):
            texts = held_out_texts(self.target, self.folder, self.settings.new_tokens, self.progress)
        with self._timed("evaluation"):
            return judge_kinds(draft, self.target, texts)

    def seconds(self) -> dict[str, dict[str, float]]:
        """Stage -> wall and processor seconds, summed over the parts of a run that were not killed."""
        file = self.folder / "times.json"
        times: dict[str, dict[str, float]] = json.loads(file.read_text()) if file.is_file() else {}
        return times

    @contextlib.contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        wall, processor = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            times = self.seconds()
            entry = times.setdefault(stage, {"wall": 0.0, "processor": 0.0})
            entry["wall"] += time.perf_counter() - wall
            entry["processor"] += time.process_time() - processor
            (self.folder / "times.json").write_text(json.dumps(times), encoding="utf-8")


def training_prompts(settings: Settings, prompts_file: Path | None) -> list[Prompt]:
    """What the target is asked for training, in the order of the run."""
    return draw_prompts(
        num_chat=settings.chat_prompts,
        num_file=settings.file_prompts,
        file=prompts_file,
        held_out={prompt.text for prompt in read_held_out()},
        seed=settings.seed,
    )


def answer(
    target: PlainTarget, prompts: Sequence[Prompt], store: TextStore, plan: Plan, progress: Progress
) -> None:
    """Texts for the prompts that the store has none for yet."""
    kept, dropped = store.done()
    tokenizer = load_tokenizer(target.config.path)
    questions = [
        Question(index, prompt.kind, chat_ids(tokenizer, prompt.text))
        for index, prompt in enumerate(prompts)
        if index not in kept and index not in dropped
    ]
    generate(target, questions, plan, store.write, progress)


def held_out_texts(target: PlainTarget, folder: Path, new_tokens: int, progress: Progress) -> list[Text]:
    """The target's greedy answers to the held-out prompts, generated once and kept in the work folder."""
    store = TextStore(folder / "held_out_texts")
    answer(target, read_held_out(), store, Plan(new_tokens=new_tokens), progress)
    return store.read()


def chat_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """A user's only message as the server would send it to the model."""
    return tokenizer.encode_chat(tokenizer.apply_chat_template([{"role": "user", "content": text}]))


def judge_kinds(draft: Draft, target: PlainTarget, texts: Sequence[Text]) -> dict[str, Judgement]:
    """One judgement for each kind of text that there is."""
    vocabulary = draft.vocabulary()
    network = draft.network(target)
    judgements: dict[str, Judgement] = {}
    for kind in KINDS:
        some = [text for text in texts if text.kind == kind]
        if some:
            judgements[kind] = judge(network, vocabulary.tokens, some, vocabulary.coverage(some))
    return judgements


def as_lines(judgements: dict[str, Judgement]) -> list[str]:
    """The figures as the command prints them."""
    lines = []
    for kind, found in judgements.items():
        accuracy = " / ".join(f"{share:.3f}" for share in found.accuracy)
        lines.append(
            f"{kind}: {found.texts} texts, {found.tokens} tokens, accuracy at depth 1 / 2 / 3 {accuracy}, "
            f"tokens per round {found.chain_length:.3f} (chain of 3), {found.tree_length:.3f} (tree 3-4-8), "
            f"coverage {found.coverage:.3f}"
        )
    return lines


def as_json(judgements: dict[str, Judgement]) -> str:
    return json.dumps({kind: dataclasses.asdict(found) for kind, found in judgements.items()}, indent=2)
