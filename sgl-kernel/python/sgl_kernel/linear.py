"""Owns linear layers over packed weights: how they are packed, the calls, and the torch references.

Read by whoever stores weights for a CPU, and by the tests. A weight is packed once, and the packed form is
the same at every instruction set. Two forms: panels of 32 outputs of float32 or bfloat16, and groups of 16
outputs of quantized blocks of 32 inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

PANEL = 32
GROUP = 16
BLOCK = 32


def with_whole_rows(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix, copied only where the numbers of a row do not lie side by side, as packing wants them."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def pack_panels(weight: torch.Tensor) -> torch.Tensor:
    """weight [outputs, in], float32 or bfloat16, as panels of 32 outputs.

    [panels, in, 32] for float32; [panels, in / 2, 32, 2] for bfloat16, where two inputs lie together. Missing
    outputs and an odd input are zeros.
    """
    step = 1 if weight.dtype == torch.float32 else 2
    outputs, inputs = weight.shape
    out = weight.new_empty(-(-outputs // PANEL), -(-inputs // step), PANEL, step)
    torch.ops.sgl_kernel.pack_panels(with_whole_rows(weight), out)
    return out


def pack_panels_reference(weight: torch.Tensor) -> torch.Tensor:
    """What `pack_panels` writes."""
    step = 1 if weight.dtype == torch.float32 else 2
    outputs, inputs = weight.shape
    panels, steps = -(-outputs // PANEL), -(-inputs // step)
    whole = weight.new_zeros(panels * PANEL, steps * step)
    whole[:outputs, :inputs] = weight
    return whole.view(panels, PANEL, steps, step).transpose(1, 2).contiguous()


def unpack_panels(packed: torch.Tensor, outputs: int, inputs: int) -> torch.Tensor:
    """The weight [outputs, in] that `pack_panels` took."""
    panels, steps, _, step = packed.shape
    whole = packed.transpose(1, 2).reshape(panels * PANEL, steps * step)
    return whole[:outputs, :inputs].contiguous()


def linear_packed(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """out[r, n] = sum of x[r, k] * weight[n, k] + bias[n]; x [rows, in], out [rows, outputs], of one dtype.

    Sums are float32 in the order of the inputs, whatever the number of rows.
    """
    torch.ops.sgl_kernel.linear_packed(x, packed, bias, out)
    return out


class BlockForm(IntEnum):
    """What a quantized number q means: `scale * q`, or `scale * q + minimum`, and how many bits it has.

    q is signed, or counted from 0 where there is a minimum. In `Q6` 16 inputs have a scale, elsewhere 32.
    """

    Q4 = 0
    Q4_MIN = 1
    Q5 = 2
    Q5_MIN = 3
    Q6 = 4
    Q8 = 5

    @property
    def bits(self) -> int:
        return int(self.name[1])

    @property
    def has_minimum(self) -> bool:
        return self.name.endswith("_MIN")

    @property
    def scales(self) -> int:
        """Scales of an output in a block of 32 inputs."""
        return 2 if self is BlockForm.Q6 else 1

    @property
    def lowest(self) -> int:
        """The lowest q; stored numbers are unsigned, so many above their value."""
        return 0 if self.has_minimum else -(2 ** (self.bits - 1))

    @property
    def highest(self) -> int:
        return self.lowest + 2**self.bits - 1


@dataclass(frozen=True)
class BlockWeight:
    """A quantized weight before packing.

    numbers: int8 [outputs, in], in a multiple of 32. scales: float16 [outputs, in / 32], of `Q6` in / 16.
    minima: float16 [outputs, in / 32].
    """

    form: BlockForm
    numbers: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None = None

    def dequantized(self) -> torch.Tensor:
        """float32 [outputs, in]."""
        scaled = BLOCK // self.form.scales
        weight = self.numbers.float() * self.scales.float().repeat_interleave(scaled, dim=1)
        if self.minima is not None:
            weight += self.minima.float().repeat_interleave(BLOCK, dim=1)
        return weight


def pack_blocks(weight: BlockWeight) -> torch.Tensor:
    """uint8 [groups, blocks, bytes of a record]: of 16 outputs the numbers of 32 inputs, scales, minima.

    Numbers lie in fours of inputs, those of 16 outputs side by side. Of less than 8 bits, the low four of
    input k are the low half of a byte, those of input k + 16 the high half; the others follow in planes of 64
    bytes, each of which holds one bit of all eight fours of inputs, or two bits of four of them. Missing
    outputs are zeros.
    """
    outputs, inputs = weight.numbers.shape
    if inputs % BLOCK:
        raise ValueError(f"a quantized weight has a multiple of {BLOCK} inputs, and this one has {inputs}")
    size = torch.ops.sgl_kernel.block_record_bytes(int(weight.form))
    out = torch.empty(-(-outputs // GROUP), inputs // BLOCK, size, dtype=torch.uint8)
    minima = None if weight.minima is None else with_whole_rows(weight.minima)
    numbers, scales = with_whole_rows(weight.numbers), with_whole_rows(weight.scales)
    torch.ops.sgl_kernel.pack_blocks(numbers, scales, minima, out, int(weight.form))
    return out


def pack_blocks_reference(weight: BlockWeight) -> torch.Tensor:
    """What `pack_blocks` writes."""
    form, (outputs, inputs) = weight.form, weight.numbers.shape
    groups, blocks = -(-outputs // GROUP), inputs // BLOCK
    numbers = weight.numbers.new_zeros(groups * GROUP, inputs, dtype=torch.int16)
    numbers[:outputs] = weight.numbers
    numbers -= form.lowest
    # [groups, blocks, fours, outputs, inputs of a four]
    fours = numbers.to(torch.uint8).view(groups, GROUP, blocks, BLOCK // 4, 4).permute(0, 2, 3, 1, 4)
    parts = [fours.reshape(groups, blocks, -1)]
    if form.bits < 8:
        low, high = (fours & 15).chunk(2, dim=2)
        parts = [(low | (high << 4)).reshape(groups, blocks, -1)]
        above = form.bits - 4
        for some in (fours >> 4).split(8 // above, dim=2) if above else ():
            shifts = torch.arange(0, 8, above, dtype=torch.uint8).view(-1, 1, 1)
            parts.append((some << shifts).sum(dim=2, dtype=torch.uint8).reshape(groups, blocks, -1))
    for halves in (weight.scales, weight.minima):
        if halves is None:
            continue
        whole = torch.zeros(groups * GROUP, halves.shape[1], dtype=torch.float16)
        whole[:outputs] = halves
        turned = whole.view(groups, GROUP, blocks, -1).permute(0, 2, 3, 1)
        parts.append(turned.contiguous().view(groups, blocks, -1).view(torch.uint8))
    return torch.cat(parts, dim=2).contiguous()


def unpack_blocks(packed: torch.Tensor, form: BlockForm, outputs: int) -> BlockWeight:
    """The weight that `pack_blocks` took."""
    groups, blocks, _ = packed.shape
    size = GROUP * BLOCK * form.bits // 8
    fours = packed[:, :, :size].reshape(groups, blocks, -1, GROUP, 4)
    if form.bits < 8:
        low, planes = fours.split((4, form.bits - 4), dim=2)
        fours = torch.cat([low & 15, low >> 4], dim=2)
        above = form.bits - 4
        if above:
            shifts = torch.arange(0, 8, above, dtype=torch.uint8).view(-1, 1, 1)
            high = (planes.unsqueeze(3) >> shifts) & (2**above - 1)
            fours |= high.flatten(2, 3) << 4
    numbers = fours.permute(0, 3, 1, 2, 4).reshape(groups * GROUP, blocks * BLOCK).to(torch.int16)
    halves = packed[:, :, size:].contiguous().view(torch.float16).view(groups, blocks, -1, GROUP)
    scales, minima = (
        part.permute(0, 3, 1, 2).reshape(groups * GROUP, -1)[:outputs]
        for part in halves.split((form.scales, halves.shape[2] - form.scales), dim=2)
    )
    values = (numbers + form.lowest).to(torch.int8)[:outputs]
    return BlockWeight(form, values, scales, minima if form.has_minimum else None)


def linear_blocks(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, form: BlockForm
) -> torch.Tensor:
    """The same over quantized blocks; x and out are float32 or bfloat16, and x is quantized on the way."""
    torch.ops.sgl_kernel.linear_blocks(x, packed, bias, out, int(form))
    return out


def quantized_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, in] as int8 numbers and float32 scales [rows, in / 32]: max / 127 of 32 inputs each.

    A block with a number that is not finite has the scale NaN; one whose max is so small that 127 / max is
    infinite has zeros for numbers.
    """
    blocks = x.float().view(x.shape[0], x.shape[1] // BLOCK, BLOCK)
    most = blocks.abs().amax(dim=-1, keepdim=True)
    inverse = torch.full_like(most, 127.0) / most
    is_used = most.isfinite() & inverse.isfinite()
    numbers = torch.where(is_used, blocks * inverse, 0.0).round().view(x.shape).to(torch.int8)
    return numbers, torch.where(most.isfinite(), most / 127.0, torch.nan).squeeze(-1)


def linear_blocks_reference(x: torch.Tensor, weight: BlockWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """What `linear_blocks` computes, in float64 behind the quantizing of x."""
    numbers, scales = quantized_rows(x)
    rows = numbers.double() * scales.double().repeat_interleave(BLOCK, dim=1)
    out = rows @ weight.dequantized().double().T
    return (out if bias is None else out + bias.double()).to(x.dtype)


@torch.library.register_fake("sgl_kernel::linear_packed")
def _linear_packed_fake(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Only writes into `out`."""


@torch.library.register_fake("sgl_kernel::linear_blocks")
def _linear_blocks_fake(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, form: int
) -> None:
    """Only writes into `out`."""


@torch.library.register_fake("sgl_kernel::pack_panels")
def _pack_panels_fake(weight: torch.Tensor, out: torch.Tensor) -> None:
    """Only writes into `out`."""


@torch.library.register_fake("sgl_kernel::pack_blocks")
def _pack_blocks_fake(
    numbers: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None, out: torch.Tensor, form: int
) -> None:
    """Only writes into `out`."""
