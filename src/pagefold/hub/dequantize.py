"""The tensor types of GGUF that are known here, and their numbers as float32.

A tensor is a row of blocks: a few numbers with their scale beside them. The arithmetic is GGML's own, in float32 and in
its order of operations, so that the results are equal in bits to what other readers get. Whole tensors at once, to be
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
    8: TensorType("Q8_0", 32, 34, _dequantize_q8_0),
}
# Known by name only, so that the error can say it.
OTHER_TYPES = {6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 30: "BF16"}
