"""Bases of keys: in which numbers of a key to spend bits, found from a model's keys and queries.

A score is a product of a key and a query. So where a key is multiplied by a matrix, and queries by the inverse's
transpose, scores are what they were; and the matrix can be such that most of what counts is in few numbers, which get
more bits (``two_widths.py``). That is transform coding (Goyal, "Theoretical Foundations of Transform Coding", 2001,
sections on the Karhunen-Loeve transform and on bit allocation) with two changes:

* An error of a key costs what queries make of it, so directions in which queries are large count more. The error's cost
  is ``d' M d`` with M the second moment of queries; M's square root is taken instead, which is halfway to treating all
  directions alike: on other text than that of the calibration it costs less (see docs/quantized-kv.md).
* Numbers of one width are mixed among each other, by an orthonormal cosine matrix, so that all have the same spread and
  none is far larger than others: one scale serves them all.

Inverses and eigenvectors are NumPy's: torch's, by MKL, failed now and then for heads of 192 and 256 in processes where
Numba's threads had run (``lu_solve``: wrong pivots; torch 2.13).
"""

from __future__ import annotations

import math

import numpy as np
import torch

from pagefold.kv.codec import num_wide
from pagefold.runner.codecs.hadamard import hadamard
from pagefold.runner.codecs.levels import REACH
from pagefold.runner.codecs.two_widths import WIDE_REACH

__all__ = ["basis_for_queries", "fitted_basis", "into_basis", "plain_basis"]

_WIDE_SPREADS, _NARROW_SPREADS = 5.0, 2.6
"""Standard deviations up to which numbers of either width are in reach of one scale. Wide ones have steps to spare."""
_LEAST_SHARE = 1e-3
"""Directions that queries hardly have count as this share of the mean: other text may have them."""


def into_basis(vectors: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Return float32 ``[..., D]`` multiplied by ``basis`` ``[D, D]``: the sum of ``vectors[j] * basis[j]``, j in order.

    The slow twin of the kernel's, with the same bits.
    """
    total = torch.zeros_like(vectors)
    for j in range(len(basis)):
        total = total + vectors[..., j : j + 1] * basis[j]
    return total


def basis_for_queries(basis: torch.Tensor) -> torch.Tensor:
    """Return the matrix for queries, ``[..., D, D]``, by which products with keys stay what they were."""
    inverse = np.linalg.inv(basis.double().numpy())
    return torch.from_numpy(inverse).mT.float().contiguous()


def plain_basis(head_dim: int) -> torch.Tensor:
    """Return a basis ``[D, D]`` where nothing is known of keys: rotated as ``hadamard.py`` does."""
    rotated = hadamard(torch.eye(head_dim)).double()  # a row for each of a key's numbers
    return _scaled(rotated, torch.ones(head_dim, dtype=torch.float64))


def fitted_basis(keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Return the basis ``[D, D]``, float32, for a head of these second moments.

    Args:
        keys: float64 ``[D, D]``: the mean of ``k k'`` of centred keys.
        queries: float64 ``[D, D]``: the mean of ``q q'``.
    """
    size = len(keys)
    weight = _power(queries, 0.25)
    spreads, directions = _eigenvectors(weight @ keys @ weight)
    spreads, directions = spreads.flip(0), directions.flip(1)
    least = max(spreads[0].item() * 1e-9, 1e-30)
    basis = weight @ directions  # a row for each of a key's numbers
    wide = num_wide(size)
    mixed = torch.cat(
        [basis[:, part] @ _cosines(part.stop - part.start).T for part in (slice(0, wide), slice(wide, size))], 1
    )
    variances = torch.cat([
        spreads[part].clamp(min=least).mean().expand(part.stop - part.start)
        for part in (slice(0, wide), slice(wide, size))
    ])  # fmt: skip
    return _scaled(mixed, variances)


def _scaled(basis: torch.Tensor, variances: torch.Tensor) -> torch.Tensor:
    """Return a basis whose numbers, of such variances, reach as far as their codes do, in scales of about 1."""
    wide = num_wide(len(basis))
    steps = variances.sqrt()
    steps[:wide] *= _WIDE_SPREADS / WIDE_REACH
    steps[wide:] *= _NARROW_SPREADS / REACH
    return (basis / steps).float().contiguous()


def _power(moment: torch.Tensor, power: float) -> torch.Tensor:
    """Return a power of a symmetric matrix without negative eigenvalues."""
    floor = _LEAST_SHARE * moment.trace() / len(moment)
    values, vectors = _eigenvectors(moment)
    raised = (values.clamp(min=0) + floor).clamp(min=1e-30).pow(power)
    powered: torch.Tensor = vectors * raised @ vectors.T
    return powered


def _eigenvectors(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the eigenvalues of a symmetric matrix, ascending, and its eigenvectors in columns."""
    values, vectors = np.linalg.eigh(matrix.numpy())
    return torch.from_numpy(values), torch.from_numpy(vectors)


def _cosines(size: int) -> torch.Tensor:
    """Return the orthonormal cosine matrix ``[n, n]`` (DCT-II), float64."""
    at = torch.arange(size, dtype=torch.float64)
    rows = torch.cos(math.pi / max(size, 1) * (at + 0.5) * at[:, None]) * math.sqrt(2 / max(size, 1))
    rows[:1] /= math.sqrt(2)
    return rows
