from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit-cpu")

import pytest
import torch
import torch.nn.functional as F

from sglang.srt.layers.activation import gated_activation
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding import apply_rotary, get_rope
from sglang.srt.layers.weights.parameter import WeightItem, WeightLedger

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def norm_of(weight, eps):
    norm = RMSNorm("n", len(weight), eps, dtype=weight.dtype)
    item = WeightItem("n.weight", "file", (len(weight),), weight.to, 1)
    WeightLedger(norm.parameters()).fill_all([item])
    return norm


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_the_norm_equals_the_formula_also_where_eps_matters(dtype, tolerance, scale):
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(5, 3, 48, generator=generator) * scale).to(dtype)
    weight = torch.randn(48, generator=generator).to(dtype)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    out = norm_of(weight, 1e-5)(x)
    assert out.dtype == dtype
    assert ((out.double() - expected).abs() <= tolerance * expected.abs() + 1e-7).all()


def test_a_row_of_zeros_stays_zero():
    assert norm_of(torch.ones(8), 1e-6)(torch.zeros(2, 8)).abs().sum() == 0


def test_the_fused_addition_changes_the_residual_in_place():
    norm = norm_of(torch.ones(8), 1e-6)
    x, residual = torch.randn(2, 8), torch.randn(2, 8)
    expected = x + residual
    assert torch.equal(norm.add(x, residual), norm(expected))
    assert torch.equal(residual, expected)


@pytest.mark.parametrize("scaling", [None, LLAMA3], ids=["plain", "llama3"])
def test_rotation_turns_pairs_by_position_times_frequency(scaling):
    """Pair i is dimensions i and i + half, as a complex number; long waves are slowed under llama3."""
    dim, theta = 16, 100.0
    positions = torch.tensor([0, 1, 7, 300])
    heads = torch.randn(4, 3, dim, generator=torch.Generator().manual_seed(1))
    rope = get_rope(dim, theta, scaling, torch.float32)
    turned = apply_rotary(heads.clone(), rope(positions))
    frequencies = theta ** -(torch.arange(0, dim, 2).double() / dim)
    if scaling is not None:
        slow = 2 * torch.pi / frequencies > 256
        fast = 2 * torch.pi / frequencies < 64
        assert torch.allclose(rope.frequencies[slow].double() * 8, frequencies[slow], rtol=1e-6)
        assert torch.allclose(rope.frequencies[fast].double(), frequencies[fast], rtol=1e-6)
        assert slow.any() and fast.any()
        frequencies = rope.frequencies.double()
    angles = positions[:, None].double() * frequencies
    pairs = torch.complex(heads[..., : dim // 2].double(), heads[..., dim // 2 :].double())
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    expected = torch.cat((pairs.real, pairs.imag), dim=-1)
    assert (turned.double() - expected).abs().max() < 2e-4
    assert torch.equal(turned[0], heads[0])


def test_an_unknown_scaling_and_an_odd_head_are_refused():
    with pytest.raises(ValueError, match="'yarn' is not served"):
        get_rope(16, 1e4, {"rope_type": "yarn"}, torch.float32)
    with pytest.raises(ValueError, match="head_dim is 15"):
        get_rope(15, 1e4, None, torch.float32)


def test_silu_gates_the_second_half_and_others_are_refused():
    x = torch.randn(3, 10)
    assert torch.allclose(gated_activation("silu")(x), F.silu(x[:, :5]) * x[:, 5:])
    with pytest.raises(ValueError, match="hidden_act is 'gelu'"):
        gated_activation("gelu")
