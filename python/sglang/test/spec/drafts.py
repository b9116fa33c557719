"""Owns the three drafts of each algorithm for one tiny model: trained, oracle, random.

Read by tests of speculative decoding on one rank. An oracle is right wherever it can be, a random draft
hardly ever, a trained one mostly. It must not touch what a draft's own code does between proposals: an oracle
lets it run and only overwrites what it proposed.
"""

from __future__ import annotations

import json
import pathlib
import random
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from sglang.srt.batch.spec_input import DraftTree
from sglang.srt.speculative.algorithms.ngram import NgramDrafter
from sglang.srt.speculative.base_spec_worker import Proposal
from sglang.srt.speculative.round_batch import Round
from sglang.srt.speculative.spec_worker import SpecWorker
from sglang.test.spec.stage import Stage
from sglang.test.spec.training import overfit_draft
from sglang.test.tiny_drafts import write_random_draft
from sglang.test.tiny_models import write_tiny_model

#: What the trained drafts have seen of each text. Behind that they guess.
TRAINED_LENGTH = 14
_TRAINING_STEPS = 10
#: Noise on the weights of a STANDALONE draft, of their standard deviation: it is right most of the time.
_NOISE = 0.02
_EAGLE_KINDS: dict[str, Literal["eagle", "eagle3"]] = {"EAGLE": "eagle", "EAGLE3": "eagle3"}


class DraftShelf:
    """The drafts for the model in folder `target`, each made when it is first asked for.

    `truth` is what the model answers to each prompt, by name, further than any test goes. The rid of a
    request is the name of its prompt, or begins with it and a slash.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        target: pathlib.Path,
        prompts: Mapping[str, list[int]],
        truth: Mapping[str, list[int]],
    ) -> None:
        self._folder = folder
        self._target = target
        self._prompts = prompts
        self._truth = truth

    def fields(self, algorithm: str, draft: str) -> dict[str, Any]:
        """The flags that name the algorithm and its draft."""
        fields = {"speculative_algorithm": algorithm}
        if algorithm in _EAGLE_KINDS:
            # An oracle overwrites what a random draft proposes.
            kind = "trained" if draft == "trained" else "random"
            return fields | {"speculative_draft_model_path": str(self._eagle(algorithm, kind))}
        if algorithm == "STANDALONE":
            return fields | {"speculative_draft_model_path": str(self._standalone(draft))}
        return fields

    def prepare(self, stage: Stage, algorithm: str, draft: str, texts: Mapping[str, Sequence[int]]) -> None:
        """What a draft needs once its scheduler stands: a corpus, or `texts` by rid for an oracle to know."""
        worker = stage.scheduler.worker
        assert isinstance(worker, SpecWorker)
        if algorithm == "NGRAM":
            assert isinstance(worker.drafter, NgramDrafter)
            self._fill_corpus(worker.drafter, draft, texts)
        elif draft == "oracle" and algorithm in _EAGLE_KINDS:
            make_oracle(stage, texts)

    def _eagle(self, algorithm: str, draft: str) -> pathlib.Path:
        folder, kind = self._folder / f"{algorithm}-{draft}", _EAGLE_KINDS[algorithm]
        if folder.exists():
            return folder
        if draft == "random":
            size = 256 if kind == "eagle3" else None
            return write_random_draft(folder, self._target, kind, draft_vocab_size=size)
        texts = [
            (prompt + self._truth[name][:TRAINED_LENGTH], len(prompt))
            for name, prompt in self._prompts.items()
        ]
        start = self._eagle(algorithm, "random")
        return overfit_draft(folder, self._target, start, texts, steps=_TRAINING_STEPS)

    def _standalone(self, draft: str) -> pathlib.Path:
        folder = self._folder / f"STANDALONE-{draft}"
        if draft == "oracle":
            return self._target
        if folder.exists():
            return folder
        if draft == "random":
            return write_tiny_model(folder, seed=77)
        return write_noisy_model(folder, self._target, _NOISE)

    def _fill_corpus(self, drafter: NgramDrafter, draft: str, texts: Mapping[str, Sequence[int]]) -> None:
        """An oracle has seen all texts, a trained corpus their beginnings and noise, a random one noise."""
        if draft == "random":
            drafter.least_match = 1  # else it is silent: noise holds no two tokens of a text
        if draft != "oracle":
            rng = random.Random(5)
            for _ in range(150):
                noise = [rng.randrange(5, 512) for _ in range(8)]
                drafter._corpus.insert(noise, len(noise))
        if draft != "random":
            for rid, known in texts.items():
                prompt = self._prompts[rid.partition("/")[0]]
                text = known[: None if draft == "oracle" else TRAINED_LENGTH]
                drafter._corpus.insert([*prompt[-drafter.num_recent_ids :], *text], len(text))


def write_noisy_model(folder: pathlib.Path, model: pathlib.Path, noise: float) -> pathlib.Path:
    """A copy of a tiny model whose matrices are a little wrong: by `noise` of their standard deviation."""
    shutil.copytree(model, folder)
    generator = torch.Generator().manual_seed(3)
    weights = load_file(model / "model.safetensors")
    for name, value in weights.items():
        if value.dim() == 2:
            weights[name] = value + noise * value.std() * torch.randn(value.shape, generator=generator)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_short_draft(
    folder: pathlib.Path, model: pathlib.Path, max_position_embeddings: int
) -> pathlib.Path:
    """A copy of a tiny model that says it reaches no further."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = max_position_embeddings
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_oracle(stage: Stage, truth: Mapping[str, Sequence[int]]) -> None:
    """Let the drafter of a scheduler know the texts: along one path of each tree it proposes what follows.

    `truth` is by rid. Where it says nothing, the draft's own proposals stand.
    """
    worker = stage.scheduler.worker
    assert isinstance(worker, SpecWorker)
    propose = worker.drafter.propose

    def right(round: Round, num_nodes: int) -> Proposal:
        proposal = propose(round, num_nodes)
        running = {req.req_pool_idx: req for req in stage.scheduler.queues.running}
        for b, row in enumerate(round.req_pool_indices.tolist()):
            req = running[row]
            _put_along_a_path(proposal.tree, b, truth.get(req.rid, ())[len(req.output_ids) :])
        return proposal

    worker.drafter.propose = right  # type: ignore[method-assign]


def _put_along_a_path(tree: DraftTree, b: int, text: Sequence[int]) -> None:
    """Write `text` along the path to the last of the deepest nodes of request b.

    A sibling that carries a token of the path takes what stood there before: the first of equals is followed.
    """
    parents, depths = tree.parents[b].tolist(), tree.depths()[b].tolist()
    path: list[int] = []
    node = max(range(len(parents)), key=lambda it: (depths[it], it))
    while node > 0:
        path.insert(0, node)
        node = parents[node]
    for node, token_id in zip(path, text):
        for other, parent in enumerate(parents):
            if parent == parents[node] and tree.token_ids[b, other] == token_id:
                tree.token_ids[b, other] = tree.token_ids[b, node]
        tree.token_ids[b, node] = token_id
