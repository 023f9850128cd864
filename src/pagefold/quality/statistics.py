"""Estimates: a mean over contexts, how uncertain it is, and the same by position.

Tokens of one context are not independent, contexts are: so errors come from resampling contexts (the bootstrap of
Efron, 1979). Both caches read the same tokens, so differences are paired, and their errors are much smaller than those
of either.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Estimate", "Floats", "bins_of", "estimate"]

Floats: TypeAlias = NDArray[np.float64]

_NUM_RESAMPLES = 2000
_LOW, _HIGH = 2.5, 97.5


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure, and how far chance may have moved it.

    Attributes:
        value: the figure.
        standard_error: standard error of the figure; None where there is one context only.
        low, high: 95 % of resampled figures lie between them; None as above.
    """

    value: float
    standard_error: float | None = None
    low: float | None = None
    high: float | None = None


def estimate(columns: Floats, figure: Callable[[Floats], Floats], *, seed: int = 0) -> Estimate:
    """Return a figure of means over contexts.

    Args:
        columns: ``[num_contexts, K]``, each context's means.
        figure: from means ``[..., K]`` to figures ``[...]``.
        seed: of the resampling.
    """
    value = float(figure(columns.mean(0)))
    num_contexts = len(columns)
    if num_contexts < 2:  # noqa: PLR2004 - one has no spread
        return Estimate(value)
    chosen = np.random.default_rng(seed).integers(num_contexts, size=(_NUM_RESAMPLES, num_contexts))
    resampled = figure(columns[chosen].mean(1))
    # The bootstrap's variance is that of n; that of a sample is of n - 1.
    error = float(resampled.std()) * (num_contexts / (num_contexts - 1)) ** 0.5
    low, high = np.percentile(resampled, (_LOW, _HIGH))
    return Estimate(value, error, float(low), float(high))


def bins_of(num_positions: int, num_bins: int) -> list[slice]:
    """Cut ``[0, num_positions)`` into at most ``num_bins`` slices of about equal length, none of them empty."""
    num_bins = min(num_bins, num_positions)
    edges = [num_positions * place // num_bins for place in range(num_bins + 1)]
    return [slice(first, last) for first, last in pairwise(edges)]
