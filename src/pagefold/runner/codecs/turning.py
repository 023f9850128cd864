"""Turning: what keys and queries would be at other positions than those at which they were computed.

Rope (Su et al., "RoFormer", 2021, section 3.2) turns numbers ``i`` and ``i + D / 2`` of a head together, by an angle
that grows with the position. So from keys of a short text follows what a model's keys are at every position.
"""

from __future__ import annotations

import torch

from pagefold.runner.codecs.constants import RANGE, num_ranges_of

__all__ = ["Turning"]


class Turning:
    """Turns vectors as a rope does.

    Args:
        table: float32 ``[P, 2, D]``: cosines and sines of each position, of any length.

    Attributes:
        num_positions: P.
        num_ranges: into which they fall.
    """

    def __init__(self, table: torch.Tensor) -> None:
        table = table.double()
        self._table = table / table.square().sum(1, keepdim=True).sqrt()
        self.num_positions = len(table)
        self.num_ranges = num_ranges_of(len(table))

    @classmethod
    def none(cls, head_dim: int) -> Turning:
        """Return that of a model whose rope is not known: nothing turns, and positions do not differ."""
        return cls(torch.stack((torch.ones(1, head_dim), torch.zeros(1, head_dim)), 1))

    def turned(self, vectors: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return float64 ``[..., n, D]``, of position 0, as they are at ``positions``, int64 ``[n]``."""
        return _apply(self._at(positions), vectors)

    def turned_back(self, vectors: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Undo :meth:`turned`."""
        return _apply(self._at(positions) * torch.tensor([[1.0], [-1.0]], dtype=torch.float64), vectors)

    def over_ranges(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return for vectors ``[..., D]`` of position 0 their mean over each range: ``[..., num_ranges, D]``."""
        means = torch.stack([part.mean(0) for part in torch.split(self._table, RANGE)])
        return _apply(means, vectors[..., None, :])

    def _at(self, positions: torch.Tensor) -> torch.Tensor:
        return self._table[positions.clamp(max=self.num_positions - 1)]


def _apply(table: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """Return vectors ``[..., n, D]`` turned by cosines and sines ``[n, 2, D]``."""
    left, right = vectors.chunk(2, -1)
    return vectors * table[:, 0] + torch.cat((-right, left), -1) * table[:, 1]
