"""Prefix codes of what is left of a number when it has been predicted: fixed tables, the same on every machine.

What is left of codes of 8 bit looks like Student's t with 4 degrees of freedom, ``(1 + r^2 / (4 s^2))^(-5/2)``,
whatever its scale: within 0.01 bit of its entropy on SmolLM2. So a table needs a scale and no counting, and none has to
travel with a block. There are 24 scales. Codes are Huffman's, at most 13 bits long (package-merge; Larmore and
Hirschberg, 1990), canonical, and read from the lowest bit of a word on. All arithmetic is with whole numbers: no
machine rounds otherwise.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["MAX_BITS", "NUM_TABLES", "SCALES", "Tables", "code_lengths", "tables"]

MAX_BITS = 13
NUM_TABLES = 24
SCALES = tuple(21 * 118**k // 100**k for k in range(NUM_TABLES))
"""The scale of each table, in sixteenths: from 1.3 to 59, by a ratio of 1.18."""

_NUM_SYMBOLS = 256


class Tables(NamedTuple):
    """What coder and decoder look up.

    Attributes:
        codes: uint32 ``[NUM_TABLES, 256]``: of each symbol its code in the lower 16 bits, its length above them.
        symbols: uint16 ``[NUM_TABLES, 2^MAX_BITS]``: by the next bits, the symbol, and its code's length above 8 bits.
        nearest: uint8 ``[8192]``: the table for a scale in sixteenths.
    """

    codes: NDArray[np.uint32]
    symbols: NDArray[np.uint16]
    nearest: NDArray[np.uint8]


@cache
def tables() -> Tables:
    """Return the tables; made once."""
    codes = np.zeros((NUM_TABLES, _NUM_SYMBOLS), np.uint32)
    symbols = np.zeros((NUM_TABLES, 2**MAX_BITS), np.uint16)
    for index, scale in enumerate(SCALES):
        lengths = code_lengths(_weights(scale))
        code, last = 0, 0
        for length, symbol in sorted((length, symbol) for symbol, length in enumerate(lengths)):
            code <<= length - last
            turned = int(f"{code:0{length}b}"[::-1], 2)
            codes[index, symbol] = turned | length << 16
            symbols[index, turned :: 2**length] = symbol | length << 8
            code, last = code + 1, length
    nearest = [min(range(NUM_TABLES), key=lambda k: abs(SCALES[k] - scale)) for scale in range(8192)]
    return Tables(codes, symbols, np.array(nearest, np.uint8))


def code_lengths(weights: list[int]) -> list[int]:
    """Return the lengths of an optimal prefix code of at most ``MAX_BITS`` bits, for symbols of these weights."""
    singles = sorted((weight, (symbol,)) for symbol, weight in enumerate(weights))
    packages: list[tuple[int, tuple[int, ...]]] = []
    for _ in range(MAX_BITS):
        merged = sorted([*singles, *packages])
        packages = [
            (left[0] + right[0], left[1] + right[1]) for left, right in zip(merged[::2], merged[1::2], strict=False)
        ]
    lengths = [0] * len(weights)
    for _, members in packages[: len(weights) - 1]:
        for symbol in members:
            lengths[symbol] += 1
    return lengths


def _weights(scale: int) -> list[int]:
    """Return what each residual, as a byte, weighs; whole numbers, for a scale in sixteenths."""
    weights = []
    for symbol in range(_NUM_SYMBOLS):
        residual = 16 * (symbol - _NUM_SYMBOLS if symbol >= _NUM_SYMBOLS // 2 else symbol)
        squared = 4 * scale * scale + residual * residual
        # squared^(-5/2), times a power of two
        weights.append(2**160 // (squared * squared * math.isqrt(squared << 32)) + 1)
    return weights
