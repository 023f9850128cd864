"""int4 with a scale a vector, symmetric: of four scales the one that leaves the least squared error."""

from __future__ import annotations

import torch

from pagefold.runner.codecs.vectors import scales_of

__all__ = ["Int4Symmetric"]

_HALF, _MAX = 7.5, 15
_SHARES = (1.0, 0.875, 0.75, 0.625)


class Int4Symmetric:
    """A :class:`~pagefold.runner.codecs.vectors.VectorFormat`: sixteen levels, as far from 0 on both sides.

    A code stands for ``(code - 7.5) * scale``. Scales that are tried are ``share * max |x| / 7.5``, rounded up to
    bfloat16: with a share of 1 nothing is out of reach and ``|decoded - x| <= scale / 2``; with less a few numbers are,
    and all others get finer steps. A byte holds the codes of elements ``i`` (low) and ``i + D / 2`` (high).
    """

    number = 9
    bits = 4
    num_scales = 1

    def encode(self, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~pagefold.runner.codecs.vectors.VectorFormat`."""
        largest = vectors.abs().amax(-1, keepdim=True)
        best_codes, best_scales, least = self._encode_with(vectors, scales_of(largest, _HALF))
        for share in _SHARES[1:]:
            codes, scales, error = self._encode_with(vectors, scales_of(largest * share, _HALF))
            is_better = error < least
            best_codes, best_scales = torch.where(is_better, codes, best_codes), scales.where(is_better, best_scales)
            least = torch.where(is_better, error, least)
        is_lost = ~best_scales.float().isfinite()
        best_scales = torch.where(is_lost, torch.tensor(torch.nan, dtype=torch.bfloat16), best_scales)
        low, high = best_codes.chunk(2, -1)
        return torch.where(is_lost, 0, low | high << 4), best_scales

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """See :class:`~pagefold.runner.codecs.vectors.VectorFormat`."""
        return (torch.cat((codes & 15, codes >> 4), -1).float() - _HALF) * scales.float()

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
        codes = (vectors / scale + _HALF).round().nan_to_num().clamp(0, _MAX)
        distances = vectors - (codes - _HALF) * scale
        error = torch.zeros_like(scale)
        for d in range(vectors.shape[-1]):
            error = error + distances[..., d : d + 1] * distances[..., d : d + 1]
        return codes.to(torch.uint8), scales, error
