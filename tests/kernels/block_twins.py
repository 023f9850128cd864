"""What is computed with GGML's blocks, said again in NumPy, number after number: slow and obvious."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from format_twins import fma

from pagefold.kernels.block_kinds import KINDS

__all__ = ["Decoded", "blocks_product", "decoded", "random_blocks", "round_row_group"]

_SMALLEST = np.finfo(np.float32).tiny


class Decoded(NamedTuple):
    """Blocks taken apart: codes less what is zero ``[N, K]``, factors ``[N, K]``, minima ``[N, K]`` (0 for none)."""

    codes: np.ndarray
    factors: np.ndarray
    minima: np.ndarray


def random_blocks(kind, num, num_k, seed=0, spread=4):
    """Blocks of random bytes whose halves are numbers near .01, times a random power of two."""
    random, kind = np.random.default_rng(seed), KINDS[kind]
    blocks = random.integers(0, 256, (num, num_k // kind.numbers, kind.block_bytes), dtype=np.uint8)
    for at in _halves_at(kind):
        halves = random.standard_normal(blocks.shape[:2]) * 0.01 * 2.0 ** random.integers(-spread, spread + 1)
        blocks[..., at : at + 2] = halves.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(num, -1)


def _halves_at(kind):
    return (208,) if kind.name == "Q6_K" else range(0, 2 * kind.halves, 2)


def decoded(kind, blocks):
    """Take rows of blocks apart, as ``ggml-quants.c`` says."""
    kind = KINDS[kind]
    parts = [_decode_block(kind, one) for one in blocks.reshape(-1, kind.block_bytes)]
    shape = len(blocks), -1
    return Decoded(*(np.array(one).reshape(shape) for one in zip(*parts, strict=True)))


def _decode_block(kind, block):
    halves = [block[at : at + 2].view(np.float16).astype(np.float32)[0] for at in _halves_at(kind)]
    d, name = halves[0], kind.name
    codes, factors = np.zeros(kind.numbers, np.int64), np.full(kind.numbers, d, np.float32)
    minima = np.zeros(kind.numbers, np.float32)
    for i in range(kind.numbers):
        group, n = divmod(i, 32)
        nibble = 4 * (n // 16)
        if name in {"Q4_0", "Q4_1", "Q5_0", "Q5_1"}:
            begin = 2 * kind.halves
            if kind.bits == 5:
                codes[i] = (int(block[begin + n // 8]) >> (n % 8) & 1) << 4
                begin += 4
            codes[i] += block[begin + n % 16] >> nibble & 15
            codes[i] -= kind.zero
            minima[i] = halves[1] if kind.has_minimum else 0
        elif name == "Q8_0":
            codes[i] = block[2:].view(np.int8)[n]
        elif name in {"Q4_K", "Q5_K"}:
            scale, minimum = _small_scales(block[4:16], group)
            lower = block[16:] if name == "Q4_K" else block[48:]
            codes[i] = lower[32 * (group // 2) + n] >> 4 * (group % 2) & 15
            if name == "Q5_K":
                codes[i] += (int(block[16 + n]) >> group & 1) << 4
            factors[i], minima[i] = d * np.float32(scale), -(halves[1] * np.float32(minimum))
        else:
            half, group = divmod(group, 4)
            codes[i] = block[64 * half + 32 * (group % 2) + n] >> 4 * (group // 2) & 15
            codes[i] += (int(block[128 + 32 * half + n]) >> 2 * group & 3) << 4
            codes[i] -= 32
            factors[i] = d * np.float32(block[192 + i // 16 : 193 + i // 16].view(np.int8)[0])
    return codes, factors, minima


def _small_scales(packed, group):
    """``get_scale_min_k4``."""
    packed = [int(one) for one in packed]
    if group < 4:
        return packed[group] & 63, packed[group + 4] & 63
    scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6 << 4)
    return scale, (packed[group + 4] >> 4) | (packed[group] >> 6 << 4)


def round_row_group(group):
    """Return the whole numbers of 32 numbers of a row, and their scale."""
    largest = np.abs(group).max()  # NaN if one is
    scale = np.maximum(largest / np.float32(127), _SMALLEST)
    if not np.isfinite(scale):
        return np.zeros(len(group), np.int64), np.float32(np.nan)
    return np.rint(group * (np.float32(1) / scale)).astype(np.int64), scale


def blocks_product(kind, x, blocks):
    """``x[T, K] @ w[N, K].T`` of blocks ``[N, bytes of a row]``."""
    w = decoded(kind, blocks)
    y = np.zeros((len(x), len(blocks)), np.float32)
    step = 16 if kind == "Q6_K" else 32
    for begin in range(0, x.shape[1], 32):
        rows = [round_row_group(row[begin : begin + 32]) for row in x]
        numbers, scales = np.array([one for one, _ in rows]), np.array([one for _, one in rows], np.float32)
        for first in range(0, 32, step):
            part = slice(begin + first, begin + first + step)
            sums = numbers[:, first : first + step] @ w.codes[:, part].T
            y = fma(sums.astype(np.float32), np.multiply.outer(scales, w.factors[:, begin + first]), y)
        if KINDS[kind].has_minimum:
            totals = numbers.sum(1).astype(np.float32) * scales
            y = fma(totals[:, None], w.minima[None, :, begin], y)
    return y
