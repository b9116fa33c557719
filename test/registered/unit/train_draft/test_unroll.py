"""The training-time test computes what a server's draft would, step by step and token by token."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit-cpu")

import math

import pytest
import torch

from train_draft.draft_tree import TreeShape, best_first, expand
from train_draft.network import KeysValues
from train_draft.unroll import first_unroll, num_rows, predicted_positions, unroll

CLOSE = {"atol": 1e-5, "rtol": 1e-5}


class ServedDraft:
    """A draft written down a second time: one row at a time, a plain list of keys and values.

    A row appended by `row` sees every earlier row of the list and itself; whoever wants another history
    passes another list.
    """

    def __init__(self, network):
        self.shape = network.shape
        self.weights = network.weights
        self.embedding = network.embedding

    def norm(self, name, x):
        return x / torch.sqrt((x * x).mean() + self.shape.rms_norm_eps) * self.weights[name + ".weight"]

    def turn(self, vector, position):
        half = len(vector) // 2
        out = vector.clone()
        for pair in range(half):
            angle = position * self.shape.rope_theta ** (-2 * pair / len(vector))
            cos, sin = math.cos(angle), math.sin(angle)
            out[pair] = vector[pair] * cos - vector[pair + half] * sin
            out[pair + half] = vector[pair + half] * cos + vector[pair] * sin
        return out

    def row(self, token, hidden, position, history):
        """The stream of one row; returns it with the history that has this row too."""
        s, layer = self.shape, "midlayer.self_attn."
        both = torch.cat(
            [
                self.norm("midlayer.input_layernorm", self.embedding[token]),
                self.norm("midlayer.hidden_norm", hidden),
            ]
        )
        q = (self.weights[layer + "q_proj.weight"] @ both).view(s.num_heads, s.head_dim)
        k = (self.weights[layer + "k_proj.weight"] @ both).view(s.num_kv_heads, s.head_dim)
        v = (self.weights[layer + "v_proj.weight"] @ both).view(s.num_kv_heads, s.head_dim)
        k = torch.stack([self.turn(head, position) for head in k])
        history = [*history, (k, v)]
        heads = []
        for index, head in enumerate(q):
            group = index // (s.num_heads // s.num_kv_heads)
            turned = self.turn(head, position)
            scores = torch.stack([turned @ keys[group] for keys, _ in history]) / math.sqrt(s.head_dim)
            chances = scores.softmax(0)
            heads.append(sum(c * values[group] for c, (_, values) in zip(chances, history)))
        stream = hidden + self.weights[layer + "o_proj.weight"] @ torch.cat(heads)
        normed = self.norm("midlayer.post_attention_layernorm", stream)
        gate = self.weights["midlayer.mlp.gate_proj.weight"] @ normed
        up = self.weights["midlayer.mlp.up_proj.weight"] @ normed
        mlp = torch.nn.functional.silu(gate) * up
        return stream + self.weights["midlayer.mlp.down_proj.weight"] @ mlp, history

    def logits(self, stream):
        return self.weights["lm_head.weight"] @ self.norm("norm", stream)

    def extend(self, text, newest):
        """Rows 0 .. newest from true features: the stream of the last one, and their keys and values."""
        history, stream = [], None
        for position in range(newest + 1):
            fused = self.weights["fc.weight"] @ text.features[position]
            stream, history = self.row(int(text.ids[position + 1]), fused, position, history)
        return stream, history


@pytest.fixture
def served(random_draft):
    return ServedDraft(random_draft)


@pytest.mark.parametrize("place", [0, 3])
def test_each_unroll_of_a_row_is_a_draft_step_from_scratch(random_draft, served, texts, place):
    """A wrong position, a missing own row or a leaked later row costs too few accepted tokens to notice."""
    some = texts[:3]
    unrolled = unroll(random_draft, some, 4)
    for index, text in enumerate(some):
        newest = text.prompt_len - 1 + place
        stream, history = served.extend(text, newest)
        for step in range(4):
            if step:
                token = int(text.ids[newest + 1 + step])
                stream, history = served.row(token, stream, newest + step, history)
            rows = unrolled[step].stream.split(unrolled[step].lengths)[index]
            torch.testing.assert_close(rows[place], stream, **CLOSE)
            torch.testing.assert_close(random_draft.logits(rows[place]), served.logits(stream), **CLOSE)


def test_an_unroll_ends_where_the_target_has_no_opinion_on_the_predicted_token(random_draft, texts):
    for step, unrolled in enumerate(unroll(random_draft, texts, 3)):
        places = predicted_positions(texts, unrolled, step)
        for text, length, place in zip(texts, unrolled.lengths, places):
            assert length == num_rows(text, step) == len(place)
            assert place.tolist() == list(range(text.prompt_len + 1 + step, len(text.ids)))


def test_a_text_too_short_to_draft_in_has_no_rows(random_draft, texts):
    """One answer of one or two tokens among others must not stop a training run."""
    import dataclasses

    text = texts[0]
    short = dataclasses.replace(
        text,
        ids=text.ids[: text.prompt_len + 2],
        features=text.features[: text.prompt_len + 1],
        final=text.final[: text.prompt_len + 1],
    )
    assert [part.lengths for part in unroll(random_draft, [short], 3)] == [[1], [0], [0]]


def chosen_paths(tree, place):
    """Each node of a tree as the tokens from the root to it."""
    tokens, parents = tree.tokens[place].tolist(), tree.parents[place].tolist()
    paths = []
    for token, parent in zip(tokens, parents):
        assert parent < len(paths)  # parents stand before their children
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    return paths


def test_a_branch_of_the_tree_attends_to_its_own_ancestors(random_draft, served, texts):
    """The beam of another tree, in which every path is drafted alone from scratch, has the same nodes."""
    shape = TreeShape(steps=3, topk=3, nodes=9)
    tokens_of = torch.arange(96) * 3
    some = texts[:2]
    newest = [text.prompt_len + 1 for text in some]
    prefixed = first_unroll(random_draft, some)
    streams = prefixed.first.stream.split(prefixed.first.lengths)
    longest = max(part.keys.shape[1] for part in prefixed.prefixes)
    padded = [
        torch.cat(
            [
                torch.nn.functional.pad(part[side], (0, 0, 0, 0, 0, longest - part[side].shape[1]))
                for part in prefixed.prefixes
            ]
        )
        for side in (0, 1)
    ]
    tree = expand(
        random_draft,
        tokens_of,
        torch.stack([rows[2] for rows in streams]),
        torch.tensor(newest),
        KeysValues(*padded),
        shape,
    )
    for index, text in enumerate(some):
        stream, history = served.extend(text, newest[index])
        frontier, candidates = [([], 1.0, stream, history)], []
        for level in range(shape.steps):
            children = []
            for path, score, last, past in frontier:
                hidden, seen = last, past
                if path:
                    hidden, seen = served.row(path[-1], last, newest[index] + level, past)
                chances = served.logits(hidden).softmax(0)
                for draft_id in best_first(chances, shape.topk).tolist():
                    token = int(tokens_of[draft_id])
                    children.append(([*path, token], score * float(chances[draft_id]), hidden, seen))
            candidates += children
            frontier = sorted(children, key=lambda child: -child[1])[: shape.topk]
        best = sorted(candidates, key=lambda child: -child[1])[: shape.nodes - 1]
        assert sorted(chosen_paths(tree, index)) == sorted(path for path, *_ in best)


def test_of_equal_scores_the_smaller_index_is_taken():
    scores = torch.tensor([[0.5, 1.0, 1.0, 0.5, 1.0]])
    assert best_first(scores, 4).tolist() == [[1, 2, 4, 0]]
    with pytest.raises(ValueError, match="6 of 5 scores"):
        best_first(scores, 6)
