"""int4 with a scale a vector, symmetric: of two scales the one that leaves the less squared error."""

from __future__ import annotations

import torch

from pagefold.runner.codecs.levels import REACH, codes_of, levels_of
from pagefold.runner.codecs.vectors import scales_of

__all__ = ["SHARE", "Int4Symmetric"]

SHARE = 0.9
"""The other scale that is tried, as a share of the one that reaches all numbers. More of them gave hardly more."""


class Int4Symmetric:
    """A :class:`~pagefold.runner.codecs.vectors.VectorFormat`: sixteen levels, as far from 0 on both sides.

    A code stands for a level of ``levels.py``, in scales. Scales that are tried are the one by which the last levels
    are at ``max |x|``, and 0.9 of that, rounded up to bfloat16: with the first nothing is out of reach and
    ``|decoded - x| <= 1.2 * scale``; with the other a few numbers are, and all others get finer steps. A byte holds the
    codes of elements ``i`` (low) and ``i + D / 2`` (high).
    """

    number = 9
    bits = 4
    num_scales = 1

    def encode(self, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~pagefold.runner.codecs.vectors.VectorFormat`."""
        largest = vectors.abs().amax(-1, keepdim=True)
        codes, scales, error = self._encode_with(vectors, scales_of(largest, REACH))
        finer_codes, finer_scales, finer_error = self._encode_with(vectors, scales_of(largest * SHARE, REACH))
        is_better = finer_error < error
        codes, scales = torch.where(is_better, finer_codes, codes), torch.where(is_better, finer_scales, scales)
        is_lost = ~scales.float().isfinite()
        scales = torch.where(is_lost, torch.tensor(torch.nan, dtype=torch.bfloat16), scales)
        low, high = codes.chunk(2, -1)
        return torch.where(is_lost, 0, low | high << 4), scales

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """See :class:`~pagefold.runner.codecs.vectors.VectorFormat`."""
        return levels_of(torch.cat((codes & 15, codes >> 4), -1).float()) * scales.float()

    def num_code_bytes(self, head_dim: int) -> int:
        """See :class:`~pagefold.runner.codecs.vectors.VectorFormat`."""
        return head_dim * self.bits // 8

    def cannot_pack(self, head_dim: int) -> str:
        """See :class:`~pagefold.runner.codecs.vectors.VectorFormat`."""
        return "" if head_dim % 4 == 0 else "heads of a multiple of 4 numbers"

    def _encode_with(
        self, vectors: torch.Tensor, scales: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return codes, scales, and the squared error, summed in the kernel's order."""
        scale = scales.float()
        codes = codes_of(vectors / scale)
        distances = vectors - levels_of(codes) * scale
        error = torch.zeros_like(scale)
        for d in range(vectors.shape[-1]):
            error = error + distances[..., d : d + 1] * distances[..., d : d + 1]
        return codes.to(torch.uint8), scales, error
