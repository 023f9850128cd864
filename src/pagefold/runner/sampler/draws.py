"""Draws: what a step's random rows ask for, in columns, and the noise that belongs to each token of a draw."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from pagefold.sampling import SamplingParams

__all__ = ["GOLDEN", "MIX_1", "MIX_2", "REACHED", "Draws", "make_draws", "noise_key"]

GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""SplitMix64's step and factors (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).

The noise of token ``t`` is number ``t`` of the stream that begins at the draw's key, which is found without the numbers
before it. Its upper 52 bits ``m`` make ``v = (m + 1/2) / 2^52``, never 0 and never 1, and ``-log(1 - v)`` is the
exponential number: exact where it is small, and the small ones are those that win, of whatever many tokens.
"""

REACHED = 1.0 - 1e-9
"""Mass of this share of top_p is top_p: of ten equal tokens five are half, however their sum is rounded."""


class Draws(NamedTuple):
    """Columns of ``D`` draws.

    Attributes:
        rows: int64, of the logits.
        keys: uint64, see :func:`noise_key`.
        inverse_temperatures: float64.
        log_min_p: float64; what lies further below the largest, divided by temperature, is cut. Minus infinity: none.
        top_k: int64; 0 for all.
        top_p: float64.
    """

    rows: NDArray[np.int64]
    keys: NDArray[np.uint64]
    inverse_temperatures: NDArray[np.float64]
    log_min_p: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]


def make_draws(
    rows: Iterable[int], params: Sequence[SamplingParams], seeds: Sequence[int], draws: Sequence[int]
) -> Draws:
    """Return the draws of ``rows``, out of columns of all rows."""
    rows = list(rows)
    asked = [params[row] for row in rows]
    return Draws(
        np.array(rows, np.int64),
        np.array([noise_key(seeds[row], draws[row]) for row in rows], np.uint64),
        np.array([1.0 / how.temperature for how in asked]),
        np.array([math.log(how.min_p) if how.min_p else -math.inf for how in asked]),
        np.array([min(max(how.top_k, 0), 2**62) for how in asked], np.int64),
        np.array([how.top_p for how in asked]),
    )


def noise_key(seed: int, draw: int) -> int:
    """Return where the draw's stream of noise begins: 64 bits of BLAKE2b of (seed, draw)."""
    digest = hashlib.blake2b(f"{seed}:{draw}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
