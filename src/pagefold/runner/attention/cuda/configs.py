"""Which tiles the kernels work in: a table by shape and card. Nothing is tried at run time.

A row of the table holds from its compute capability on. Shared memory bounds the tiles: a block of threads has 227 KiB
on compute capability 9.0, 163 KiB on 8.0 and 99 KiB on 8.6 and 8.9 (CUDA C++ Programming Guide, "Technical
Specifications per Compute Capability"); the tests compile every row and compare.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = [
    "DTYPES",
    "MAX_HEAD_DIM",
    "MAX_SHARED_BYTES",
    "MIN_CAPABILITY",
    "KernelConfig",
    "choose_config",
    "num_splits_for",
    "padded",
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


def choose_config(
    kernel: str, dtype: torch.dtype, head_dim: int, group: int, capability: tuple[int, int]
) -> KernelConfig:
    """Return how ``decode`` or ``prefill`` works on this shape and card.

    Args:
        kernel: which.
        dtype: of query and blocks.
        head_dim: numbers of a head.
        group: query heads a KV head.
        capability: the card's compute capability.
    """
    has_room = MAX_SHARED_BYTES.get(capability, 99 * 1024) >= 163 * 1024
    width = max(16, padded(head_dim)) * dtype.itemsize  # bytes of a token's K
    if kernel == "decode":
        tile = 64 if width <= 256 else 32  # noqa: PLR2004 - head_dim 128 of 16 bits
        return KernelConfig(max(_MIN_ROWS, padded(group)), tile, 4, 3 if has_room else 2)
    rows, tile, num_warps, num_stages = next(row for most, *row in _PREFILL[has_room] if width <= most)
    if group > rows:  # a token's rows are one program's
        rows = padded(group)
    return KernelConfig(rows, tile, num_warps, num_stages)


_PREFILL = {
    True: ((128, 128, 64, 4, 3), (256, 128, 64, 8, 3), (512, 64, 32, 4, 2), (1024, 32, 16, 4, 2)),
    False: ((128, 64, 64, 4, 2), (256, 64, 32, 4, 2), (512, 32, 16, 4, 2), (1024, 16, 16, 4, 1)),
}
"""By room and bytes of a token's K at most: rows, tile, warps, stages."""


def num_splits_for(num_rows: int, num_kv_heads: int, num_processors: int) -> int:
    """Return into how many splits the sequences of a decoding step are cut: a power of two, by their number alone.

    It does not follow from their lengths: a CUDA graph is captured once for all lengths. A sequence that is too short
    for so many takes fewer.
    """
    wanted = _PROGRAMS_A_PROCESSOR * num_processors // max(1, num_rows * num_kv_heads)
    return min(_MAX_SPLITS, padded(wanted)) if wanted > 1 else 1
