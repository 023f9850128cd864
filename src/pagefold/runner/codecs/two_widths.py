"""Two widths: a vector's first numbers in 8 bits, all others in 4, and one scale for both.

For vectors in a basis whose first numbers are the ones that count most (see ``basis.py``, which also sees to it that
both widths reach as far as their numbers do).
"""

from __future__ import annotations

import torch

from pagefold.kv.codec import num_wide
from pagefold.runner.codecs.levels import REACH, codes_of, levels_of
from pagefold.runner.codecs.vectors import scales_of

__all__ = ["WIDE_REACH", "TwoWidths"]

WIDE_REACH = 127.0
"""How far from 0 the codes of 8 bits reach, in scales."""


class TwoWidths:
    """A :class:`~pagefold.runner.codecs.vectors.VectorFormat`: ``num_wide(D)`` numbers as int8, the others as int4.

    The scale is the least at which every number is in reach, rounded up to bfloat16. A code of 8 bits is
    ``round_half_even(x / scale)``, by which ``|decoded - x| <= scale / 2``; one of 4 bits stands for a level of
    ``levels.py``: ``|decoded - x| <= 1.2 * scale``.
    The bytes of wide numbers come first; each of the others holds the codes of narrow numbers ``i`` (low) and
    ``i + N / 2`` (high) of N.
    """

    number = 8
    bits = 4
    num_scales = 1

    def encode(self, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~pagefold.runner.codecs.vectors.VectorFormat`."""
        wide, narrow = vectors.tensor_split([num_wide(vectors.shape[-1])], -1)
        largest = wide.abs().amax(-1, keepdim=True) / WIDE_REACH
        if narrow.shape[-1]:
            largest = torch.maximum(largest, narrow.abs().amax(-1, keepdim=True) / REACH)
        scales = scales_of(largest, 1)
        is_lost = ~scales.float().isfinite()
        scale = scales.float()
        whole = (wide / scale).round().nan_to_num().clamp(-WIDE_REACH, WIDE_REACH).to(torch.int8).view(torch.uint8)
        codes = codes_of(narrow / scale).to(torch.uint8)
        low, high = codes.chunk(2, -1) if narrow.shape[-1] else (codes, codes)
        scales = torch.where(is_lost, torch.tensor(torch.nan, dtype=torch.bfloat16), scales)
        return torch.where(is_lost, 0, torch.cat((whole, low | high << 4), -1)), scales

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """See :class:`~pagefold.runner.codecs.vectors.VectorFormat`."""
        num_bytes = codes.shape[-1]
        sizes = range(4, 2 * num_bytes + 1, 4)  # one of them has so many bytes
        size = next(size for size in sizes if self.num_code_bytes(size) == num_bytes)
        whole, pairs = codes.tensor_split([num_wide(size)], -1)
        wide = whole.contiguous().view(torch.int8).float()
        narrow = levels_of(torch.cat((pairs & 15, pairs >> 4), -1).float())
        return torch.cat((wide, narrow), -1) * scales.float()

    def num_code_bytes(self, head_dim: int) -> int:
        """See :class:`~pagefold.runner.codecs.vectors.VectorFormat`."""
        wide = num_wide(head_dim)
        return wide + (head_dim - wide) // 2

    def cannot_pack(self, head_dim: int) -> str:
        """See :class:`~pagefold.runner.codecs.vectors.VectorFormat`."""
        return "" if head_dim % 4 == 0 else "heads of a multiple of 4 numbers"
