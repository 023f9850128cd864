"""int4 with a scale and a zero point a vector: an element is off by at most half a scale, 1/30 of the range."""

from __future__ import annotations

import torch

from pagefold.runner.codecs.vectors import down_to_bfloat16, scales_of

__all__ = ["Int4"]

_MAX = 15


class Int4:
    """A :class:`~pagefold.runner.codecs.vectors.VectorFormat`, asymmetric.

    The zero point is the least element, rounded down to bfloat16; a code is ``round_half_even((x - zero) / scale)``
    with ``scale = (max x - zero) / 15`` rounded up to bfloat16. So ``|decoded - x| <= scale / 2``. A byte holds the
    codes of elements ``i`` (low) and ``i + D / 2`` (high).
    """

    number = 4
    bits = 4
    num_scales = 2

    def encode(self, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~pagefold.runner.codecs.vectors.VectorFormat`."""
        zeros = down_to_bfloat16(vectors.amin(-1, keepdim=True))
        scales = scales_of(vectors.amax(-1, keepdim=True) - zeros.float(), _MAX)
        codes = ((vectors - zeros.float()) / scales.float()).round().nan_to_num().clamp(0, _MAX).to(torch.uint8)
        low, high = codes.chunk(2, -1)
        is_lost = ~scales.float().isfinite()
        scales = torch.where(is_lost, torch.tensor(torch.nan, dtype=torch.bfloat16), scales)
        zeros = torch.where(is_lost, torch.tensor(0.0, dtype=torch.bfloat16), zeros)
        return torch.where(is_lost, 0, low | high << 4), torch.cat((scales, zeros), -1)

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """See :class:`~pagefold.runner.codecs.vectors.VectorFormat`."""
        scale, zero = scales.float().chunk(2, -1)
        return torch.cat((codes & 15, codes >> 4), -1).float() * scale + zero

    def num_code_bytes(self, head_dim: int) -> int:
        """See :class:`~pagefold.runner.codecs.vectors.VectorFormat`."""
        return head_dim * self.bits // 8

    def cannot_pack(self, head_dim: int) -> str:
        """See :class:`~pagefold.runner.codecs.vectors.VectorFormat`."""
        return "" if head_dim % 4 == 0 else "heads of a multiple of 4 numbers"
