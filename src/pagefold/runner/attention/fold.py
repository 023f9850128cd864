"""Putting partial results of attention together: of a token's splits, in order (FlashDecoding, Dao et al., 2023)."""

from __future__ import annotations

import numpy as np

from pagefold.kernels.compiled import part

__all__ = ["NOTHING", "fold"]

NOTHING = np.float32(-1e30)
"""The score of no entry at all: finite, so that no difference of two is NaN."""


@part()
def fold(top, total, acc, other_top, other_total, other):
    """Fold a later split's partial result into ``acc``; return the new (top, total). Scores are powers of two."""
    new_top = max(top, other_top)
    ours, theirs = np.exp2(top - new_top), np.exp2(other_top - new_top)
    for d in range(len(acc)):
        acc[d] = acc[d] * ours + other[d] * theirs
    return new_top, total * ours + other_total * theirs
