"""Hadamard rotation: every number of a rotated head is a sum of all of them, so that none is far larger than others.

Scores are unchanged where K and Q are both rotated. An output is as rotated as its V's are, so it is rotated back.
QuaRot (Ashkboos et al., 2024), section 4, does so for the cache of keys and values.
"""

from __future__ import annotations

import torch

__all__ = ["hadamard", "hadamard_size"]


def hadamard_size(head_dim: int) -> int:
    """Return how many neighbouring numbers are rotated together: the largest power of two that divides a head."""
    return head_dim & -head_dim


def hadamard(vectors: torch.Tensor) -> torch.Tensor:
    """Return ``[..., D]`` rotated, in runs of ``hadamard_size(D)``; it is its own inverse, up to rounding.

    The order of additions is that of the kernel's, so both give the same bits: every pass adds and subtracts
    neighbours, and puts sums before differences.
    """
    size = hadamard_size(vectors.shape[-1])
    runs = vectors.reshape(*vectors.shape[:-1], vectors.shape[-1] // size, size)
    for _ in range(size.bit_length() - 1):
        a, b = runs[..., 0::2], runs[..., 1::2]
        runs = torch.cat((a + b, a - b), -1)
    return (runs * (torch.tensor(1.0) / torch.tensor(float(size)).sqrt())).reshape(vectors.shape)
