"""Owns the training of a one-layer EAGLE or EAGLE3 draft that knows a few texts by heart, in seconds.

Read by tests that need many accepted drafts, but not all. The draft is unrolled as it is served: each further
step reads the stream of the step before, at the next position. It must not be used for a draft that anyone
serves.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy, silu

from sglang.srt.speculative.spec_worker import SpecWorker
from sglang.test.worker_driver import driven_worker

Tensors = dict[str, torch.Tensor]
_HEAD_DIM, _HEADS, _KV_HEADS, _EPS = 16, 4, 2, 1e-5


def overfit_draft(
    folder: pathlib.Path,
    target: pathlib.Path,
    start: pathlib.Path,
    texts: Sequence[tuple[list[int], int]],
    *,
    steps: int,
    depth: int = 3,
    learning_rate: float = 5e-3,
) -> pathlib.Path:
    """Train the draft in folder `start` on `texts` and write it into `folder`, with the same config.

    Each text is token ids and the length of its prompt, whose tokens are read and not learned. A draft with a
    vocabulary of its own gets the tokens of the texts into it, so it must have room for them.
    """
    config = json.loads((start / "config.json").read_text())
    third = config["architectures"] == ["LlamaForCausalLMEagle3"]
    rows = [_features(target, start, "EAGLE3" if third else "EAGLE", ids) for ids, _ in texts]
    weights = load_file(target / "model.safetensors")
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    draft = load_file(start / "model.safetensors")
    own_ids = torch.arange(len(head))
    if "d2t" in draft:
        known = _vocabulary(texts, len(draft["d2t"]), len(head))
        own_ids = torch.full((len(head),), -1).index_put((known,), torch.arange(len(known)))
        draft["d2t"], draft["t2d"] = known - torch.arange(len(known)), own_ids >= 0
        draft["lm_head.weight"] = head[known].clone()
    params = {name: value.requires_grad_() for name, value in draft.items() if value.is_floating_point()}
    prefix = "midlayer." if third else "layers.0."
    network = _Network({name.removeprefix(prefix): value for name, value in params.items()}, third)
    optimizer = torch.optim.Adam(params.values(), lr=learning_rate)
    length = max(len(ids) for ids, _ in texts)
    ids = torch.tensor([text + [0] * (length - len(text)) for text, _ in texts])
    hidden = torch.stack([torch.nn.functional.pad(it, (0, 0, 0, length - len(it))) for it in rows])
    # Row p of step i predicts token p + 2 + i; only tokens of the answers are learned.
    place = torch.arange(length)
    learned = torch.stack([(place >= begin) & (place < len(text)) for text, begin in texts])
    scored = params.get("lm_head.weight", head)
    for _ in range(steps):
        loss = torch.zeros(())
        for i, stream in enumerate(network.unrolled(hidden, embedding[ids], depth)):
            count = length - 2 - i
            wanted = own_ids[ids[:, 2 + i :]][learned[:, 2 + i :]]
            loss = loss + cross_entropy(stream[:, :count][learned[:, 2 + i :]] @ scored.T, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: value.detach().contiguous() for name, value in draft.items()}, folder / "model.safetensors"
    )
    return folder


class _Network:
    """The draft's layer over whole texts [texts, length], without a cache."""

    def __init__(self, params: Mapping[str, torch.Tensor], third: bool) -> None:
        self._params = params
        self._third = third

    def unrolled(self, hidden: torch.Tensor, embedded: torch.Tensor, depth: int) -> list[torch.Tensor]:
        """What the head reads in each of `depth` steps [texts, length, hidden].

        Row p of step i stands at position p + i and reads token p + 1 + i. It sees the rows of step 0 up to p
        and row p of every step up to its own.
        """
        params, length = self._params, hidden.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        found: list[torch.Tensor] = []
        stream = hidden
        for i in range(depth):
            read = embedded.roll(-1 - i, dims=1)
            if not self._third:
                stream = torch.cat((read, stream), dim=-1) @ params["fc.weight"].T + params["fc.bias"]
                x = stream
            else:
                stream = stream @ params["fc.weight"].T if i == 0 else stream
                x = torch.cat(
                    (self._norm("input_layernorm", read), self._norm("hidden_norm", stream)), dim=-1
                )
            q, k, v = (self._project(x, name, i) for name in ("q_proj", "k_proj", "v_proj"))
            keys.append(k)
            values.append(v)
            scores = (q @ keys[0].transpose(-1, -2)).masked_fill(~causal, -math.inf)
            own = [(q * key).sum(dim=-1, keepdim=True) for key in keys[1:]]
            shares = torch.softmax(torch.cat((scores, *own), dim=-1) / math.sqrt(_HEAD_DIM), dim=-1)
            mixed = shares[..., :length] @ values[0]
            for j, value in enumerate(values[1:]):
                mixed = mixed + shares[..., length + j, None] * value
            stream = stream + mixed.transpose(1, 2).flatten(2) @ params["self_attn.o_proj.weight"].T
            x = self._norm("post_attention_layernorm", stream)
            gate, up = (x @ params[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            stream = stream + (silu(gate) * up) @ params["mlp.down_proj.weight"].T
            found.append(self._norm("norm", stream) if self._third else stream)
        return found

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + _EPS) * self._params[f"{name}.weight"]

    def _project(self, x: torch.Tensor, name: str, step: int) -> torch.Tensor:
        """Queries, keys or values of all heads [texts, heads, length, head size], rotated where they are."""
        y = (x @ self._params[f"self_attn.{name}.weight"].T).unflatten(-1, (-1, _HEAD_DIM)).transpose(1, 2)
        if name != "q_proj":
            y = y.repeat_interleave(_HEADS // _KV_HEADS, dim=1)
        if name == "v_proj":
            return y
        frequencies = 10000.0 ** -(torch.arange(0, _HEAD_DIM, 2) / _HEAD_DIM)
        angles = (torch.arange(x.shape[1]) + step)[:, None] * frequencies
        cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
        first, second = y.chunk(2, dim=-1)
        return y * cos + torch.cat((-second, first), dim=-1) * sin


def _features(target: pathlib.Path, draft: pathlib.Path, algorithm: str, ids: list[int]) -> torch.Tensor:
    """The target's captured rows [length, features] of a whole text."""
    fields: dict[str, Any] = {
        "speculative_algorithm": algorithm,
        "speculative_draft_model_path": str(draft),
        "speculative_num_steps": 1,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 2,
    }
    with driven_worker(target, **fields) as driver, torch.inference_mode():
        assert isinstance(driver.worker, SpecWorker)
        seq = driver.add(ids)
        batch = driver.batch([(seq, len(ids))])
        batch.capture_hidden = True
        hidden = driver.target.model_runner.forward(batch).hidden
        assert hidden is not None
    return hidden.clone()


def _vocabulary(texts: Sequence[tuple[list[int], int]], size: int, num_ids: int) -> torch.Tensor:
    """`size` ids of the target, ascending: those of the answers, and the first others."""
    needed = {token_id for ids, begin in texts for token_id in ids[begin:]}
    others = [token_id for token_id in range(num_ids) if token_id not in needed]
    assert len(needed) <= size, f"the texts have {len(needed)} tokens, and the draft has room for {size}"
    return torch.tensor(sorted([*needed, *others[: size - len(needed)]]))
