"""The tensor types of GGUF that are known here, and their numbers as float32.

A tensor is a row of blocks: a few numbers with their scale beside them. The arithmetic is GGML's own, in float32 and in
its order of operations, so that the results are equal in bits to what other readers get. Many blocks at once, to be
fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["OTHER_TYPES", "TENSOR_TYPES", "TensorType"]


def _dequantize_f32(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return blocks.view("<f4").astype(np.float32)  # a copy, so that the file can be closed


def _dequantize_f16(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return blocks.view("<f2").astype(np.float32)


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
    numbers = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little")
    numbers <<= 4
    numbers |= _nibbles(blocks[:, 6:]).reshape(-1, 32)
    return (numbers.view(np.int8) - np.int8(16)) * scales


def _dequantize_q4_k(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    # scale f16 | minimum f16 | 12 bytes, for 8 runs of 32 numbers a factor of each of the two | 4 x 32 x two nibbles
    scale_and_minimum = blocks[:, :4].view("<f2").astype(np.float32)
    factors = _factors_of_runs(blocks[:, 4:16])
    scales = scale_and_minimum[:, 0:1] * factors[:, 0]
    minima = scale_and_minimum[:, 1:2] * factors[:, 1]
    # 32 bytes are two runs: the low halves are the first.
    packed = blocks[:, 16:].reshape(-1, 4, 32)
    unpacked = np.empty((len(blocks), 4, 2, 32), np.uint8)
    np.bitwise_and(packed, 15, out=unpacked[:, :, 0])
    np.right_shift(packed, 4, out=unpacked[:, :, 1])
    numbers = unpacked.reshape(-1, 8, 32) * scales[:, :, None]
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


def _nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Unpack uint8 [n, 16] into uint8 [n, 2, 16]: the low halves are a block's first 16 numbers, the high its last."""
    unpacked = np.empty((len(packed), 2, 16), np.uint8)
    np.bitwise_and(packed, 15, out=unpacked[:, 0])
    np.right_shift(packed, 4, out=unpacked[:, 1])
    return unpacked


@dataclass(frozen=True, slots=True)
class TensorType:
    """How the tensors of one type are stored.

    Attributes:
        name: GGML's name.
        block_size: numbers in a block.
        block_bytes: bytes in a block.
        dequantize: from stored blocks, uint8 [num_blocks, block_bytes], to float32 [num_blocks, block_size], as a copy.
    """

    name: str
    block_size: int
    block_bytes: int
    dequantize: Callable[[NDArray[np.uint8]], NDArray[np.float32]]


TENSOR_TYPES = {
    0: TensorType("F32", 1, 4, _dequantize_f32),
    1: TensorType("F16", 1, 2, _dequantize_f16),
    2: TensorType("Q4_0", 32, 18, _dequantize_q4_0),
    3: TensorType("Q4_1", 32, 20, _dequantize_q4_1),
    6: TensorType("Q5_0", 32, 22, _dequantize_q5_0),
    8: TensorType("Q8_0", 32, 34, _dequantize_q8_0),
    12: TensorType("Q4_K", 256, 144, _dequantize_q4_k),
    14: TensorType("Q6_K", 256, 210, _dequantize_q6_k),
}
# Known by name only, so that the error can say it.
OTHER_TYPES = {7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 13: "Q5_K", 30: "BF16"}
