"""Tensors of the kinds that are known here, and their numbers as float32.

A tensor is a row of blocks: a few numbers with their scale beside them. The arithmetic is GGML's own, in float32 and in
its order of operations, so that the results are equal in bits to what other readers get. Many blocks at once, to be
fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

__all__ = ["DEQUANTIZE"]


def _dequantize_f32(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return blocks.view("<f4").astype(np.float32)  # a copy, so that the file can be closed


def _dequantize_f16(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return blocks.view("<f2").astype(np.float32)


def _dequantize_bf16(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _dequantize_q8_0(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    # scale f16 | 32 x i8
    scales = blocks[:, :2].view("<f2").astype(np.float32)
    return blocks[:, 2:].view(np.int8) * scales


def _dequantize_q4_0(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    # scale f16 | 16 x two nibbles, each 8 too high
    scales = blocks[:, :2].view("<f2").astype(np.float32)[:, None]
    return ((_nibbles(blocks[:, 2:]).view(np.int8) - np.int8(8)) * scales).reshape(-1, 32)


def _dequantize_q4_1(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    # scale f16 | minimum f16 | 16 x two nibbles
    scales_and_minima = blocks[:, :4].view("<f2").astype(np.float32)
    numbers = _nibbles(blocks[:, 4:]) * scales_and_minima[:, None, 0:1]
    numbers += scales_and_minima[:, None, 1:2]
    return numbers.reshape(-1, 32)


def _dequantize_q5_0(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    # scale f16 | 32 fifth bits, in the order of the numbers | 16 x two nibbles; 5 bit together, 16 too high
    scales = blocks[:, :2].view("<f2").astype(np.float32)
    return (_five_bits(blocks[:, 2:]).view(np.int8) - np.int8(16)) * scales


def _dequantize_q5_1(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    # scale f16 | minimum f16 | 32 fifth bits | 16 x two nibbles
    scales_and_minima = blocks[:, :4].view("<f2").astype(np.float32)
    numbers = _five_bits(blocks[:, 4:]) * scales_and_minima[:, 0:1]
    numbers += scales_and_minima[:, 1:2]
    return numbers


def _dequantize_q4_k(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    # scale f16 | minimum f16 | 12 bytes, for 8 runs of 32 numbers a factor of each of the two | 4 x 32 x two nibbles
    return _scaled_runs(_halves(blocks[:, 16:]), blocks)


def _dequantize_q5_k(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    # The same, with 32 bytes of fifth bits before the nibbles: the lowest bit of each is of the first run, and so on.
    numbers = _halves(blocks[:, 48:])
    for run in range(8):
        numbers[:, run] |= (blocks[:, 16:48] >> run & 1) << 4
    return _scaled_runs(numbers, blocks)


def _halves(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Unpack the nibbles of 8 runs, uint8 [n, 128], into uint8 [n, 8, 32]: 32 bytes are two runs, the low first."""
    unpacked = np.empty((len(packed), 4, 2, 32), np.uint8)
    np.bitwise_and(packed.reshape(-1, 4, 32), 15, out=unpacked[:, :, 0])
    np.right_shift(packed.reshape(-1, 4, 32), 4, out=unpacked[:, :, 1])
    return unpacked.reshape(-1, 8, 32)


def _scaled_runs(runs: NDArray[np.uint8], blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the numbers of blocks, whose first 16 bytes have their scales and minima."""
    scale_and_minimum = blocks[:, :4].view("<f2").astype(np.float32)
    factors = _factors_of_runs(blocks[:, 4:16])
    scales = scale_and_minimum[:, 0:1] * factors[:, 0]
    minima = scale_and_minimum[:, 1:2] * factors[:, 1]
    numbers = runs * scales[:, :, None]
    numbers -= minima[:, :, None]
    return numbers.reshape(-1, 256)


def _factors_of_runs(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Unpack the factors of 6 bit of a block's 8 runs, uint8 [n, 12], into uint8 [n, 2, 8]: of scales, of minima.

    The first four of either kind are the low 6 bit of four bytes. The others are torn: the top 2 bit of those bytes are
    theirs, and the last four bytes hold the rest, scales in the low halves.
    """
    first, rest = packed[:, :8].reshape(-1, 2, 4), packed[:, 8:]
    factors = np.empty((len(packed), 2, 8), np.uint8)
    np.bitwise_and(first, 63, out=factors[:, :, :4])
    np.bitwise_and(first >> 2, 48, out=factors[:, :, 4:])
    factors[:, 0, 4:] |= rest & 15
    factors[:, 1, 4:] |= rest >> 4
    return factors


def _dequantize_q6_k(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    # 2 x 64 x two nibbles | 2 x 32 x four times 2 bit | 16 x i8, a factor of the scale for each 16 numbers | scale f16
    low, high = blocks[:, :128].reshape(-1, 2, 64), blocks[:, 128:192].reshape(-1, 2, 32)
    # Of each half of a block the 128 numbers are four times 32: two by the nibbles' low halves, two by their high ones,
    # and each has its pair of bits of the same 32 bytes. 6 bit together, 32 too high.
    numbers = np.empty((len(blocks), 2, 4, 32), np.uint8)
    np.bitwise_and(low, 15, out=numbers[:, :, :2].reshape(-1, 2, 64))
    np.right_shift(low, 4, out=numbers[:, :, 2:].reshape(-1, 2, 64))
    for part in range(4):
        numbers[:, :, part] |= (high >> (2 * part) & 3) << 4
    scales = blocks[:, 208:].view("<f2").astype(np.float32) * blocks[:, 192:208].view(np.int8)
    signed = numbers.view(np.int8) - np.int8(32)
    return (signed.reshape(-1, 16, 16) * scales[:, :, None]).reshape(-1, 256)


def _five_bits(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Unpack uint8 [n, 20], 32 fifth bits in the order of the numbers and 16 x two nibbles, into uint8 [n, 32]."""
    numbers = np.unpackbits(packed[:, :4], axis=1, bitorder="little")
    numbers <<= 4
    numbers |= _nibbles(packed[:, 4:]).reshape(-1, 32)
    return numbers


def _nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Unpack uint8 [n, 16] into uint8 [n, 2, 16]: the low halves are a block's first 16 numbers, the high its last."""
    unpacked = np.empty((len(packed), 2, 16), np.uint8)
    np.bitwise_and(packed, 15, out=unpacked[:, 0])
    np.right_shift(packed, 4, out=unpacked[:, 1])
    return unpacked


DEQUANTIZE: Mapping[str, Callable[[NDArray[np.uint8]], NDArray[np.float32]]] = {
    "F32": _dequantize_f32,
    "F16": _dequantize_f16,
    "BF16": _dequantize_bf16,
    "Q4_0": _dequantize_q4_0,
    "Q4_1": _dequantize_q4_1,
    "Q5_0": _dequantize_q5_0,
    "Q5_1": _dequantize_q5_1,
    "Q8_0": _dequantize_q8_0,
    "Q4_K": _dequantize_q4_k,
    "Q5_K": _dequantize_q5_k,
    "Q6_K": _dequantize_q6_k,
}
"""By the kind's name: from stored blocks, uint8 [num_blocks, block_bytes], to float32 [num_blocks, block_size], a
copy."""
