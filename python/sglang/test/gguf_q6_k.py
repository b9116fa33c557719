"""Owns the writing of Q6_K blocks, which the `gguf` package only reads.

Read by `tiny_models.py`. Scales are the plain ones: no search for those of the least error.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def q6_k_blocks(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """rows [rows, columns], in a multiple of 256, as [rows, 210 bytes for 256 columns].

    A block is [128 bytes of low nibbles][64 bytes of high pairs][16 int8 scales][d f16].
    """
    parts = rows.reshape(-1, 16, 16)
    ideal = np.abs(parts).max(axis=2) / 31
    d = (ideal.max(axis=1, keepdims=True) / 127).astype(np.float16)
    step = np.maximum(d.astype(np.float32), np.float32(1e-8))
    scales = np.round(ideal / step).clip(0, 127)
    quotients = parts / np.maximum(step * scales, np.float32(1e-12))[:, :, None]
    numbers = (np.round(quotients).clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low, high = numbers & 15, numbers >> 4
    nibbles = low[:, :, :2] | low[:, :, 2:] << 4
    pairs = np.bitwise_or.reduce(high << np.array([0, 2, 4, 6], dtype=np.uint8)[:, None], axis=2)
    blocks = [
        nibbles.reshape(-1, 128),
        pairs.reshape(-1, 64),
        scales.astype(np.int8).view(np.uint8),
        d.view(np.uint8),
    ]
    return np.concatenate(blocks, axis=1).reshape(len(rows), -1)
