"""Which tiles the kernels work in: a table by shape and card. Nothing is tried at run time.

A row of the table holds from its compute capability on. Shared memory bounds the tiles: a block of threads has 227 KiB
on compute capability 9.0, 163 KiB on 8.0 and 99 KiB on 8.6 and 8.9 (CUDA C++ Programming Guide, "Technical
Specifications per Compute Capability"); the tests compile every row and compare.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch

__all__ = [
    "DTYPES",
    "MAX_HEAD_DIM",
    "MAX_SHARED_BYTES",
    "MIN_CAPABILITY",
    "KernelConfig",
    "Reads",
    "choose_config",
    "num_splits_for",
    "padded",
    "sealing_warps",
]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""What the kernels compute in. Their sums are always float32."""

MAX_HEAD_DIM = 256

MIN_CAPABILITY = (8, 0)
"""Ampere: the first with bfloat16 products and asynchronous copies, which the tiles of this table rely on."""

MAX_SHARED_BYTES = {(8, 0): 163 * 1024, (8, 6): 99 * 1024, (8, 7): 163 * 1024, (8, 9): 99 * 1024, (9, 0): 227 * 1024}
"""Shared memory of one block of threads, by compute capability."""

_MIN_ROWS = 16
"""Rows of the smallest product that a tensor core makes."""

_PROGRAMS_A_PROCESSOR = 4
"""Programs of decoding that there ought to be for each multiprocessor, so that all are busy to the end."""

_MAX_SPLITS = 64

_SEALED_NUMBERS_A_WARP = 1024
"""Numbers of K, and as many of V, that one warp seals: 32 of each a thread."""


class KernelConfig(NamedTuple):
    """How one kernel works.

    Attributes:
        rows: query rows of a program: tokens times the heads of a group.
        tile: entries that it takes at a time.
        num_warps: of a program.
        num_stages: tiles that are on their way at once.
    """

    rows: int
    tile: int
    num_warps: int
    num_stages: int


def padded(number: int) -> int:
    """Return the next power of two: Triton's tiles have no other sizes."""
    return 1 << max(0, number - 1).bit_length()


class Reads(Enum):
    """What a kernel reads of blocks, and so what it needs registers for."""

    NUMBERS = "numbers"
    CODES = "codes"
    CENTRED_CODES = "codes of what constants were taken off"
    SEALED_CODES = "the same, with scales of channels"


def choose_config(  # noqa: PLR0913, PLR0917 - the columns of a table
    kernel: str,
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    capability: tuple[int, int],
    reads: Reads = Reads.NUMBERS,
) -> KernelConfig:
    """Return how ``decode`` or ``prefill`` works on this shape and card.

    Args:
        kernel: ``decode`` or ``prefill``.
        dtype: of queries.
        head_dim: numbers of a head.
        group: query heads a KV head.
        capability: the card's compute capability.
        reads: what blocks hold.
    """
    has_room = MAX_SHARED_BYTES.get(capability, 99 * 1024) >= 163 * 1024
    dims, is_float32 = max(16, padded(head_dim)), dtype == torch.float32
    if kernel == "decode":
        tile = next(tile for most, tile in _DECODE[is_float32] if dims <= most)
        num_warps = 8 if reads is Reads.SEALED_CODES else 4
        return KernelConfig(max(_MIN_ROWS, padded(group)), tile, num_warps, 3 if has_room and dims <= 128 else 2)  # noqa: PLR2004
    table = _PREFILL_FLOAT32 if is_float32 else _PREFILL[has_room] if reads is Reads.NUMBERS else _PREFILL_CODES[reads]
    rows, tile, num_warps, num_stages = next(row for most, *row in table if dims <= most)
    if group > rows:  # a token's rows are one program's
        rows = padded(group)
    return KernelConfig(rows, tile, num_warps, num_stages)


_DECODE = {False: ((128, 64), (256, 32)), True: ((64, 32), (256, 16))}
"""The tile of ``decode``, by whether numbers are float32 and by padded head_dim, which is at most so large."""

_PREFILL = {
    True: ((64, 128, 64, 4, 3), (128, 128, 64, 8, 3), (256, 64, 32, 4, 2)),
    False: ((64, 64, 64, 4, 2), (128, 64, 32, 4, 2), (256, 32, 16, 4, 2)),
}
"""Rows, tile, warps and stages of ``prefill``, by room and by padded head_dim, which is at most so large."""

_PREFILL_CODES = {
    Reads.CODES: ((64, 128, 64, 8, 3), (128, 128, 64, 8, 3), (256, 64, 32, 8, 2)),
    Reads.CENTRED_CODES: ((64, 128, 64, 8, 3), (128, 64, 64, 8, 3), (256, 64, 32, 8, 2)),
    Reads.SEALED_CODES: ((64, 128, 64, 8, 3), (128, 64, 32, 8, 3), (256, 32, 32, 8, 2)),
}
"""``_PREFILL`` where codes become numbers in registers, on every card: tiles take less room, and more registers."""

_PREFILL_FLOAT32 = ((32, 64, 32, 4, 2), (64, 32, 32, 4, 2), (256, 32, 16, 8, 2))
"""``_PREFILL`` of float32, which tensor cores do not multiply: sums want registers, and spill with larger tiles."""


def sealing_warps(block_size: int, head_dim: int) -> int:
    """Return how many warps seal a block: with more numbers a thread they spill, and take minutes to compile."""
    numbers = block_size * max(16, padded(head_dim))
    return min(16, max(4, numbers // _SEALED_NUMBERS_A_WARP))


def num_splits_for(num_rows: int, num_kv_heads: int, num_processors: int) -> int:
    """Return into how many splits the sequences of a decoding step are cut: a power of two, by their number alone.

    It does not follow from their lengths: a CUDA graph is captured once for all lengths. A sequence that is too short
    for so many takes fewer.
    """
    wanted = _PROGRAMS_A_PROCESSOR * num_processors // max(1, num_rows * num_kv_heads)
    return min(_MAX_SPLITS, padded(wanted)) if wanted > 1 else 1
