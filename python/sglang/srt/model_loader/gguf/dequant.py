"""GGUF blocks to plain numbers.

Owns one decoder per tensor type, each equal bit for bit to the format's reference in float32, and the blocks
as whole numbers with their scales, for layers that compute with those. Read by the GGUF reader. It must not
know names or shapes of models.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang.srt.configs.gguf.types import GGMLType

Bytes = npt.NDArray[np.uint8]  # [blocks, block_bytes]
Floats = npt.NDArray[np.float32]  # [blocks, block_elements]

# Values decoded at a time: the float32 scratch (256 KiB) stays in the second-level cache.
_CHUNK_VALUES = 1 << 16


def dequantize(
    data: memoryview,
    kind: GGMLType,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    what: str,
    columns: tuple[int, int] | None = None,
) -> torch.Tensor:
    """The tensor of `shape` packed in `data`, decoded in float32 and then rounded once to `dtype`.

    `columns` (start, length) keeps a part of the last dimension: only the blocks that hold it are decoded.
    """
    decode = DECODERS.get(kind.name)
    if decode is None:
        raise ValueError(f"{what} is stored as {kind.name}, which is not read; known: {', '.join(DECODERS)}")
    values = math.prod(shape)
    if len(data) != kind.nbytes(values):
        raise ValueError(
            f"{what} of shape {list(shape)} needs {kind.nbytes(values)} bytes, it has {len(data)}"
        )
    if columns is not None:
        return _dequantize_columns(data, kind, shape, dtype, *columns)
    out = torch.empty(shape, dtype=dtype)
    flat = out.view(-1)
    blocks = np.frombuffer(data, dtype=np.uint8).reshape(-1, kind.block_bytes)
    step = max(1, _CHUNK_VALUES // kind.block_elements)
    for start in range(0, len(blocks), step):
        chunk = torch.from_numpy(decode(blocks[start : start + step])).view(-1)
        begin = start * kind.block_elements
        flat[begin : begin + chunk.numel()].copy_(chunk)
    return out


def _dequantize_columns(
    data: memoryview, kind: GGMLType, shape: tuple[int, ...], dtype: torch.dtype, start: int, length: int
) -> torch.Tensor:
    """Columns `start : start + length` of every row, out of whole blocks."""
    out = torch.empty(*shape[:-1], length, dtype=dtype)
    flat = out.view(-1, length)
    size = kind.block_elements
    first, last = start // size, -(-(start + length) // size)
    blocks = np.frombuffer(data, dtype=np.uint8).reshape(len(flat), -1, kind.block_bytes)[:, first:last]
    inside = start - first * size
    step = max(1, _CHUNK_VALUES // ((last - first) * size))
    for row in range(0, len(flat), step):
        part = np.ascontiguousarray(blocks[row : row + step])
        chunk = torch.from_numpy(DECODERS[kind.name](part.reshape(-1, kind.block_bytes)))
        flat[row : row + step].copy_(chunk.view(len(part), -1)[:, inside : inside + length])
    return out


@dataclass(frozen=True, slots=True)
class SplitBlocks:
    """Blocks as whole numbers with scales: a value is `number * scale`, plus a minimum where there is one.

    `numbers` is [blocks, parts, size] of 8 bits, `scales` and `minima` [blocks, parts]: `size` numbers of a
    block have one scale.
    """

    numbers: npt.NDArray[np.int8] | npt.NDArray[np.uint8]
    scales: Floats
    minima: Floats | None = None

    def values(self) -> Floats:
        values = self.numbers.astype(np.float32)
        values *= self.scales[:, :, None]
        if self.minima is not None:
            values += self.minima[:, :, None]
        return values.reshape(len(values), -1)


def split_rows(
    data: memoryview, kind: GGMLType, rows: int, width: int, columns: tuple[int, int]
) -> SplitBlocks:
    """Columns (start, length) of `rows` rows of `width` values, as [rows, parts, size].

    Start and length are multiples of the size that shares a scale.
    """
    blocks = np.frombuffer(data, dtype=np.uint8).reshape(rows, -1, kind.block_bytes)
    start, length = columns
    size = kind.block_elements
    first, last = start // size, -(-(start + length) // size)
    part = np.ascontiguousarray(blocks[:, first:last]).reshape(-1, kind.block_bytes)
    found = SPLITTERS[kind.name](part)
    shared = found.numbers.shape[2]
    begin, count = start // shared - first * size // shared, length // shared

    def cut(values: npt.NDArray[Any], *tail: int) -> npt.NDArray[Any]:
        return values.reshape(rows, -1, *tail)[:, begin : begin + count]

    return SplitBlocks(
        cut(found.numbers, shared),
        cut(found.scales),
        None if found.minima is None else cut(found.minima),
    )


def _f16(blocks: Bytes, start: int) -> Floats:
    """The half-precision number at byte `start` of each block, as [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """[blocks, n] bytes to [blocks, 2n] values: all low halves, then all high halves."""
    count = packed.shape[1]
    out = np.empty((packed.shape[0], 2 * count), dtype=np.uint8)
    np.bitwise_and(packed, 15, out=out[:, :count])
    np.right_shift(packed, 4, out=out[:, count:])
    return out


def _fifth_bits(blocks: Bytes, start: int) -> Bytes:
    """The 32 bits at byte `start`, lowest first, as [blocks, 32] zeros and sixteens."""
    bits = np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little")
    return np.left_shift(bits, 4, out=bits)


def _less(quants: Bytes, offset: int) -> npt.NDArray[np.int8]:
    """Unsigned numbers with their offset taken off, as [blocks, 1, size]."""
    return (quants.view(np.int8) - np.int8(offset))[:, None]


def _f32(blocks: Bytes) -> Floats:
    return blocks.copy().view(np.float32)


def _half(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view(np.float16).astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    high = np.ascontiguousarray(blocks).view(np.uint16).astype(np.uint32)
    return np.left_shift(high, 16, out=high).view(np.float32)


def _q4_0(blocks: Bytes) -> SplitBlocks:
    # [d f16][16 bytes of nibbles]: d * (q - 8)
    return SplitBlocks(_less(_nibbles(blocks[:, 2:]), 8), _f16(blocks, 0))


def _q4_1(blocks: Bytes) -> SplitBlocks:
    # [d f16][m f16][16 bytes of nibbles]: d * q + m
    return SplitBlocks(_nibbles(blocks[:, 4:])[:, None], _f16(blocks, 0), _f16(blocks, 2))


def _q5_0(blocks: Bytes) -> SplitBlocks:
    # [d f16][32 fifth bits][16 bytes of nibbles]: d * (q - 16)
    quants = _nibbles(blocks[:, 6:])
    quants |= _fifth_bits(blocks, 2)
    return SplitBlocks(_less(quants, 16), _f16(blocks, 0))


def _q5_1(blocks: Bytes) -> SplitBlocks:
    # [d f16][m f16][32 fifth bits][16 bytes of nibbles]: d * q + m
    quants = _nibbles(blocks[:, 8:])
    quants |= _fifth_bits(blocks, 4)
    return SplitBlocks(quants[:, None], _f16(blocks, 0), _f16(blocks, 2))


def _q8_0(blocks: Bytes) -> SplitBlocks:
    # [d f16][32 int8]: d * q
    return SplitBlocks(np.ascontiguousarray(blocks[:, 2:]).view(np.int8)[:, None], _f16(blocks, 0))


def _k_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """The 8 six-bit scales and 8 six-bit minimums in 12 bytes, each as [blocks, 8].

    Bytes 0-3 hold scales 0-3, bytes 4-7 minimums 0-3 (six low bits each); bytes 8-11 hold the low halves of
    scales 4-7 (low nibble) and minimums 4-7 (high nibble), whose two high bits top bytes 0-3 and 4-7.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1)
    minimums = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    return scales.astype(np.float32), minimums.astype(np.float32)


def _k_blocks(blocks: Bytes, quants: Bytes) -> SplitBlocks:
    """(d * scale) * q - (dmin * minimum) over 8 sub-blocks of 32; `quants` is [blocks, 8, 32]."""
    scales, minimums = _k_scales(blocks[:, 4:16])
    scales *= _f16(blocks, 0)
    minimums *= _f16(blocks, 2)
    return SplitBlocks(quants, scales, np.negative(minimums, out=minimums))


def _k_nibbles(packed: Bytes) -> Bytes:
    # 128 bytes are 4 groups of 32; a group's low halves are one sub-block, its high halves the next.
    groups = packed.reshape(-1, 4, 32)
    return np.stack([groups & 15, groups >> 4], axis=2).reshape(-1, 8, 32)


def _q4_k(blocks: Bytes) -> SplitBlocks:
    # [d f16][dmin f16][12 bytes of scales][128 bytes of nibbles]
    return _k_blocks(blocks, _k_nibbles(blocks[:, 16:]))


def _q5_k(blocks: Bytes) -> SplitBlocks:
    # [d f16][dmin f16][12 bytes of scales][32 bytes of fifth bits][128 bytes of nibbles]
    # Byte i of the fifth bits holds, for each of the 8 sub-blocks, the bit of its value i.
    shifts = np.arange(8, dtype=np.uint8)[None, :, None]
    fifth: Bytes = np.left_shift(blocks[:, None, 16:48] >> shifts & 1, 4, dtype=np.uint8)
    return _k_blocks(blocks, np.bitwise_or(_k_nibbles(blocks[:, 48:]), fifth, dtype=np.uint8))


def _q6_k(blocks: Bytes) -> SplitBlocks:
    # [128 bytes of low nibbles][64 bytes of high pairs][16 int8 scales][d f16]: (d * scale) * (q - 32)
    # Each half of 128 values takes 64 low bytes (low nibbles first) and 32 high bytes, four pairs in each.
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[None, None, :, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    numbers = (low | high << 4).reshape(-1, 16, 16).view(np.int8) - np.int8(32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    scales *= _f16(blocks, 208)
    return SplitBlocks(numbers, scales)


#: Types whose values are whole numbers with a scale for 32 or 16 of them: layers can compute with those.
SPLITTERS: dict[str, Callable[[Bytes], SplitBlocks]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def _decoder(split: Callable[[Bytes], SplitBlocks]) -> Callable[[Bytes], Floats]:
    return lambda blocks: split(blocks).values()


DECODERS: dict[str, Callable[[Bytes], Floats]] = {
    "F32": _f32,
    "F16": _half,
    "BF16": _bf16,
    **{name: _decoder(split) for name, split in SPLITTERS.items()},
}
