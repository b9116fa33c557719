"""Layers cut over ranks that do not divide them: what the ranks compute adds up to the whole layer."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit-cpu")

import pytest
import torch
import torch.nn.functional as F

from sglang.kernels.compiled import compiled_kernels
from sglang.srt.layers import vocab_parallel_embedding as vocab
from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.quantization import stored_forms
from sglang.srt.layers.quantization.unquant import UnquantizedConfig, UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.layers.weights.head_share import AxisShare
from sglang.srt.layers.weights.parameter import LoadableParameter, Place, WeightLedger, bytes_to_read
from sglang.test.test_utils import published_topology
from sglang.test.weight_items import Reads, fill

DTYPE = torch.float32
HIDDEN, DIM = 24, 6


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def method():
    return UnquantizedConfig().linear_method("")


def on_ranks(width, build, **fields):
    """`build()` as each rank of a layout would do it, one after another."""
    layers = []
    for rank in range(width):
        with published_topology(tp_size=width, ranks={"world_rank": rank, "dp_rank": None}, **fields):
            layers.append(build())
    return layers


def attend(q, k, v):
    """Causal attention of whole groups: q [rows, heads, dim] with kv head i // group."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1).transpose(0, 1) for t in (k, v))
    return F.scaled_dot_product_attention(q.transpose(0, 1), k, v, is_causal=True).transpose(0, 1)


def attention_of(qkv, o_proj, x):
    """One rank's term: [rows, HIDDEN], with the bias of the output projection left out."""
    q_heads, kv_heads = qkv.num_heads, qkv.num_kv_heads
    heads = qkv(x).view(x.shape[0], q_heads + 2 * kv_heads, DIM)
    q, k, v = heads.split([q_heads, kv_heads, kv_heads], dim=1)
    return o_proj.stored.apply(attend(q, k, v).flatten(1), None)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [(9, 3, 2), (8, 2, 3), (8, 2, 4), (3, 1, 2), (9, 9, 4)])
def test_attention_over_padded_and_copied_heads_adds_up_to_the_whole(sizes, bias):
    heads, kv_heads, width = sizes

    def build():
        qkv = QKVParallelLinear("a", HIDDEN, DIM, heads, kv_heads, method=method(), dtype=DTYPE, bias=bias)
        share = qkv.heads.q.times(DIM)
        o = RowParallelLinear(
            "a.o_proj", heads * DIM, HIDDEN, method=method(), dtype=DTYPE, axis="attn_tp", share=share
        )
        fill([*qkv.parameters(), *o.parameters()], tensors)
        return qkv, o

    tensors = {"a.o_proj.weight": random(HIDDEN, heads * DIM, seed=1)}
    for seed, (part, count) in enumerate((("q", heads), ("k", kv_heads), ("v", kv_heads))):
        tensors[f"a.{part}_proj.weight"] = random(count * DIM, HIDDEN, seed=seed + 2)
        if bias:
            tensors[f"a.{part}_proj.bias"] = random(count * DIM, seed=seed + 5)
    x = random(7, HIDDEN, seed=9)
    [(qkv, o)] = on_ranks(1, build)
    expected = attention_of(qkv, o, x)
    got = sum(attention_of(qkv, o, x) for qkv, o in on_ranks(width, build))
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("inner, width", [(45, 2), (45, 4), (3, 4)])
def test_a_feed_forward_block_adds_up_and_its_bias_comes_once(inner, width, bias):
    names = [("m.gate_proj", inner, HIDDEN), ("m.up_proj", inner, HIDDEN), ("m.down_proj", HIDDEN, inner)]
    tensors = {f"{name}.weight": random(*shape, seed=i) for i, (name, *shape) in enumerate(names)}
    if bias:
        tensors |= {f"{name}.bias": random(out, seed=i + 3) for i, (name, out, _) in enumerate(names)}
    x = random(5, HIDDEN, seed=9)

    def term():
        up = MergedColumnParallelLinear("m", HIDDEN, inner, method=method(), dtype=DTYPE, bias=bias)
        down = RowParallelLinear(
            "m.down_proj", inner, HIDDEN, method=method(), dtype=DTYPE, bias=bias, reduce_results=False
        )
        fill([*up.parameters(), *down.parameters()], tensors)
        gate, value = up(x).chunk(2, dim=-1)
        return down(F.silu(gate) * value)

    [expected] = on_ranks(1, term)
    assert (sum(on_ranks(width, term)) - expected).abs().max() < 1e-5 * expected.abs().max()


def both(embedding, head):
    """All parameters; a tied head may have that of the table."""
    return torch.nn.ModuleList([embedding, head]).parameters()


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head_of_101_ids_over_any_width(monkeypatch, width, tied):
    """The gathered logits are cut: there are exactly as many columns as ids."""
    table, head_weight = random(101, HIDDEN), random(101, HIDDEN, seed=1)
    tensors = {"e.weight": table} if tied else {"e.weight": table, "h.weight": head_weight}

    def build():
        embedding = VocabParallelEmbedding("e", 101, HIDDEN, dtype=DTYPE)
        head = ParallelLMHead("h", 101, HIDDEN, dtype=DTYPE, tied_to=embedding if tied else None)
        fill(both(embedding, head), tensors)
        return embedding, head

    layers = on_ranks(width, build)
    ids = torch.arange(101)
    monkeypatch.setattr(vocab, "attention_tensor_parallel_all_reduce", lambda rows: rows)
    assert torch.equal(sum(embedding(ids) for embedding, _ in layers), table)

    columns = []
    hidden = random(3, HIDDEN, seed=2)
    for _, head in layers:
        monkeypatch.setattr(vocab, "tensor_model_parallel_all_gather", lambda t, dim: columns.append(t) or t)
        with pytest.raises(RuntimeError, match=f"cut over {width} ranks.* another group than"):
            head(hidden)  # a group of one: what comes back is this rank's part, and no logit of the others
    room = -(-101 // width)
    assert {part.shape for part in columns} == {(3, room)}
    gathered = torch.cat(columns, dim=-1)
    assert (gathered[:, 101:] == 0).all()
    monkeypatch.setattr(vocab, "tensor_model_parallel_all_gather", lambda t, dim: gathered)
    logits = layers[0][1](hidden)
    assert logits.shape == (3, 101)
    assert (logits - hidden @ (table if tied else head_weight).t()).abs().max() < 1e-4


def test_no_rows_pass_through_every_layer(monkeypatch):
    monkeypatch.setattr(vocab, "attention_tensor_parallel_all_reduce", lambda rows: rows)
    monkeypatch.setattr(vocab, "tensor_model_parallel_all_gather", lambda t, dim: torch.cat((t, t), dim))

    def build():
        embedding = VocabParallelEmbedding("e", 101, HIDDEN, dtype=DTYPE)
        head = ParallelLMHead("h", 101, HIDDEN, dtype=DTYPE, tied_to=embedding)
        fill(both(embedding, head), {"e.weight": random(101, HIDDEN)})
        return embedding, head

    for embedding, head in on_ranks(2, build):
        rows = embedding(torch.empty(0, dtype=torch.int64))
        assert rows.shape == (0, HIDDEN)
        assert (head(rows).shape, head(rows).dtype) == ((0, 101), torch.float32)


def test_a_tied_head_that_is_cut_otherwise_reads_its_own_part_of_the_table():
    """Attention data parallelism: the table is cut over 2 ranks, the head over 4. Where both are cut alike
    they have one weight."""
    table = random(101, HIDDEN)
    dp = {"dp_size": 2, "enable_dp_attention": True}

    def build(axis):
        embedding = VocabParallelEmbedding("e", 101, HIDDEN, dtype=DTYPE)
        head = ParallelLMHead("h", 101, HIDDEN, dtype=DTYPE, tied_to=embedding, axis=axis)
        own = [p.shape for p in head.parameters() if p is not embedding.weight]
        reads = fill(both(embedding, head), {"e.weight": table})
        first = embedding.first_id
        mine = embedding._rows(torch.arange(first, first + -(-101 // embedding.width)))
        return mine, head.stored.unpack(), own, reads.values["e.weight"]

    for rank, (mine, scored, own, read) in enumerate(on_ranks(4, lambda: build("tp"), **dp)):
        assert torch.equal(mine[: [51, 50][rank % 2]], table[51 * (rank % 2) :][:51])
        wanted = table[26 * rank : 26 * rank + 26]
        assert torch.equal(scored[: len(wanted)], wanted) and (scored[len(wanted) :] == 0).all()
        assert own == [(26, HIDDEN)]
        assert read == ([51, 50][rank % 2] + len(wanted)) * HIDDEN
    for mine, scored, own, _ in on_ranks(4, lambda: build("attn_tp"), **dp):
        assert torch.equal(mine, scored) and own == []


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("with_kernels", [False, True])
def test_the_numbers_of_a_tied_head_and_its_table_are_held_once(monkeypatch, tied, with_kernels):
    """By the form that is multiplied if it gives rows, as the compiled kernels' does; else row-major too."""
    if with_kernels and compiled_kernels() is None:
        pytest.skip("the compiled kernels are not installed")
    if not with_kernels:
        monkeypatch.setattr(stored_forms, "compiled_kernels", lambda: None)
    table = random(101, HIDDEN)
    tensors = {"e.weight": table} if tied else {"e.weight": table, "h.weight": random(101, HIDDEN, seed=1)}

    def build():
        embedding = VocabParallelEmbedding("e", 101, HIDDEN, dtype=DTYPE)
        head = ParallelLMHead("h", 101, HIDDEN, dtype=DTYPE, tied_to=embedding if tied else None)
        fill(both(embedding, head), tensors)
        return embedding, head

    [(embedding, head)] = on_ranks(1, build)
    assert head.stored.has_rows == with_kernels
    assert (embedding.weight.numel() == 0) == (tied and with_kernels)
    assert (head.weight is embedding.weight) == tied
    ids = torch.tensor([100, 0, 7, 7])
    assert torch.equal(embedding(ids), table[ids])


def test_padding_is_zero_before_the_weight_is_packed(monkeypatch):
    """Also on a rank that holds padding only, and in memory that was not zero before."""
    monkeypatch.setattr(
        torch, "empty", lambda *size, dtype=None, device=None: torch.full(_flat(size), 7.0, dtype=dtype)
    )
    seen = []
    monkeypatch.setattr(UnquantizedLinearMethod, "pack", lambda self, weight: seen.append(weight.clone()))
    a = random(3, 4)

    def build():
        up = MergedColumnParallelLinear("m", 4, 3, method=method(), dtype=DTYPE, bias=True)
        fill(
            up.parameters(),
            {
                "m.gate_proj.weight": a,
                "m.up_proj.weight": a + 1,
                "m.gate_proj.bias": torch.ones(3),
                "m.up_proj.bias": torch.ones(3),
            },
        )
        return up.bias.data

    biases = on_ranks(4, build)
    assert [tuple(bias.tolist()) for bias in biases] == [(1, 1)] * 3 + [(0, 0)]
    assert torch.equal(torch.cat([weight[:1] for weight in seen]), F.pad(a, (0, 0, 0, 1)))
    assert torch.equal(seen[3], torch.zeros(2, 4))


def _flat(size):
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size


def test_one_tensor_feeds_several_parameters_and_the_same_part_is_read_once():
    whole = random(10, 4)
    parts = [AxisShare.even(10, 0, 3), AxisShare.even(10, 0, 3), AxisShare.even(10, 2, 3)]
    filled = []
    parameters = [
        LoadableParameter(
            torch.empty(share.room, 4),
            [Place("t", (10, 4), 0, 0, share)],
            on_filled=lambda i=i: filled.append(i),
        )
        for i, share in enumerate(parts)
    ]
    reads = Reads()
    item = reads.item("t", whole)
    ledger = WeightLedger(parameters)
    ledger.fill(item)
    ledger.assert_complete()
    assert torch.equal(parameters[1], whole[:4]) and torch.equal(parameters[0], whole[:4])
    assert torch.equal(parameters[2], F.pad(whole[8:], (0, 0, 0, 2)))
    assert filled == [0, 1, 2]
    assert reads.values["t"] == (4 + 2) * 4
    assert bytes_to_read(parameters, [item]) == {"t": (4 + 2) * 4 * 4}
    with pytest.raises(ValueError, match="already loaded"):
        ledger.fill(item)


def test_a_tensor_is_expected_even_by_a_rank_that_holds_nothing_of_it():
    share = AxisShare.even(5, 3, 4)
    parameter = LoadableParameter(torch.full((2, 4), 7.0), [Place("t", (5, 4), 0, 0, share)])
    with pytest.raises(ValueError, match=r"missing.*t \(5, 4\)"):
        WeightLedger([parameter]).fill_all([])
    reads = fill([parameter], {"t": random(5, 4)})
    assert reads.values == {} and (parameter == 0).all()


def test_places_that_leave_the_tensor_or_the_parameter_are_our_own_mistake():
    with pytest.raises(AssertionError, match="does not lie in"):
        LoadableParameter(torch.empty(4, 2), [Place("t", (5, 2), 0, 0, AxisShare(3, 4, 4))])
    with pytest.raises(AssertionError, match="expected 4"):
        LoadableParameter(
            torch.empty(8, 2),
            [Place("t", (5, 2), 0, 0, AxisShare(0, 2, 4)), Place("u", (5, 2), 0, 2, AxisShare(0, 4, 4))],
        )
